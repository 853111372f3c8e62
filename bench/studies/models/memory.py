"""Measure the memory of a process after some work: weights, used KV memory, and everything else.

    python -m trouper.bench.studies.models.memory MODEL [--num-prompts 16] [--input-len 128] [--output-len 32]
        [--dtype bfloat16] [--quantization int4] [--output FILE.json]

The figures are resident pages, as counted by Linux, in MiB; the output is a line of JSON.
"""

import argparse
import json
import mmap
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from trouper.actors.executor.models.native_decoder import NativeDecoder
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.bench.report import about, write
from trouper.frontends.python.llm import LLM
from trouper.params import SamplingParams

# The bit of a present page in an entry of the page map.
PRESENT = np.uint64(1 << 63)


def measure(given: argparse.Namespace) -> dict[str, float]:
    options = {"dtype": given.dtype, "quantization": given.quantization, "max_model_len": 2048}
    with _caught() as runners, LLM(given.model, **options) as llm:
        config = llm.llm_engine.model_config
        rng = random.Random(0)
        prompts: list[Any] = [
            {"prompt_token_ids": rng.choices(range(3, config.vocab_size), k=given.input_len)}
            for _ in range(given.num_prompts)
        ]
        params = SamplingParams(temperature=0, max_tokens=given.output_len, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        decoder, kv = runners[0].model.decoder, runners[0].model.memory
        assert isinstance(decoder, NativeDecoder)
        assert decoder._embedding is not None  # pyright: ignore[reportPrivateUsage]  # the same
        assert kv is not None
        weights = decoder.num_bytes + decoder._embedding.nbytes  # pyright: ignore[reportPrivateUsage]  # the same
        touched = sum(resident(group.data_ptr(), group.nbytes) for group in kv.groups)
        whole = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    parts = {
        "resident": whole,
        "weights": weights,
        "kv": touched,
        "else": whole - weights - touched,
    }
    return {name: round(num_bytes / 2**20, 1) for name, num_bytes in parts.items()}


def resident(address: int, num_bytes: int) -> int:
    """Count the resident bytes in an address range, by Linux's page map of this process.

    Pages never touched, or returned to the system, do not count.
    """
    first, last = address // mmap.PAGESIZE, (address + num_bytes - 1) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as entries:
        entries.seek(8 * first)
        found = np.frombuffer(entries.read(8 * (last + 1 - first)), np.uint64)
    return int(((found & PRESENT) != 0).sum()) * mmap.PAGESIZE


@contextmanager
def _caught() -> Iterator[list[CpuRunner]]:
    """Collect the runners loaded during the block."""
    runners: list[CpuRunner] = []
    load = CpuRunner.load

    def load_and_tell(self: CpuRunner) -> Any:
        runners.append(self)
        return load(self)

    with mock.patch.object(CpuRunner, "load", load_and_tell):
        yield runners


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--output", help="a file for the report, in JSON")
    given = parser.parse_args()
    found = measure(given)
    print(json.dumps(found))
    if given.output:
        write(given.output, {"about": about(sys.argv[1:]), "results": {"mib": found}})


if __name__ == "__main__":
    main()
