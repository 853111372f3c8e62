"""Measure the cost of LoRA adapters: tokens per second with adapters relative to the base model.

    python -m trouper.bench.studies.models.adapters [--model qwen3-0.6b] [--adapters 8] [--rank 16] [--output FILE.json]
    python -m trouper.bench.studies.models.adapters --model FOLDER --load-format auto --vllm-python PYTHON

Random adapters change every projection. Both engines are open at the same time and alternate, so a disturbance of the
machine affects both; the result is the ratio of the medians. With the interpreter of an environment with vLLM, the
batch with adapters is compared with vLLM's instead, and the engine that is not measured is stopped.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trouper import LLM, LoRARequest, SamplingParams, TokensPrompt
from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.parameters import layer_parameters
from trouper.bench import peers
from trouper.bench.report import about, write
from trouper.config.args import EngineArgs
from trouper.config.model import ModelConfig
from trouper.config.resolve import resolve

# The number of requests.  The batch uses all adapters.
CASES = {"one stream": 1, "a batch": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of LoRA adapters.")
    parser.add_argument("--model", default="qwen3-0.6b", help="Folder, or a geometry of dummies.")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--adapters", type=int, default=8, help="Different adapters of the batch.")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization")
    parser.add_argument("--vllm-python", help="Interpreter of an environment with vLLM.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.vllm_python:
            results = beside_vllm(options, Path(folder))
            print(json.dumps(results))
        else:
            results = measure(options, Path(folder))
            _show(results)
    if options.output:
        write(str(options.output), {"about": about(sys.argv[1:]), "results": results})


def _show(results: dict[str, Any]) -> None:
    print(f"{'':14}{'requests':>9}{'base tok/s':>12}{'adapters':>10}{'ratio':>8}")
    for name, record in results.items():
        figures = f"{record['base_tokens_per_s']:12.1f}{record['adapters_tokens_per_s']:10.1f}"
        print(f"{name:14}{record['num_requests']:9}{figures}{record['ratio']:8.3f}")


def beside_vllm(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare the batch with adapters in trouper and in vLLM.

    Returns the output tokens per second of both, and how many times as fast trouper is.
    """
    config = resolve(EngineArgs(options.model, load_format=options.load_format), offline=True)
    numbers = range(1, options.adapters + 1)
    paths = [write_adapter(folder / str(i), config.model, options.rank, i) for i in numbers]
    settings = peers.Settings(
        model=config.model.path,
        dtype="bfloat16",
        peers=("vllm",),
        pythons={"vllm": options.vllm_python},
        load_format=options.load_format,
        adapters=tuple(paths),
        rank=options.rank,
    )
    work = peers.Workload(CASES["a batch"], options.input_len, options.output_len)
    record = peers.compare(settings, [work], options.rounds, range(3, 1000))
    found = {result["engine"]: result for result in record["results"]}
    return {
        "num_requests": work.num,
        "num_adapters": len(paths),
        "rank": options.rank,
        "trouper_tok_s": found["trouper"]["output_tok_s"],
        "vllm_tok_s": found["vllm"]["output_tok_s"],
        "ratio": found["vllm"]["trouper_is"],
        "vllm": record["engines"]["vllm"],
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure each case with and without adapters.

    Returns one record for each case: the median tokens per second with and without adapters, and their ratio. Rounds
    of both engines alternate.
    """
    common: dict[str, Any] = {
        "load_format": options.load_format, "skip_tokenizer_init": True, "dtype": "bfloat16",
        "max_num_seqs": 16, "max_model_len": options.input_len + options.output_len,
        "enable_prefix_caching": False, "quantization": options.quantization,
    }  # fmt: skip
    rooms: dict[str, Any] = {"max_loras": options.adapters, "max_lora_rank": options.rank}
    with (
        LLM(options.model, **common) as base,
        LLM(options.model, enable_lora=True, **rooms, **common) as adapted,
    ):
        adapters = [
            LoRARequest(f"random-{i}", i, write_adapter(folder / str(i), base.model_config, options.rank, i))
            for i in range(1, options.adapters + 1)
        ]  # fmt: skip
        return {
            name: _compared(base, adapted, num, adapters, options) for name, num in CASES.items()
        }


def write_adapter(folder: Path, model: ModelConfig, rank: int, seed: int) -> str:
    """Write a random adapter of every projection, in PEFT's format.

    Returns the folder.  The same seed gives the same adapter.  All projections have the same rank.
    """
    generator = torch.Generator().manual_seed(seed)
    traits = decoder_traits(model.hf_config, model.architecture)
    tensors: dict[str, Tensor] = {}
    for layer in range(len(traits.layers)):
        for parameter in layer_parameters(traits, layer):
            for name, shape in parameter.sources if parameter.name.endswith(".weight") else ():
                module = f"base_model.model.{name.removesuffix('.weight')}"
                for side, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                    matrix = torch.randn(size, generator=generator).to(torch.bfloat16) / 100
                    tensors[f"{module}.lora_{side}.weight"] = matrix
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def _compared(
    base: LLM, adapted: LLM, num: int, adapters: list[LoRARequest], options: argparse.Namespace
) -> dict[str, Any]:
    chosen = [adapters[i % len(adapters)] for i in range(num)]
    seconds: tuple[list[float], list[float]] = [], []
    # The first round compiles kernels and loads adapters, and is not counted.
    for turn in range(options.rounds + 1):
        found = _seconds(base, None, num, options), _seconds(adapted, chosen, num, options)
        if turn:
            for held, one in zip(seconds, found, strict=True):
                held.append(one)
    num_tokens = num * options.output_len
    plain, with_them = (num_tokens / median(found) for found in seconds)
    return {
        "num_requests": num,
        "num_adapters": len({adapter.lora_int_id for adapter in chosen}),
        "base_tokens_per_s": round(plain, 2),
        "adapters_tokens_per_s": round(with_them, 2),
        "ratio": round(with_them / plain, 4),
    }


def _seconds(
    llm: LLM, adapters: list[LoRARequest] | None, num: int, options: argparse.Namespace
) -> float:
    params = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True)
    prompts = [
        TokensPrompt(prompt_token_ids=[1 + (i * 31 + k) % 1000 for k in range(options.input_len)])
        for i in range(num)
    ]
    begin = perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    return perf_counter() - begin


if __name__ == "__main__":
    main()
