"""The program, whose workers have faults: `python -m tests.robustness.faulty_server serve …`."""

from functools import partial

from trouper.actors.executor.devices import launch_local
from trouper.frontends.cli.main import main

if __name__ == "__main__":
    launch_local.launch = partial(launch_local.launch, module="tests.robustness.faulty_worker")
    main()
