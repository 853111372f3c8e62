"""The memory and links that the workers of a device share, and what each worker inherits.

    worker          stage · ranks + rank
    group           memory in which the ranks of a stage add their results (`kernels/cpu/rank_exchange.py`)
    hidden states   from each rank of a stage to the same rank of the next: all ranks have all of them
    tokens          from rank 0 of the last stage, which samples, to the first stage, whose other ranks embed them

Links between workers on one machine are rings in shared memory, links between machines TCP connections. Both
are inherited by descriptor, so nothing remains after the processes. On GPUs there is one stage, and sums and
tokens go from device to device; the group is an empty file through which the ranks find each other.

A message over TCP (`TcpLink`) is the step and the number of bytes, then the bytes. Sent messages wait in the system's
buffers on both sides. A sender of hidden states may wait for room, since nothing that the receiver needs is queued after it.

A link ends with the process on its other side. The engine also sees that end and knows its cause, so a worker
that finds it first waits a moment for the engine to end it too. Only what the engine has not seen becomes an
error, `LinkLostError`, which no request can have caused: on a silent network each connection detects the loss
at a different time.
"""

import os
import select
import socket
import stat
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn, Protocol

import numpy as np

from trouper.actors.executor.rings import Ring, RingFiles, create_ring
from trouper.actors.stages import num_ring_entries
from trouper.config.context import available_bytes
from trouper.config.engine_config import EngineConfig
from trouper.errors import DeviceStartError
from trouper.kernels.cpu.exchange_sizes import ExchangeSizes

HEADER = struct.Struct("<qq")
PATIENCE_S = 2.0


class LinkLostError(ConnectionError):
    """The connection to another stage has ended.

    The worker ends too, since it cannot continue without the other stage; the engine then restarts the device.
    """


