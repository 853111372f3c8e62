"""Matchers of grammars for one vocabulary, for the checks of new requests and for the steps of a device.

The compiler limits most of its steps, but not all of them and not its recursion.  Therefore a source is compiled here
only after its trial in a process (`trial_processes.py`).

Compiled grammars stay in a cache with a limit in bytes, because one client can make a very large one.  An owner may
hold at most half of the space, so one client's values cannot evict those of all others.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar

from trouper.actors.messages.requests import Grammar, GrammarRules, Vocabulary, key_of
from trouper.lark import Lark

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class _KeptValue(NamedTuple, Generic[ValueT]):
    value: ValueT
    num_bytes: int
    owner: str


class KeptBySize(Generic[KeyT, ValueT]):
    """A cache limited by the sizes of its values instead of their number.

    The least recently used values are dropped first.  It is not safe for several threads at a time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[KeyT, _KeptValue[ValueT]] = (
            OrderedDict()
        )  # the last used at the end
        self._num_bytes: dict[str, int] = {}  # by owner

    def __repr__(self) -> str:
        return f"<KeptBySize: {len(self)} of {self.num_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """The bytes of all together."""
        return sum(self._num_bytes.values())

    def get(self, key: KeyT) -> ValueT | None:
        """Return the value of a key and mark it as used now.

        Returns None if it was never stored or has been dropped. It takes constant time.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.value

    def put(self, key: KeyT, value: ValueT, num_bytes: int, owner: str = "") -> None:
        """Store a value, and drop the least recently used ones to make room.

        An owner may use at most half of the cache, and its own values are dropped first.
        """
        self._remove(key)
        self._entries[key] = _KeptValue(value, num_bytes, owner)
        self._num_bytes[owner] = self._num_bytes.get(owner, 0) + num_bytes
        while self._num_bytes.get(owner, 0) > self._max_bytes // (2 if owner else 1):
            self._remove(next(key for key, entry in self._entries.items() if entry.owner == owner))
        while self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: KeyT) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            rest = self._num_bytes[entry.owner] - entry.num_bytes
            self._num_bytes[entry.owner] = rest
            if not rest:
                del self._num_bytes[entry.owner]


# Of memory for compiled grammars that no request needs any more, in the process that compiled them.
MAX_KEPT_BYTES = 128 * 2**20
ENTRY_BYTES = 1024  # that keeping one costs at the least
CHECKED = object()  # in place of a matcher: the source compiles
# Steps of the lexer's construction (10 ms), of a mask's, its states, and symbols of a grammar.
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


class NotAGrammarError(Exception):
    """The compiler refuses a source; the message contains its reason.

    `sources.py` turns it into the error of the request.
    """


class EmptyGrammarError(NotAGrammarError):
    """No text matches a source, so a model could generate nothing with it.

    Such grammars are refused instead of letting the request fail at its first token.
    """


class CompiledGrammar(NamedTuple):
    """A matcher at the beginning of an output.

    Users copy it, because matching changes its state.  `seconds` is the compile time, or None if it was cached.
    """

    matcher: Any
    seconds: float | None = None  # that it took; None: it was kept


