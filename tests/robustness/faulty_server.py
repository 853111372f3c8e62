"""Run the program with faulty workers: `python -m tests.robustness.faulty_server serve …`."""

from functools import partial

from trouper.actors.executor.workers import launching
from trouper.frontends.cli.main import main

if __name__ == "__main__":
    launching.launch = partial(launching.launch, module="tests.robustness.faulty_worker")
    main()
