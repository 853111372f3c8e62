"""A worker process whose GPU is emulated: `python -m tests.parity.emulated_worker`, with the arguments of the real one.

Its ranks meet through gloo as they do through NCCL.
"""

import os

from trouper.actors.executor.workers import worker


def run() -> None:
    """Serve an engine on emulated GPUs."""
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    os.environ["OMP_NUM_THREADS"] = "1"
    from trouper.actors.executor.runners.cuda import runner

    from .emulated_gpu import EmulatedMachine

    runner.CudaMachine = lambda *index: EmulatedMachine()
    worker.main()


if __name__ == "__main__":
    run()
