"""Measure models computed by transformers, relative to its own continuous batching and to trouper's own code.

    python -m trouper.bench.studies.models.fallback [--workload 16x128x64] [--layers 16] [--rounds 5] [--output FILE.json]

Both models have random weights and about 0.4 B parameters. trouper has no code for OLMo, so it runs the library's
modules with its own attention, batching and linear layers; the library's engine is stopped while it is not measured.
For Llama, both of trouper's implementations are open at the same time and alternate.
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

from trouper import LLM, SamplingParams, TokensPrompt
from trouper.bench import peers
from trouper.bench.peers import Workload
from trouper.bench.report import about, write

SHAPE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16,
    "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "hidden_act": "silu", "eos_token_id": 2, "pad_token_id": 1, "dtype": "bfloat16",
}  # fmt: skip
MODELS = {"olmo": "OlmoForCausalLM", "llama": "LlamaForCausalLM"}
BY = ("trouper", "transformers")  # model_impl


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure models computed by transformers.")
    parser.add_argument("--workload", default="16x128x64", type=peers.parse_workload)
    parser.add_argument("--layers", default=16, type=int)
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in MODELS:
            write_config(folder / kind, kind, options.layers)
        results = {
            "olmo_beside_continuous_batching": beside_library(
                folder / "olmo", options.workload, options.rounds
            ),
            "llama_beside_own_code": beside_own_code(
                folder / "llama", options.workload, options.rounds
            ),
        }
    for what, record in results.items():
        figures = ", ".join(f"{key} {value}" for key, value in record.items())
        print(f"{what}: {figures}")
    if options.output:
        write(str(options.output), {"about": about(sys.argv[1:]), "results": results})


def write_config(folder: Path, kind: str, num_layers: int) -> None:
    """Write the configuration of a random model. No other file is needed, since the weights are random."""
    folder.mkdir()
    config = {
        **SHAPE, "model_type": kind, "architectures": [MODELS[kind]], "num_hidden_layers": num_layers,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def beside_library(model: Path, work: Workload, num_rounds: int) -> dict[str, Any]:
    """Compare trouper with transformers' own continuous batching.

    Returns the output tokens per second of both, and how many times as fast trouper is. Rounds of both alternate.
    """
    settings = peers.Settings(
        model=str(model), dtype="bfloat16", load_format="dummy", peers=("transformers-cb",)
    )
    record = peers.compare(settings, [work], num_rounds, range(3, SHAPE["vocab_size"]))
    found = {result["engine"]: result for result in record["results"]}
    return {
        "trouper_tok_s": found["trouper"]["output_tok_s"],
        "transformers_tok_s": found["transformers-cb"]["output_tok_s"],
        "ratio": found["transformers-cb"]["trouper_is"],
    }


def beside_own_code(model: Path, work: Workload, num_rounds: int) -> dict[str, Any]:
    """Return the output tokens per second of both implementations, and the speed of transformers' modules relative to trouper's."""
    common: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "max_num_seqs": work.num, "max_model_len": work.input_len + work.output_len,
        "enable_prefix_caching": False,
    }  # fmt: skip
    rng = random.Random(0)
    vocabulary = range(3, SHAPE["vocab_size"])
    prompts = [
        TokensPrompt(prompt_token_ids=rng.choices(vocabulary, k=work.input_len))
        for _ in range(work.num)
    ]
    params = SamplingParams(temperature=0, max_tokens=work.output_len, ignore_eos=True)
    seconds: dict[str, list[float]] = {by: [] for by in BY}
    with (
        LLM(str(model), model_impl="trouper", **common) as own,
        LLM(str(model), model_impl="transformers", **common) as library,
    ):
        for turn in range(num_rounds + 1):  # the first compiles
            for by, llm in zip(BY, (own, library), strict=True):
                begin = perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                if turn:
                    seconds[by].append(perf_counter() - begin)
    own_s, library_s = (median(seconds[by]) for by in BY)
    num_tokens = work.num * work.output_len
    return {
        "own_tok_s": round(num_tokens / own_s, 1),
        "by_transformers_tok_s": round(num_tokens / library_s, 1),
        "ratio": round(own_s / library_s, 3),
    }


if __name__ == "__main__":
    main()
