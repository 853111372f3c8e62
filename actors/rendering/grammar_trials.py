"""Grammars tried in processes of their own before this one compiles them.

The compiler is native code that recurses as deep as a grammar leads it and has phases that its limits do not bound, so a
hostile grammar could end or hold up the process that compiles it.  A trial reads a grammar, compiles it for a vocabulary of
single bytes and makes the first mask, on a budget of computing time, address space and stack.  What ends the trial is
refused; what passes is safe here, where the stack is larger, and takes no longer than it took there.

Trials are remembered, those that refuse too, by what the request asked for.
"""

import hashlib
import json
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from threading import Lock
from typing import NamedTuple

import msgspec

from trouper.actors.rendering.confined_process import ConfinedProcess
from trouper.actors.rendering.grammar import (
    INVALID_GRAMMAR,
    INVALID_SCHEMA,
    SCHEMA_KINDS,
    TOO_COMPLEX,
    refused,
)
from trouper.actors.rendering.matchers import MAX_COMPILED
from trouper.errors import GenerationError, GrammarError
from trouper.structured_outputs import StructuredOutputsParams

WORKER = "trouper.actors.rendering.grammar_worker"
WALL_S = 10.0  # on a machine that has other things to do
OVER = (
    "too complex: the compiler would take more than a second of computing, or too much memory, "
    "or recurse too deep (long chains of references, integers next to -2**63)"
)


class TrialBudget(NamedTuple):
    """Bounds of one trial.

    Twenty times what the dearest grammars take that `grammar_work.py` lets through.  A thread of this process has 8 MiB of
    stack by default, and 2 MiB where the system sets no limit; 1 MiB is enough for 130 objects, each in the last.
    """

    cpu_s: int = 1
    memory: int = 512 * 2**20  # bytes of address space
    stack: int = 2**20  # bytes; half of the system's limit where that is less


BUDGET = TrialBudget()


class TrialTokens(NamedTuple):
    """The part of a vocabulary that a grammar can name."""

    num_tokens: int
    added: Mapping[int, str]  # tokens that have names, special or not


class UntriedGrammarError(Exception):
    """A grammar that must be tried first."""


class GrammarTrials:
    """Tries grammars and remembers the outcomes.  Threads share it.

    There are as many processes as there are threads that try at once; they end with this object.

    Args:
        read: gives the tokens, at the first trial.
    """

    def __init__(self, read: Callable[[], TrialTokens], budget: TrialBudget = BUDGET) -> None:
        self._read = read
        self._budget = budget
        self._idle: list[ConfinedProcess] = []
        self._lock = Lock()
        # By digest, the last used at the end; sources of at most some 256 Ki characters.
        self._outcomes: OrderedDict[bytes, str | GrammarError] = OrderedDict()
        self.close = weakref.finalize(self, _close_all, self._idle)

    def check_tried(self, wanted: StructuredOutputsParams) -> None:
        """Return at once.

        Raises:
            UntriedGrammarError: the grammar must be tried.
            GrammarError: it is nothing that can be written down.
        """
        if self._known(_digest(_order(wanted))) is None:
            raise UntriedGrammarError

    def source(self, wanted: StructuredOutputsParams) -> str:
        """Return the grammar as the compiler reads it, when it has been tried.

        Raises:
            GrammarError: it is no grammar, or takes too much.
            GenerationError: there is no process to try it in.
        """
        order = _order(wanted)
        digest = _digest(order)
        outcome = self._known(digest)
        if outcome is None:
            outcome = self._tried(order, wanted.kind)
            with self._lock:
                self._outcomes[digest] = outcome
                if len(self._outcomes) > MAX_COMPILED:
                    self._outcomes.popitem(last=False)
        if isinstance(outcome, GrammarError):
            raise _copy(outcome)
        return outcome

    def _known(self, digest: bytes) -> str | GrammarError | None:
        with self._lock:
            if digest in self._outcomes:
                self._outcomes.move_to_end(digest)
            return self._outcomes.get(digest)

    def _tried(self, order: bytes, kind: str) -> str | GrammarError:
        process = self._take()
        try:
            answer = json.loads(process.ask(order, WALL_S))
        except TimeoutError:
            raise refused(kind, OVER, TOO_COMPLEX) from None  # not remembered: the machine was busy
        except OSError as error:
            raise GenerationError(f"trying a grammar failed: {error}") from None
        finally:
            self._give_back(process)
        match answer:
            case {"source": source}:
                return source
            case {"message": message, "code": code}:
                return GrammarError(message, parameter="structured_outputs", code=code)
            case {"failure": failure}:
                raise GenerationError(f"trying a grammar failed: {failure}")
            case _:
                return refused(kind, OVER, TOO_COMPLEX)

    def _take(self) -> ConfinedProcess:
        while self._idle:
            process = self._idle.pop()
            if process.is_usable:
                return process
            process.close()
        try:
            process = ConfinedProcess(WORKER, *self._budget)
            process.ask(json.dumps(self._read()).encode(), WALL_S)
        except OSError as error:
            raise GenerationError(f"no process to try a grammar in: {error}") from error
        return process

    def _give_back(self, process: ConfinedProcess) -> None:
        if process.is_usable and self.close.alive:
            self._idle.append(process)
        else:
            process.close()


def _order(wanted: StructuredOutputsParams) -> bytes:
    """Write down what is asked for."""
    try:
        return json.dumps(msgspec.structs.asdict(wanted)).encode()
    except (TypeError, ValueError) as error:
        code = INVALID_SCHEMA if wanted.kind in SCHEMA_KINDS else INVALID_GRAMMAR
        raise refused(wanted.kind, f"no JSON: {error}", code) from None


def _digest(order: bytes) -> bytes:
    return hashlib.sha256(order).digest()


def _copy(error: GrammarError) -> GrammarError:
    """Copy an error, since the threads that raise it write where into it."""
    return GrammarError(error.message, parameter="structured_outputs", code=error.code)


def _close_all(processes: list[ConfinedProcess]) -> None:
    while processes:
        processes.pop().close()
