"""The fast async check has the findings of flake8-async."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

# Only the `dev` extra installs it.
pytest.importorskip("flake8_async")
ROOT = Path(__file__).parents[2]
# Findings of rules on syntax trees and of rules on libcst's trees, and one that a comment excuses.
FAULTY = """
import anyio
import asyncio
import time
import trio


async def blocks():
    time.sleep(1)


async def loses_a_task():
    asyncio.create_task(blocks())
    await anyio.sleep(0)


async def swallows_cancellation():
    try:
        await anyio.sleep(1)
    except BaseException:
        pass


async def yields_in_a_scope():
    with anyio.move_on_after(1):
        yield


async def excused():
    time.sleep(1)  # noqa: ASYNC251
    with trio.CancelScope():
        pass
"""


def test_fast_async_rules_agree(tmp_path):
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    script = runpy.run_path(str(ROOT / "scripts" / "async_rules.py"))
    options = ["--anyio", f"--startable-in-context-manager={script['STARTABLE']}", "--disable="]
    command = "from flake8_async import main; main()"
    slow = subprocess.run(
        [sys.executable, "-c", command, *options, file], capture_output=True, text=True, check=False
    )
    found = script["findings"](file, "--disable=")
    assert found == slow.stdout.splitlines()
    codes = {line.split(": ")[1].split()[0] for line in found}
    assert codes >= {"ASYNC100", "ASYNC101", "ASYNC103", "ASYNC251", "ASYNC300"}


def test_irrelevant_modules_are_skipped(tmp_path):
    (tmp_path / "plain.py").write_text("print(1)\n")
    (tmp_path / "waits.py").write_text("async def wait(): ...\n")
    (tmp_path / "swallows.py").write_text("try:\n    f()\nexcept BaseException:\n    pass\n")
    script = runpy.run_path(str(ROOT / "scripts" / "async_rules.py"))
    assert script["modules"](tmp_path) == [tmp_path / "swallows.py", tmp_path / "waits.py"]
