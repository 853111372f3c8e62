"""The answer format of one model: its dialect of tool calls and its reasoning marks, detected from its chat templates."""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from trouper.errors import invalid
from trouper.frontends.dialects.calls import MAX_HELD, Schemas
from trouper.frontends.dialects.core import AnswerParser
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
