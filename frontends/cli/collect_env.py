"""`trouper collect-env`: collect the facts about this machine that a bug report needs.

Most defects depend on versions, instruction sets or container limits, which users rarely know. Only a fixed list
of environment variables is read, because other variables may hold secrets. Nothing is sent anywhere.
"""

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from trouper import __version__
from trouper.config.context import UNLIMITED, control_groups, read_number, read_text
from trouper.frontends.cli.options import expand_options


@expand_options
def collect_env(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show versions, processor, memory, limits and devices for a bug report; nothing is sent.

    For example: trouper collect-env --json > environment.json

    Environment variables appear only if they set thread counts, devices and similar; secrets do not.
    """
    facts = collect()
    print(json.dumps(facts, indent=2) if as_json else "\n".join(_lines(facts)))


def _lines(facts: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(cast("dict[str, Any]", value), indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{name}:"
            for number, item in enumerate(cast("list[dict[str, Any]]", value)):
                yield f"{indent}  {number}:"
                yield from _lines(item, indent + "    ")
        else:
            yield f"{indent}{name.removesuffix('_bytes')}: {_text(name, value)}"


def _text(name: str, value: Any) -> str:
    match value:
        case None | []:
            return "none"
        case bool():
            return "yes" if value else "no"
        case list():
            return " ".join(cast("list[str]", value))
        case int() if name.endswith("_bytes"):
            return f"{value / 2**30:.1f} GiB"
        case _:
            return str(value)


PACKAGES = (
    "anyio", "httptools", "httpx2", "huggingface_hub", "hypercorn", "jinja2", "msgspec", "numpy", "prometheus_client",
    "safetensors", "tokenizers", "torch", "transformers", "trio", "triton", "typer", "uvicorn", "uvloop",
)  # fmt: skip
# Kernels are chosen by these instruction sets.
FEATURES = re.compile(r"\b(?:avx\w*|amx_\w+|fma|f16c|vnni|asimd\w*|sve\w*|bf16|i8mm)\b")
# The complete list: any other variable may hold a secret or a personal name.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "KMP_AFFINITY", "KMP_BLOCKTIME", "LRU_CACHE_CAPACITY",
    "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "PYTHONHASHSEED", "TROUPER_BATCH_INVARIANT", "TROUPER_CHAT_TEMPLATE_RENDER_TIMEOUT",
    "TROUPER_CPU_BIND", "TROUPER_CPU_KVCACHE_SPACE", "TROUPER_DEVICE", "TROUPER_LOG_STATS_INTERVAL", "TROUPER_RAY_CPUS_PER_WORKER",
)  # fmt: skip


def collect() -> dict[str, Any]:
    """Collect all facts in nested sections, ready for JSON; an absent or unknown fact is None.

    Sizes are in bytes. Imports happen here, because reading the GPU's properties needs torch.
    """
    from trouper.actors.executor.device import torch_facts

    return {
        "trouper": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": {
            "platform": platform.platform(),
            "virtual_environment": sys.prefix != sys.base_prefix,
        },
        "cpu": _cpu(),
        "memory": _memory(),
        "cgroup": cgroup_limits(),
        "torch": torch_facts() or None,
        "packages": {name: _version(name) for name in PACKAGES},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def cgroup_limits(
    memberships: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> dict[str, Any]:
    """Return the narrowest limits between this process's cgroup and the root, in CPUs and bytes.

    Both versions of cgroups are read; a limit that no level sets is None. The parameters exist for tests.
    """
    cpus: list[float] = []
    memory: list[int] = []
    for folder in control_groups(memberships, root):
        quota, _, period = read_text(folder / "cpu.max").strip().partition(" ")
        quota = quota or read_text(folder / "cpu.cfs_quota_us").strip()
        period = period or read_text(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit():
            cpus.append(int(quota) / int(period))
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = read_number(folder / name)
            if limit is not None and limit < UNLIMITED:
                memory.append(limit)
    return {"cpus": min(cpus, default=None), "memory_bytes": min(memory, default=None)}


def _cpu() -> dict[str, Any]:
    from trouper.actors.runtime.startup import num_physical_cores

    info = read_text(Path("/proc/cpuinfo"))
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "model": model.group(1) if model else platform.processor() or platform.machine(),
        "logical": os.cpu_count(),
        "usable": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "usable_physical": num_physical_cores(),
        "features": sorted(set(FEATURES.findall(flags.group(1)))) if flags else [],
    }


def _memory() -> dict[str, Any]:
    info = read_text(Path("/proc/meminfo"))
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s*(\d+) kB$", info, re.MULTILINE))
    return {
        "total_bytes": int(found["MemTotal"]) * 1024 if "MemTotal" in found else None,
        "available_bytes": int(found["MemAvailable"]) * 1024 if "MemAvailable" in found else None,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
