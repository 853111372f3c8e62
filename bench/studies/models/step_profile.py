"""Measure the time of each kernel in a replayed decode step, and compare matrix products with the memory bandwidth.

    python -m trouper.bench.studies.models.step_profile MODEL [--quantization int4] [--batch-size 1] [--num-drafts 0]
        [--output FILE.json]

The processor's time counter is read after each command of the recorded step, so the figures include the time for which threads wait
for each other. Each is the median of many steps. The bandwidth is measured by a sum in the same process.

With `--num-drafts` the prompt repeats itself, and the figures are those of steps that verify this number of drafts. `over_plain` is
their time relative to steps of single tokens in the same run.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
from collections import defaultdict
from time import perf_counter
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from trouper.bench.kernels.measure import measure_roofs
from trouper.bench.report import about, write
from trouper.frontends.python.llm import LLM
from trouper.kernels.codegen.recording import Recording
from trouper.params import SamplingParams

INPUT_LEN, OUTPUT_LEN, NUM_RUNS = 32, 64, 3
# Length of the pattern that a sequence with drafts repeats, in tokens.
PERIOD = 8
# Bytes to sum for the memory bandwidth: more than any cache.
READ_BYTES = 2**28


class TimedReplay(NamedTuple):
    """A replayed step: its start, and the seconds of each command."""

    began_s: float
    recording: Recording[Any]
    seconds: np.ndarray


def measure(
    model: str, *, batch_size: int = 1, num_drafts: int = 0, **engine_options: Any
) -> dict[str, Any]:
    """Return the µs of a step by kernel with the number of launches, and the rest of the step outside of kernels."""
    steps: list[TimedReplay] = []

    def timed(recording: Recording[Any]) -> None:
        steps.append(TimedReplay(perf_counter(), recording, recording.timed_replay()))

    options: dict[str, Any] = {"max_model_len": 512} | engine_options
    options["enable_prefix_caching"] = False
    if num_drafts:
        drafts = {"method": "ngram", "num_speculative_tokens": num_drafts}
        options["speculative_config"] = drafts
    period = PERIOD if num_drafts else INPUT_LEN
    with mock.patch.object(Recording, "replay", timed), LLM(model, **options) as llm:
        rng = random.Random(0)
        size = llm.llm_engine.model_config.vocab_size
        prompts: list[Any] = [
            {"prompt_token_ids": rng.choices(range(3, size), k=period) * (INPUT_LEN // period)}
            for _ in range(batch_size)
        ]
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        for _ in range(NUM_RUNS):
            # Only the last run counts; the first ones record steps and warm up.
            steps.clear()
            llm.generate(prompts, params, use_tqdm=False)
        recording = _sampling_step(steps, batch_size * (1 + num_drafts))
        names = recording.names
    pairs = [pair for pair in itertools.pairwise(steps) if pair[0].recording is recording]
    wholes = [after.began_s - step.began_s for step, after in pairs]
    outside = [whole - step.seconds.sum() for whole, (step, _) in zip(wholes, pairs, strict=True)]
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    medians = np.median(_seconds(steps, recording), axis=0)
    for name, seconds in zip(names, medians.tolist(), strict=True):
        kernels[name][0] += 1
        kernels[name][1] += seconds
    roofs = measure_roofs(torch.float32, read_bytes=READ_BYTES, gemm=256)
    ratios: dict[str, float] = {}
    if num_drafts:
        plain = _sampling_step(steps, batch_size)
        both = (np.median(_seconds(steps, each).sum(axis=1)) for each in (recording, plain))
        ratios["over_plain"] = round(float(next(both) / next(both)), 3)
    return {
        "step_us": round(1e6 * statistics.median(wholes), 1),
        "outside_us": round(1e6 * float(np.median(outside)), 1),
        **ratios,
        "read_gb_s": round(roofs.bytes_s / 1e9, 1),
        "kernels": {
            name: {"launches": int(num), "us": round(1e6 * seconds, 1)}
            for name, (num, seconds) in sorted(kernels.items(), key=lambda kernel: -kernel[1][1])
        },
    }


def _sampling_step(steps: list[TimedReplay], num_rows: int) -> Recording[Any]:
    """Return the recording of this number of rows with the most launches: it also samples.

    Raises:
        ValueError: no step had this number of rows.
    """
    found = [step.recording for step in steps if len(step.recording.result[0]) == num_rows]
    if not found:
        raise ValueError(f"no step of {num_rows} rows was replayed")
    return max(found, key=lambda recording: len(recording.names))


def _seconds(steps: list[TimedReplay], recording: Recording[Any]) -> np.ndarray:
    return np.array([step.seconds for step in steps if step.recording is recording])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--load-format", default="auto", help="With dummy, the weights are random.")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--num-drafts", type=int, default=0)
    parser.add_argument("--output", help="a file for the report, in JSON")
    given = parser.parse_args()
    found = measure(
        given.model,
        batch_size=given.batch_size,
        num_drafts=given.num_drafts,
        dtype=given.dtype,
        quantization=given.quantization,
        load_format=given.load_format,
    )
    print(json.dumps(found, indent=1))
    if given.output:
        write(given.output, {"about": about(sys.argv[1:]), "results": found})


if __name__ == "__main__":
    main()
