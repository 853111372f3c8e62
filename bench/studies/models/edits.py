"""Compare edits with drafts from the prompt: repeat functions with a changed name, with trouper, llama.cpp and vLLM.

    python -m trouper.bench.studies.models.edits --gguf FILE.gguf (--llama-python PYTHON | --vllm-python PYTHON) [--rounds 3] [--output FILE.json]

llama.cpp uses the file with the prompt lookup of its Python package, and trouper the same file. For vLLM with n-grams,
the file's weights are written to a folder in bfloat16, which trouper then uses too. All decode one stream greedily and
ignore the end token; texts differ in a few places, because sums are rounded differently. The engines alternate, and the
others are stopped.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.parameters import layer_parameters, outer_parameters
from trouper.actors.executor.weights.gguf import GgufCheckpoint
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.actors.runtime.startup import num_physical_cores
from trouper.bench import peers
from trouper.bench.datasets import edit_requests
from trouper.bench.report import about, check_writable, write
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve

# trouper must not draft from stored answers, because each round sends the same prompts again.
OURS: dict[str, Any] = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
NGRAMS = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}  # vLLM's
# Maximum number of tokens of a function's source.
INPUT_LEN = 384
Prompts = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare edits with peers that speculate.")
    parser.add_argument("--gguf", required=True, help="GGUF file of a model.")
    parser.add_argument("--llama-python", help="Interpreter of an environment with llama_cpp.")
    parser.add_argument("--vllm-python", help="Interpreter of an environment with vLLM.")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--drafts", type=int, default=7, help="The longest draft of vLLM and of llama.cpp."
    )
    parser.add_argument(
        "--llama-ngram", type=int, default=3, help="Longest n-gram of llama.cpp's lookup."
    )
    parser.add_argument("--output")
    options = parser.parse_args()
    if not (options.llama_python or options.vllm_python):
        parser.error("name a peer to compare with, by --llama-python or --vllm-python")
    check_writable("output", options.output)
    prompts = edits(options.gguf, options.requests, options.output_len)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in cases(options, Path(folder)):
            results[name] = compare(settings, prompts, options.output_len, options.rounds, say)
            say(f"{name}: {json.dumps(results[name])}")
    if options.output:
        write(options.output, {"about": about(sys.argv[1:]), "results": results})


def say(text: str) -> None:
    print(text, flush=True)


def edits(model: str, num: int, output_len: int) -> Prompts:
    tokenizer = Tokenizer.load(Path(model))
    asked = edit_requests(
        num, tokenizer.encode, random.Random(0), input_len=INPUT_LEN, output_len=output_len
    )
    return [list(request.prompt_token_ids) for request in asked]


def cases(
    options: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, dict[str, peers.Settings]]]:
    """Return the comparisons by name: for each the settings of its engines by label, trouper with drafts first."""
    if options.llama_python:
        lookup = {"max_ngram_size": options.llama_ngram, "num_pred_tokens": options.drafts}
        common = settings_of(options.gguf, "llama.cpp", options.llama_python)
        yield "beside_llama_cpp", labelled(common, "llama.cpp", lookup)
    if options.vllm_python:
        write_folder(options.gguf, folder / "model")
        common = settings_of(str(folder / "model"), "vllm", options.vllm_python)
        drafts = {**NGRAMS, "num_speculative_tokens": options.drafts}
        yield "beside_vllm", labelled(common, "vllm", drafts)


def settings_of(model: str, peer: str, python: str) -> dict[str, Any]:
    return {
        "model": model, "gguf": model, "dtype": "bfloat16", "peers": (peer,), "pythons": {peer: python},
        "threads": num_physical_cores(),
    }  # fmt: skip


def labelled(
    common: dict[str, Any], peer: str, speculation: dict[str, Any]
) -> dict[str, peers.Settings]:
    plain, own = peers.Settings(**common), peers.Settings(**common, speculation=OURS)
    # Raises an error for an engine that cannot run.
    plain.engines()
    drafting = peers.Settings(**common, speculation=speculation)
    return {
        "trouper with drafts": own, "trouper": plain, f"{peer} with drafts": drafting, peer: plain,
    }  # fmt: skip


def write_folder(gguf: str | Path, folder: Path) -> None:
    """Write the model of a GGUF file as a folder of bfloat16. vLLM then runs the same weights as llama.cpp.

    Quantised numbers are dequantized exactly first.
    """
    model = resolve(EngineArgs(str(gguf)), offline=True).model
    config = {k: v for k, v in model.hf_config.items() if k != "quantization_config"}
    traits = decoder_traits(config, model.architecture)
    checkpoint = GgufCheckpoint(Path(gguf))
    layers = (layer_parameters(traits, layer) for layer in range(len(traits.layers)))
    tensors = {
        name: checkpoint.read(name, shape).to(torch.bfloat16)
        for parameters in (outer_parameters(traits), *layers)
        for parameter in parameters
        for name, shape in parameter.sources
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    tokenizer = Tokenizer.load(Path(gguf))
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


def compare(
    engines: dict[str, peers.Settings],
    prompts: Prompts,
    output_len: int,
    num_rounds: int,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Answer the prompts one after the other, alternating between the engines.

    Returns:
        {label: {"version", "output_tok_s": of the median round, "all_s": [seconds of each round], "trouper_is": how many times
        as fast the first engine is as this one}}.

    Raises:
        PeerError: an engine failed, or made fewer tokens than it was asked for.
    """
    work = peers.Workload(1, max(map(len, prompts)), output_len)
    seconds: dict[str, list[float]] = {label: [] for label in engines}
    with ExitStack() as stack:
        running: dict[str, peers.PeerEngine] = {}
        for label, settings in engines.items():
            tell(f"{label}: loading")
            running[label] = stack.enter_context(
                peers.started(label.removesuffix(" with drafts"), settings, [work])
            )
            answered(label, running[label], prompts[:1], output_len)
        for turn in range(num_rounds):
            for label, peer in running.items():
                seconds[label].append(answered(label, peer, prompts, output_len))
                tell(f"{turn + 1}/{num_rounds}  {label}: {seconds[label][-1]:.3f} s")
        versions = {label: peer.version for label, peer in running.items()}
    first_s = median(next(iter(seconds.values())))
    num_tokens = len(prompts) * output_len
    return {
        label: {
            "version": versions[label],
            "output_tok_s": round(num_tokens / median(all_s), 1),
            "all_s": [round(each, 3) for each in all_s],
            "trouper_is": round(median(all_s) / first_s, 3),
        }
        for label, all_s in seconds.items()
    }


def answered(label: str, peer: peers.PeerEngine, prompts: Prompts, output_len: int) -> float:
    total_s = 0.0
    for prompt in prompts:
        answer = peer.measure([prompt], output_len)
        if answer.num_output_tokens != output_len:
            raise peers.PeerError(f"{label} made {answer.num_output_tokens} tokens")
        total_s += answer.seconds
    return total_s


if __name__ == "__main__":
    main()
