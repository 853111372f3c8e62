"""Events that the parser of a model's answer yields."""

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text for the user.

    It is what remains of the answer without reasoning and calls, and goes into the message's `content`.
    """

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model wrote for itself before the answer.

    It goes into `reasoning_content` of chat messages, and is not part of the text that clients send back.
    """

    text: str


class CallStarted(msgspec.Struct, frozen=True):
    """A tool call begins; `index` counts the calls of one answer from 0.

    The function is known to be one of the request's tools.  Its arguments follow in `Arguments` events.
    """

    index: int
    name: str


class Arguments(msgspec.Struct, frozen=True):
    """A part of the arguments of call `index`: all parts in order are its JSON object.

    A part may end anywhere in the JSON text, even inside an escape sequence, so clients parse only the whole.
    """

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True):
    """Call `index` is complete, or gets no more arguments.

    If the answer was cut off, the arguments so far may be invalid JSON.
    """

    index: int


ParserEvent = Content | Reasoning | CallStarted | Arguments | CallEnded


class EventList:
    """Collects events, and merges adjacent events of one kind.

    The parser reads many small parts of a text, and clients should get one chunk for them.
    """

    def __init__(self) -> None:
        self._events: list[ParserEvent] = []
        # The texts of the last event, which are joined once, so that many are cheap.
        self._pieces: list[str] = []

    def add(self, event: ParserEvent) -> None:
        """Append the event, or append its text to the last event of the same kind."""
        if isinstance(event, CallStarted | CallEnded):
            self._close()
            self._events.append(event)
        elif event.text:
            if not self._pieces or not _are_alike(event, self._events[-1]):
                self._close()
                self._events.append(event)
            self._pieces.append(event.text)

    def take(self) -> list[ParserEvent]:
        """Return the events since the last call."""
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
