"""A rank on an emulated GPU in a process of its own, as tests drive it: `python -m tests.parity.cuda_rank CONNECTION RANK`.

Each message is a method with its arguments: `open` makes a runner, the others are the runner's own; the answer is a
result, or the error.  Ranks meet through gloo as they do through NCCL.
"""

import os
import sys
import traceback
from multiprocessing.connection import Connection

import torch

from trouper.actors.executor.device import PendingResult
from trouper.actors.executor.runners.cuda import runner as cuda_runner
from trouper.kernels.cuda.collectives import CollectiveSums

from .emulated_gpu import EmulatedMachine


def main() -> None:
    torch.set_num_threads(1)
    connection, rank = Connection(int(sys.argv[1])), int(sys.argv[2])
    cuda_runner.CudaMachine = lambda index: EmulatedMachine()
    runner = None
    while True:
        try:
            method, *arguments = connection.recv()
        except EOFError:
            return
        try:
            if method == "open":
                config, path = arguments
                runner = cuda_runner.RankRunner(config, rank, [open_file(path)])
                result = None
            elif method == "machine":
                result = getattr(runner._machine, *arguments)
            elif method == "invariant_sum":
                (parts,) = arguments
                sums = CollectiveSums(runner._source.ranks, None, None, is_invariant=True)
                part = torch.from_numpy(parts[rank]).bfloat16()
                result = sums._sum(part).float().numpy()
            else:
                result = getattr(runner, method)(*arguments)
                result = result.finish() if isinstance(result, PendingResult) else result
        except Exception as error:
            traceback.print_exc()
            result = error
        connection.send(result)


def open_file(path: str) -> int:
    """Open the file by which the ranks meet, which an engine's workers inherit."""
    return os.open(path, os.O_RDWR)


if __name__ == "__main__":
    main()
