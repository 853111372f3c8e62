"""Events that a parser of a model's answer yields, piece by piece."""

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text for the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model wrote to itself before it answered."""

    text: str


class CallStarted(msgspec.Struct, frozen=True):
    """A tool call begins; `index` counts the calls of one answer from 0."""

    index: int
    name: str


class Arguments(msgspec.Struct, frozen=True):
    """A piece of the arguments of call `index`: all pieces in order are its JSON object."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True):
    """Call `index` is complete, or will get no more."""

    index: int


ParserEvent = Content | Reasoning | CallStarted | Arguments | CallEnded


class EventList:
    """Collects events; neighbours of one kind become one."""

    def __init__(self) -> None:
        self._events: list[ParserEvent] = []
        self._pieces: list[str] = []  # of the last event: joined once, so that many are cheap

    def add(self, event: ParserEvent) -> None:
        """Append the event, or its text to the last one if that is of its kind."""
        if isinstance(event, CallStarted | CallEnded):
            self._close()
            self._events.append(event)
        elif event.text:
            if not self._pieces or not _are_alike(event, self._events[-1]):
                self._close()
                self._events.append(event)
            self._pieces.append(event.text)

    def take(self) -> list[ParserEvent]:
        """Return what has been collected since the last call."""
        self._close()
        events, self._events = self._events, []
        return events

    def _close(self) -> None:
        if len(self._pieces) > 1:
            last = self._events[-1]
            self._events[-1] = msgspec.structs.replace(last, text="".join(self._pieces))
        self._pieces = []


def _are_alike(event: ParserEvent, last: ParserEvent) -> bool:
    if isinstance(event, Arguments):
        return isinstance(last, Arguments) and event.index == last.index
    return type(event) is type(last)
