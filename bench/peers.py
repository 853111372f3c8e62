"""Compare trouper with vLLM, llama.cpp and transformers on the same prompts.

The speed of a shared machine drifts, so the engines alternate: every engine runs in its own process for the whole
benchmark and computes each workload once per round. While one engine is measured the others are stopped by SIGSTOP, so
that they cannot use a core.
"""

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import msgspec

from trouper.bench import runner
from trouper.bench.report import repeats
from trouper.errors import TrouperError, TrouperValidationError, UnsupportedFeatureError

NAMES = ("trouper", "vllm", "llama.cpp", "transformers")
NAMES_IF_ASKED = (*NAMES, "transformers-cb")
PACKAGES = {
    "vllm": "vllm",
    "llama.cpp": "llama_cpp",
    "transformers": "transformers",
    "transformers-cb": "transformers",
}
ERROR = re.compile(r"\w+(Error|Exception): ")
# A process that has not exited after this time is killed.
GRACE_S = 20.0


class PeerError(TrouperError):
    """An engine exited or returned an invalid answer.

    The comparison ends, because a missing engine would make its table misleading. The message names the engine.
    """


class Workload(NamedTuple):
    """A number of equal requests, with their numbers of prompt and output tokens.

    Equal requests make the result independent of the order in which an engine runs them.
    """

    num: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.num} × ({self.input_len} in, {self.output_len} out)"


