"""The channels between actors: bounded, in order, any number of ends.

As anyio's memory streams, but who waits for a message takes one turn of the loop and not two: those give the
loop away before they look.  A pooling request goes through seven inboxes.

Laws.  A message is taken in the same turn in which its receiver goes on, so no cancellation loses it.  Who finds
a message there, or waits to send, gives the others a turn first.  Waiting ends with the other side's last end.
Messages are taken in the order of their sending.
"""

import warnings
from collections import deque
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

import anyio
import anyio.lowlevel

T = TypeVar("T")


class Usage(NamedTuple):
    """A look at a channel; named as in anyio's."""

    current_buffer_used: int
    tasks_waiting_send: int
    tasks_waiting_receive: int


class _Channel(Generic[T]):
    """What all ends share."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.messages: deque[T] = deque()
        self.num_senders = self.num_inboxes = 0
        self.receiving: deque[anyio.Event] = deque()
        self.sending: deque[anyio.Event] = deque()
        self._event_type: type[anyio.Event] | None = None

    def __repr__(self) -> str:
        ends = f"{self.num_senders} senders, {self.num_inboxes} inboxes"
        return f"<channel, {len(self.messages)} of {self.capacity} messages, {ends}>"

    async def wait_in(self, queue: deque[anyio.Event]) -> None:
        """Until it is this task's turn, or all are told to look again."""
        if self._event_type is None:
            self._event_type = type(anyio.Event())  # the backend's, which is looked for but once
        event = self._event_type()
        queue.append(event)
        try:
            await event.wait()
        except BaseException:
            if event in queue:
                queue.remove(event)
            else:  # the turn is somebody else's
                self.wake(queue)
            raise

    def wake(self, queue: deque[anyio.Event]) -> None:
        if queue:
            queue.popleft().set()

    def wake_all(self) -> None:
        for queue in (self.receiving, self.sending):
            while queue:
                queue.popleft().set()


class _End(Generic[T]):
    def __init__(self, channel: _Channel[T]) -> None:
        self._channel = channel
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed, " if self._is_closed else ""
        return f"<{type(self).__name__}: {state}{self._channel!r}>"

    def clone(self) -> Self:
        """Another end of the channel, to be closed on its own."""
        if self._is_closed:
            raise anyio.ClosedResourceError
        return type(self)(self._channel)

    def close(self) -> None:
        """Idempotent; whoever waits looks again."""
        if not self._is_closed:
            self._is_closed = True
            self._leave()
            self._channel.wake_all()

    def _leave(self) -> None:
        raise NotImplementedError

    def statistics(self) -> Usage:
        channel = self._channel
        return Usage(len(channel.messages), len(channel.sending), len(channel.receiving))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._is_closed:
            warnings.warn(f"left open: {self!r}", ResourceWarning, 2, source=self)


class Inbox(_End[T]):
    """The receiving end."""

    def __init__(self, channel: _Channel[T]) -> None:
        super().__init__(channel)
        channel.num_inboxes += 1

    def receive_nowait(self) -> T:
        """
        Raises:
            WouldBlock: there is no message now.
            EndOfStream: and there will be none.
            ClosedResourceError: this end is closed.
        """
        channel = self._channel
        if self._is_closed:
            raise anyio.ClosedResourceError
        if channel.messages:
            message = channel.messages.popleft()
            channel.wake(channel.sending)
            return message
        raise anyio.WouldBlock if channel.num_senders else anyio.EndOfStream

    async def receive(self) -> T:
        """Raises as `receive_nowait`, but for WouldBlock."""
        channel = self._channel
        if channel.messages or self._is_closed or not channel.num_senders:
            await anyio.lowlevel.checkpoint()
        while not (channel.messages or self._is_closed) and channel.num_senders:
            await channel.wait_in(channel.receiving)
        return self.receive_nowait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    def _leave(self) -> None:
        self._channel.num_inboxes -= 1


class Sender(_End[T]):
    """The sending end."""

    def __init__(self, channel: _Channel[T]) -> None:
        super().__init__(channel)
        channel.num_senders += 1

    @property
    def is_full(self) -> bool:
        """There is no room now."""
        return len(self._channel.messages) >= self._channel.capacity

    def send_nowait(self, message: T) -> None:
        """
        Raises:
            WouldBlock: there is no room now.
            BrokenResourceError: nobody will receive it.
            ClosedResourceError: this end is closed.
        """
        channel = self._channel
        if self._is_closed:
            raise anyio.ClosedResourceError
        if not channel.num_inboxes:
            raise anyio.BrokenResourceError
        if len(channel.messages) >= channel.capacity:
            raise anyio.WouldBlock
        channel.messages.append(message)
        channel.wake(channel.receiving)

    async def send(self, message: T) -> None:
        """Raises as `send_nowait`, but for WouldBlock."""
        channel = self._channel
        await anyio.lowlevel.checkpoint()
        while self.is_full and channel.num_inboxes and not self._is_closed:
            await channel.wait_in(channel.sending)
        self.send_nowait(message)

    def _leave(self) -> None:
        self._channel.num_senders -= 1


class open_channel(
    tuple[Sender[T], Inbox[T]]
):  # it is called as a function, and the message named as of a class
    """One end of each kind; `capacity` messages at most wait in between."""

    def __new__(cls, capacity: int) -> tuple[Sender[T], Inbox[T]]:  # pyright: ignore[reportInconsistentConstructor]  # that is all it makes
        channel = _Channel[T](capacity)
        return Sender(channel), Inbox(channel)
