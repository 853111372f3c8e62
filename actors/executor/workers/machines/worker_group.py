"""A place: another machine, or a part of one, on which some workers of an engine run.

What is here is synchronous, since a host of ours uses it as well as an actor of Ray.  The workers of a place share rings;
to those elsewhere go connections, which the place makes and its workers inherit, so that they know neither key nor address.
"""

import socket

from trouper.actors.executor.links.worker_links import close_files, create_shared_files, link_ends
from trouper.actors.executor.workers.machines.accept_links import LinkAcceptor
from trouper.actors.executor.workers.machines.authentication import WrongKeyError, dial, serve_at
from trouper.actors.executor.workers.machines.channel import LinkHello, Start, WorkerHello, encode
from trouper.actors.executor.workers.worker_process import MODULE, Exit, WorkerProcess
from trouper.errors import DeviceStartError

BACKLOG = 64  # connections that wait to be accepted: links of one place


class WorkerGroup:
    """The workers of one order that a place has: `listen`, `connect` and `spawn`, in this order, then `reap` each.

    Args:
        front: address and port of the front.
        address: of this place, as the others reach it.
        machine: a `MachineFacts` in JSON, for its workers.
    """

    def __init__(
        self,
        front: tuple[str, int],
        address: str,
        key: bytes,
        machine: bytes = b"",
        module: str = MODULE,
    ) -> None:
        self._front, self._key = front, key
        self._machine, self._module = machine, module
        self._address = address
        self._listener: socket.socket | None = None
        self._controls: list[socket.socket] = []
        self._files: list[tuple[int, ...]] = []
        self._ranks: tuple[int, ...] = ()
        self._first_number = 0
        self.processes: dict[int, WorkerProcess] = {}  # by rank

    def __repr__(self) -> str:
        return f"<WorkerGroup of {list(self.processes)}>"

    def listen(self) -> int:
        """Listen for the links of other places; returns the port.

        Raises:
            OSError: this address cannot be bound.
        """
        self._listener = serve_at((self._address, 0), BACKLOG)
        return self._listener.getsockname()[1]

    def connect(self, start: Start) -> None:
        """Connect the workers with the front, and with their neighbours; blocks.

        Raises:
            DeviceStartError: the front or another place does not answer, or there is no room for rings.
        """
        try:
            for rank in start.ranks:
                control = dial(self._front, self._key)
                self._controls.append(control)
                control.sendall(encode(WorkerHello(start.order, rank)))
                control.settimeout(None)
            self._files = self.connect_links(start)
        except (OSError, WrongKeyError) as error:
            raise DeviceStartError(
                f"cannot connect the workers of {self._address}: {error}"
            ) from None
        self._ranks, self._first_number = start.ranks, start.first_number

    def connect_links(self, start: Start) -> list[tuple[int, ...]]:
        """Make the rings of this place's ranks and their connections to others; blocks.

        Returns:
            The descriptors that each rank inherits, which are the caller's to close.

        Raises:
            OSError: another place does not answer.
            DeviceStartError: there is no room for rings.
        """
        if start.sizes is None:
            return [() for _ in start.ranks]
        made: dict[str, int] = {}
        try:
            for name, address in start.dials.items():
                with dial(address, self._key) as link:
                    link.sendall(encode(LinkHello(start.order, name)))
                    made[name] = link.detach()
            awaited = outer_links(start) - made.keys()
            if awaited:
                assert self._listener is not None, "the front has us start before it has us listen"
                made |= LinkAcceptor(self._listener, self._key, start.order, awaited).accept_all()
            return create_shared_files(start.sizes, start.ranks, made)
        except BaseException:
            close_files([tuple(made.values())])
            raise

    def spawn(self) -> None:
        """Start the processes; in the thread that lives as long as they shall.

        Raises:
            DeviceStartError: the system has refused.
        """
        try:
            for rank, control, files in zip(self._ranks, self._controls, self._files, strict=True):
                name = f"worker {self._first_number + rank}"
                self.processes[rank] = WorkerProcess(
                    control, name, self._module, files=files, machine=self._machine
                )
        finally:
            self.close()

    def reap(self, rank: int, grace_s: float) -> Exit:
        """Let a worker exit for so long, then kill it; blocks."""
        process = self.processes.get(rank)
        return Exit(None) if process is None else process.reap(grace_s)

    @property
    def is_over(self) -> bool:
        """Whether its workers have run, and all are gone."""
        return bool(self.processes) and all(p.is_reaped for p in self.processes.values())

    def kill(self) -> None:
        """End all at once; blocks for as long as the system takes.  Idempotent."""
        for process in self.processes.values():
            process.reap(0.0)
        self.close()

    def close(self) -> None:
        """Close what the workers have inherited, or will not.  Idempotent."""
        if self._listener is not None:
            self._listener.close()
        for control in self._controls:
            control.close()
        close_files(self._files)
        self._listener, self._controls, self._files = None, [], []


def outer_links(start: Start) -> set[str]:
    """Return the names of the links between ranks of a place and others."""
    if start.sizes is None:
        return set()
    links = link_ends(start.sizes)
    return {x.name for x in links if (x.sender in start.ranks) != (x.receiver in start.ranks)}
