"""Collect what every report says about the machine and the command; nothing that names a host or a user."""

import json
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trouper import __version__
from trouper.actors.executor.topology import num_physical_cores
from trouper.errors import TrouperValidationError

PACKAGES = ("torch", "transformers", "tokenizers", "anyio", "trio", "llvmlite", "triton", "httpx2", "vllm")  # fmt: skip
SECRETS = ("--api-key", "--hf-token")


def about(arguments: Sequence[str]) -> dict[str, Any]:
    """Versions, processor and the command line as it was typed, without keys."""
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
    """Name, driver and memory of each, as the driver tells them."""
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
    """Before the measurement, so that none is lost.  Raises TrouperValidationError."""
    try:
        if path is not None:
            Path(path).open("a").close()
    except OSError as error:
        raise unwritable(parameter, path, error) from None


def unwritable(parameter: str, path: str | None, error: OSError) -> TrouperValidationError:
    return TrouperValidationError(
        f"cannot be written: {error.strerror}", parameter=parameter, value=path
    )
