"""When an engine's process is killed at any moment, its worker also ends and leaves nothing behind."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1200)
ENGINE = """
import sys
from trouper.frontends.python.llm import LLM
from trouper.params import SamplingParams
llm = LLM(device_worker="process")
print("up", flush=True)
while True:
    llm.generate(["def f("], SamplingParams(max_tokens=1000, ignore_eos=True))
"""
NUM_MOMENTS = 6  # 100 of them take 260 s, and pass as well
LONGEST_S = 5.0  # start-up, and some steps
LATE_S = 10.0  # the engine has a worker by then, also on a busy machine


def workers_of(parent):
    """Return the processes with this parent in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        is_worker = b"trouper.actors.executor.workers.worker" in words
        if entry.name.isdigit() and is_worker and str(parent).encode() in words and state != "Z":
            found.append(int(entry.name))
    return found


def kill_after(seconds):
    """Start an engine, kill it, and return the workers that still exist 2 s later."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(seconds)
        had = workers_of(process.pid)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 2.0
    while (left := workers_of(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return had, left


@pytest.mark.slow
def test_no_worker_outlives_its_engine():
    moments = random.Random(4)
    shared = set(os.listdir("/dev/shm"))
    num_with_worker = 0
    for seconds in (*(moments.uniform(0.1, LONGEST_S) for _ in range(NUM_MOMENTS - 1)), LATE_S):
        had, left = kill_after(seconds)
        num_with_worker += bool(had)
        assert not left
    # Some engines are killed before they have a worker, on a busy machine more of them.
    assert num_with_worker >= 1
    assert set(os.listdir("/dev/shm")) <= shared
