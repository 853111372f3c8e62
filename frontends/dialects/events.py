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

    def add(self, event: ParserEvent) -> None:
        """Append the event, or its text to the last one if that is of its kind."""
        last = self._events[-1] if self._events else None
        match event, last:
            case ((Content("") | Reasoning("") | Arguments(_, "")), _):
                return
            case Content(text), Content(before):
                self._events[-1] = Content(before + text)
            case Reasoning(text), Reasoning(before):
                self._events[-1] = Reasoning(before + text)
            case Arguments(index, text), Arguments(same, before) if index == same:
                self._events[-1] = Arguments(index, before + text)
            case _:
                self._events.append(event)

    def take(self) -> list[ParserEvent]:
        """Return what has been collected since the last call."""
        events, self._events = self._events, []
        return events
