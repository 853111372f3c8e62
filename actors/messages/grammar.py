"""A grammar on its way from the renderer to the device, which may be in another process."""

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from trouper.actors.messages.thinking import Thinking


class Vocabulary(msgspec.Struct, frozen=True):
    """Renderer → device: the tokens of a model, as grammars and reasoning read them.

    It goes to a device in another process, once and before the first grammar.
    """

    rules: str  # a tokenizer.json
    num_tokens: int  # that masks are made for
    eos_token_ids: tuple[int, ...]
    texts: tuple[str, ...]  # of the tokens by id


class GrammarRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for the outputs of one request, as they cross to another process."""

    source: (
        str | None
    )  # as `llguidance` reads it; None: behind its reasoning an output may be anything
    eos_token_ids: tuple[int, ...]  # all of them end the output
    ignore_eos: bool  # they are drawn only where nothing else can be
    num_tokens: int  # of the vocabulary that masks are made for
    thinking: Thinking | None  # reasoning that comes first
    num_bytes: int = (
        0  # of memory that the source takes when it is compiled, as its trial measured it
    )


class PrepareGrammar(msgspec.Struct, frozen=True):
    """Scheduler → Executor → device: compile a grammar while steps go on, and keep it until it is released."""

    grammar: "Grammar"
    released: tuple[bytes, ...] = ()  # keys of grammars that are dropped first


class GrammarReady(msgspec.Struct, frozen=True):
    """Device → Executor → Scheduler: a grammar that was to be prepared has been compiled, or why not."""

    key: bytes
    error: str | None = None


class GrammarWork(msgspec.Struct, frozen=True):
    """The work of a step for the sequences in it that have a grammar."""

    seconds: float  # of the device's thread: to follow them, and to fill masks
    num_tokens: int  # that were sampled
    num_redrawn: int  # of those: the grammar refused the token that was drawn first


class Grammar:
    """Rules for the outputs of one request, as devices see them.  Sequences share them, and they never change.

    Args:
        matcher: returns a matcher of `llguidance` at the beginning of an output; None: behind its reasoning it may be anything.
            It compiles the source where `prepare` has not.
        text_of: gives the text of a token.
        vocabulary: for a device in another process; None: it is in this one.
        compile_s: that it took to compile; None: it was compiled before, or is none.
        prepare: compiles the source for a device in this process, and keeps what it compiled until `release`.
        release: gives up what `prepare` keeps of this key.
    """

    def __init__(
        self,
        rules: GrammarRules,
        matcher: Callable[[], Any],
        text_of: Callable[[int], str],
        vocabulary: Vocabulary | None = None,
        compile_s: float | None = None,
        prepare: Callable[[], None] = lambda: None,
        release: Callable[[bytes], None] = lambda key: None,
    ) -> None:
        self.rules = rules
        self.key = b"" if rules.source is None else key_of(rules.source)
        self.prepare, self.release = prepare, release
        self.eos_token_ids, self.ignore_eos = rules.eos_token_ids, rules.ignore_eos
        self.num_tokens, self.thinking = rules.num_tokens, rules.thinking
        self.matcher, self.text_of = matcher, text_of
        self.vocabulary, self.compile_s = vocabulary, compile_s

    def __repr__(self) -> str:
        return f"<Grammar of {len(self.rules.source or '')} characters>"


def key_of(source: str) -> bytes:
    """Return the name of a source on a device: requests that bring the same one share what is compiled of it."""
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
