"""Measure how large prompts of embeddings delay other streams: gaps of the event loop and inter-token latency.

    python -m trouper.bench.studies.server.embeds_gap [--streams 32] [--requests 10] [--output FILE.json]

Streams run continuously together with a heartbeat. From time to time a prompt of 2049 or 8193 rows of 4096 bfloat16
arrives, once as a tensor in this process and once over HTTP from another process. The figures "beside" cover the time
from sending the prompt to its answer, the figures "before" the pause before it. The model has two small random layers of that width, and its prefix
cache contains the prompt, so the figures show the transport of the rows and not their computation.
"""

import argparse
import base64
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import torch
from safetensors.torch import save

from trouper.bench.report import about, percentile, summary, write
from trouper.bench.studies.server.client_process import Ask, client_of
from trouper.config.args import EngineArgs
from trouper.frontends.python.async_engine import AsyncLLMEngine
from trouper.params import RequestOutputKind, SamplingParams

# One row more than full blocks.  The prefix cache contains the blocks, so only the last row is computed.
ROWS = (2049, 8193)
WIDTH = 4096
MODEL_LEN = 16384
INTERVAL_S = 0.001
PERCENTILES = (50.0, 99.0, 99.9)
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": WIDTH,
    "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096, "rms_norm_eps": 1e-6,
    "max_position_embeddings": MODEL_LEN, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure how large prompts of embeddings delay other streams."
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument(
        "--requests", type=int, default=10, help="Prompts of each size, sent each way."
    )
    parser.add_argument(
        "--pause", type=float, default=1.0, help="Seconds between two large prompts."
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        act = (Path(folder), options.streams, options.requests, options.pause)
        results = anyio.run(measure, *act, backend="trio")
    head = "gap p50", "gap p99", "gap max", "itl mean", "itl p50", "itl p99"
    print(" " * 26 + "".join(f"{name:>9}" for name in head))
    for name, record in results.items():
        for state in ("before", "beside", "both"):
            gap, itl = record[f"{state}_gap_ms"], record[f"{state}_itl_ms"]
            figures = [gap["p50"], gap["p99"], gap["max"], itl["mean"], itl["p50"], itl["p99"]]
            print(f"{name:18} {state:7}" + "".join(f"{value:9.3f}" for value in figures))
    if options.output:
        write(str(options.output), {"about": about(sys.argv[1:]), "results": results})


class Record:
    """Gaps of the event loop and times between tokens.

    They are recorded separately for the times with and without large prompts. Both are in milliseconds.
    """

    def __init__(self) -> None:
        self.state = "warm"
        self.gap_ms: dict[str, list[float]] = defaultdict(list)
        self.itl_ms: dict[str, list[float]] = defaultdict(list)

    async def beat(self) -> None:
        while True:
            due = perf_counter() + INTERVAL_S
            await anyio.sleep(INTERVAL_S)
            self.gap_ms[self.state].append(1000 * max(0.0, perf_counter() - due))

    async def stream(self, engine: AsyncLLMEngine) -> None:
        """Run one request after the other until cancelled, and record the times between tokens under `state`."""
        params = SamplingParams(
            max_tokens=1000, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        while True:
            last: float | None = None
            async with engine.generate([1, 2, 3], params) as outputs:
                async for _ in outputs:
                    now = perf_counter()
                    if last is not None:
                        self.itl_ms[self.state].append(1000 * (now - last))
                    last = now

    def take(self) -> dict[str, Any]:
        """Summarise gaps and latencies since the last call in milliseconds, and reset them."""
        found: dict[str, Any] = {}
        for kind, values in (("gap", self.gap_ms), ("itl", self.itl_ms)):
            before, beside = values.pop("before"), values.pop("beside")
            for state, some in (("before", before), ("beside", beside), ("both", before + beside)):
                found[f"{state}_{kind}_ms"] = summary(some, PERCENTILES)
        return found


async def measure(
    folder: Path, num_streams: int, num_requests: int, pause_s: float
) -> dict[str, Any]:
    """Measure each way of sending embeddings, for each number of rows, while streams run.

    Returns the figures of the event loop and of the streams.
    """
    arguments = EngineArgs(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
        enable_prompt_embeds=True, max_num_seqs=num_streams + 2, max_model_len=MODEL_LEN,
    )  # fmt: skip
    results: dict[str, Any] = {}
    async with AsyncLLMEngine(arguments) as engine:
        record = Record()
        async with anyio.create_task_group() as tasks:
            for rows in ROWS:
                tensor = torch.randn(rows, WIDTH).to(torch.bfloat16)
                # Fills the prefix cache.
                await _in_process(engine, tensor)
                if rows == ROWS[0]:
                    tasks.start_soon(record.beat)
                    for _ in range(num_streams):
                        tasks.start_soon(record.stream, engine)
                for way in (_tensors, _clients):
                    async with way(engine, tensor, folder) as ask:
                        seconds = await _repeat(record, ask, num_requests, pause_s)
                    name = f"{way.__name__[1:]}, {rows} rows"
                    results[name] = {"request_s_p50": percentile(seconds, 50), **record.take()}
            tasks.cancel_scope.cancel()
    return results


async def _repeat(record: Record, ask: Ask, num: int, pause_s: float) -> list[float]:
    seconds: list[float] = []
    await ask()
    for _ in range(num):
        record.state = "before"
        await anyio.sleep(pause_s)
        record.state, begin = "beside", perf_counter()
        await ask()
        seconds.append(perf_counter() - begin)
    record.state = "warm"
    return seconds


@asynccontextmanager
async def _tensors(engine: AsyncLLMEngine, tensor: torch.Tensor, _: Path) -> AsyncGenerator[Ask]:
    async def ask() -> None:
        await _in_process(engine, tensor)

    yield ask


async def _in_process(engine: AsyncLLMEngine, tensor: torch.Tensor) -> None:
    async for _ in engine.generate({"prompt_embeds": tensor}, SamplingParams(max_tokens=1)):
        pass


@asynccontextmanager
async def _clients(
    engine: AsyncLLMEngine, tensor: torch.Tensor, folder: Path
) -> AsyncGenerator[Ask]:
    text = base64.b64encode(save({"prompt_embeds": tensor})).decode()
    body = {"prompt_embeds": text, "max_tokens": 1}
    async with client_of(engine, "/v1/completions", body, folder) as ask:
        yield ask


if __name__ == "__main__":
    main()
