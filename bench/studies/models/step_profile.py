"""Divide the time of a replayed decode step by kernel, and compare its products with the rate of memory.

    python -m trouper.bench.studies.models.step_profile MODEL [--quantization int4] [--batch-size 1] [--output FILE.json]

The counter of the processor is read after each command of the recorded step, so that the figures include the waits of
threads for each other. Each is the median of many steps. The rate of memory is that of a sum in the same process.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
from collections import defaultdict
from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np
import torch

from trouper.bench.kernels.measure import measure_roofs
from trouper.bench.report import about, write
from trouper.frontends.python.llm import LLM
from trouper.kernels.codegen.recording import Recording
from trouper.params import SamplingParams

INPUT_LEN, OUTPUT_LEN, NUM_RUNS = 32, 64, 3
# Bytes to sum for the rate of memory: more than any cache.
READ_BYTES = 2**28


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return the µs of a step by kernel with the number of launches, and the rest of the step outside of kernels."""
    steps: list[tuple[float, Recording[Any], np.ndarray]] = []

    def timed(recording: Recording[Any]) -> None:
        steps.append((perf_counter(), recording, recording.timed_replay()))

    options = {
        "dtype": given.dtype,
        "quantization": given.quantization,
        "max_model_len": 512,
        "enable_prefix_caching": False,
    }
    with mock.patch.object(Recording, "replay", timed), LLM(given.model, **options) as llm:
        rng = random.Random(0)
        size = llm.llm_engine.model_config.vocab_size
        prompts: list[Any] = [
            {"prompt_token_ids": rng.choices(range(3, size), k=INPUT_LEN)}
            for _ in range(given.batch_size)
        ]
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        for _ in range(NUM_RUNS):
            # Only the last run is kept; the first ones record and warm up.
            steps.clear()
            llm.generate(prompts, params, use_tqdm=False)
        # The step with the most launches also samples.
        recording = max((recording for _, recording, _ in steps), key=lambda r: len(r.names))
        names = recording.names
    steps = [step for step in steps if step[1] is recording]
    wholes = [after[0] - before[0] for before, after in itertools.pairwise(steps)]
    outside = [whole - step[2].sum() for whole, step in zip(wholes, steps[:-1], strict=True)]
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    medians = np.median(np.array([seconds for _, _, seconds in steps]), axis=0)
    for name, seconds in zip(names, medians.tolist(), strict=True):
        kernels[name][0] += 1
        kernels[name][1] += seconds
    roofs = measure_roofs(torch.float32, read_bytes=READ_BYTES, gemm=256)
    return {
        "step_us": round(1e6 * statistics.median(wholes), 1),
        "outside_us": round(1e6 * float(np.median(outside)), 1),
        "read_gb_s": round(roofs.bytes_s / 1e9, 1),
        "kernels": {
            name: {"launches": int(num), "us": round(1e6 * seconds, 1)}
            for name, (num, seconds) in sorted(kernels.items(), key=lambda kernel: -kernel[1][1])
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--output", help="a file for the report, in JSON")
    given = parser.parse_args()
    found = measure(given)
    print(json.dumps(found, indent=1))
    if given.output:
        write(given.output, {"about": about(sys.argv[1:]), "results": found})


if __name__ == "__main__":
    main()