class Matchers:
    """Compiles sources, keeps the most recently used ones, and those held for a device.  Threads share it.

    Args:
        read: gives the vocabulary, of which no text is looked at; called once, at the first use.
        max_bytes: of memory for those that are only kept.
        only_checks: nothing follows the matchers here, so only the verdicts are kept.
    """

    def __init__(
        self,
        read: Callable[[], Vocabulary],
        max_bytes: int = MAX_KEPT_BYTES,
        *,
        only_checks: bool = False,
    ) -> None:
        self._read = read
        self._only_checks = only_checks
        self._lock = Lock()
        self._reading = Lock()
        self._tokens: Any = None  # as `llguidance` has them
        self._kept = KeptBySize[bytes, Any](max_bytes)
        self._held: dict[bytes, tuple[Any, int]] = {}  # and how many devices hold it

    def __repr__(self) -> str:
        return f"<Matchers: {len(self._kept)} kept, {len(self._held)} held>"

    def read_vocabulary(self) -> None:
        """Prepare the vocabulary for grammars, which takes long for a large one.

        The first grammar would otherwise wait for it, so this runs in advance.
        """
        self._vocabulary_tokens()

    def compile(self, source: str, num_bytes: int = 0, owner: str = "") -> CompiledGrammar:
        """Compile a source, unless it is among those kept or held.

        Args:
            num_bytes: of memory that it takes.
            owner: the client for which it is cached.

        Raises:
            ImportError: llguidance is not installed.
            UnicodeError: it holds a lone surrogate.
            NotAGrammarError: it is no grammar, or too complex.
        """
        key, tokens = key_of(source), self._vocabulary_tokens()
        with self._lock:
            held = self._held.get(key)
            known = self._kept.get(key) if held is None else held[0]
        if known is not None:
            return CompiledGrammar(known)
        started = perf_counter()
        found = compiled(tokens, source)
        with self._lock:
            if self._only_checks:
                self._kept.put(key, CHECKED, ENTRY_BYTES, owner)
            else:
                self._kept.put(key, found, num_bytes + ENTRY_BYTES, owner)
        return CompiledGrammar(found, perf_counter() - started)

    def matcher(self, source: str) -> Any:
        """Return a new matcher for a source, at the beginning of an output.

        It belongs to the caller.  Raises the errors of `compile`.  Two of them never share state.
        """
        found = self.compile(source).matcher
        return compiled(self._tokens, source) if found is CHECKED else found.deep_copy()

    def hold(self, source: str) -> None:
        """Compile a source for a device, and keep it until every device has released it.

        Holders are counted, because several devices may use one grammar.  Raises the errors of `compile`.
        """
        key, found = key_of(source), self.compile(source).matcher
        with self._lock:
            matcher, num_holders = self._held.get(key, (found, 0))
            self._held[key] = matcher, num_holders + 1

    def release(self, key: bytes) -> None:
        """Release a source that a device holds.

        Does nothing for a source without a holder.  The compiled grammar remains cached while there is room.
        """
        with self._lock:
            matcher, num_holders = self._held.pop(key, (None, 0))
            if num_holders > 1:
                self._held[key] = matcher, num_holders - 1

    def _vocabulary_tokens(self) -> Any:
        with self._reading:
            if self._tokens is None:
                self._tokens = _tokens(self._read())
            return self._tokens


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
            raise _failure(matcher.get_error())
    return found


def matches_only(tokens: Any, pattern: str, names: Sequence[str]) -> bool:
    """Check whether a schema's pattern matches only some of these names.

    It compiles the pattern with the names excluded: if nothing matches then, the answer is yes.
    """
    body = pattern.removeprefix("^")
    body = body.removesuffix("$") if not body.endswith("\\$") else body
    head = "" if pattern.startswith("^") else "(?s:.*)"
    tail = "" if len(head + body) < len(head + pattern.removeprefix("^")) else "(?s:.*)"
    lark = Lark({})
    terminal = lark.terminal(f"{head}(?:{body}){tail}", names)
    try:
        compiled(tokens, lark.source(terminal))
    except EmptyGrammarError:
        return True
    except NotAGrammarError:
        pass
    return False


class ReceivedGrammars:
    """The grammars of plans from another process, which sends its vocabulary before them.

    It keeps what the scheduler has had prepared and nothing else: there the bytes are counted.
    """

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None
        self._matchers = Matchers(self._known, max_bytes=0)

    def __repr__(self) -> str:
        return f"<ReceivedGrammars: {self._matchers!r}>"

    def take(self, vocabulary: Vocabulary) -> None:
        """Take the vocabulary of all grammars that follow."""
        self._vocabulary = vocabulary

    def make(self, rules: GrammarRules) -> Grammar:
        """Create the state of a grammar for one sequence from its rules.

        Compiling happens on first use, or earlier by `hold`. Each has its own matcher.
        """
        return Grammar(rules, partial(self._matcher, rules.source), self._text_of)

    def hold(self, source: str) -> None:
        """Compile a source and keep it until `release`.

        Any thread may call it, since compiling can take seconds and must not delay steps.
        """
        self._matchers.hold(source)

    def release(self, key: bytes) -> None:
        """Release a source; does nothing if it is not held."""
        self._matchers.release(key)

    def read_vocabulary(self) -> None:
        """Prepare the vocabulary, which the first grammar would wait for; any thread may do so."""
        self._matchers.read_vocabulary()

    def _matcher(self, source: str | None) -> Any:
        return None if source is None else self._matchers.matcher(source)

    def _known(self) -> Vocabulary:
        if self._vocabulary is None:
            raise RuntimeError("a grammar before its vocabulary")
        return self._vocabulary

    def _text_of(self, token: int) -> str:
        texts = self._known().texts
        return texts[token] if 0 <= token < len(texts) else ""


def _failure(reason: str) -> NotAGrammarError:
    """Make the error for the compiler's reason, which names only its own function if no text matches."""
    if reason.startswith("NoExtensionBias"):
        return EmptyGrammarError("no text matches it")
    return NotAGrammarError(reason)


def _tokens(vocabulary: Vocabulary) -> Any:
    import llguidance

    return llguidance.LLTokenizer(
        vocabulary.rules,
        n_vocab=vocabulary.num_tokens,
        eos_token=list(vocabulary.eos_token_ids),
    )
