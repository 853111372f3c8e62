"""The grammars of one model: from the constraints of a request to rules that a device follows.

Renderers call this module in their threads.  Each grammar is tried in a process first and then compiled here, even if
the device is in another process, so that an error of the compiler belongs to the request with the grammar.

The compiler sees the rules of the tokenizer with other names for added tokens.  With the true names, the constant text
`<|im_end|>` in a schema would become the token that ends the answer.  The new names occur in no text, and the ids stay.
"""

import re
from collections.abc import Mapping
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple, cast

import msgspec
from msgspec import Raw
from msgspec.json import decode, encode

from trouper.actors.messages.requests import Grammar, GrammarRules, ReasoningRules, Vocabulary
from trouper.actors.rendering.grammar.matchers import Matchers
from trouper.actors.rendering.grammar.sources import typed_failures
from trouper.actors.rendering.grammar.trial_processes import GrammarTrials, TrialTokens
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.generation import StructuredOutputsConfig
from trouper.errors import MissingExtraError, UnsupportedFeatureError
from trouper.extras import install_hint
from trouper.params import SamplingParams
from trouper.structured_outputs import StructuredOutputsParams

NOT_INSTALLED = (
    "this server cannot hold an answer to a schema, a grammar or a forced tool call: "
    "it was set up without support for grammars"
)
TURNED_OFF = "this engine takes no grammars (structured_outputs_config)"


class _Found(NamedTuple):
    """A grammar that passed its trial and compiles."""

    source: str
    num_bytes: int  # of memory that it takes
    seconds: float | None  # that it took; None: it was known


class Grammars:
    """Compiles grammars for one vocabulary.  Threads share it.

    Args:
        tokenizer: None = there is none, and no request gets this far with a grammar.
        vocab_size: of the model's logits.
        eos_token_ids: that end an output.
        sends_grammars: the device is in another process, which is given the vocabulary and compiles each source itself.
        config: the defaults for a request without settings of its own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        sends_grammars: bool = False,
        config: StructuredOutputsConfig = StructuredOutputsConfig(),  # noqa: B008  # it is frozen
    ) -> None:
        self._sends_grammars = sends_grammars
        self._config = config
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(token for token in eos_token_ids if token < vocab_size)
        self._num_tokens = max(vocab_size, 0 if tokenizer is None else tokenizer.max_id + 1)
        self._lock = Lock()
        self._trials = GrammarTrials(self._trial_tokens)
        self._vocabulary: Vocabulary | None = None  # that is sent; read at the first use
        self._matchers = Matchers(
            self._known_vocabulary if sends_grammars else self._read_vocabulary,
            only_checks=sends_grammars,
        )

    def compile(
        self, params: SamplingParams, reasoning: ReasoningRules | None = None, owner: str = ""
    ) -> Grammar | None:
        """Compile the constraints of a request's output.  Returns None if there are none.

        Args:
            reasoning: reasoning that may come first.
            owner: the client of the request; its own cached sources are dropped first.

        Raises:
            GrammarError: it is no grammar, or too complex.
            GenerationError: there is no process to try it in.
            UnsupportedFeatureError: llguidance is not installed, or grammars are turned off.
        """
        wanted, tokenizer = params.structured_outputs, self._tokenizer
        if (wanted is None and reasoning is None) or tokenizer is None:
            return None
        if (
            wanted is not None
            and self._config.enable_in_reasoning
            and params.thinking_token_budget is None
        ):
            reasoning = None
        found = None if wanted is None else self._compiled(wanted, owner)
        source = None if found is None else found.source
        rules = GrammarRules(
            source=source,
            eos_token_ids=self._eos_token_ids,
            ignore_eos=params.ignore_eos,
            num_tokens=self._num_tokens,
            reasoning=reasoning,
            num_bytes=0 if found is None else found.num_bytes,
        )
        vocabulary = self._known_vocabulary() if self._sends_grammars else None
        if source is None:
            return Grammar(rules, _no_matcher, tokenizer.token_text, vocabulary)
        matchers = self._matchers
        return Grammar(
            rules,
            partial(matchers.matcher, source),
            tokenizer.token_text,
            vocabulary,
            None if found is None else found.seconds,
            partial(matchers.hold, source),
            matchers.release,
        )

    def check_tried(self, params: SamplingParams) -> None:
        """Return at once; what then compiles the grammar does so as well.

        Raises:
            UntriedGrammarError: the grammar must be tried first, which may take a second.
            GrammarError: it is nothing that can be written down.
        """
        wanted = params.structured_outputs
        if wanted is None or self._tokenizer is None or self._config.backend == "none":
            return
        with typed_failures(wanted.kind):
            self._trials.check_tried(self._with_defaults(wanted))

    def _with_defaults(self, wanted: StructuredOutputsParams) -> StructuredOutputsParams:
        """Turn on what the engine's options turn on for every request, and name tokens in a grammar by their ids."""
        given: dict[str, Any] = {
            name: True
            for name in ("disable_any_whitespace", "disable_additional_properties")
            if getattr(self._config, name)
        }
        if wanted.grammar is not None and self._tokenizer is not None:
            ids = {text: id for id, text in self._tokenizer.added_tokens.items()}
            given["grammar"] = with_token_ids(wanted.grammar, ids)
        return msgspec.structs.replace(wanted, **given) if given else wanted

    def _compiled(self, wanted: StructuredOutputsParams, owner: str) -> _Found:
        if self._config.backend == "none":
            raise UnsupportedFeatureError(TURNED_OFF, parameter="structured_outputs")
        try:
            import llguidance  # noqa: F401  # pyright: ignore[reportUnusedImport]  # the trial needs it too
        except ImportError as error:
            raise MissingExtraError(
                f"structured outputs need llguidance: {install_hint('grammar')}",
                refusal=NOT_INSTALLED,
                parameter="structured_outputs",
            ) from error
        started = perf_counter()
        with typed_failures(wanted.kind):
            source, num_bytes = self._trials.passed(self._with_defaults(wanted), owner)
            seconds = self._matchers.compile(source, num_bytes, owner).seconds
        if seconds is not None:
            seconds = perf_counter() - started  # with the trial
        return _Found(source, num_bytes, seconds)

    def _trial_tokens(self) -> TrialTokens:
        assert self._tokenizer is not None
        return TrialTokens(self._num_tokens, self._tokenizer.added_tokens)

    def _known_vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary(with_texts=True)
            return self._vocabulary

    def _read_vocabulary(self, *, with_texts: bool = False) -> Vocabulary:
        """Read the vocabulary as the compiler is to see it."""
        assert self._tokenizer is not None
        rules = compiler_rules(self._tokenizer.to_json())
        texts: list[str] = []
        if with_texts:
            texts = [self._tokenizer.token_text(token) for token in range(self._num_tokens)]
        return Vocabulary(rules, self._num_tokens, self._eos_token_ids, tuple(texts))


