"""The memory that this machine, and the container of this process, can still provide."""

from collections.abc import Iterator
from pathlib import Path

MEMBERSHIPS = Path("proc/self/cgroup")
GROUPS = Path("sys/fs/cgroup")
# Version 1 of control groups represents "no limit" by a number above this one.
UNLIMITED = 2**60
# The files of versions 2 and 1: the limit, the usage, and the line of memory.stat for file pages that the system reclaims
# when it needs memory.
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/"), *, with_swap: bool = False) -> int | None:
    """Return the bytes that can be allocated before memory must be reclaimed, or None if the system does not report it.

    It is the minimum over the machine and all control groups above this process.
    """
    kib = _numbers(root / "proc/meminfo")
    if "MemAvailable" not in kib:
        return None
    left = [(kib["MemAvailable"] + (kib.get("SwapFree", 0) if with_swap else 0)) * 2**10]
    for folder in control_groups(root / MEMBERSHIPS, root / GROUPS):
        for limit_file, used_file, cache in FILES:
            limit, used = read_number(folder / limit_file), read_number(folder / used_file)
            if limit is not None and used is not None and limit < UNLIMITED:
                left.append(limit - used + _numbers(folder / "memory.stat").get(cache, 0))
    return max(0, min(left))


def control_groups(memberships: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups, each followed by its parents.

    A limit of any of them applies.  Handles both versions of the interface: version 1 has a folder
    for each controller below `root`.
    """
    for line in read_text(memberships).splitlines():
        _, controllers, path = line.split(":", 2)
        top = root / controllers if controllers else root
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            yield folder


def read_number(path: Path) -> int | None:
    """Read a file with one number.  Returns None for another text, and if the file does not exist."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None


def read_text(path: Path) -> str:
    """Read a file.  Returns an empty text if it is absent or unreadable."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _numbers(path: Path) -> dict[str, int]:
    """Read lines with a name and a number."""
    lines = (line.replace(":", " ").split() for line in read_text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
