"""How many sequences are open at once.  A full server says so at once instead of queueing for ever."""

from types import TracebackType
from typing import Self

from trouper.frontends.server.errors import unavailable


class Admission:
    """`with admission.enter() as ticket`: every way out gives the places back."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_requests = 0
        self.num_sequences = 0

    def __repr__(self) -> str:
        return f"<Admission {self.num_sequences} of {self.limit}, {self.num_requests} requests>"

    def enter(self) -> "AdmissionTicket":
        """Reserve one place, before the body is read.  Raises Refusal when there is none."""
        if self.num_sequences >= self.limit:
            raise full()
        self.num_requests += 1
        self.num_sequences += 1
        return AdmissionTicket(self)


class AdmissionTicket:
    """The places of one request."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._size = 1

    def resize(self, size: int) -> None:
        """All or nothing.  What is larger than the whole house is let in when it is alone."""
        others = self._admission.num_sequences - self._size
        if others and others + size > self._admission.limit:
            raise full()
        self._admission.num_sequences += size - self._size
        self._size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._admission.num_requests -= 1
        self._admission.num_sequences -= self._size


def full() -> Exception:
    return unavailable("overloaded", "the server is full, try again later")
