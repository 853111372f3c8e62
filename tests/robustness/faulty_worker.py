"""Run a faulty worker, with the arguments of a real one: `python -m … CONTROL PARENT`.

It dies when it computes a prompt that begins with POISON. The worker whose number is in `TROUPER_TEST_HANGING_DISK` never reads a block of
the tier on disk. Once, in one step, it or a successor also executes the fault in the file
named by `TROUPER_TEST_FAULT`; it removes the file first.
"""

import faulthandler
import os
import resource
import signal
import threading
from pathlib import Path

from trouper.actors.executor.workers import worker
from trouper.actors.executor.workers.model_host import ModelHost

POISON = 7  # a prompt that begins with it
FIRST_STEP = 5  # in which a fault may come


def run() -> None:
    """Serve an engine, with a model host that a prompt can kill."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    execute = ModelHost.execute
    slots = {}

    def execute_or_fail(self, plan):
        slots.update({new.request_slot: new.token_ids[0] for new in plan.new_sequences})
        if any(slots[slot] == POISON for slot in plan.request_slots):
            os.kill(os.getpid(), signal.SIGILL)
        if plan.step >= FIRST_STEP:
            fail_once(self)
        return execute(self, plan)

    ModelHost.execute = execute_or_fail
    if os.environ.get("TROUPER_TEST_HANGING_DISK"):
        ModelHost.open_tier = open_hanging_tier
    worker.main()


def open_hanging_tier(host, answer) -> None:
    """Open the tier, whose disk hangs from now on in one worker."""
    if host._rank == int(os.environ["TROUPER_TEST_HANGING_DISK"]):
        host._tier._disk.read = lambda path, most: threading.Event().wait()
    host._tier.begin(answer)


def fail_once(host) -> None:
    """Execute the fault in the file, if the file exists."""
    path = Path(os.environ.get("TROUPER_TEST_FAULT", "/nowhere"))
    if not path.exists():
        return
    fault = path.read_text()
    if fault == "another step" and host._rank == 0:
        return
    path.unlink()
    match fault:
        case "exit":
            os._exit(3)
        case "segv":
            faulthandler._sigsegv()
        case "sticky":  # nothing runs on the device any more

            def execute(plan):
                import torch

                raise torch.AcceleratorError("an illegal memory access was encountered")

            host._runner.execute = execute
        case "another step":  # than the other ranks
            group = host._runner._share.group
            begin_step = group.begin_step
            group.begin_step = lambda step: begin_step(step + 1)
        case "encode":  # after the first slice of the next image
            die_in_image(host._runner._encoder)
        case "memory":
            fill_memory()


def fill_memory() -> None:
    held = []
    while True:
        held.append(bytearray(os.urandom(1)) * 2**24)


def die_in_image(encoder) -> None:
    def advance(wholes, seconds):
        type(encoder).advance(encoder, wholes, 0.0)
        os.kill(os.getpid(), signal.SIGKILL)

    encoder.advance = advance


if __name__ == "__main__":
    run()
