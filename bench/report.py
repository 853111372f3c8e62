"""Describe the machine and command of a report, summarize repeated measurements, and plot them.

Reports are published, so they must name no host or user and contain no keys.
"""

import json
import platform
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from trouper import __version__
from trouper.actors.runtime.startup import num_physical_cores
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.extras import install_hint

PACKAGES = ("torch", "transformers", "tokenizers", "anyio", "trio", "llvmlite", "triton", "httpx2", "vllm")  # fmt: skip
SECRETS = ("--api-key", "--hf-token")


def about(arguments: Sequence[str]) -> dict[str, Any]:
    """Return versions, processor, GPUs and the command line without keys, for the head of a report.

    API keys in the command are removed, because reports are published.
    """
    versions = {"trouper": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "cpu": cpu_name(),
        "cores": num_physical_cores(),
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "arguments": without_secrets(arguments),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown")


def gpus() -> list[str]:
    """Return the name, driver and memory of each NVIDIA GPU, as reported by nvidia-smi.

    The list is empty without the program or without GPUs. It is for the report's head.
    """
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return []
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def without_secrets(arguments: Sequence[str]) -> list[str]:
    shown: list[str] = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if shown and shown[-1] in SECRETS:
            argument = "***"
        elif equals and name in SECRETS:
            argument = f"{name}=***"
        shown.append(argument)
    return shown


def write(path: str, report: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise unwritable("output_json", path, error) from None


def check_writable(parameter: str, path: str | None) -> None:
    """Raise TrouperValidationError, which names the option, if a file cannot be written; call it before the measurement.

    It does not change an existing file.
    """
    try:
        if path is not None:
            Path(path).open("a").close()
    except OSError as error:
        raise unwritable(parameter, path, error) from None


def unwritable(parameter: str, path: str | None, error: OSError) -> TrouperValidationError:
    return TrouperValidationError(
        f"cannot be written: {error.strerror}", parameter=parameter, value=path
    )


PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)


def percentile(values: Sequence[float], q: float) -> float:
    """Return a percentile (q in [0, 100]), interpolated between the two nearest ranks.

    Raises ValueError without values.
    """
    if not values or not 0 <= q <= 100:
        raise ValueError("a percentile needs values, and q in [0, 100]")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def spread(values: Sequence[float]) -> float:
    """Return (largest - smallest) / median, a measure of the uncertainty of a few repeats.

    Differences smaller than this have no meaning. It is relative to the median.
    """
    return (max(values) - min(values)) / statistics.median(values)


def summary(
    values: Sequence[float], percentiles: Sequence[float] = PERCENTILES
) -> dict[str, float]:
    """Return mean, median, std, max and the percentiles as `p<q>`.

    The result is empty without values, for example if all requests failed. The standard deviation is that of the
    population.
    """
    if not values:
        return {}
    figures = {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.pstdev(values),
        "max": max(values),
    }
    return figures | {f"p{q:g}": percentile(values, q) for q in percentiles}


def repeats(seconds: Sequence[float]) -> dict[str, object]:
    """Return the median, the spread and all values of a repeated measurement, in seconds.

    All values are included, so readers can judge the variation themselves.
    """
    return {
        "median_s": round(statistics.median(seconds), 6),
        "spread": round(spread(seconds), 4),
        "all_s": [round(value, 6) for value in seconds],
    }


def num_good(requests: Sequence[Mapping[str, float]], objectives: Mapping[str, float]) -> int:
    """Count the requests that meet all objectives; a missing figure counts as met.

    Goodput counts only such requests.
    """
    return sum(
        all(request.get(name, 0.0) <= limit for name, limit in objectives.items())
        for request in requests
    )


class Latency(NamedTuple):
    """The median and the 99th percentile of one latency, in milliseconds.

    A plot has one line for each, because users notice slow requests more than the average one.
    """

    median_ms: float
    p99_ms: float


class Point(NamedTuple):
    """One measurement at one concurrency; the names of its latencies are the labels in the plot."""

    concurrency: float
    tokens_per_s: float
    latencies: Mapping[str, Latency]


def check_available() -> None:
    """Raise UnsupportedFeatureError with an install command if matplotlib is missing.

    Call it before the measurement, because otherwise the results would be lost at its end.
    """
    if find_spec("matplotlib") is None:
        raise UnsupportedFeatureError(f"--plot needs matplotlib: {install_hint('bench')}")


def plot(path: str, points: Sequence[Point], *, title: str, concurrency: str) -> None:
    """Write a PNG with the throughput and each latency over the concurrency; `concurrency` labels that axis."""
    check_available()
    # pyplot is avoided, because it needs a display and keeps global state.
    from matplotlib.figure import Figure

    points = sorted(points, key=lambda point: point.concurrency)
    names = list(dict.fromkeys(name for point in points for name in point.latencies))
    figure = Figure(figsize=(6, 3 * (1 + len(names))), layout="constrained")
    figure.suptitle(title, wrap=True)
    throughput, *below = figure.subplots(1 + len(names), sharex=True, squeeze=False)[:, 0]
    xs = [point.concurrency for point in points]
    throughput.plot(xs, [point.tokens_per_s for point in points], marker="o")
    throughput.set(ylabel="output tokens/s")
    for axes, name in zip(below, names, strict=True):
        found = [
            (point.concurrency, point.latencies[name])
            for point in points
            if name in point.latencies
        ]
        for label, pick in (("median", 0), ("99th percentile", 1)):
            axes.plot(
                [x for x, _ in found], [pair[pick] for _, pair in found], marker="o", label=label
            )
        axes.set(ylabel=f"{name}, ms")
        axes.legend()
    for axes in (throughput, *below):
        axes.set_xlabel(concurrency)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, format="png", dpi=150)
