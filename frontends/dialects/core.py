"""Parse a model's answer during its generation into text, reasoning and tool calls.  The parser is pure.

Laws:
  1. The events do not depend on how the text is split, if adjacent events of one kind are merged.
  2. Arguments are a JSON object, or the beginning of one if the answer is cut off; anything else is content.  Arguments in
     JSON are slices of the model's text, except that raw line breaks in strings become escapes.  Only a call that was
     released before its end (`MAX_HELD`) may turn out to be invalid.
  3. Arguments in another format become JSON by the types in the tool's schema.  A text that is not a literal of its type
     remains a string.  Nothing is evaluated.
  4. A character is scanned at most twice, and nesting and the number of steps are bounded, so a long answer costs little
     more than copying it.
  5. Text that turns out not to be a call is content.  No text is lost, and no error is raised.
"""

from collections.abc import Mapping

from trouper.frontends.dialects.bodies import read_array, read_object, read_python, read_section
from trouper.frontends.dialects.calls import (
    MAX_HELD,
    CallWriter,
    Content,
    EventList,
    ParserEvent,
    Reasoning,
    Schemas,
    read_channels,
)
from trouper.frontends.dialects.reader import Parse, Reader
from trouper.frontends.dialects.table import Dialect, Span

# The number of characters of an answer that may be a call without marks, until it names a tool.
MAX_BARE = 256
FENCES = ("```json", "```tool_call", "```python", "```")


class AnswerParser:
    """Converts the text of one answer to events.

    Args:
        dialect: the dialect of the model.
        schemas: JSON schemas of the tools' parameters, by name; calls are not parsed if there are none.
        reasoning: the marks around the reasoning; reasoning is not parsed if it is None.
        begins_in_reasoning: whether the prompt already opens the reasoning.
        max_held: number of characters of a call's arguments that are held back until the call is complete.
    """

    def __init__(
        self,
        dialect: Dialect,
        schemas: Schemas | None = None,
        *,
        reasoning: Span | None = None,
        begins_in_reasoning: bool = False,
        max_held: int = MAX_HELD,
    ) -> None:
        self._dialect = dialect
        self._schemas = schemas or {}
        self._begins_in_reasoning = begins_in_reasoning
        self._reasoning = reasoning
        self._events = EventList()
        self._reader = Reader()
        self._parse = self._read_answer()
        self._is_over = False
        self._calls = CallWriter(self._events, self._schemas, self._reader, max_held)
        self._num_bare = self._num_refused = 0

    def __repr__(self) -> str:
        return f"<AnswerParser {self._dialect.name}: {self._reader!r}>"

    def feed(self, text: str) -> list[ParserEvent]:
        """Parse more text of the answer.  Returns the events that are certain now.

        Text that may still become a mark is held back until the next call, or until `end`.
        """
        if text:
            self._reader.feed(text)
            self._go_on()
        return self._events.take()

    def end(self, *, is_cut: bool = False) -> list[ParserEvent]:
        """Parse the end of the answer.  Returns the events that were held back.

        Args:
            is_cut: whether the answer was cut off.  An incomplete call is then a call, and otherwise content.
        """
        self._reader.end(is_cut=is_cut)
        self._go_on()
        return self._events.take()

    @property
    def num_calls(self) -> Mapping[str, int]:
        """The number of calls so far: with marks (ok), without marks (bare), and marks without a call (content).

        The server counts them as a metric, which shows operators when a dialect does not fit a model.
        """
        num_marked = self._calls.num_started - self._num_bare
        return {"ok": num_marked, "bare": self._num_bare, "content": self._num_refused}

    def _go_on(self) -> None:
        if not self._is_over:
            try:
                next(self._parse)
            except StopIteration:
                self._is_over = True

    def _content(self, text: str) -> None:
        self._events.add(Content(text))

    def _reason(self, text: str) -> None:
        self._events.add(Reasoning(text))

    def _read_answer(self) -> Parse[None]:
        reader, calls = self._reader, self._calls
        if self._dialect.body == "channels":
            reason = self._content if self._reasoning is None else self._reason
            yield from read_channels(reader, calls, self._content, reason)
            return
        if self._reasoning is not None:
            yield from self._read_reasoning(*self._reasoning)
        if self._schemas:
            yield from self._read_bare_calls(calls)
            if self._dialect.marks:
                yield from self._read_marked_calls(calls)
        yield from reader.rest(self._content)

    def _read_reasoning(self, start: str, end: str) -> Parse[None]:
        """Read the reasoning at the beginning of an answer, if there is any."""
        reader = self._reader
        reader.hold()
        yield from reader.skip_blanks()
        is_opened = yield from reader.accept(start.rstrip())
        if not is_opened and not self._begins_in_reasoning:
            reader.rewind()
            return
        reader.give_back()
        yield from reader.skip_blanks()
        if (yield from reader.until((end,), self._reason)):
            yield from reader.skip_blanks()

    def _read_marked_calls(self, calls: CallWriter) -> Parse[None]:
        """Read content, and the calls behind the dialect's marks, up to the end."""
        reader, marks = self._reader, self._dialect.marks
        while calls.step() and (mark := (yield from reader.until(marks, self._content))):
            num_before = calls.num_started
            reader.hold()
            yield from read_section(reader, self._dialect, calls)
            text = reader.give_back()
            is_none = calls.num_started == num_before
            if is_none or calls.is_dropped:
                self._num_refused += 1
                self._content(mark + text if is_none else text)
            else:
                yield from reader.skip_blanks_before(marks)

    def _read_bare_calls(self, calls: CallWriter) -> Parse[None]:
        """Read calls at the beginning of an answer without the dialect's marks.

        Small models omit the marks.  A text that looks like a call is held back until it names a declared tool.
        """
        reader = self._reader
        reader.hold()
        calls.accepts = lambda name: (
            name in self._schemas and (calls.has_named or reader.num_held <= MAX_BARE)
        )
        attempt = self._try_bare_calls(calls)
        # The parser needs more text.
        for _ in attempt:
            if not calls.has_named and reader.num_held > MAX_BARE:
                attempt.close()
                break
            yield
        calls.accepts = bool
        self._num_bare = calls.num_started
        if calls.num_started == 0 or calls.is_dropped:
            reader.rewind()
        else:
            reader.give_back()
            yield from reader.skip_blanks_before(self._dialect.marks)

    def _try_bare_calls(self, calls: CallWriter) -> Parse[None]:
        reader = self._reader
        yield from reader.skip_blanks()
        fence = yield from reader.accept(*FENCES)
        yield from reader.skip_blanks()
        opening = yield from reader.peek()
        if opening == "{":
            yield from read_object(reader, self._dialect, calls)
        elif opening == "[" and self._dialect.body == "python":
            yield from read_python(reader, self._dialect, calls)
        elif opening == "[":
            yield from read_array(reader, self._dialect, calls)
        if fence and calls.num_started:
            yield from reader.skip_blanks_before(("```",))
            yield from reader.accept("```")
