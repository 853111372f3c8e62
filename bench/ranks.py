"""A model by two ranks or more beside one process with as many threads, or beside one GPU: a prompt, and steps of a few rows.

Both engines are open at once and are measured in turn, so a machine that is disturbed disturbs both.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median
from time import perf_counter
from typing import Any

import anyio

from trouper.actors.engine.wiring import Engine, open_engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.config.args import EngineArgs
from trouper.config.resolve import EngineConfig, resolve
from trouper.params import SamplingParams

VOCABULARY = range(1, 1000)  # ids that every model has
SHORT = 16  # tokens of the prompt of a sequence that decodes
GPU_KV_BYTES = 2**32  # of each engine, since the first GPU is in both


def configs(
    args: EngineArgs,
    num_ranks: int,
    num_prompt_tokens: int,
    num_rows: int,
    num_outputs: int,
    device: str = "cpu",
) -> tuple[EngineConfig, EngineConfig]:
    """Resolve one process and several ranks, for prompts and streams of these sizes."""
    args.enable_prefix_caching = False
    args.max_num_seqs = num_rows
    args.max_num_batched_tokens = max(num_prompt_tokens, num_rows * SHORT)
    args.max_model_len = max(num_prompt_tokens + 1, SHORT + num_outputs)
    args.compress_weights = False  # of one row alone, and not of the rest
    args.device, args.device_worker = device, "process"
    if device == "cuda":
        args.kv_cache_memory_bytes = GPU_KV_BYTES
    whole = resolve(args)
    args.tensor_parallel_size = num_ranks
    return whole, resolve(args)


async def measure(
    whole: EngineConfig,
    cut: EngineConfig,
    *,
    num_prompt_tokens: int,
    rows: Sequence[int],
    num_outputs: int,
    num_rounds: int,
) -> list[dict[str, Any]]:
    """One record for the prompt and one for each number of rows: median seconds of both, and their ratio."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(open_engine(config, ProcessDevice(config)))
            for config in (whole, cut)
        ]

        async def turns(what: str, num_tokens: int, count: int, num_rows: int) -> dict[str, Any]:
            seconds: list[list[float]] = [[], []]
            for turn in range(-1, num_rounds):  # the first compiles and records
                for number, engine in enumerate(engines):
                    name = f"{what}-{turn}-{number}"
                    found = await _seconds(engine, num_tokens, count, num_rows, name)
                    if turn >= 0:
                        seconds[number].append(found)
            one, several = map(median, seconds)
            return {
                "what": what, "num_ranks": cut.tensor_parallel_size, "one_process_s": one, "ranks_s": several,
                "ratio": one / several, "seconds": seconds,
            }  # fmt: skip

        records = [await turns(f"prompt of {num_prompt_tokens}", num_prompt_tokens, 1, 1)]
        for num_rows in rows:
            name = f"step of {num_rows} rows"
            records.append(await turns(name, SHORT, num_outputs, num_rows))
        return records


async def _seconds(
    engine: Engine, num_tokens: int, num_outputs: int, num_rows: int, name: str
) -> float:
    """Return the seconds of a prompt alone; of several outputs those of one step after the first tokens."""
    params = SamplingParams(
        temperature=0, max_tokens=num_outputs, ignore_eos=True, detokenize=False
    )
    first_s: list[float] = []

    async def stream(row: int) -> None:
        ids = [VOCABULARY[(i + row) % len(VOCABULARY)] for i in range(num_tokens)]
        is_first = True
        async for _ in engine.generate({"prompt_token_ids": ids}, params, f"{name}-{row}"):
            if is_first:
                first_s.append(perf_counter())
                is_first = False

    started = perf_counter()
    async with anyio.create_task_group() as tasks:
        for row in range(num_rows):
            tasks.start_soon(stream, row)
    if num_outputs == 1:
        return perf_counter() - started
    return (perf_counter() - max(first_s)) / (num_outputs - 1)


def measure_both(whole: EngineConfig, cut: EngineConfig, **options: Any) -> list[dict[str, Any]]:
    """Measure on an event loop of its own."""

    async def act() -> list[dict[str, Any]]:
        return await measure(whole, cut, **options)

    return anyio.run(act, backend="trio")
