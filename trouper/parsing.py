"""The parsers of a model's answers, `parser_for`, and the events that they return."""

from trouper.frontends.dialects.calls import (
    Arguments,
    CallEnded,
    CallStarted,
    Content,
    Reasoning,
)
from trouper.frontends.dialects.core import AnswerParser
from trouper.frontends.dialects.table import Dialect, Tags
from trouper.frontends.python.parsing import parser_for

__all__ = [
    "AnswerParser",
    "Arguments",
    "CallEnded",
    "CallStarted",
    "Content",
    "Dialect",
    "Reasoning",
    "Tags",
    "parser_for",
]
