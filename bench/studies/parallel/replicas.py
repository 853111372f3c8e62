"""Measure the cost of the server's side of several replicas, and how evenly requests are distributed among them.

The devices compute nothing and answer immediately, so only the engine is measured: scheduling, detokenizing and the
clients' streams. One event loop serves all replicas, so its time per token limits all of them together.

Run it as `python -m trouper.bench.studies.parallel.replicas`; `--help` lists its options.
"""

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any, cast

import anyio
import anyio.lowlevel
import msgspec
import typer

from trouper.actors.engine.wiring import Engine, open_engine
from trouper.actors.executor.device import DeviceInfo
from trouper.actors.messages.controls import DeviceAction
from trouper.actors.messages.outputs import SchedulerStats
from trouper.actors.messages.requests import PrepareGrammar
from trouper.actors.messages.steps import PoolPlan, StepDone, StepPlan, TierOrder
from trouper.bench.cli.options import ReportOptions, note
from trouper.bench.studies.command import run_study
from trouper.config.args import EngineArgs
from trouper.config.engine_config import EngineConfig
from trouper.config.resolve import resolve
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.values import integers
from trouper.params import SamplingParams

NUM_BLOCKS, BLOCK_SIZE = 4096, 16
# The token that all devices return.
TOKEN = 7
PREFIX_TOKENS, OWN_TOKENS = 480, 32  # of a prompt


class InstantDevice:
    """A device that computes nothing: each plan is answered at once, always with the same token.

    So the measured time is that of the engine's own work.
    """

    process_ids = ()

    def __init__(self) -> None:
        self._plans: deque[StepPlan] = deque()  # at most `max_steps_in_flight`
        self._has_plan = anyio.Event()

    async def load(self) -> DeviceInfo:
        await anyio.lowlevel.checkpoint()
        return DeviceInfo(NUM_BLOCKS, BLOCK_SIZE, "float32", "none")

    def submit(self, plan: StepPlan | PoolPlan) -> None:
        self._plans.append(cast("StepPlan", plan))
        self._has_plan.set()

    def order_tier(self, order: TierOrder) -> None:
        raise NotImplementedError("there is no tier on disk")

    def prepare(self, order: PrepareGrammar) -> None:
        raise AssertionError("no request of this bench has a grammar")

    async def receive(self) -> StepDone:
        while not self._plans:
            self._has_plan = anyio.Event()
            await self._has_plan.wait()
        await anyio.lowlevel.checkpoint()
        plan = self._plans.popleft()
        return StepDone(plan.step, tuple((TOKEN,) * num for num in plan.num_sampled_tokens))

    async def call(self, action: DeviceAction) -> object:
        await anyio.lowlevel.checkpoint()
        return None

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()


def config_of(args: EngineArgs, num_replicas: int) -> EngineConfig:
    """Resolve an engine with this many replicas. It has no tokenizer, so outputs are token ids only."""
    args = EngineArgs(**{**vars(args), "data_parallel_size": num_replicas})
    config = resolve(args)
    return msgspec.structs.replace(config, block_size=BLOCK_SIZE, tokenizer=None)


async def _stream(engine: Engine, prompt: Sequence[int], num_tokens: int, name: str) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    async for _ in engine.generate({"prompt_token_ids": list(prompt)}, params, name):
        pass


async def us_per_token(engine: Engine, num_streams: int, num_tokens: int) -> float:
    """Return the microseconds per token of this many simultaneous streams.

    It is the elapsed time divided by the tokens of all streams, because one event loop serves them all.
    """
    begun = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for number in range(num_streams):
            tasks.start_soon(_stream, engine, [number + 1] * 8, num_tokens, f"{number}")
    return (time.perf_counter() - begun) * 1e6 / (num_streams * num_tokens)


