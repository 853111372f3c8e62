"""How much memory this machine, and the container that this process is in, can still give."""

from collections.abc import Iterator
from pathlib import Path

MEMBERSHIPS = Path("proc/self/cgroup")
GROUPS = Path("sys/fs/cgroup")
# Version 1 of control groups says "no limit" with a number beyond this one.
UNLIMITED = 2**60
# The files of versions 2 and 1: the limit, what is used, and the line of memory.stat for the
# pages of files that the system takes back when it needs memory.
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/"), *, with_swap: bool = False) -> int | None:
    """Compute the bytes that can be taken before something must be given up; None where the system does not say.

    It is the least of what the machine has left and of what each control group above this process may still take.
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
    """List the folders of this process's control groups, each followed by those above it."""
    for line in read_text(memberships).splitlines():
        _, controllers, path = line.split(":", 2)
        top = root / controllers if controllers else root
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            yield folder


def read_number(path: Path) -> int | None:
    """Read a file that holds one number; None for another text, and where there is no file."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None


def read_text(path: Path) -> str:
    """Read a file; an empty text where it is absent or unreadable."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _numbers(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    lines = (line.replace(":", " ").split() for line in read_text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
