"""The processors of each worker process, where the environment binds them.  Pure."""

import os

from trouper.errors import TrouperValidationError

CPU_BIND = "TROUPER_CPU_BIND"  # processors by worker, as "0-15|16-31" or "0,2,4|1,3,5"
MAX_CPUS = 2**16  # a number above is a slip

CpuBind = tuple[tuple[int, ...], ...]


def read_cpu_bind(num_workers: int, *, is_inline: bool) -> CpuBind | None:
    """Read the processors of each worker from the environment; None: it does not bind them.

    Args:
        is_inline: whether the model is in the engine's process, which is not bound.

    Raises:
        TrouperValidationError: they are not of so many workers, or cannot be read.
    """
    text = os.environ.get(CPU_BIND)
    if not text:
        return None
    try:
        bind = tuple(tuple(_cpus(part)) for part in text.split("|"))
    except ValueError:
        raise _problem("must be processors by worker, as in 0-15|16-31", text) from None
    if is_inline:
        raise _problem("binds worker processes, and device_worker is inline", text)
    if len(bind) != num_workers:
        raise _problem(f"has processors of {len(bind)} workers, and there are {num_workers}", text)
    return bind


def _cpus(part: str) -> list[int]:
    found: list[int] = []
    for piece in part.split(","):
        first, _, last = piece.partition("-")
        begin, end = int(first), int(last or first)
        if not 0 <= begin <= end < MAX_CPUS:
            raise ValueError
        found += range(begin, end + 1)
    return found


def _problem(rule: str, text: str) -> TrouperValidationError:
    return TrouperValidationError(f"{CPU_BIND}: {rule}", parameter=CPU_BIND, value=text)
