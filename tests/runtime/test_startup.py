"""Torch's libraries are loaded ahead of the import, with the environment that they read set before."""

import os
import subprocess
import sys

import pytest

from trouper.actors.runtime import startup

CHECK = """
import sys
from trouper.actors.runtime.startup import load_ahead
thread = load_ahead()
thread.join()
assert "torch" not in sys.modules
with open("/proc/self/maps") as maps:
    assert "libtorch_cpu" in maps.read()
import os, torch
assert os.environ["OMP_WAIT_POLICY"] == "passive"
print(torch.ones(3).sum().item())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_is_loaded_ahead_is_what_torch_then_uses():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, check=False)
    assert done.stdout == b"3.0\n", done.stderr


ENDS_AT_ONCE = """
import atexit
from trouper.actors.runtime.startup import load_ahead
thread = load_ahead()
atexit.register(lambda: print(thread.is_alive()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_process_that_ends_meanwhile_waits_for_libraries():
    """Or it would destroy their globals while they are made: an abort, or a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"False\n"), done.stderr


def test_without_such_libraries_nothing_is_done(monkeypatch):
    monkeypatch.setattr(startup, "find_spec", lambda _: None)
    monkeypatch.setattr(os, "environ", environment := {})
    assert startup.load_ahead() is None
    assert not environment
