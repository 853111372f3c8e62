"""Embeddings on a real model beside its peers: documents per second, what HTTP takes, what the actors add.

    python -m trouper.bench.embeddings MODEL_DIR [--num-docs 1000] [--engines st:float32,trouper:float32,…]
        [--vllm-python PYTHON] [--output FILE.json]

Every engine runs in a process of its own, on the same texts: pieces of the standard library's sources, 85
tokens each on average.  The first 64 texts warm it up; the figure is the median of `ROUNDS`.

    st, trouper, vllm   offline
    http, http16        `trouper serve`, 32 clients whose requests have one text each, or 16; answers as
                        base64; the clients are one cheap thread on the same cores
    latency             ms, p50, of one short text: through all actors, and the tokenizer and the runner alone,
                        a hundred in turn: another copy of the weights is not in the cache

Lines of JSON, then the ratios.
"""

import argparse
import glob
import json
import random
import re
import statistics
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trouper.bench.callers import Call, Callers
from trouper.bench.report import about, write

DTYPES = ("float32", "bfloat16")
ENGINES = ",".join(
    f"{name}:{dtype}" for dtype in DTYPES for name in ("st", "trouper", "http", "http16", "latency")
)
ROUNDS = 5
NUM_CLIENTS = 32
MAX_ROUND_S = 600
NUM_LATENCIES = 1000
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
EMBEDDING = b'"embedding":"'
SHORT = "How many actors play here?"
RATIOS = (("trouper", "st"), ("trouper", "vllm"), ("http", "trouper"), ("http16", "trouper"))
# Stands alone: the peer's Python knows nothing of this package.
VLLM = """
import json, os, sys, time
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
from vllm import LLM
if __name__ == "__main__":
    docs = json.load(open(sys.argv[3]))
    llm = LLM(model=sys.argv[1], runner="pooling", dtype=sys.argv[2], max_model_len=256)
    llm.embed(docs[:64], use_tqdm=False)
    for _ in range(int(sys.argv[4])):
        began = time.perf_counter()
        llm.embed(docs, use_tqdm=False)
        print("seconds", time.perf_counter() - began, flush=True)
"""


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


def run_vllm(python: str, model: str, dtype: str, docs: list[str], folder: Path) -> dict[str, Any]:
    script, texts = folder / "peer.py", folder / "docs.json"
    script.write_text(VLLM)
    texts.write_text(json.dumps(docs))
    command = [python, str(script), model, dtype, str(texts), str(ROUNDS)]
    found = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True).stdout
    seconds = [float(line.split()[1]) for line in found.splitlines() if line.startswith("seconds ")]
    if len(seconds) < ROUNDS:  # its end is its own: now and then it aborts
        raise SystemExit("vLLM did not finish")
    return _rates([len(docs) / s for s in seconds])


