"""Runs one tensor-parallel rank's part of each plan, on a GPU of its own.

Laws, in addition to those of `CudaRunner`:
  * A process has one rank and one device: among the visible devices, the one with the rank's number.
  * The ranks find each other by a file without a name that all have inherited, and whatever NCCL opens besides is on the loopback: all of
    a model's ranks are on one machine.
  * A rank that fails or dies no longer takes part in sums; the engine ends the other ranks and starts all of them again.
"""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from trouper.actors.executor.models.sharding import OPTION
from trouper.actors.executor.runners.cuda.machine import CudaMachine, Machine
from trouper.actors.executor.runners.cuda.runner import CudaRunner
from trouper.config.engine_config import EngineConfig
from trouper.errors import UnsupportedFeatureError

# The time limit of collective calls. It is longer than any load, because the workers have a deadline of their own for steps.
PATIENCE = timedelta(hours=1)


class RankRunner(CudaRunner):
    """One rank of the config's model, on a GPU of its own.

    Args:
        rank: the number of this rank.
        files: the descriptor of the file through which the ranks find each other.

    Raises:
        TrouperValidationError: the model cannot be divided among this many ranks.
        UnsupportedFeatureError: this build of torch has no NCCL.
    """

    def __init__(self, config: EngineConfig, rank: int, files: Sequence[int]) -> None:
        num_ranks = config.tensor_parallel_size
        machine = CudaMachine(rank)
        self._group_file = files[0]
        super().__init__(config, machine, join_group(machine, files[0], rank, num_ranks))
        self.start_profile = self._start_profile

    def __repr__(self) -> str:
        return f"<RankRunner {self._shard.rank} of {self._shard.size} on {self._machine.name}>"

    def _start_profile(self, folder: str, prefix: str) -> None:
        """Begin a trace of this rank, in a file of its own."""
        self._profiler.start(folder, f"{prefix}-rank-{self._shard.rank}")

    def close(self) -> None:
        super().close()
        if self._source.leave_ranks():
            dist.destroy_process_group()
            os.close(self._group_file)


def join_group(machine: Machine, file: int, rank: int, num_ranks: int) -> dist.ProcessGroup:
    """Join the group of all ranks.

    Waits until every rank has joined.  The descriptor leads to a file that all ranks share.

    Raises:
        UnsupportedFeatureError: torch was built without the backend of collective calls.
    """
    if not dist.is_available() or not dist.is_backend_available(machine.backend):
        raise UnsupportedFeatureError(
            f"{OPTION}={num_ranks} needs {machine.backend.upper()}, which this build of torch lacks",
            parameter=OPTION,
        )
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        machine.backend,
        store=dist.FileStore(f"/proc/self/fd/{file}", num_ranks),  # pyright: ignore[reportPrivateImportUsage]  # torch's stubs
        rank=rank,
        world_size=num_ranks,
        timeout=PATIENCE,
        device_id=machine.device if machine.device.type == "cuda" else None,
    )
    group = dist.group.WORLD
    assert group is not None
    return group