async def measure_front(
    args: EngineArgs, replicas: Sequence[int], *, num_streams: int, num_tokens: int, num_rounds: int
) -> dict[str, dict[str, Any]]:
    """Return {number of replicas: median microseconds per token of `num_streams` streams, and those of each round}.

    The numbers of replicas alternate.
    """
    found: dict[int, list[float]] = {count: [] for count in replicas}
    async with AsyncExitStack() as stack:
        engines = {
            count: await stack.enter_async_context(
                open_engine(config_of(args, count), [InstantDevice() for _ in range(count)])
            )
            for count in replicas
        }
        for engine in engines.values():
            await us_per_token(engine, num_streams, num_tokens // 4 + 1)
        for _ in range(num_rounds):
            for count, engine in engines.items():
                found[count].append(await us_per_token(engine, num_streams, num_tokens))
    return {
        str(count): {
            "us_per_token": round(statistics.median(rounds), 2),
            "rounds": [round(value, 2) for value in rounds],
        }
        for count, rounds in found.items()
    }


async def measure_sharing(
    args: EngineArgs, replicas: Sequence[int], *, num_requests: int, num_prefixes: int
) -> dict[str, dict[str, Any]]:
    """Return {number of replicas: share of prompt tokens found in caches, and the most work of a replica over the least}.

    Prompts begin with one of `num_prefixes` shared prefixes, and eight are open at a time for each replica.
    """
    found: dict[str, dict[str, Any]] = {}
    for count in replicas:
        devices = [InstantDevice() for _ in range(count)]
        async with open_engine(config_of(args, count), devices) as engine:
            room = anyio.CapacityLimiter(8 * count)

            async def ask(
                number: int, engine: Engine = engine, room: anyio.CapacityLimiter = room
            ) -> None:
                prefix = [1 + number * 7919 % num_prefixes] * PREFIX_TOKENS
                async with room:
                    own = [100 + number % 800] * OWN_TOKENS
                    await _stream(engine, prefix + own, 16, f"{number}")

            async with anyio.create_task_group() as tasks:
                for number in range(num_requests):
                    tasks.start_soon(ask, number)
            found[str(count)] = shared_out(engine.statistics().replicas)
    return found


def shared_out(parts: Sequence[SchedulerStats]) -> dict[str, Any]:
    """Return the hit rate of all caches together, and the balance of the computed tokens."""
    hits = sum(part.prefix_cache_hits for part in parts)
    queries = sum(part.prefix_cache_queries for part in parts)
    work = [part.num_prompt_tokens + part.num_generation_tokens for part in parts]
    return {
        "hit_rate": round(hits / max(1, queries), 4),
        "work": work,
        "max_over_min": round(max(work) / max(1, min(work)), 3),
    }


def measure(
    args: EngineArgs,
    replicas: Sequence[int],
    *,
    num_streams: int,
    num_tokens: int,
    num_rounds: int,
    num_requests: int = 400,
    num_prefixes: int = 16,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run both measurements on a new event loop."""

    async def act() -> dict[str, Any]:
        front = await measure_front(
            args, replicas, num_streams=num_streams, num_tokens=num_tokens, num_rounds=num_rounds
        )
        tell("front: done")
        sharing = await measure_sharing(
            args, replicas, num_requests=num_requests, num_prefixes=num_prefixes
        )
        return {"front": front, "sharing": sharing}

    return anyio.run(act, backend="asyncio")


@expand_options
def replicas(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder or hub id; the demo model by default."),
    ] = None,
    data_parallel_size: Annotated[
        Any,
        typer.Option(
            "--data-parallel-size",
            "-dp",
            parser=integers,
            metavar="N,N,…",
            help="Numbers of replicas to measure, separated by commas.",
        ),
    ] = "1,2,4",
    streams: Annotated[int, typer.Option(min=1, help="Streams at once, of all replicas.")] = 64,
    output_len: Annotated[
        int, typer.Option(min=1, help="Tokens to generate in each stream.")
    ] = 200,
    num_iters: Annotated[int, typer.Option(min=1, help="Timed rounds of each, in turn.")] = 5,
    *,
    report: ReportOptions,
) -> None:
    """Measure replicas with immediate devices: the engine's time per token, cache hits, and the balance of work."""
    report.check()
    args = EngineArgs(model=model, device="cpu", skip_tokenizer_init=True, disable_log_stats=True)
    results = measure(
        args,
        data_parallel_size,
        num_streams=streams,
        num_tokens=output_len,
        num_rounds=num_iters,
        tell=note,
    )
    lines = (
        f"{count:>2} replicas: {front['us_per_token']:.1f} µs a token, "
        f"hit rate {results['sharing'][count]['hit_rate']:.3f}, "
        f"most work of a replica over the least {results['sharing'][count]['max_over_min']:.2f}"
        for count, front in results["front"].items()
    )
    report.finish(ctx, {"results": results}, lines)


if __name__ == "__main__":
    sys.exit(run_study(replicas))
