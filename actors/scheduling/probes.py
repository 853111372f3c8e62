"""Probes of the devices of all replicas: the first that answers proves that the engine makes progress.  Pure.

A device that hangs holds the probe that is on its way to it, and no other: so that its inbox has room, none is sent after it
until that one is answered.
"""

from collections.abc import Iterable

from trouper.actors.messages.promise import Promise


class Probes:
    """The promises that wait for an answer, and the replicas to which a probe is on its way."""

    def __init__(self) -> None:
        self._waiting: list[Promise[object]] = []  # few: the front asks one at a time
        self._under_way: set[int] = set()

    def __repr__(self) -> str:
        return f"<Probes: {len(self._waiting)} wait, under way to {sorted(self._under_way)}>"

    def begin(self, answer: Promise[object], replicas: Iterable[int]) -> list["ReplicaProbe"]:
        """Take a promise that the first answer keeps; return what is to be sent to which replica."""
        self._waiting.append(answer)
        sent = [
            ReplicaProbe(self, replica) for replica in replicas if replica not in self._under_way
        ]
        self._under_way.update(probe.replica for probe in sent)
        return sent

    def passed(self, replica: int, value: object) -> None:
        """A device has answered: so the engine makes progress."""
        self._under_way.discard(replica)
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer.set(value)

    def failed(self, replica: int, error: BaseException) -> None:
        """A device has refused; the last one that might have answered fails all that wait."""
        self._under_way.discard(replica)
        if not self._under_way:
            waiting, self._waiting = self._waiting, []
            for answer in waiting:
                answer.fail(error)


class ReplicaProbe:
    """One probe, on its way to a replica: a promise that the executor keeps."""

    def __init__(self, probes: Probes, replica: int) -> None:
        self.replica = replica
        self._probes = probes

    def set(self, value: object) -> None:
        """Tell that the device has answered."""
        self._probes.passed(self.replica, value)

    def fail(self, error: BaseException) -> None:
        """Tell that the device has refused."""
        self._probes.failed(self.replica, error)
