"""Grammars tried in processes of their own before this one compiles them.

The compiler is native code that recurses as deep as a grammar leads it and has phases that its limits do not bound, so a
hostile grammar could end or hold up the process that compiles it.  A trial reads a grammar, compiles it for a vocabulary of
single bytes and makes the first mask, on a budget of computing time, address space and stack.  What ends the trial is
refused; what passes is safe here, where the stack is larger, and takes no longer than it took there.

What the trial measures of a grammar's memory is what caches and devices count it as.

Trials are remembered, those that refuse too, by what the request asked for.
"""

import hashlib
import json
import sys
import weakref
from collections.abc import Callable, Mapping
from threading import Lock
from typing import NamedTuple

import msgspec

from trouper.actors.rendering.confined_process import ConfinedProcess
from trouper.actors.rendering.grammar.matchers import KeptBySize
from trouper.actors.rendering.grammar.sources import (
    INVALID_GRAMMAR,
    INVALID_SCHEMA,
    SCHEMA_KINDS,
    TOO_COMPLEX,
    refused,
)
from trouper.errors import GenerationError, GrammarError
from trouper.structured_outputs import StructuredOutputsParams

WORKER = "trouper.actors.rendering.grammar.trial_worker"
WALL_S = 10.0  # on a busy machine
MAX_REMEMBERED_BYTES = 32 * 2**20  # of sources and refusals that were asked for last
OUTCOME_BYTES = 512  # that one takes beside its text
OVER = (
    "too complex: the compiler would take more than half a second of computing, or too much memory, "
    "or recurse too deep (long literals, long chains of references, integers next to -2**63)"
)


class TrialBudget(NamedTuple):
    """Bounds of one trial.

    Twice what the dearest schemas take that `check_work` lets through.  A thread of this process has 8 MiB of
    stack by default, and 2 MiB where the system sets no limit; 1 MiB is enough for 130 objects, each in the last.
    """

    cpu_ms: int = 500
    memory: int = 512 * 2**20  # bytes of address space
    stack: int = 2**20  # bytes; half of the system's limit where that is less
    # Bytes that the grammar may take when it is compiled: 2,000 properties take 10 MiB, a multiple of 100,000 takes 20.
    kept: int = 24 * 2**20


BUDGET = TrialBudget()


class TrialTokens(NamedTuple):
    """The part of a vocabulary that a grammar can name.

    A trial needs no more, because the ordinary tokens do not decide whether a grammar compiles.
    """

    num_tokens: int
    added: Mapping[int, str]  # tokens that have names, special or not


class TriedGrammar(NamedTuple):
    """A grammar that passed its trial, with its size in memory."""

    source: str  # as the compiler reads it
    num_bytes: int  # of memory that it takes


class UntriedGrammarError(Exception):
    """A grammar that must be tried first.

    The renderer then hands the request to another renderer, which may wait for the trial.
    """


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
        self._outcomes = KeptBySize[bytes, TriedGrammar | GrammarError](MAX_REMEMBERED_BYTES)
        self.close = weakref.finalize(self, _close_all, self._idle)

    def check_tried(self, wanted: StructuredOutputsParams) -> None:
        """Return at once.

        Raises:
            UntriedGrammarError: the grammar must be tried.
            GrammarError: it is nothing that can be written down.
        """
        if self._known(_digest(_order(wanted))) is None:
            raise UntriedGrammarError

    def passed(self, wanted: StructuredOutputsParams, owner: str = "") -> TriedGrammar:
        """Return the grammar as the compiler reads it, when it has been tried.

        Args:
            owner: the client of the request.

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
                self._outcomes.put(digest, outcome, OUTCOME_BYTES + _size(outcome), owner)
        if isinstance(outcome, GrammarError):
            raise _copy(outcome)
        return outcome

    def _known(self, digest: bytes) -> TriedGrammar | GrammarError | None:
        with self._lock:
            return self._outcomes.get(digest)

    def _tried(self, order: bytes, kind: str) -> TriedGrammar | GrammarError:
        try:
            try:
                answer = self._answer(order)
            except ChildProcessError:  # something killed it; a grammar ends only a fork of it
                answer = self._answer(order)
        except TimeoutError:
            raise refused(kind, OVER, TOO_COMPLEX) from None  # not remembered: the machine was busy
        except OSError as error:
            raise GenerationError(f"trying a grammar failed: {error}") from None
        match answer:
            case {"source": str(source), "num_bytes": int(num_bytes)}:
                if num_bytes <= self._budget.kept:
                    return TriedGrammar(source, num_bytes)
                words = f"too complex: it takes {num_bytes / 2**20:.0f} MiB, at most {self._budget.kept // 2**20} may be"
                return refused(kind, words, TOO_COMPLEX)
            case {"message": str(message), "code": str(code)}:
                return GrammarError(message, parameter="structured_outputs", code=code)
            case {"failure": failure}:
                raise GenerationError(f"trying a grammar failed: {failure}")
            case _:
                return refused(kind, OVER, TOO_COMPLEX)

    def _answer(self, order: bytes) -> dict[str, object]:
        process = self._take()
        try:
            return json.loads(process.ask(order, WALL_S))
        finally:
            self._give_back(process)

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
        raise refused(wanted.kind, f"not valid JSON: {error}", code) from None


def _digest(order: bytes) -> bytes:
    return hashlib.sha256(order).digest()


def _size(outcome: TriedGrammar | GrammarError) -> int:
    text = outcome.message if isinstance(outcome, GrammarError) else outcome.source
    return sys.getsizeof(text)


def _copy(error: GrammarError) -> GrammarError:
    """Copy an error, since the threads that raise it write where into it."""
    return GrammarError(error.message, parameter="structured_outputs", code=error.code)


def _close_all(processes: list[ConfinedProcess]) -> None:
    while processes:
        processes.pop().close()
