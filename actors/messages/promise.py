"""The writing end of a future, as a message lends it to the actor that does the work."""

from typing import Protocol, TypeVar

T = TypeVar("T", contravariant=True)


class Promise(Protocol[T]):
    """A result to be delivered once.  Delivering never waits and never fails, whether it is read or not."""

    def set(self, value: T) -> None:
        """Deliver the result."""

    def fail(self, error: BaseException) -> None:
        """Deliver an error, which is raised where the result is waited for."""
