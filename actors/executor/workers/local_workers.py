"""Start all workers of a device on this machine.

The sizes of what the workers of a device share, from its config; torch is not needed.
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
    """`WorkersLauncher` of one replica: a process for each rank, with its ends of the rings between them."""

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
        pass  # nothing is held between two starts


async def launch_all(
    launcher: Launcher, first_number: int, ranks: Sequence[int], files: Sequence[tuple[int, ...]]
) -> list[Peer]:
    """Start the workers of some ranks with the descriptors that each inherits, which are closed here.

    Raises:
        DeviceStartError: the system has refused; none is left.
    """
    peers: list[Peer] = []
    try:
        for rank, inherited in zip(ranks, files, strict=True):
            peers.append(launcher(first_number + rank, files=inherited))  # ended if one fails
    except BaseException:
        await end_all(peers)  # noqa: ASYNC102  # shielded inside
        raise
    finally:
        close_files(files)
    return peers


async def end_all(peers: Sequence[Peer]) -> None:
    """Kill workers that have been started in vain."""
    with anyio.CancelScope(shield=True):  # bounded: each is killed, which takes no time
        for peer in peers:
            await peer.end(0.0)


def shared_sizes(config: EngineConfig) -> SharedSizes:
    """Read the model's widths, and size all memory and links by them.

    Raises:
        TrouperValidationError: the model cannot be shared out among so many ranks.
        UnsupportedFeatureError: the architecture is not known, or not on the device.
    """
    traits = decoder_traits(config.model.hf_config, config.model.architecture)
    check_device(traits, config.device)
    check_shards(traits, config.tensor_parallel_size, quantization=config.quantization)
    return SharedSizes.of(config, ModelSizes(traits.hidden_size, traits.vocab_size))
