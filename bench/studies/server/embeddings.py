"""Compare embeddings with peers on a real model: documents per second, the cost of HTTP, and of the actors.

    python -m trouper.bench.studies.server.embeddings MODEL_DIR [--num-docs 1000] [--engines st:float32,trouper:float32,…]
        [--num-rounds 5] [--vllm-python PYTHON] [--output FILE.json]

All engines embed the same texts, parts of the standard library's sources with 85 tokens on average. Every engine has its
own process; all are loaded and warmed up with 64 texts before the first round, and then alternate, because machines
drift by a third within minutes. A result is the median of the ratios of all rounds.

    st, trouper, vllm   offline
    http, http16        `trouper serve` with 32 clients, whose requests have one text each, or 16; answers in base64;
                        the clients are one thread on the same cores
    latency             milliseconds (p50) of one short text: through all actors, and with direct calls of the same
                        tokenizer, runner and post-processing in the loop's thread, alternately, with one model.
                        Also with the runner called by `anyio.to_thread.run_sync`, the minimum that does not block
                        the loop. Measured after the others, in a new process for each round; the reported round has
                        the median difference. On trio; `latency_asyncio` on asyncio

The output is lines of JSON, then the ratios.
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
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from trouper.bench.report import about, write
from trouper.bench.studies.server.callers import Callers, ClientCall
from trouper.config.engine_config import EngineConfig

if TYPE_CHECKING:
    from trouper.actors.executor.runners.cpu.pooling_runner import PoolingRunner
    from trouper.frontends.python.async_engine import AsyncLLMEngine

DTYPES = ("float32", "bfloat16")
# The studies of latency, with their event loops.
LATENCIES = {"latency": "trio", "latency_asyncio": "asyncio"}
ENGINES = ",".join(
    f"{name}:{dtype}"
    for dtype in DTYPES
    for name in ("st", "trouper", "http", "http16", *LATENCIES)
)
NUM_CLIENTS = 32
MAX_ROUND_S = 600
NUM_LATENCIES = 1000
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
EMBEDDING = b'"embedding":"'
SHORT = "How many actors play here?"
RATIOS = (("trouper", "st"), ("trouper", "vllm"), ("http", "trouper"), ("http16", "trouper"))
READY = "ready"
# A program of its own, because trouper is not installed in the peer's environment.
VLLM = """
import json, os, sys, time
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
from vllm import LLM
if __name__ == "__main__":
    docs = json.load(open(sys.argv[3]))
    llm = LLM(model=sys.argv[1], runner="pooling", dtype=sys.argv[2], max_model_len=256)
    llm.embed(docs[:64], use_tqdm=False)
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        llm.embed(docs, use_tqdm=False)
        print("seconds", time.perf_counter() - began, flush=True)
