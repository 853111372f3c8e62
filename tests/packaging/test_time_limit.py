"""A hanging test fails and its neighbours pass, in one process and in several."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# A worker process that ends is replaced by one that imports torch again.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
PLANTED = """
import asyncio, threading, time
import anyio, anyio.to_thread, pytest, trio

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_hangs_on_asyncio(anyio_backend):
    await anyio.sleep_forever()

@pytest.mark.anyio
async def test_after_asyncio():
    await anyio.sleep(0)

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_hangs_in_a_task_group(anyio_backend):
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep_forever)

@pytest.mark.anyio
async def test_after_a_task_group():
    await anyio.sleep(0)

@pytest.mark.trio
async def test_hangs_on_trio():
    await trio.sleep_forever()

@pytest.mark.trio
async def test_after_trio():
    await trio.sleep(0)

def test_hangs_in_a_call():
    time.sleep(1000)

def test_hangs_on_a_thread():
    thread = threading.Thread(target=time.sleep, args=[1000], daemon=True)
    thread.start()
    thread.join()

def test_hangs_in_a_run_of_trio():
    trio.run(trio.sleep_forever)

def test_hangs_in_a_run_of_asyncio():
    asyncio.run(anyio.sleep_forever())

@pytest.mark.anyio
async def test_after_all():
    await anyio.sleep(0)

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_hangs_in_a_worker_thread(anyio_backend):
    await anyio.to_thread.run_sync(time.sleep, 1000)

@pytest.mark.trio
async def test_after_a_worker_thread():
    await trio.sleep(0)
"""


def run_planted(folder, *options):
    """Run pytest on the planted file with this project's settings and hooks. Returns its exit code and output."""
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "test_planted.py").write_text(PLANTED)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    settings = ["-c", ROOT / "pyproject.toml", "--rootdir", folder, "-q", "--timeout", "1.5"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, *options, folder],
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    return result.returncode, result.stdout


@pytest.mark.parametrize(
    ("options", "hangs", "passed"),
    [
        (("-k", "not worker_thread"), 7, 7),
        (("-n", "2", "--dist", "worksteal", "-k", "not run_of and not group"), 5, 6),
    ],
    ids=["one process", "xdist"],
)
def test_only_the_tests_that_hang_fail(tmp_path, options, hangs, passed):
    code, output = run_planted(tmp_path, *options)
    failed = re.findall(r"^FAILED \S*test_planted.py::(\w+)", output, re.MULTILINE)
    assert len(failed) == hangs, output
    assert all(name.startswith("test_hangs") for name in failed), output
    assert f"{hangs} failed, {passed} passed" in output
    assert "time limit" in output
    assert code == 1


def test_hard_hang_ends_process_with_stacks(tmp_path):
    code, output = run_planted(tmp_path, "-k", "worker_thread")
    assert code == 1
    assert "Stack of MainThread" in output
    assert "run_sync" in output or "select" in output
