"""The workers of one order on one machine: their links, processes and end.

This module is synchronous because both our own host and an actor of Ray use it. Workers on the same machine
share rings. Links to other machines are TCP connections that this module opens and the workers inherit, so
workers need neither key nor address.
"""

import socket

from trouper.actors.executor.links.worker_links import close_files, create_shared_files, link_ends
from trouper.actors.executor.workers.machines.accept_links import LinkAcceptor
from trouper.actors.executor.workers.machines.authentication import WrongKeyError, dial, serve_at
from trouper.actors.executor.workers.machines.channel import LinkHello, Start, WorkerHello, encode
from trouper.actors.executor.workers.worker_process import MODULE, Exit, WorkerProcess
from trouper.errors import DeviceStartError

# Connections waiting to be accepted: the links of one group.
BACKLOG = 64


class WorkerGroup:
    """The workers of one order on this machine. Call `listen`, `connect` and `spawn` in this order, then `reap`
    for each worker.

    Args:
        coordinator: address and port of the coordinator.
        address: address at which other machines reach this one.
        machine: encoded `MachineFacts` for the workers.
    """

    def __init__(
        self,
        coordinator: tuple[str, int],
        address: str,
        key: bytes,
        machine: bytes = b"",
        module: str = MODULE,
    ) -> None:
        self._coordinator, self._key = coordinator, key
        self._machine, self._module = machine, module
        self._address = address
        self._listener: socket.socket | None = None
        self._controls: list[socket.socket] = []
        self._files: list[tuple[int, ...]] = []
        self._ranks: tuple[int, ...] = ()
        self._first_number = 0
        # Processes by rank.
        self.processes: dict[int, WorkerProcess] = {}

    def __repr__(self) -> str:
        return f"<WorkerGroup of {list(self.processes)}>"

    def listen(self) -> int:
        """Listen for the links of other machines. Returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        self._listener = serve_at((self._address, 0), BACKLOG)
        return self._listener.getsockname()[1]

    def connect(self, start: Start) -> None:
        """Connect the workers to the coordinator and to their neighbours. Blocks.

        Raises:
            DeviceStartError: the coordinator or another machine does not answer, or there is no memory for
                rings.
        """
        try:
            for rank in start.ranks:
                control = dial(self._coordinator, self._key)
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
        """Create the rings between ranks on this machine and their connections to other machines. Blocks.

        Returns:
            The descriptors that each rank inherits, which the caller closes.

        Raises:
            OSError: another machine does not answer.
            DeviceStartError: there is no memory for rings.
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
                assert self._listener is not None, (
                    "the coordinator has us start before it has us listen"
                )
                made |= LinkAcceptor(self._listener, self._key, start.order, awaited).accept_all()
            return create_shared_files(start.sizes, start.ranks, made)
        except BaseException:
            close_files([tuple(made.values())])
            raise

    def spawn(self) -> None:
        """Start the processes, in a thread that lives as long as they do.

        Raises:
            DeviceStartError: the system refused.
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
        """Wait up to `grace_s` seconds for a worker to exit, then kill it. Blocks."""
        process = self.processes.get(rank)
        return Exit(None) if process is None else process.reap(grace_s)

    @property
    def is_over(self) -> bool:
        """Whether the workers have run and all have ended.

        The listeners and descriptors of the group can then be closed.
        """
        return bool(self.processes) and all(p.is_reaped for p in self.processes.values())

    def kill(self) -> None:
        """Kill all workers, and close everything of the group.

        Blocks until the system has ended them.  Idempotent.
        """
        for process in self.processes.values():
            process.reap(0.0)
        self.close()

    def close(self) -> None:
        """Close listener, connections and descriptors that the workers inherited or will not inherit.
        Idempotent.
        """
        if self._listener is not None:
            self._listener.close()
        for control in self._controls:
            control.close()
        close_files(self._files)
        self._listener, self._controls, self._files = None, [], []


def outer_links(start: Start) -> set[str]:
    """Return the names of the links between this group and ranks on other machines."""
    if start.sizes is None:
        return set()
    links = link_ends(start.sizes)
    return {x.name for x in links if (x.sender in start.ranks) != (x.receiver in start.ranks)}