WORKLOADS = ("1x32x64", "1x1024x1", "16x128x64", "16x1024x32", "64x128x128")
WARM_UP = Workload(1, 32, 8)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The engines to compare, and their files and options.

    Attributes:
        quantization: of trouper only; llama.cpp has the quantization of its file.
        peers: names of engines; None means all installed ones.
        pythons: the interpreter of an engine's environment, by engine; the default is this environment.
        llama_batched_bench: path of llama.cpp's own benchmark program.
        adapters: folders; the prompts of vLLM and trouper use them alternately.
        rank: the largest rank of the adapters.
        speculation: `speculative_config` of vLLM and trouper, or the arguments of llama.cpp's prompt lookup.
        model_impl: the implementation of the model in trouper; see `EngineArgs`.
    """

    model: str
    dtype: str
    quantization: str | None = None
    gguf: str | None = None
    peers: tuple[str, ...] | None = None
    pythons: dict[str, str] = {}
    llama_batched_bench: str | None = None
    threads: int = 1
    load_format: str = "auto"
    adapters: tuple[str, ...] = ()
    rank: int = 16
    speculation: dict[str, Any] | None = None
    model_impl: str | None = None

    def engines(self) -> list[str]:
        """Return the engines that can run.

        Raises:
            TrouperValidationError: an unknown name.
            UnsupportedFeatureError: a requested engine cannot run; the message gives the reason.
        """
        asked = NAMES if self.peers is None else ("trouper", *self.peers)
        unknown = [name for name in asked if name not in NAMES_IF_ASKED]
        if unknown:
            raise TrouperValidationError(
                f"must be one of {', '.join(NAMES_IF_ASKED)}", parameter="peers", value=unknown[0]
            )
        missing = {name: self._what_is_missing(name) for name in dict.fromkeys(asked)}
        named = {*self.pythons, *(self.peers or ())}
        if self.llama_batched_bench or self.gguf:
            named.add("llama.cpp")
        for name, problem in missing.items():
            if problem and name in named:
                raise UnsupportedFeatureError(f"{name} cannot run: {problem}")
        return [name for name, problem in missing.items() if not problem]

    def _what_is_missing(self, name: str) -> str | None:
        if name == "trouper":
            return None
        if name == "llama.cpp" and self.gguf is None:
            return "--gguf is missing"
        if name == "llama.cpp" and self.gguf and not Path(self.gguf).is_file():
            return f"no file {self.gguf}"
        program = self.pythons.get(name)
        if name == "llama.cpp" and self.llama_batched_bench:
            program = self.llama_batched_bench
        if program is not None:
            return None if os.access(program, os.X_OK) else f"no program {program}"
        package = PACKAGES[name]
        return None if find_spec(package) else f"{package} is not installed here"


class Answer(NamedTuple):
    """The time of a workload, and the number of tokens that the engine generated.

    The number is checked, so an engine that stops early is not counted as faster.
    """

    seconds: float
    num_output_tokens: int


class PeerEngine(Protocol):
    """An engine with its model loaded.

    All engines of a comparison stay loaded, and only one of them computes at a time. `ready_s` is the time to load
    it.
    """

    ready_s: float
    version: str

    def measure(self, prompts: list[list[int]], output_len: int | list[int]) -> Answer:
        """Run prompts and return their time; only transformers-cb supports one length for each prompt."""
        ...


class ProcessPeer:
    """`runner.py` in the engine's own environment; the process is stopped while it is not measured.

    The environments can be different, because engines need different versions of torch.
    """

    def __init__(self, name: str, process: "subprocess.Popen[str]", log: Any) -> None:
        self._name, self._process, self._log = name, process, log
        self.ready_s, self.version = 0.0, ""

    def load(self, options: dict[str, Any]) -> None:
        """Load the model in the engine's process.

        `ready_s` includes the imports, since a user waits for these as well. The process is stopped until its turn.
        """
        started = perf_counter()
        self.version = self._ask(options)["version"]
        self.ready_s = perf_counter() - started
        self._signal(signal.SIGSTOP)

    def measure(self, prompts: list[list[int]], output_len: int | list[int]) -> Answer:
        self._signal(signal.SIGCONT)
        answer = self._ask({"prompts": prompts, "output_len": output_len})
        self._signal(signal.SIGSTOP)
        return Answer(answer["seconds"], int(answer["num_output_tokens"]))

    def close(self) -> None:
        """Close the process's stdin, which ends it and its children; kill it if that takes too long."""
        self._signal(signal.SIGCONT)
        try:
            self._process.communicate(timeout=GRACE_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            raise PeerError(failed(self._name, code, self._log.read()))
        try:
            return json.loads(line)
        except ValueError:
            raise PeerError(f"{self._name} answered {line[:100]!r}") from None

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            # The process and its children have ended.
            pass


class LlamaBinary:
    """llama.cpp's own benchmark, `llama-batched-bench`, to confirm figures measured through its Python package.

    It creates its own prompts, of the same lengths, and reports its own times.
    """

    ready_s, version = 0.0, "llama-batched-bench"

    def __init__(self, program: str, options: dict[str, Any]) -> None:
        self._program, self._options = program, options

    def measure(self, prompts: list[list[int]], output_len: int | list[int]) -> Answer:
        assert isinstance(output_len, int)
        num, length = len(prompts), len(prompts[0])
        # The logits of the prompt give the first token.
        num_steps = max(1, output_len - 1)
        values = {
            "-m": self._options["model"], "-c": num * (length + num_steps + 32), "-b": runner.LLAMA_BATCH,
            "-ub": runner.LLAMA_MICRO_BATCH, "-npp": length, "-ntg": num_steps, "-npl": num,
            "-t": self._options["threads"], "-tb": self._options["threads"], "--output-format": "jsonl",
        }  # fmt: skip
        command = [self._program, *(str(part) for pair in values.items() for part in pair)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not rows:
            raise PeerError(failed("llama.cpp", done.returncode, done.stderr))
        row = json.loads(rows[-1])
        seconds = row["t_pp"] + (row["t_tg"] if output_len > 1 else 0.0)
        return Answer(seconds, num * output_len)


@contextmanager
def started(
    name: str, settings: Settings, workloads: Sequence[Workload] = ()
) -> Iterator[PeerEngine]:
    """Start an engine and load its model; the end of the block ends the process and its children."""
    works = [WARM_UP, *workloads]
    options = {
        "model": settings.gguf if name == "llama.cpp" else settings.model,
        "dtype": settings.dtype,
        "max_model_len": max(work.input_len + work.output_len for work in works),
        "max_num_seqs": max(work.num for work in works),
        "threads": settings.threads,
        "quantization": settings.quantization if name == "trouper" else None,
        "load_format": settings.load_format,
        "adapters": settings.adapters,
        "rank": settings.rank,
        "speculation": settings.speculation,
        "model_impl": settings.model_impl if name == "trouper" else None,
    }
    if name == "llama.cpp" and settings.llama_batched_bench:
        yield LlamaBinary(settings.llama_batched_bench, options)
        return
    if name == "trouper":
        command = [sys.executable, "-m", "trouper.bench.runner", name]
    else:
        # Without -I the folder of the script would be on the import path, and its `datasets.py` found first.
        python = settings.pythons.get(name, sys.executable)
        command = [python, "-I", runner.__file__, name]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        peer = ProcessPeer(name, process, log)
        try:
            peer.load(options)
            yield peer
        finally:
            peer.close()


def compare(
    settings: Settings,
    workloads: Sequence[Workload],
    num_repeats: int,
    vocabulary: Sequence[int],
    *,
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run every workload on every engine in `num_repeats` rounds; `report` receives lines of progress.

    Returns:
        {"engines": {engine: version}, "ready_s": {engine: s}, "results": [{engine, requests,
        input_len, output_len, median_s, spread, all_s, output_tok_s, total_tok_s, trouper_is}]}, where
        `trouper_is` is how many times as fast trouper is as this engine.

    Raises:
        PeerError: an engine failed, or generated fewer tokens than requested.
    """
    rng = random.Random(seed)
    asked = [[rng.choices(vocabulary, k=work.input_len) for _ in range(work.num)] for work in workloads]  # fmt: skip
    warm_up = [rng.choices(vocabulary, k=WARM_UP.input_len)]
    with ExitStack() as stack:
        peers: dict[str, PeerEngine] = {}
        for name in settings.engines():
            report(f"{name}: loading")
            peer = stack.enter_context(started(name, settings, workloads))
            _seconds(name, peer, WARM_UP, warm_up)
            peers[name] = peer
        seconds: dict[tuple[str, Workload], list[float]] = {}
        for repeat in range(num_repeats):
            for work, prompts in zip(workloads, asked, strict=True):
                for name, peer in peers.items():
                    taken = _seconds(name, peer, work, prompts)
                    seconds.setdefault((name, work), []).append(taken)
                    report(f"{repeat + 1}/{num_repeats}  {work}  {name}: {taken:.3f} s")
        return {
            "engines": {name: peer.version for name, peer in peers.items()},
            "ready_s": {name: round(peer.ready_s, 3) for name, peer in peers.items()},
            "results": list(_results(workloads, list(peers), seconds)),
        }


def _seconds(name: str, peer: PeerEngine, work: Workload, prompts: list[list[int]]) -> float:
    answer = peer.measure(prompts, work.output_len)
    if answer.num_output_tokens != work.num * work.output_len:
        raise PeerError(f"{name} generated only {answer.num_output_tokens} tokens of {work}")
    return answer.seconds


def _results(
    workloads: Sequence[Workload],
    engines: Sequence[str],
    seconds: dict[tuple[str, Workload], list[float]],
) -> Iterator[dict[str, Any]]:
    for work in workloads:
        ours = statistics.median(seconds["trouper", work])
        for name in engines:
            median = statistics.median(seconds[name, work])
            num_in, num_out = work.num * work.input_len, work.num * work.output_len
            yield {
                "engine": name,
                "requests": work.num,
                "input_len": work.input_len,
                "output_len": work.output_len,
                **repeats(seconds[name, work]),
                "output_tok_s": round(num_out / median, 1),
                "total_tok_s": round((num_in + num_out) / median, 1),
                "trouper_is": round(median / ours, 3),
            }


def failed(name: str, code: int, log: str) -> str:
    """Return the message about a failed engine: its exit code and the first error in its log, which usually causes the later ones."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = (line[found.start() :] for line in lines if (found := ERROR.search(line)))
    return f"{name} exited with code {code}: {next(named, lines[-1] if lines else 'no message')}"


def parse_workload(text: str) -> Workload:
    """Parse a workload such as `16x128x64`: 16 requests with 128 prompt tokens and 64 output tokens each."""
    try:
        work = Workload(*(int(part) for part in text.split("x")))
    except (TypeError, ValueError):
        work = Workload(0, 0, 0)
    if min(work) < 1:
        raise TrouperValidationError(
            "must be requests x input x output, such as 16x128x64", parameter="workload", value=text
        )
    return work
