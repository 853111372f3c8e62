"""The program, whose workers have faults: `python -m tests.robustness.faulty_server serve …`."""

from functools import partial

from trouper.actors.executor.devices.launch_local import launch
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.frontends.cli.main import main
from trouper.frontends.python import async_engine

if __name__ == "__main__":
    launcher = partial(launch, module="tests.robustness.faulty_worker")
    async_engine.ProcessDevice = partial(ProcessDevice, launcher=launcher)
    main()
