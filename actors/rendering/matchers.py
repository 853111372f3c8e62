"""Matchers of grammars for one vocabulary: of those that are checked as requests come, and of those that a device follows.

The compiler counts most of its steps, but neither all of them nor its depth: a source comes here when it has been tried in a
process (`grammar_trials.py`).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple

from trouper.actors.messages.grammar import Grammar, GrammarRules, Vocabulary

MAX_COMPILED = 256  # grammars, of some 10 KiB; a large one takes a megabyte
# Steps of the lexer's construction (10 ms), of a mask's, its states, and symbols of a grammar.
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


class NotAGrammarError(Exception):
    """The compiler refuses a source."""


class CompiledGrammar(NamedTuple):
    """A matcher at the beginning of an output, which is only copied."""

    matcher: Any
    seconds: float | None = None  # that it took; None: it was kept


class Matchers:
    """Compiles sources, and keeps those that were asked for last.  Threads share it.

    Args:
        read: gives the vocabulary, of which no text is looked at; called once, at the first use.
    """

    def __init__(self, read: Callable[[], Vocabulary]) -> None:
        self._read = read
        self._lock = Lock()
        self._tokens: Any = None  # as `llguidance` has them
        self._compiled: OrderedDict[bytes, Any] = (
            OrderedDict()
        )  # by digest, the last used at the end

    def __repr__(self) -> str:
        return f"<Matchers: {len(self._compiled)} grammars>"

    def compile(self, source: str) -> CompiledGrammar:
        """Compile a source, unless it is among those kept.

        Raises:
            ImportError: llguidance is not installed.
            UnicodeError: it holds a lone surrogate.
            NotAGrammarError: it is no grammar, or too complex.
        """
        digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if self._tokens is None:
                self._tokens = _tokens(self._read())
            known = self._compiled.get(digest)
            if known is not None:
                self._compiled.move_to_end(digest)
                return CompiledGrammar(known)
        started = perf_counter()
        found = compiled(self._tokens, source)
        with self._lock:
            self._compiled[digest] = found
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return CompiledGrammar(found, perf_counter() - started)


def compiled(tokens: Any, source: str) -> Any:
    """Compile a source for the tokens of an `LLTokenizer`; raises as `Matchers.compile` does."""
    import llguidance

    options: dict[str, Any] = dict(LIMITS)
    limits: Any = llguidance.LLParserLimits(**options)
    try:
        found: Any = llguidance.LLMatcher(tokens, source, log_level=0, limits=limits)
    except (ValueError, UnicodeError) as error:
        raise NotAGrammarError(str(error)) from None
    first = found.deep_copy()
    first.compute_bitmask()  # what no text matches, and what takes too many steps at once, is seen here
    for matcher in (found, first):
        if matcher.is_error():
            raise NotAGrammarError(_reason(matcher.get_error()))
    return found


class ReceivedGrammars:
    """The grammars of plans that come from another process, whose vocabulary comes before them."""

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None
        self._matchers = Matchers(self._known)

    def __repr__(self) -> str:
        return f"<ReceivedGrammars: {self._matchers!r}>"

    def take(self, vocabulary: Vocabulary) -> None:
        """Take the vocabulary of all grammars that follow."""
        self._vocabulary = vocabulary

    def make(self, rules: GrammarRules) -> Grammar:
        """Make a grammar of its rules; it is compiled when a sequence takes its slot."""
        return Grammar(rules, partial(self._matcher, rules.source), self._text_of)

    def _matcher(self, source: str | None) -> Any:
        return None if source is None else self._matchers.compile(source).matcher.deep_copy()

    def _known(self) -> Vocabulary:
        if self._vocabulary is None:
            raise RuntimeError("a grammar before its vocabulary")
        return self._vocabulary

    def _text_of(self, token: int) -> str:
        texts = self._known().texts
        return texts[token] if 0 <= token < len(texts) else ""


def _reason(error: str) -> str:
    """Write the compiler's error; of a grammar without any text it says only what it could not compute."""
    return "no text matches it" if error.startswith("NoExtensionBias") else error


def _tokens(vocabulary: Vocabulary) -> Any:
    import llguidance

    return llguidance.LLTokenizer(
        vocabulary.rules,
        n_vocab=vocabulary.num_tokens,
        eos_token=list(vocabulary.eos_token_ids),
    )