class TcpLink:
    """One side of a link. It owns the descriptor and closes it.

    Args:
        max_bytes: maximum size of a message.
        patience_s: seconds before the end of the other side becomes an error of this side.
    """

    def __init__(self, file: int, max_bytes: int, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._socket = socket.socket(fileno=file)
        self._socket.setblocking(True)
        self._max_bytes = max_bytes
        # The header and bytes of a partly received message.
        self._buffer = np.empty(HEADER.size + max_bytes, dtype=np.uint8)
        self._num_here = 0

    def __repr__(self) -> str:
        return f"<TcpLink of {self._max_bytes} bytes, {self._num_here} here>"

    def send(self, step: int, payload: np.ndarray) -> None:
        """Send the payload, contiguous uint8. Waits for room in the system's buffer.

        Raises:
            ValueError: the payload is larger than a message may be.
            LinkLostError: the other side has disconnected.
        """
        if len(payload) > self._max_bytes:
            raise ValueError(f"the payload has {len(payload)} bytes (maximum {self._max_bytes})")
        header = HEADER.pack(step, len(payload))
        try:
            num_sent = self._socket.sendmsg([header, payload.data])
            if num_sent < len(header):
                self._socket.sendall(header[num_sent:])
            self._socket.sendall(payload.data[max(0, num_sent - len(header)) :])
        except OSError as error:
            self._lose(error)

    def receive(self, out: np.ndarray, *, wait: bool) -> tuple[int, int] | None:
        """Copy the payload of the next message to the beginning of `out`.

        Returns:
            Its step and number of bytes, or None if no complete message has arrived and `wait` is False.

        Raises:
            LinkLostError: the other side has disconnected.
            ValueError: a message is too large.
        """
        if not self._read_up_to(HEADER.size, wait=wait):
            return None
        step, num_bytes = HEADER.unpack_from(self._buffer.data)
        if not 0 <= num_bytes <= self._max_bytes:
            raise ValueError(
                f"a message of {num_bytes} bytes is too long (maximum {self._max_bytes})"
            )
        end = HEADER.size + num_bytes
        if not self._read_up_to(end, wait=wait):
            return None
        out[:num_bytes] = self._buffer[HEADER.size : end]
        self._num_here = 0
        return step, num_bytes

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _read_up_to(self, end: int, *, wait: bool) -> bool:
        """Read until `end` bytes of the message are buffered. Returns False if that would wait."""
        while self._num_here < end:
            if not wait and not select.select([self._socket], [], [], 0)[0]:
                return False
            try:
                num_read = self._socket.recv_into(self._buffer[self._num_here : end].data)
            except OSError as error:
                self._lose(error)
            if num_read == 0:
                self._lose("closed by another stage")
            self._num_here += num_read
        return True

    def _lose(self, words: object) -> NoReturn:
        """Give the engine time to end this worker, then raise the error."""
        time.sleep(self._patience_s)
        raise LinkLostError(f"a link between stages: {words}") from None


class Link(Protocol):
    """One side of a link between two workers: hidden states from a stage to the next, or tokens from the last to
    the first.
    """

    def send(self, step: int, payload: np.ndarray) -> None:
        """Send a message with the step to which it belongs.

        Waits until the receiver has room, so a fast stage cannot run ahead without limit.
        """
        ...

    def receive(self, out: np.ndarray, *, wait: bool) -> tuple[int, int] | None:
        """Copy the next message to the beginning of `out`. Returns its step and number of bytes, or None if it
        has not arrived and `wait` is False.
        """
        ...

    def close(self) -> None:
        """Release memory and descriptors. Idempotent."""
        ...


def close_files(files: Iterable[Sequence[int]]) -> None:
    """Close descriptors, each once."""
    for file in {file for some in files for file in some}:
        os.close(file)


def open_next(files: list[int], num_entries: int, entry_bytes: int) -> Link:
    """Open the link whose descriptors are first in the list, and remove them from it.

    A ring has three descriptors, and a connection has one.
    """
    if stat.S_ISSOCK(os.fstat(files[0]).st_mode):
        return TcpLink(files.pop(0), entry_bytes)
    ring, files[:3] = RingFiles(*files[:3]), []
    return Ring(ring, num_entries, entry_bytes)


# Entries of a ring of hidden states: one is written while the other is read. A sender may wait for room,
# since nothing that the receiver needs is queued after it.
HIDDEN_ENTRIES = 2
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TOKEN_BYTES = 8  # int64
# Minimum size of the sheet through which ranks exchange logits, in numbers. A recorded step needs the logits
# of all its rows, at most `recorded_steps.MAX_LOGITS` numbers. Other steps may exceed the sheet, for instance
# for prompt logprobs, and then use it repeatedly.
MIN_SHEET_NUMBERS = 2**23


class WorkerPosition(NamedTuple):
    """The stage and the rank of a worker. Workers are numbered stage by stage, so both follow from the number."""

    stage: int
    rank: int

    @classmethod
    def of(cls, worker: int, config: EngineConfig) -> "WorkerPosition":
        """Compute the position of a worker from its number."""
        return cls(*divmod(worker, config.tensor_parallel_size))

    def samples(self, config: EngineConfig) -> bool:
        """Whether this worker has complete logits. Only this worker samples and answers plans."""
        return self == (config.num_stages - 1, 0)


class WorkerLinks(NamedTuple):
    """The links of one worker; None for a neighbour that it does not have. `group` is the descriptor of the
    memory shared by the ranks of its stage.
    """

    group: int | None
    hidden_in: Link | None
    hidden_out: Link | None
    tokens_in: Link | None
    tokens_out: tuple[Link, ...]

    def close(self) -> None:
        """Close all links of this worker.  Idempotent. The workers at the other ends then find their links lost."""
        for link in (self.hidden_in, self.hidden_out, self.tokens_in, *self.tokens_out):
            if link is not None:
                link.close()


class ModelSizes(NamedTuple):
    """The widths of a model that determine the sizes of shared memory.

    They are known before the weights are loaded, when the memory must be created.
    """

    hidden_size: int
    vocab_size: int


def group_sizes(config: EngineConfig, model: ModelSizes, stage: int) -> ExchangeSizes:
    """Compute the sizes of the memory shared by the ranks of a stage. Only the last stage has logits."""
    scheduler, sheet = config.scheduler, 0
    if stage == config.num_stages - 1:
        sheet = max(scheduler.max_num_seqs * model.vocab_size, MIN_SHEET_NUMBERS)
    rows = scheduler.max_num_scheduled_tokens
    # At least 64 bytes a row, the size of a vote.
    part = rows * max(model.hidden_size * ITEM_BYTES[config.dtype], 64)
    return ExchangeSizes(config.tensor_parallel_size, part, sheet)


class SharedSizes(NamedTuple):
    """Sizes of everything that the workers of a device share.

    `hidden_bytes` holds the hidden states of the largest step; `token_bytes` the tokens of a step with all
    sequences, 0 if they go from device to device; `group_bytes` the memory of each stage's ranks, empty for
    one rank.
    """

    num_stages: int
    num_ranks: int
    hidden_bytes: int
    token_bytes: int
    group_bytes: tuple[
        int, ...
    ]  # of the memory of the ranks of each stage; empty: there is one rank

    @classmethod
    def of(cls, config: EngineConfig, model: ModelSizes) -> "SharedSizes":
        """Compute the sizes of all shared memory from the config and the widths of the model.

        Workers on GPUs communicate through their own library, so they need none.
        """
        scheduler, num_ranks = config.scheduler, config.tensor_parallel_size
        if config.device == "cuda":
            return cls(1, num_ranks, 0, 0, (0,))
        stages = range(config.num_stages if num_ranks > 1 else 0)
        groups = tuple(group_sizes(config, model, stage).num_bytes for stage in stages)
        row_bytes = model.hidden_size * ITEM_BYTES[config.dtype]
        hidden_bytes = scheduler.max_num_scheduled_tokens * row_bytes
        token_bytes = scheduler.max_num_seqs * TOKEN_BYTES
        return cls(config.num_stages, num_ranks, hidden_bytes, token_bytes, groups)

    @property
    def num_workers(self) -> int:
        """Number of workers of the device."""
        return self.num_stages * self.num_ranks


class LinkEnds(NamedTuple):
    """A link between two workers, given by their numbers, with its capacity.

    Both sides compute the same list of links, so no names need to be exchanged.
    """

    name: str
    sender: int
    receiver: int
    num_entries: int
    entry_bytes: int


def link_ends(sizes: SharedSizes) -> list[LinkEnds]:
    """Return the links between the workers of a device, in the order in which each worker inherits its own."""
    num_ranks, last = sizes.num_ranks, sizes.num_stages - 1
    found = [
        LinkEnds(f"hidden {worker}", worker, worker + num_ranks, HIDDEN_ENTRIES, sizes.hidden_bytes)
        for worker in range(last * num_ranks)
    ]
    sampler, entries = last * num_ranks, num_ring_entries(sizes.num_stages)
    found += [
        LinkEnds(f"tokens {worker}", sampler, worker, entries, sizes.token_bytes)
        for worker in range(num_ranks)
        if worker != sampler and sizes.token_bytes
    ]
    return found


def create_shared_files(
    sizes: SharedSizes,
    workers: Sequence[int] | None = None,
    connections: Mapping[str, int] | None = None,
) -> list[tuple[int, ...]]:
    """Create everything that workers on one machine share. Returns the descriptors for each worker.

    Args:
        workers: numbers of the workers on this machine, always all ranks of a stage; None for all
            workers of the device.
        connections: descriptors of links to other machines by name, which the caller closes if this function
            fails.

    Raises:
        DeviceStartError: not enough memory, or no descriptors.
    """
    workers = range(sizes.num_workers) if workers is None else workers
    links = link_ends(sizes)
    rings = [link for link in links if link.sender in workers and link.receiver in workers]
    stages = sorted({worker // sizes.num_ranks for worker in workers})
    groups = {stage: sizes.group_bytes[stage] for stage in stages if sizes.group_bytes}
    _check_memory([*groups.values(), *(link.num_entries * link.entry_bytes for link in rings)])
    files: dict[int, list[int]] = {worker: [] for worker in workers}
    made: list[Sequence[int]] = []
    try:
        for stage, num_bytes in groups.items():
            made.append((_create_memory(num_bytes),))
            for worker in range(stage * sizes.num_ranks, (stage + 1) * sizes.num_ranks):
                files[worker] += made[-1]
        for link in links:
            if link in rings:
                made.append(create_ring(link.num_entries, link.entry_bytes))
            for end in {link.sender, link.receiver} & files.keys():
                files[end] += made[-1] if link in rings else ((connections or {})[link.name],)
    except DeviceStartError:
        close_files(made)
        raise
    return [tuple(some) for some in files.values()]


def open_worker_links(worker: int, files: Sequence[int], sizes: SharedSizes) -> WorkerLinks:
    """Open the links of a worker from the descriptors that it inherited.

    The descriptors have the order of `link_ends`.
    """
    rest = list(files)
    group = rest.pop(0) if sizes.num_ranks > 1 else None
    opened = [
        (link, open_next(rest, link.num_entries, link.entry_bytes))
        for link in link_ends(sizes)
        if worker in (link.sender, link.receiver)
    ]

    def found(name: str, side: str) -> tuple[Link, ...]:
        return tuple(
            one
            for link, one in opened
            if link.name.startswith(name) and getattr(link, side) == worker
        )

    return WorkerLinks(
        group,
        next(iter(found("hidden", "receiver")), None),
        next(iter(found("hidden", "sender")), None),
        next(iter(found("tokens", "receiver")), None),
        found("tokens", "sender"),
    )


def _check_memory(parts: Sequence[int]) -> None:
    wanted, free = sum(parts), available_bytes()
    if free is not None and wanted > free:
        raise DeviceStartError(
            f"the workers need {wanted} bytes of shared memory for sums, hidden states and logits, but only {free} are free"
        )


def _create_memory(num_bytes: int) -> int:
    """Create a file of zeros whose memory is allocated immediately, so that a shortage is an error here and not
    a crash later.
    """
    try:
        file = os.memfd_create("trouper-ranks", os.MFD_CLOEXEC)
    except OSError as error:
        raise DeviceStartError(f"cannot share memory between ranks: {error}") from None
    try:
        if num_bytes:
            os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        os.close(file)
        raise DeviceStartError(f"cannot share {num_bytes} bytes between ranks: {error}") from None
    return file
