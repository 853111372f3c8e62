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

`AnswerFormat` is the format of one model: its dialect of tool calls and its reasoning marks, detected from its chat templates.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from trouper.errors import invalid
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
from trouper.frontends.dialects.table import (
    AUTO,
    BY_NAME,
    DIALECTS,
    Dialect,
    Span,
    by_name,
    by_reasoning_name,
    detect,
)

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


NONE = "none"


class AnswerFormat(msgspec.Struct, frozen=True):
    """How the answers of one model mark calls and reasoning.

    Attributes:
        tools: the dialect of tool calls; calls are not parsed if it is None.
        reasoning: the marks around the reasoning; it remains part of the text if it is None.
        special: texts of the special tokens, which are removed from a text unless a request asks for them.
        token_ids: ids of the added tokens, by their text.
    """

    tools: Dialect | None = None
    reasoning: Span | None = None
    special: frozenset[str] = frozenset()
    token_ids: Mapping[str, int] = {}

    @property
    def has_special_marks(self) -> bool:
        """Whether a mark contains a special token.

        The detokenizer then keeps special tokens in the text, because the parser could not find such marks otherwise.
        """
        spans = [self.reasoning or ("", "")]
        if self.tools is not None:
            spans += [self.tools.section, self.tools.call, self.tools.name_end]
        return any(token in mark for span in spans for mark in span for token in self.special)

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Return whether the prompt already opens the reasoning, as some templates do.

        The answer then contains only the closing mark, and the parser begins inside the reasoning.
        """
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0].rstrip())

    def parser(self, schemas: Schemas, prompt: str = "", max_held: int = MAX_HELD) -> AnswerParser:
        """Make the parser of one answer.

        Args:
            schemas: JSON schemas of the tools' parameters, by name; calls are not parsed if there are none.
            prompt: the rendered prompt.
            max_held: number of characters of a call's arguments that are held back until the call is complete.
        """
        return AnswerParser(
            self.tools or BY_NAME["json"],
            schemas if self.tools is not None else {},
            reasoning=self.reasoning,
            begins_in_reasoning=self.begins_in_reasoning(prompt),
            max_held=max_held,
        )


def answer_format(
    chat_templates: Iterable[str],
    token_ids: Mapping[str, int],
    special: Collection[str],
    *,
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    more: Sequence[Dialect] = (),
) -> AnswerFormat:
    """Find the answer format of a model.

    Args:
        token_ids: ids of the added tokens, by their text.
        special: texts of the special ones among them.
        tool_call_parser, reasoning_parser: a name; auto detects it from the templates, none disables parsing.
        more: dialects that take precedence over those of the table.

    Raises:
        TrouperValidationError: a name is unknown.
    """
    check_parser_names(tool_call_parser, reasoning_parser, more)
    template, dialects = "\n".join(chat_templates), (*more, *DIALECTS)
    detected = detect(template, dialects)
    named = by_name((*DIALECTS, *more)).get(tool_call_parser)
    dialect = detected if tool_call_parser == AUTO else named
    if reasoning_parser == AUTO:
        span = _detect_reasoning(template, (dialect or detected, *dialects))
    else:
        named = by_reasoning_name((*DIALECTS, *more)).get(reasoning_parser)
        span = None if named is None else named.reasoning
    return AnswerFormat(dialect, span, frozenset(special), dict(token_ids))


def check_parser_names(
    tool_call_parser: str, reasoning_parser: str, more: Sequence[Dialect] = ()
) -> None:
    """Check the names of parsers.

    Raises:
        TrouperValidationError: a name is unknown; the error suggests similar names.

    It runs when the server starts, so that a typing error does not first appear as unparsed calls in answers.
    """
    dialects = (*DIALECTS, *more)
    _check_name("tool_call_parser", tool_call_parser, by_name(dialects))
    _check_name("reasoning_parser", reasoning_parser, by_reasoning_name(dialects))


def _check_name(option: str, name: str, known: Iterable[str]) -> None:
    names = (AUTO, NONE, *known)
    if name not in names:
        near = difflib.get_close_matches(name, names, cutoff=0.5)
        rule = f"is not a known parser; similar names: {', '.join(near)}" if near else ""
        raise invalid(option, rule or f"must be one of {', '.join(sorted(names))}", name)


def _detect_reasoning(template: str, dialects: Iterable[Dialect]) -> Span | None:
    """Find the first span with its end mark in the template."""
    spans = (each.reasoning for each in dialects)
    return next((span for span in spans if span is not None and span[1] in template), None)


class ReasoningTokens:
    """Counts the tokens of one answer that belong to its reasoning, without the marks.

    Args:
        span: the marks around the reasoning.
        begins_inside: whether the prompt already opens the reasoning.
        text_of: returns the text of a token.
    """

    def __init__(self, span: Span, *, begins_inside: bool, text_of: Callable[[int], str]) -> None:
        self._start, self._end = span[0].strip(), span[1].strip()
        self._is_inside = begins_inside
        self._is_over = False
        self._text_of = text_of
        # The end of the text, which may contain the beginning of a mark.
        self._tail = ""

    def add(self, token_ids: Iterable[int]) -> int:
        """Count the reasoning tokens among the next tokens of the answer.

        Returns their number.  Token ids are compared, not texts, so the count is exact even if marks are cut between
        two outputs.
        """
        return 0 if self._is_over else sum(map(self._is_reasoning, token_ids))

    def _is_reasoning(self, token_id: int) -> bool:
        if self._is_over:
            return False
        text = self._text_of(token_id)
        self._tail += text
        if self._is_inside:
            self._is_over = self._end in self._tail
            self._tail = self._tail[-len(self._end) :]
            return not self._is_over or self._end not in text
        began = self._tail.lstrip()
        self._is_inside = began.startswith(self._start)
        self._is_over = not (self._is_inside or self._start.startswith(began))
        if self._is_inside:
            self._tail = ""
        return False
