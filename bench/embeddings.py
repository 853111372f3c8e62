"""Embeddings on a real model: documents per second beside sentence-transformers, and the actors' latency.

    python -m trouper.bench.embeddings MODEL_DIR [--num-docs 1000] [--engines st:float32,trouper:bfloat16,…]

Every engine runs in a process of its own, on the same texts: pieces of the standard library's sources,
85 tokens each on average.  The first 64 texts warm it up; the figure is the best of `ROUNDS`.  `latency` is
one short text through the engine, over calling its runner directly, in one process.  Lines of JSON.
"""

import argparse
import glob
import json
import random
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

ENGINES = "st:float32,trouper:float32,st:bfloat16,trouper:bfloat16,latency:float32,latency:bfloat16"
ROUNDS = 3
NUM_LATENCIES = 300
SHORT = "How many actors play here?"


def documents(count: int) -> list[str]:
    rng = random.Random(0)
    lines: list[str] = []
    for path in sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py"))[:120]:
        words = Path(path).read_text(errors="ignore").split()
        first = 0
        while first < len(words):
            length = rng.choice([8, 16, 32, 64, 128, 180])
            lines.append(" ".join(words[first : first + length]))
            first += length
    rng.shuffle(lines)
    return [" ".join(line.split()[:60])[:350] for line in lines[:count]]


def run_sentence_transformers(model: str, dtype: str, docs: list[str]) -> dict[str, Any]:
    import torch
    from sentence_transformers import SentenceTransformer

    engine = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    engine.encode(docs[:64], batch_size=32)
    return _rate(lambda: engine.encode(docs, batch_size=32), len(docs))


def run_trouper(model: str, dtype: str, docs: list[str]) -> dict[str, Any]:
    from trouper import LLM

    with LLM(model, dtype=dtype) as llm:
        llm.embed(docs[:64], use_tqdm=False)
        return _rate(lambda: llm.embed(docs, use_tqdm=False), len(docs))


def run_latency(model: str, dtype: str, _: list[str]) -> dict[str, Any]:
    """Milliseconds, p50, in turn: through all actors, and the tokenizer and the runner called directly."""
    import trio

    from trouper import AsyncLLMEngine, EngineArgs, PoolingParams
    from trouper.actors.executor.pooling_runner import PoolingRunner
    from trouper.actors.messages import PoolColumn, PoolPlan

    args, params = EngineArgs(model=model, dtype=dtype), PoolingParams(task="embed")
    runner = PoolingRunner(args.resolve())
    through: list[float] = []
    alone: list[float] = []

    async def measure() -> None:
        async with AsyncLLMEngine(args) as engine:
            tokenizer = engine.engine.tokenizer
            assert tokenizer is not None
            runner.load()
            for _ in range(NUM_LATENCIES):
                began = time.perf_counter()
                async for _output in engine.encode(SHORT, params):
                    pass
                through.append(time.perf_counter() - began)
                began = time.perf_counter()
                ids = tuple(tokenizer.encode(SHORT))
                runner.step(PoolPlan(1, 0, (PoolColumn(ids, None, "embed"),)))
                alone.append(time.perf_counter() - began)

    trio.run(measure)
    engine_ms, direct_ms = (sorted(times)[len(times) // 2] * 1e3 for times in (through, alone))
    figures = {"engine_ms": engine_ms, "direct_ms": direct_ms, "added_ms": engine_ms - direct_ms}
    return {name: round(value, 3) for name, value in figures.items()}


RUNS = {"st": run_sentence_transformers, "trouper": run_trouper, "latency": run_latency}


def _rate(work: Any, count: int) -> dict[str, Any]:
    rates: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        rates.append(round(count / (time.perf_counter() - began), 1))
    return {"docs_s": max(rates), "rounds": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a sentence-transformers folder")
    parser.add_argument("--num-docs", type=int, default=1000)
    parser.add_argument("--engines", default=ENGINES)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # what a child process runs
    given = parser.parse_args()
    if given.one is None:
        for engine in given.engines.split(","):
            arguments = [given.model, "--num-docs", str(given.num_docs), "--one", engine]
            subprocess.run(
                [sys.executable, "-m", "trouper.bench.embeddings", *arguments], check=True
            )
        return
    name, _, dtype = given.one.partition(":")
    figures = RUNS[name](given.model, dtype, documents(given.num_docs))
    print(json.dumps({"engine": name, "dtype": dtype, **figures}), flush=True)


if __name__ == "__main__":
    main()
