"""Run everything that needs a GPU with one command: tests, kernels, steps, throughput, and the table of goals.

    python -m trouper.bench.h200 [--out FOLDER] [--only NAME …] [--budget SECONDS] [--again] [--tiny]

It needs a checkout. GPU machines are often available only for minutes, so each job is a process with a time limit that
leaves a report in the folder; a job with a report is skipped, and the next call continues with the others. Nothing is
installed, but missing packages are named. `--tiny` tests the whole procedure on the CPU with tiny shapes and
interpreted kernels, where the figures mean nothing.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic
from typing import Any, NamedTuple

from trouper.bench import report
from trouper.bench.h200 import goals
from trouper.config.devices import num_devices

# Relative to the checkout, which must be the current folder.
PROJECT = Path("pyproject.toml")
MODELS = tuple(dict.fromkeys(goal.model for goal in goals.GOALS))
PEER = "transformers-cb"
# Replaced by the path of the report.
REPORT = "{report}"
GRACE_S = 30.0
BENCH = ("-m", "trouper", "bench")


class GpuJob(NamedTuple):
    """A process to run; `command` follows the interpreter and writes a report to REPORT, unless it is only a test.

    Each job runs in its own process, so a crash costs only its own result.
    """

    name: str
    limit_s: float
    command: tuple[str, ...]
    num_gpus: int = 1


def jobs(*, is_tiny: bool) -> list[GpuJob]:
    """Return the jobs to run, the most informative ones first.

    The time on a rented GPU may end early.  `is_tiny` replaces all models by tiny ones, to test the procedure.
    """
    tests = ("tests/kernels/cuda", "tests/parity")
    if is_tiny:
        tests = ("tests/kernels/cuda/test_act_and_mul.py",)
    run_goals, tiny = ("-m", "trouper.bench.h200.goals_run"), ("--tiny",) * is_tiny
    kinds: dict[str, tuple[float, Callable[[str], tuple[str, ...]]]] = {
        "kernels": (300, lambda model: _kernels(model, is_tiny=is_tiny)),
        "goals": (400, lambda model: (*run_goals, model, REPORT, *tiny)),
        PEER: (500, lambda model: (*run_goals, model, REPORT, "--peer", PEER, *tiny)),
        "latency": (300, lambda model: _latency("tiny" if is_tiny else model, is_tiny=is_tiny)),
        "throughput": (
            300,
            lambda model: _throughput("tiny" if is_tiny else model, is_tiny=is_tiny),
        ),
    }
    return [
        GpuJob("tests", 500, ("-m", "pytest", "-q", "-m", "gpu", *tests)),
        *(
            GpuJob(f"{kind}-{model}", limit_s, command(model))
            for kind, (limit_s, command) in kinds.items()
            # A tiny run has one model, but the goals of both.
            for model in (MODELS if kind in ("goals", PEER) or not is_tiny else MODELS[:1])
        ),
        _ranks(is_tiny=is_tiny),
    ]


def _kernels(model: str, *, is_tiny: bool) -> tuple[str, ...]:
    command = (*BENCH, "kernels", "--output-json", REPORT)
    if not is_tiny:
        return (*command, "--device", "cuda", "--model", model, "--num-tokens", "1,32,256,2048")
    sizes = "--num-tokens 2 --context 20 --roof-mib 1 --roof-gemm 64 --cold-mib 0 --dtype float32"
    # The interpreter is too slow for the other operations.
    few = "linear (cuBLAS)", "decode_attention", "prefill_attention", "sample"
    ops = (part for op in few for part in ("--op", op))
    return (*command, "--device", "interpreter", "--model", "tiny", *sizes.split(), *ops)


def _ranks(*, is_tiny: bool) -> GpuJob:
    """Return the job that compares two GPUs with one, on the largest model of the goals."""
    model = "tiny" if is_tiny else MODELS[0]
    sizes = "--ranks 2 --device cuda --prompt-tokens 2048 --rows 1,32,256 --output-tokens 64"
    if is_tiny:
        sizes = (
            "--ranks 2 --dtype float32 --prompt-tokens 16 --rows 1 --output-tokens 2 --num-iters 1"
        )
    command = (
        "-m",
        "trouper.bench.studies.parallel.ranks",
        *_dummy(model),
        *sizes.split(),
        "--output-json",
        REPORT,
    )
    return GpuJob(f"ranks-{MODELS[0]}", 300, command, num_gpus=1 if is_tiny else 2)


def _latency(model: str, *, is_tiny: bool) -> tuple[str, ...]:
    sizes = "--batch-size 1,2 --input-len 8 --output-len 8 --num-iters 2 --num-iters-warmup 1"
    if not is_tiny:
        sizes = "--batch-size 1,8,32,128,256 --input-len 32 --output-len 128 --num-iters 5 --num-iters-warmup 2"
    options = ("--max-model-len", "1024", "--breakdown", "--output-json", REPORT)
    return (*BENCH, "latency", *_dummy(model), *sizes.split(), *options)


def _throughput(model: str, *, is_tiny: bool) -> tuple[str, ...]:
    sizes = "--num-prompts 4 --input-len 8 --output-len 8"
    if not is_tiny:
        sizes = "--num-prompts 1000 --input-len 512 --output-len 128"
    options = "--max-model-len 1024 --num-warmups 4 --repeat 3 --disable-detokenize --output-json"
    return (*BENCH, "throughput", *_dummy(model), *sizes.split(), *options.split(), REPORT)


def _dummy(model: str) -> tuple[str, ...]:
    return "--model", model, "--load-format", "dummy"


def missing_packages() -> list[str]:
    """List packages that pyproject.toml requires for running and testing, and that are not installed.

    They are printed at the start, because a missing one fails only some of the jobs.
    """
    project = tomllib.loads(PROJECT.read_text())["project"]
    more = project["optional-dependencies"]
    wanted = [*project["dependencies"], *more["cuda"], *more["test"]]
    return [line for line in wanted if not _has(re.split(r"[\[<>=!~ ]", line)[0])]


def _has(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def run_jobs(wanted: Sequence[GpuJob], folder: Path, budget_s: float) -> Iterator[str]:
    """Run the jobs without a report while the time budget lasts; yield a line for each job.

    A later run continues with the jobs that have no report.
    """
    end = monotonic() + budget_s
    for job in wanted:
        path = folder / f"{job.name}.json"
        left_s = end - monotonic()
        if path.exists():
            yield f"{job.name}: done before"
        elif job.num_gpus > 1 and job.num_gpus > (found := num_devices()):
            yield f"{job.name}: skipped, because it needs {job.num_gpus} GPUs (visible: {found})"
        elif left_s < min(job.limit_s, budget_s) / 2:
            yield f"{job.name}: NOT RUN, {left_s:.0f} s are left; call again"
        else:
            yield f"{job.name}: {_run(job, path, min(job.limit_s, left_s))}"


def _run(job: GpuJob, path: Path, limit_s: float) -> str:
    """Run one job and return its line; the report gets its final name when it is complete."""
    partial, log = path.with_suffix(".partial"), path.with_suffix(".log")
    command = [
        sys.executable,
        *(str(partial) if part == REPORT else part for part in job.command),
    ]
    started = monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"FAILED after {limit_s:g} s; see {log.name}"
        finally:
            _end(process)
    if code:
        return f"FAILED with {code}: {last_line(log)}"
    seconds = monotonic() - started
    if not partial.exists():
        report.write(str(partial), {"about": report.about(job.command), "said": last_line(log)})
    partial.rename(path)
    log.unlink()
    return f"{seconds:.0f} s"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Terminate a process, and kill it only after a grace period, so that it can end its own processes."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_line(log: Path) -> str:
    return next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "")


def goals_table(folder: Path) -> str:
    """Return the table of goals from the reports in a folder, as Markdown.

    Limits measured on the machine replace those of its data sheet. It has one row for each goal.
    """
    ours, theirs = _results(folder, "goals-*"), _results(folder, f"{PEER}-*")
    roofs = [
        json.loads(path.read_text())["roofs"] for path in sorted(folder.glob("kernels-*.json"))
    ]
    ceilings = goals.Ceilings(
        max((1e9 * r["copy_gb_s"] for r in roofs if "copy_gb_s" in r), default=goals.BYTES_S),
        max((1e9 * r["gemm_gflop_s"] for r in roofs if "copy_gb_s" in r), default=goals.FLOPS_S),
    )
    return "\n".join(goals.table(ours, theirs, ceilings))


def _results(folder: Path, pattern: str) -> list[dict[str, Any]]:
    paths = sorted(folder.glob(f"{pattern}.json"))
    return [record for path in paths for record in json.loads(path.read_text())["results"]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Everything that needs a GPU, in one command.")
    parser.add_argument("--out", type=Path, help="folder of the reports; bench/results/h200")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="jobs whose names contain one of these"
    )
    parser.add_argument("--budget", type=float, default=570, help="seconds for this call")
    parser.add_argument(
        "--again", action="store_true", help="also run jobs that already have a report"
    )
    parser.add_argument("--tiny", action="store_true", help="test the procedure on the CPU")
    options = parser.parse_args()
    if not PROJECT.is_file():
        sys.exit(
            "run this command in a checkout of trouper: pyproject.toml and tests are not in the current folder"
        )
    default = Path(mkdtemp(prefix="trouper-")) if options.tiny else Path("bench/results/h200")
    folder: Path = options.out or default
    folder.mkdir(parents=True, exist_ok=True)
    if missing := missing_packages():
        print(f"missing here: {' '.join(missing)}", flush=True)
    if not options.tiny and not report.gpus():
        sys.exit("no GPU: nvidia-smi finds none; use --tiny to test the procedure on the CPU")
    chosen = [
        job for job in jobs(is_tiny=options.tiny) if any(part in job.name for part in options.only)
    ]
    if options.again:
        for job in chosen:
            (folder / f"{job.name}.json").unlink(missing_ok=True)
    is_whole = True
    for line in run_jobs(chosen, folder, options.budget):
        is_whole &= "FAILED" not in line and "NOT RUN" not in line
        print(line, flush=True)
    print(f"\n{goals_table(folder)}\n\nreports: {folder}")
    sys.exit(0 if is_whole else 1)
