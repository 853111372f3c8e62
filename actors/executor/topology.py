"""The processors of this process."""

import os
from pathlib import Path

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def num_physical_cores() -> int:
    """Count the cores that this process may use; two hyper-threads of a core count once."""
    cpus = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    try:
        return len({Path(SIBLINGS.format(cpu)).read_text() for cpu in cpus})
    except OSError:
        return len(cpus)
