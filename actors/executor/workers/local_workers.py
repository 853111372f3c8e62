"""Starts all workers of a replica on this machine, and computes the sizes of the memory that they share.

Everything shared is created before the processes and inherited by descriptor, so no name in the file system
remains after a crash. Sizes come from the config only; torch is not imported.
"""

from collections.abc import Sequence

import anyio

from trouper.actors.executor.links.worker_links import (
    ModelSizes,
    SharedSizes,
    close_files,
    create_shared_files,
)
from trouper.actors.executor.models.families.mixtures import check_device
from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.sharding import check_shards
from trouper.actors.executor.workers.launching import Launcher, Peer
from trouper.config.resolve import EngineConfig


class LocalLauncher:
    """`WorkersLauncher` of one replica on this machine: one process for each rank, connected by rings."""

    def __init__(self, config: EngineConfig, replica: int, launcher: Launcher) -> None:
        self._config, self._launcher = config, launcher
        self._first_number = replica * config.workers_per_replica

    def __repr__(self) -> str:
        return f"<LocalLauncher from worker {self._first_number}>"

    async def __call__(self) -> Sequence[Peer]:
        is_alone = self._config.workers_per_replica == 1
        files = [()] if is_alone else create_shared_files(shared_sizes(self._config))
        return await launch_all(self._launcher, self._first_number, range(len(files)), files)

    async def release(self) -> None:
        # Nothing is reserved between two starts.
        pass


async def launch_all(
    launcher: Launcher, first_number: int, ranks: Sequence[int], files: Sequence[tuple[int, ...]]
) -> list[Peer]:
    """Start the workers of some ranks, each with its descriptors, which are closed here afterwards.

    Raises:
        DeviceStartError: the system refused; no worker remains.
    """
    peers: list[Peer] = []
    try:
        for rank, inherited in zip(ranks, files, strict=True):
            peers.append(launcher(first_number + rank, files=inherited))
    except BaseException:
        await end_all(peers)  # noqa: ASYNC102  # shielded inside
        raise
    finally:
        close_files(files)
    return peers


async def end_all(peers: Sequence[Peer]) -> None:
    """Kill workers whose start was abandoned."""
    # Bounded, since each process is killed without a grace period.
    with anyio.CancelScope(shield=True):
        for peer in peers:
            await peer.end(0.0)


def shared_sizes(config: EngineConfig) -> SharedSizes:
    """Compute the sizes of all shared memory and links from the widths of the model.

    Raises:
        TrouperValidationError: the model cannot be split among this many ranks.
        UnsupportedFeatureError: the architecture is not supported, or not on this device.
    """
    traits = decoder_traits(config.model.hf_config, config.model.architecture)
    check_device(traits, config.device)
    check_shards(traits, config.tensor_parallel_size, quantization=config.quantization)
    return SharedSizes.of(config, ModelSizes(traits.hidden_size, traits.vocab_size))