def run_http(model: str, dtype: str, docs: list[str], *, texts: int = 1) -> dict[str, Any]:
    """Clients of `texts` texts a request."""
    command = [sys.executable, "-m", "trouper", "serve", model, "--dtype", dtype, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            found = (re.search(r"http://127\.0\.0\.1:(\d+)", line) for line in server.stderr)
            port = next(int(match[1]) for match in found if match)
            _wait_ready(port)
            _ask_all(port, docs[:64], texts)
            rate = _rate(lambda: _ask_all(port, docs, texts), len(docs))
            return {"texts_per_request": texts, **rate}
        finally:
            server.terminate()
            server.stderr.read()


def _wait_ready(port: int) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except OSError:  # it does not listen yet, or says that it is starting
            time.sleep(0.1)
    raise TimeoutError("the server is not ready after a minute")


def bodies(docs: list[str], texts: int) -> list[bytes]:
    """Of requests for `texts` texts each, the last for what is left; one is sent as itself, several as a list."""
    asked = (docs[first : first + texts] for first in range(0, len(docs), texts))
    return [
        json.dumps({"input": part[0] if texts == 1 else part, "encoding_format": "base64"}).encode()
        for part in asked
    ]


def _ask_all(port: int, docs: list[str], texts: int) -> None:
    """Every answer must be a 200 with as many embeddings as there were texts; nobody decodes them."""
    parts = [docs[first : first + texts] for first in range(0, len(docs), texts)]
    waiting = iter(zip(map(len, parts), bodies(docs, texts), strict=True))
    callers = Callers(port, EMBEDDING)

    def ask(kind: str) -> None:
        num_texts, body = next(waiting, (0, b""))
        if num_texts:
            callers.call(HEAD % len(body) + body, kind, lambda call: check(call, num_texts))

    def check(call: Call, num_texts: int) -> None:
        found = callers.num_frames.pop(call.kind, 0)
        if call.outcome != "200" or found != num_texts:
            raise SystemExit(f"answer {call.outcome} with {found} embeddings of {num_texts}")
        ask(call.kind)

    try:
        for client in range(NUM_CLIENTS):
            ask(str(client))
        callers.run(time.perf_counter() + MAX_ROUND_S, lambda: not callers.num_open)
        assert not callers.num_open, callers.num_open
    finally:
        callers.close()


def run_latency(model: str, dtype: str, _: list[str]) -> dict[str, Any]:
    """In one process."""
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
            for _ in range(NUM_LATENCIES // 100):
                for _ in range(100):
                    began = time.perf_counter()
                    async for _output in engine.encode(SHORT, params):
                        pass
                    through.append(time.perf_counter() - began)
                for _ in range(100):
                    began = time.perf_counter()
                    ids = tuple(tokenizer.encode(SHORT))
                    runner.step(PoolPlan(1, 0, (PoolColumn(ids, None, "embed"),)))
                    alone.append(time.perf_counter() - began)

    trio.run(measure)
    engine_ms, direct_ms = (sorted(times)[len(times) // 2] * 1e3 for times in (through, alone))
    figures = {"engine_ms": engine_ms, "direct_ms": direct_ms, "added_ms": engine_ms - direct_ms}
    return {name: round(value, 3) for name, value in figures.items()}


RUNS: dict[str, Callable[[str, str, list[str]], dict[str, Any]]] = {
    "st": run_sentence_transformers,
    "trouper": run_trouper,
    "http": run_http,
    "http16": partial(run_http, texts=16),
    "latency": run_latency,
}


def _rate(work: Callable[[], Any], count: int) -> dict[str, Any]:
    rates: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        rates.append(count / (time.perf_counter() - began))
    return _rates(rates)


def _rates(rates: list[float]) -> dict[str, Any]:
    return {
        "docs_s": round(statistics.median(rates), 1),
        "rounds": [round(rate, 1) for rate in rates],
    }


def ratios(results: list[dict[str, Any]]) -> dict[str, float]:
    """Of documents per second, in each dtype that both were measured in."""
    rates = {(r["engine"], r["dtype"]): r["docs_s"] for r in results if "docs_s" in r}
    return {
        f"{ours} / {theirs}, {dtype}": round(rates[ours, dtype] / rates[theirs, dtype], 3)
        for ours, theirs in RATIOS
        for dtype in DTYPES
        if (ours, dtype) in rates and (theirs, dtype) in rates
    }


def _run_apart(given: argparse.Namespace, engine: str, folder: Path) -> dict[str, Any]:
    name, _, dtype = engine.partition(":")
    if name == "vllm":
        docs = documents(given.num_docs)
        found = run_vllm(given.vllm_python, given.model, dtype, docs, folder)
        return {"engine": name, "dtype": dtype, **found}
    command = [sys.executable, "-m", "trouper.bench.embeddings", given.model, "--num-docs"]
    command += [str(given.num_docs), "--one", engine]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a sentence-transformers folder")
    parser.add_argument("--num-docs", type=int, default=1000)
    parser.add_argument("--engines", default=ENGINES)
    parser.add_argument("--vllm-python", help="where vLLM is installed; then it is measured, too")
    parser.add_argument("--output", help="a file for the report, in JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # what a child process runs
    given = parser.parse_args()
    if given.one is not None:
        name, _, dtype = given.one.partition(":")
        figures = RUNS[name](given.model, dtype, documents(given.num_docs))
        print(json.dumps({"engine": name, "dtype": dtype, **figures}), flush=True)
        return
    engines = given.engines.split(",")
    if given.vllm_python:
        engines += [] if "vllm" in given.engines else [f"vllm:{dtype}" for dtype in DTYPES]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for engine in engines:
            results.append(_run_apart(given, engine, Path(folder)))
            print(json.dumps(results[-1]), flush=True)
    print(json.dumps(ratios(results)))
    if given.output:
        report = {"about": about(sys.argv[2:]), "results": results, "ratios": ratios(results)}
        write(given.output, report)


if __name__ == "__main__":
    main()
