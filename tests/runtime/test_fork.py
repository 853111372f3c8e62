"""A process that was forked from one with an engine: it has the objects, and none of the threads."""

import subprocess
import sys

import pytest

from trouper.actors.runtime import event_loop
from trouper.actors.runtime.event_loop import EventLoop

PROGRAM = """
import os, signal, sys
from trouper import LLM, SamplingParams

llm = LLM(max_num_seqs=4, max_model_len=256, block_size=16)
params = SamplingParams(max_tokens=2, temperature=0)
for last in (llm.close, str):  # a child may close its copy or leave it open
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # rather than outlive the test
        for act in (lambda: llm.generate("x", params, use_tqdm=False), lambda: llm.sleep(1), last):
            try:
                act()
            except RuntimeError as error:
                print(type(error).__name__, flush=True)
        sys.exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print(len(llm.generate("x", params, use_tqdm=False)))
llm.close()
"""


def test_forked_child_is_refused_and_exits_while_parent_goes_on():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    child = ["EngineForkedError", "EngineForkedError", "3"]
    assert done.stdout.split() == [*child, *child, "1"]
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.anyio
async def test_a_loop_is_not_reached_from_another_process(monkeypatch):
    loop = EventLoop()
    monkeypatch.setattr(event_loop.os, "getpid", lambda: -1)
    for act in (loop.check_current, lambda: loop.call_soon(print)):
        with pytest.raises(RuntimeError):
            act()
