"""Measure how long one request with many texts blocks the event loop.

    python -m trouper.bench.studies.server.many_inputs [--inputs 2048] [--requests 5] [--output FILE.json]

The time between two awaits of a task is measured in CPU time of the loop's thread, which excludes other work on the machine. The
bundled model embeds whole texts, or their tokens; the garbage collector has the settings of `trouper serve`.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import anyio
import trio

from trouper.bench.report import about, percentile, summary, write
from trouper.bench.studies.server.client_process import client_of
from trouper.config.args import EngineArgs
from trouper.frontends.python.async_engine import AsyncLLMEngine
from trouper.frontends.server.program.monitor import Heap

PERCENTILES = (50.0,)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure how long many texts block the event loop."
    )
    parser.add_argument("--inputs", type=int, default=2048, help="Number of texts in one request.")
    parser.add_argument("--requests", type=int, default=5, help="Number of requests of each kind.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder, Heap() as heap:
        results = anyio.run(
            measure, Path(folder), steps, heap, options.inputs, options.requests,
            backend="trio", backend_options={"instruments": [steps]},
        )  # fmt: skip
    print(f"{'':32}{'request s':>10}{'step ms p50':>12}{'max':>8}")
    for name, record in results.items():
        longest = record["longest_step_ms"]
        figures = f"{record['request_s_p50']:10.2f}{longest['p50']:12.2f}{longest['max']:8.2f}"
        print(f"{name:32}{figures}")
    if options.output:
        write(str(options.output), {"about": about(sys.argv[1:]), "results": results})


class Steps(trio.abc.Instrument):
    """Measure the longest time between two awaits of any task since the last `take`."""

    def __init__(self) -> None:
        self._begin = self._longest_s = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._begin = thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._longest_s = max(self._longest_s, thread_time() - self._begin)

    def take(self) -> float:
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


def requests(num: int) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Return the requests to measure: {name: (the engine's pooling task, path, body)}."""
    texts = [f"a text of some words, number {i}" for i in range(num)]
    pairs = {"data_1": texts[::-1], "data_2": texts}
    ranking = {"query": "a text", "documents": texts}
    ids = [[5 + i % 7, 6, 7] for i in range(num)]
    return {
        "embeddings of texts": ("embed", "/v1/embeddings", {"input": texts}),
        "the same in base64": ("embed", "/v1/embeddings", {"input": texts, "encoding_format": "base64"}),
        "embeddings of ids": ("embed", "/v1/embeddings", {"input": ids}),
        "ranking": ("embed", "/rerank", ranking),
        "scores of pairs": ("embed", "/score", pairs),
        "ranking, late interaction": ("token_embed", "/rerank", ranking),
        "scores, late interaction": ("token_embed", "/score", pairs),
    }  # fmt: skip


async def measure(
    folder: Path, steps: Steps, heap: Heap, num_inputs: int, num_requests: int
) -> dict[str, Any]:
    """Return the figures of each request, by its name in `requests`."""
    results: dict[str, Any] = {}
    cases = requests(num_inputs)
    for task in ("embed", "token_embed"):
        arguments = EngineArgs(runner="pooling", pooler_config={"task": task}, max_model_len=64)
        async with AsyncLLMEngine(arguments) as engine:
            heap.settle()
            for name, (its_task, path, body) in cases.items():
                if its_task != task:
                    continue
                async with client_of(engine, path, body, folder) as ask:
                    await ask()
                    seconds, longest_ms = [], []
                    for _ in range(num_requests):
                        steps.take()
                        begin = perf_counter()
                        await ask()
                        seconds.append(perf_counter() - begin)
                        longest_ms.append(1000 * steps.take())
                results[name] = {
                    "request_s_p50": percentile(seconds, 50),
                    "longest_step_ms": summary(longest_ms, PERCENTILES),
                }
    return results


if __name__ == "__main__":
    main()
