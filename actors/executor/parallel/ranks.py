"""The files that the workers of a device share when its layers are cut into ranks, and what each of them inherits.

    worker          stage · ranks + rank
    group           memory of the ranks of a stage, in which they add up (`kernels/cpu/rank_exchange.py`)
    hidden states   from each rank of a stage to the same rank of the next: all ranks have all of them
    tokens          from rank 0 of the last stage, which samples, to the first stage, whose other ranks embed them

All is inherited by descriptor, so nothing of it outlives the processes.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from trouper.actors.executor.parallel.links import (
    HIDDEN_ENTRIES,
    ITEM_BYTES,
    Link,
    RingSizes,
    close_files,
    create_files,
    free_bytes,
    open_links,
)
from trouper.actors.executor.parallel.rings import Ring, RingFiles, create_ring
from trouper.actors.stages import num_ring_entries
from trouper.config.resolve import EngineConfig
from trouper.errors import DeviceStartError
from trouper.kernels.cpu.exchange_sizes import ExchangeSizes

# A recorded step has the logits of all of its rows, at most `recorded_steps.MAX_LOGITS` numbers.  Any other may have more rows
# than the sheet, as for the logprobs of a prompt, and has them in turns.
MIN_SHEET_NUMBERS = 2**23


class RankPlace(NamedTuple):
    """The stage and the rank of a worker."""

    stage: int
    rank: int

    @classmethod
    def of(cls, worker: int, config: EngineConfig) -> "RankPlace":
        return cls(*divmod(worker, config.tensor_parallel_size))

    def samples(self, config: EngineConfig) -> bool:
        """Whether this worker has all logits: it alone samples, and answers plans."""
        return self == (config.num_stages - 1, 0)


class WorkerLinks(NamedTuple):
    """The links of one worker to the others; None where it has no such neighbour."""

    group: int | None  # the descriptor of the group's memory
    hidden_in: Link | None
    hidden_out: Link | None
    tokens_in: Link | None
    tokens_out: tuple[Link, ...]

    def close(self) -> None:
        """Close all.  Idempotent."""
        for link in (self.hidden_in, self.hidden_out, self.tokens_in, *self.tokens_out):
            if link is not None:
                link.close()


class ModelSizes(NamedTuple):
    """The widths that what workers share depends on."""

    hidden_size: int
    vocab_size: int


def group_sizes(config: EngineConfig, model: ModelSizes, stage: int) -> ExchangeSizes:
    """Return the sizes of what the ranks of a stage share; only those of the last one have logits."""
    scheduler, sheet = config.scheduler, 0
    if stage == config.num_stages - 1:
        sheet = max(scheduler.max_num_seqs * model.vocab_size, MIN_SHEET_NUMBERS)
    rows = scheduler.max_num_scheduled_tokens
    part = rows * max(model.hidden_size * ITEM_BYTES[config.dtype], 64)  # at least a vote
    return ExchangeSizes(config.tensor_parallel_size, part, sheet)


def create_crew_files(config: EngineConfig, model: ModelSizes) -> list[tuple[int, ...]]:
    """Make all that the workers of a device share; returns the descriptors of each.

    Raises:
        DeviceStartError: the system has not so much memory, or no descriptors.
    """
    sizes = RingSizes.of(config, model.hidden_size)
    if config.tensor_parallel_size == 1:
        return create_files(sizes)
    groups = [group_sizes(config, model, stage) for stage in range(config.num_stages)]
    places = [RankPlace.of(worker, config) for worker in range(config.workers_per_replica)]
    hidden = _hidden_links(config, places)
    receivers = _token_receivers(config, places)
    _check_memory(
        [sum(group.num_bytes for group in groups),
         len(hidden) * HIDDEN_ENTRIES * sizes.hidden_bytes,
         len(receivers) * num_ring_entries(config.num_stages) * sizes.token_bytes]
    )  # fmt: skip
    made: list[Sequence[int]] = []

    def kept(files: Sequence[int]) -> Sequence[int]:
        made.append(files)
        return files

    try:
        memories = [kept((_create_memory(group.num_bytes),)) for group in groups]
        rings = {ends: kept(create_ring(HIDDEN_ENTRIES, sizes.hidden_bytes)) for ends in hidden}
        entries = num_ring_entries(config.num_stages)
        tokens = {to: kept(create_ring(entries, sizes.token_bytes)) for to in receivers}
    except DeviceStartError:
        close_files(made)
        raise
    return [
        (
            *memories[place.stage],
            *(file for (_, receiver), ring in rings.items() if receiver == place for file in ring),
            *(file for (sender, _), ring in rings.items() if sender == place for file in ring),
            *tokens.get(place, ()),
            *(file for ring in tokens.values() if place.samples(config) for file in ring),
        )
        for place in places
    ]


def open_worker_links(
    worker: int, files: Sequence[int], config: EngineConfig, hidden_size: int
) -> WorkerLinks:
    """Open the links of a worker by the descriptors that it has inherited."""
    sizes = RingSizes.of(config, hidden_size)
    place = RankPlace.of(worker, config)
    if config.tensor_parallel_size == 1:
        links = open_links(worker, files, sizes)
        tokens = links.tokens
        is_sender = place.samples(config) and tokens is not None
        return WorkerLinks(
            None,
            links.hidden_in,
            links.hidden_out,
            None if is_sender else tokens,
            (tokens,) if is_sender and tokens is not None else (),
        )
    rest = list(files)
    group = rest.pop(0)

    def open_next(num_entries: int, entry_bytes: int) -> Ring:
        ring, rest[:3] = RingFiles(*rest[:3]), []
        return Ring(ring, num_entries, entry_bytes)

    places = [RankPlace.of(other, config) for other in range(config.workers_per_replica)]
    receivers = _token_receivers(config, places)
    hidden = HIDDEN_ENTRIES, sizes.hidden_bytes
    tokens = num_ring_entries(config.num_stages), sizes.token_bytes
    return WorkerLinks(
        group,
        open_next(*hidden) if place.stage > 0 else None,
        open_next(*hidden) if place.stage < config.num_stages - 1 else None,
        open_next(*tokens) if place in receivers else None,
        tuple(open_next(*tokens) for _ in receivers) if place.samples(config) else (),
    )


def _hidden_links(
    config: EngineConfig, places: Sequence[RankPlace]
) -> list[tuple[RankPlace, RankPlace]]:
    last = config.num_stages - 1
    return [
        (place, RankPlace(place.stage + 1, place.rank)) for place in places if place.stage < last
    ]


def _token_receivers(config: EngineConfig, places: Sequence[RankPlace]) -> list[RankPlace]:
    return [place for place in places if place.stage == 0 and not place.samples(config)]


def _check_memory(parts: Sequence[int]) -> None:
    wanted, free = sum(parts), free_bytes()
    if wanted > free:
        raise DeviceStartError(
            f"the ranks share {wanted} bytes for their sums, hidden states and logits, {free} are free"
        )


def _create_memory(num_bytes: int) -> int:
    """Make a file of zeros whose memory is there, or this fails."""
    try:
        file = os.memfd_create("trouper-ranks", os.MFD_CLOEXEC)
    except OSError as error:
        raise DeviceStartError(f"cannot share memory between ranks: {error}") from None
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        os.close(file)
        raise DeviceStartError(f"cannot share {num_bytes} bytes between ranks: {error}") from None
    return file
