"""Measure when a draft model pays: tokens per second of one stream with and without drafts, by the drafts' accuracy.

    python -m trouper.bench.studies.models.draft_model --model FOLDER [--layers 4] [--shares 0,0.1,0.3] [--drafts 4] [--rounds 3] [--output FILE.json]

The draft model consists of the first layers of the model, with its embeddings and last norm. The output of the other
layers is multiplied by a share, which controls how often both models agree: always with 0, at the full cost of the
model. So any folder can be used, also one with random weights.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from trouper import LLM, SamplingParams, TokensPrompt
from trouper.bench.report import about, check_writable, write

ADDING = (
    "o_proj.weight",
    "down_proj.weight",
)  # what a layer adds to the hidden states is their product
Tensors = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure when a draft model pays.")
    parser.add_argument("--model", required=True, help="Folder of a decoder in one file.")
    parser.add_argument("--layers", type=int, default=4, help="Layers of the draft model.")
    parser.add_argument(
        "--shares", default="0,0.1,0.3", help="Factors of the other layers' outputs, at most 1."
    )
    parser.add_argument(
        "--drafts", type=int, default=4, help="Maximum number of tokens in a draft."
    )
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization")
    parser.add_argument("--output")
    options = parser.parse_args()
    check_writable("output", options.output)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, tensors = read_folder(Path(options.model))
        write_folder(folder / "draft", *first_layers(config, tensors, options.layers))
        for share in map(float, options.shares.split(",")):
            write_folder(folder / "model", config, weakened(tensors, options.layers, share))
            results[str(share)] = measure(folder, options)
            print(f"share {share}: {json.dumps(results[str(share)])}", flush=True)
    if options.output:
        write(options.output, {"about": about(sys.argv[1:]), "results": results})


def read_folder(folder: Path) -> tuple[dict[str, Any], Tensors]:
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def first_layers(
    config: dict[str, Any], tensors: Tensors, num_layers: int
) -> tuple[dict[str, Any], Tensors]:
    """Return a model with only its first layers.

    It is a draft model for the whole model that needs no training. Embedding and head are those of the model.
    """
    kept = {name: x for name, x in tensors.items() if layer_of(name) < num_layers}
    config = {**config, "num_hidden_layers": num_layers}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    return config, kept


def weakened(tensors: Tensors, num_layers: int, share: float) -> Tensors:
    """Scale the contributions of the layers behind the first ones.

    With a small share, the first layers predict almost the same tokens, so drafts are accepted often.
    """
    return {
        name: x * share if layer_of(name) >= num_layers and name.endswith(ADDING) else x
        for name, x in tensors.items()
    }


def layer_of(name: str) -> int:
    """Return the number of the layer to which a parameter belongs.

    Returns -1 for parameters outside of the layers, such as the embedding. Names are those of the checkpoint.
    """
    _, found, rest = name.partition("layers.")
    return int(rest.partition(".")[0]) if found else -1


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the tokens per second with and without drafts, their ratio, and the share of accepted drafts."""
    common: dict[str, Any] = {
        "skip_tokenizer_init": True, "dtype": "bfloat16", "max_num_seqs": 1, "enable_prefix_caching": False,
        "max_model_len": options.input_len + options.output_len, "quantization": options.quantization,
    }  # fmt: skip
    drafts = {
        "method": "draft_model", "model": str(folder / "draft"), "num_speculative_tokens": options.drafts,
    }  # fmt: skip
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True)
    seconds: tuple[list[float], list[float]] = [], []
    with (
        LLM(str(folder / "model"), **common) as plain,
        LLM(str(folder / "model"), speculative_config=drafts, **common) as drafting,
    ):
        vocabulary = range(plain.model_config.vocab_size)
        for turn in range(options.rounds + 1):  # the first compiles
            prompt = TokensPrompt(prompt_token_ids=rng.choices(vocabulary, k=options.input_len))
            answers: list[list[int]] = []
            for llm, all_s in zip((plain, drafting), seconds, strict=True):
                begin = perf_counter()
                (output,) = llm.generate(prompt, params, use_tqdm=False)
                if turn:
                    all_s.append(perf_counter() - begin)
                answers.append(list(output.outputs[0].token_ids))
            assert answers[0] == answers[1], "a draft has changed a token"
        stats = drafting.llm_engine.statistics().scheduler
    plain_s, drafting_s = map(median, seconds)
    return {
        "plain_tok_s": round(options.output_len / plain_s, 1),
        "drafting_tok_s": round(options.output_len / drafting_s, 1),
        "ratio": round(plain_s / drafting_s, 3),
        "num_drafted": stats.num_draft_tokens,
        "num_right": stats.num_accepted_tokens,
        "tokens_per_step": round(stats.num_generation_tokens / stats.num_steps, 2),
    }


if __name__ == "__main__":
    main()
