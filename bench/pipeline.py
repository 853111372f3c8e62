"""How much faster one prompt is computed by the stages of a pipeline, a core each, than by one process on one core."""

import os
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import anyio
import msgspec

from trouper.actors.engine.wiring import Engine
from trouper.bench.in_turn import in_turn
from trouper.config.args import EngineArgs
from trouper.config.resolve import EngineConfig, resolve
from trouper.params import SamplingParams

NUM_THREADS = "OMP_NUM_THREADS"  # of a worker, which inherits it
VOCABULARY = range(1, 1000)  # ids that every model has
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


def configs(
    args: EngineArgs, num_stages: int, chunk_tokens: int, num_chunks: int, *, stalls: bool
) -> tuple[EngineConfig, EngineConfig]:
    """Resolve one stage and several, for prompts of up to so many chunks.

    A step is one chunk.  With `stalls` one step is in flight, so each waits until the last stage has answered the one
    before.  The layers are cut evenly where the environment does not say how: a prompt reads the head once, not in every
    chunk.
    """
    args.enable_prefix_caching = False
    args.max_num_seqs = 1
    args.max_num_batched_tokens = chunk_tokens
    args.max_model_len = chunk_tokens * num_chunks + 1
    args.device, args.device_worker = "cpu", "process"
    whole = resolve(args)
    args.pipeline_parallel_size = num_stages
    num_layers = whole.model.hf_config["num_hidden_layers"]
    bounds = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    even = tuple(end - begin for begin, end in pairwise(bounds))
    cut = resolve(args)
    if cut.layer_partition is None:
        cut = msgspec.structs.replace(cut, layer_partition=even)
    if stalls:
        scheduler = msgspec.structs.replace(cut.scheduler, max_steps_in_flight=1)
        cut = msgspec.structs.replace(cut, scheduler=scheduler)
    return whole, cut


async def measure(
    whole: EngineConfig,
    cut: EngineConfig,
    *,
    chunk_tokens: int,
    chunks: Sequence[int],
    num_rounds: int,
) -> list[dict[str, Any]]:
    """One record for each number of chunks: median seconds of both, and their ratio."""
    records: list[dict[str, Any]] = []
    async with in_turn(whole, cut) as both:
        # what is compiled at a first step
        await both.measure("first", partial(_seconds, 2 * chunk_tokens), 1)
        for num_chunks in chunks:
            one, several, turns = await both.measure(
                f"{num_chunks}", partial(_seconds, num_chunks * chunk_tokens), num_rounds
            )
            depth = cut.num_stages
            records.append(
                {
                    "num_chunks": num_chunks,
                    "chunk_tokens": chunk_tokens,
                    "num_stages": depth,
                    "one_stage_s": one,
                    "stages_s": several,
                    "gain": one / several,
                    "bound": num_chunks * depth / (num_chunks + depth - 1),
                    "seconds": turns,
                }
            )
    return records


async def _seconds(num_tokens: int, engine: Engine, name: str) -> float:
    ids = [VOCABULARY[i % len(VOCABULARY)] for i in range(num_tokens)]
    started = perf_counter()
    async for _ in engine.generate({"prompt_token_ids": ids}, PARAMS, name):
        pass
    return perf_counter() - started


def measure_on_one_core_each(
    whole: EngineConfig, cut: EngineConfig, **options: Any
) -> list[dict[str, Any]]:
    """Measure on an event loop of its own, with one thread in each worker."""
    before = os.environ.get(NUM_THREADS)
    os.environ[NUM_THREADS] = "1"
    try:
        return anyio.run(partial(measure, whole, cut, **options), backend="trio")
    finally:
        if before is None:
            del os.environ[NUM_THREADS]
        else:
            os.environ[NUM_THREADS] = before
