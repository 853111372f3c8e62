"""A worker that dies of prompts that begin with POISON: `python -m … CONTROL PARENT`, as the real one."""

import os
import resource
import signal

from trouper.actors.executor.devices import worker
from trouper.actors.executor.devices.model_host import ModelHost

POISON = 7  # a prompt that begins with it


def run() -> None:
    """Serve an engine, with a model host that a prompt can kill."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    execute = ModelHost.execute
    slots = {}

    def execute_or_die(self, plan):
        slots.update({new.request_slot: new.token_ids[0] for new in plan.new_sequences})
        if any(slots[slot] == POISON for slot in plan.request_slots):
            os.kill(os.getpid(), signal.SIGILL)
        return execute(self, plan)

    ModelHost.execute = execute_or_die
    worker.main()


if __name__ == "__main__":
    run()