"""
Round = Callable[[], object]


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


@contextmanager
def sentence_transformers(model: str, dtype: str, docs: list[str]) -> Generator[Round]:
    import torch
    from sentence_transformers import SentenceTransformer

    engine = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    engine.encode(docs[:64], batch_size=32)
    yield lambda: engine.encode(docs, batch_size=32)


@contextmanager
def offline(model: str, dtype: str, docs: list[str]) -> Generator[Round]:
    from trouper import LLM

    with LLM(model, dtype=dtype) as llm:
        llm.embed(docs[:64], use_tqdm=False)
        yield lambda: llm.embed(docs, use_tqdm=False)


@contextmanager
def over_http(model: str, dtype: str, docs: list[str], *, texts: int = 1) -> Generator[Round]:
    """Serve the model over HTTP to clients that send `texts` texts in each request."""
    command = [sys.executable, "-m", "trouper", "serve", model, "--dtype", dtype, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            found = (re.search(r"http://127\.0\.0\.1:(\d+)", line) for line in server.stderr)
            port = next(int(match[1]) for match in found if match)
            _wait_ready(port)
            _ask_all(port, docs[:64], texts)
            yield lambda: _ask_all(port, docs, texts)
        finally:
            server.terminate()
            server.stderr.read()


def _wait_ready(port: int) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        # Either nothing listens yet, or the server answers 503 while it starts.
        except OSError:
            time.sleep(0.1)
    raise TimeoutError("the server is not ready after a minute")


def bodies(docs: list[str], texts: int) -> list[bytes]:
    """Encode request bodies with `texts` texts each; the last has the remainder. A single text is sent as a string, not as a list."""
    asked = (docs[first : first + texts] for first in range(0, len(docs), texts))
    return [
        json.dumps({"input": part[0] if texts == 1 else part, "encoding_format": "base64"}).encode()
        for part in asked
    ]


def _ask_all(port: int, docs: list[str], texts: int) -> None:
    """Embed all documents over HTTP. Embeddings are counted but not decoded.

    Raises SystemExit if an answer is not a 200 with one embedding for each text.
    """
    parts = [docs[first : first + texts] for first in range(0, len(docs), texts)]
    waiting = iter(zip(map(len, parts), bodies(docs, texts), strict=True))
    callers = Callers(port, EMBEDDING)

    def ask(kind: str) -> None:
        num_texts, body = next(waiting, (0, b""))
        if num_texts:
            callers.call(HEAD % len(body) + body, kind, lambda call: check(call, num_texts))

    def check(call: ClientCall, num_texts: int) -> None:
        found = callers.num_frames.pop(call.kind, 0)
        if call.outcome != "200" or found != num_texts:
            raise SystemExit(f"answer {call.outcome} with {found} embeddings of {num_texts}")
        ask(call.kind)

    try:
        for client in range(NUM_CLIENTS):
            ask(str(client))
        callers.run_until(time.perf_counter() + MAX_ROUND_S, lambda: not callers.num_open)
        assert not callers.num_open, callers.num_open
    finally:
        callers.close()


def latency(model: str, dtype: str, backend: str) -> dict[str, Any]:
    """Return the median milliseconds of one short text, for each way of `_ways`.

    All ways share one process and one model, because two copies of the weights differ by up to 0.3 ms per
    forward pass, depending on their memory pages.
    """
    import anyio

    from trouper import AsyncLLMEngine, EngineArgs
    from trouper.actors.executor.runners.cpu import pooling_runner

    args = EngineArgs(model=model, dtype=dtype)
    runners: list[PoolingRunner] = []
    times: dict[str, list[float]] = defaultdict(list)
    make = pooling_runner.PoolingRunner

    def make_known(config: EngineConfig) -> "PoolingRunner":
        runners.append(make(config))
        return runners[-1]

    async def measure() -> None:
        async with AsyncLLMEngine(args) as engine:
            ways = _ways(engine, *runners)
            for _ in range(NUM_LATENCIES // 100):
                for name, embed in ways.items():
                    for _ in range(100):
                        began = time.perf_counter()
                        if (embedding := embed()) is not None:
                            await embedding
                        times[name].append(time.perf_counter() - began)

    with patch.object(pooling_runner, "PoolingRunner", make_known):
        anyio.run(measure, backend=backend)
    figures = {name: statistics.median(taken) * 1e3 for name, taken in times.items()}
    figures["added_ms"] = figures["engine_ms"] - figures["direct_ms"]
    return {name: round(value, 3) for name, value in figures.items()}


def _ways(
    engine: "AsyncLLMEngine", runner: "PoolingRunner"
) -> dict[str, Callable[[], Awaitable[None] | None]]:
    """Return functions that embed one short text: by the engine, by the runner in a thread, and by the runner directly."""
    import anyio.to_thread

    from trouper import PoolingParams
    from trouper.actors.executor.device import PendingResult
    from trouper.actors.messages.steps import PoolEntry, PoolPlan
    from trouper.actors.output.postprocessing import finish

    tokenizer, spec = engine.tokenizer, engine.config.pooler
    assert tokenizer is not None
    assert spec is not None
    params = PoolingParams(task="embed")
    resolved = params.resolve(spec)

    def plan() -> PoolPlan:
        ids = tuple(tokenizer.encode(SHORT))
        return PoolPlan(1, 0, (PoolEntry(ids, None, "embed"),))

    def end(answer: Any) -> None:
        done = answer.finish() if isinstance(answer, PendingResult) else answer
        finish(done.arrays[0], resolved, spec)

    async def through() -> None:
        async for _ in engine.encode(SHORT, params):
            pass

    async def in_a_thread() -> None:
        end(await anyio.to_thread.run_sync(runner.execute, plan()))

    def direct() -> None:
        end(runner.execute(plan()))

    return {"engine_ms": through, "thread_ms": in_a_thread, "direct_ms": direct}


ENGINES_HERE = {
    "st": sentence_transformers,
    "trouper": offline,
    "http": over_http,
    "http16": partial(over_http, texts=16),
}


class Apart:
    """An engine in its own process. It runs one round for each line on its stdin."""

    def __init__(self, engine: str, command: Sequence[str], stack: ExitStack) -> None:
        self.engine = engine
        self.rates: list[float] = []
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        stack.enter_context(process)
        assert process.stdin is not None
        assert process.stdout is not None
        self._asked, self._said = process.stdin, process.stdout
        self._find(READY)

    def play(self, num_docs: int) -> None:
        print(file=self._asked, flush=True)
        self.rates.append(num_docs / float(self._find("seconds ")))

    def _find(self, word: str) -> str:
        """Find the line that begins with the word and return what follows it."""
        for line in self._said:
            if line.startswith(word):
                return line.removeprefix(word)
        raise SystemExit(f"the process of {self.engine} ended early; its errors are above")

    def figures(self) -> dict[str, Any]:
        name, _, dtype = self.engine.partition(":")
        rates = [round(rate, 1) for rate in self.rates]
        return {
            "engine": name,
            "dtype": dtype,
            "docs_s": round(statistics.median(rates), 2),
            "rounds": rates,
        }


def _serve(engine: str, model: str, docs: list[str]) -> None:
    """Run one engine as a child process: print `READY`, then the seconds of a round for each line on stdin."""
    name, _, dtype = engine.partition(":")
    if name in LATENCIES:
        print(
            json.dumps({"engine": name, "dtype": dtype, **latency(model, dtype, LATENCIES[name])})
        )
        return
    with ENGINES_HERE[name](model, dtype, docs) as play:
        print(READY, flush=True)
        for _ in sys.stdin:
            began = time.perf_counter()
            play()
            print("seconds", time.perf_counter() - began, flush=True)


def ratios(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios of documents per second, round by round, for each dtype measured with both engines."""
    rounds = {(r["engine"], r["dtype"]): r["rounds"] for r in results if "rounds" in r}
    found: dict[str, Any] = {}
    for ours, theirs in RATIOS:
        for dtype in DTYPES:
            if (ours, dtype) in rounds and (theirs, dtype) in rounds:
                pairs = zip(rounds[ours, dtype], rounds[theirs, dtype], strict=True)
                shares = [round(our / their, 3) for our, their in pairs]
                median = round(statistics.median(shares), 3)
                found[f"{ours} / {theirs}, {dtype}"] = {"median": median, "of rounds": shares}
    return found