def _no_matcher() -> None:
    """Return the matcher of an output that may be anything."""


NAME = "<\U0010ffff{}>"  # with a code point of no character
_LARK = re.compile(
    r"""(?P<kept>"(?:[^"\\]|\\.)*"|/(?![/*])(?:[^/\\\n]|\\.)+/|//[^\n]*)|<(?P<name>[^<>\s\["]+)>"""
)


def compiler_rules(tokenizer_json: str) -> str:
    """Return a `tokenizer.json` in which no text spells an added token.

    Tokens in the model's own vocabulary other than special ones, such as runs of blanks, are text and stay so.
    """
    # Only what changes is parsed: the merges are the greater part, and each call of the parser holds the interpreter.
    rules = decode(tokenizer_json, type=dict[str, Raw])
    model = decode(rules.get("model", b"{}"), type=dict[str, Raw])
    vocabulary: Any = decode(model.get("vocab", b"{}"))
    known = (
        set(cast("dict[str, int]", vocabulary))
        if isinstance(vocabulary, dict)
        else {piece for piece, *_ in vocabulary}
    )
    names: dict[str, str] = {}
    kept: list[Any] = []
    for token in decode(rules.get("added_tokens", b"[]")):
        if token["special"] or token["content"] not in known:
            names[token["content"]] = NAME.format(token["id"])
            kept.append({**token, "content": names[token["content"]], "special": True})
    changed: dict[str, Any] = {}
    if isinstance(vocabulary, dict):
        plain = cast("dict[str, int]", vocabulary)
        changed["vocab"] = {names.get(text, text): index for text, index in plain.items()}
    else:
        changed["vocab"] = [[names.get(text, text), *rest] for text, *rest in vocabulary]
    if "unk_token" in model and (unknown := decode(model["unk_token"])) in names:
        changed["unk_token"] = names[unknown]
    own = {"model": {**model, **changed}} if "model" in rules else {}
    # The post-processor names tokens, and concerns whole prompts only.
    return encode({**rules, **own, "added_tokens": kept, "post_processor": None}).decode()


def with_token_ids(lark: str, token_ids: Mapping[str, int]) -> str:
    """Return a grammar in Lark with the ids of tokens, `<[2]>`, in place of their names, `<|im_end|>`."""

    def replaced(found: re.Match[str]) -> str:
        if found["kept"] is not None:
            return found[0]
        token = token_ids.get(found[0])
        return found[0] if token is None else f"<[{token}]>"

    return _LARK.sub(replaced, lark)