def _is_latency(engine: str) -> bool:
    return engine.partition(":")[0] in LATENCIES


def _command(given: argparse.Namespace, engine: str, folder: Path) -> list[str]:
    name, _, dtype = engine.partition(":")
    if name == "vllm":
        script, texts = folder / "peer.py", folder / "docs.json"
        script.write_text(VLLM)
        texts.write_text(json.dumps(documents(given.num_docs)))
        return [given.vllm_python, str(script), given.model, dtype, str(texts)]
    command = [sys.executable, "-m", "trouper.bench.studies.server.embeddings", given.model]
    return [*command, "--num-docs", str(given.num_docs), "--one", engine]


def _measure(given: argparse.Namespace, engines: list[str], folder: Path) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        in_turn = [
            Apart(engine, _command(given, engine, folder), stack)
            for engine in engines
            if not _is_latency(engine)
        ]
        for i in range(given.num_rounds):
            for engine in in_turn if i % 2 else in_turn[::-1]:
                engine.play(given.num_docs)
        results = [engine.figures() for engine in in_turn]
    for engine in engines:
        if _is_latency(engine):
            command = _command(given, engine, folder)
            rounds = [_figures_of(command) for _ in range(given.num_rounds)]
            middle = sorted(rounds, key=lambda figures: figures["added_ms"])[len(rounds) // 2]
            added = [figures["added_ms"] for figures in rounds]
            results.append({**middle, "added_ms of rounds": added})
    return results


def _figures_of(command: list[str]) -> dict[str, Any]:
    """Run a command to its end and parse the last line of its output as JSON."""
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ended.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a sentence-transformers model")
    parser.add_argument("--num-docs", type=int, default=1000)
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--engines", default=ENGINES)
    parser.add_argument(
        "--vllm-python", help="Python interpreter of an environment with vLLM, to measure it, too"
    )
    parser.add_argument("--output", help="a file for the report, in JSON")
    # Internal: `Apart` starts this module again with the engine to run.
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        _serve(given.one, given.model, documents(given.num_docs))
        return
    engines = given.engines.split(",")
    if given.vllm_python:
        engines += [] if "vllm" in given.engines else [f"vllm:{dtype}" for dtype in DTYPES]
    with tempfile.TemporaryDirectory() as folder:
        results = _measure(given, engines, Path(folder))
    for result in results:
        print(json.dumps(result))
    print(json.dumps(ratios(results)))
    if given.output:
        report = {"about": about(sys.argv[2:]), "results": results, "ratios": ratios(results)}
        write(given.output, report)


if __name__ == "__main__":
    main()
