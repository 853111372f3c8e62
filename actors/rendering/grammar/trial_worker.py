"""The process in which grammars are tried: each in a fork of it, which may die, and which waits for its order beforehand.

python -P -m trouper.actors.rendering.grammar.trial_worker CPU_MS MEMORY STACK KEPT    (standard input is the socket)

The first order is the `TrialTokens`, in JSON, and is answered when the compiler is there.  Each further order holds the fields of a
`StructuredOutputsParams`; the answer is {"source": ..., "num_bytes": ...}, the {"message": ..., "code": ...} of a `GrammarError`,
{"failure": ...} on a defect, or {} when the fork has ended without one.
"""

import ctypes
import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import Any, cast

import llguidance

from trouper.actors.rendering.confined_process import LENGTH_BYTES, framed
from trouper.actors.rendering.grammar.matchers import compiled, matches_only
from trouper.actors.rendering.grammar.sources import grammar_source, typed_failures
from trouper.actors.rendering.grammar.trial_processes import TrialBudget
from trouper.errors import GrammarError
from trouper.structured_outputs import StructuredOutputsParams

FAILED, NO_ORDER = 1, 2  # exit codes of a fork
NICENESS = 10  # streams go on while grammars are tried
UNASKED = NO_ORDER, -signal.SIGKILL  # what no limit of ours ends may have had no order


class ByteVocabulary:
    """The single bytes, the named tokens, and an end; the others are empty.

    It compiles in a fraction of the time of the model's vocabulary, and accepts the same grammars.
    """

    bos_token_id = None

    def __init__(self, num_tokens: int, added: dict[str, str]) -> None:
        self._first_byte = num_tokens
        self.eos_token_id = num_tokens + 256
        self.tokens = [b""] * num_tokens + [bytes([byte]) for byte in range(256)] + [b"<end>"]
        for id, text in added.items():
            self.tokens[int(id)] = text.encode()
        self.special_token_ids = [*map(int, added), self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        given = text.encode() if isinstance(text, str) else text
        return [self._first_byte + byte for byte in given]


def main() -> None:
    limits = TrialBudget(*map(int, sys.argv[1:]))
    os.nice(NICENESS)
    with socket.socket(fileno=sys.stdin.fileno()) as orders, suppress(OSError):
        vocabulary = ByteVocabulary(*json.loads(_read(orders) or b"[]"))
        tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(cast("Any", vocabulary)))
        compiled(tokens, grammar_source(StructuredOutputsParams(json_object=True)))  # warms up
        orders.sendall(framed(b"{}"))
        gc.freeze()  # what a fork does not look at is not copied
        while (code := _fork(orders, tokens, limits)) not in UNASKED:
            if code:
                orders.sendall(framed(b"{}"))


def _read(orders: socket.socket) -> bytes:
    """Return the next frame; empty at the end."""
    with orders.makefile("rb") as stream:  # nothing comes behind the frame before its answer
        return stream.read(int.from_bytes(stream.read(LENGTH_BYTES)))


def _fork(orders: socket.socket, tokens: Any, limits: TrialBudget) -> int:
    """Let a fork wait for the next order and answer it, and return its exit code: of none but 0 has it answered."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    code = NO_ORDER
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # panics have no message
        if order := _read(orders):  # whole, before anything can end this fork
            code = FAILED
            code = _try(order, orders, tokens, limits)
    finally:
        os._exit(code)


def _try(order: bytes, orders: socket.socket, tokens: Any, limits: TrialBudget) -> int:
    threading.stack_size(_limit(limits))
    answers: list[bytes] = []

    def answer() -> None:
        answers.append(json.dumps(_answer(order, tokens)).encode())

    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    # All that was made of the grammar is gone again; half an answer would be worse than none.
    signal.setitimer(signal.ITIMER_PROF, 0)
    if not answers:
        return FAILED
    orders.sendall(framed(answers[0]))
    return 0


def _answer(order: bytes, tokens: Any) -> dict[str, str | int]:
    try:
        wanted = StructuredOutputsParams(**json.loads(order))
        with typed_failures(wanted.kind):
            source = grammar_source(wanted, partial(matches_only, tokens))
            before = memory()
            found = compiled(tokens, source)
            num_bytes = max(0, memory() - before)
            del found
    except GrammarError as error:
        return {"message": error.message, "code": error.code}
    except MemoryError:
        return {}
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    return {"source": source, "num_bytes": num_bytes}


class _Allocated(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


def memory() -> int:
    """Return the bytes that are allocated in this process; without glibc the most that it has held so far."""
    try:
        count: Any = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    count.restype = _Allocated
    found = count()
    return found.uordblks + found.hblkhd


def _limit(limits: TrialBudget) -> int:
    """Limit this process and return the size of the stack."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it ends the process
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_ms / 1000)
    if sys.platform != "darwin":  # which maps more than any useful limit before a program begins
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
    most, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return limits.stack if most == resource.RLIM_INFINITY else min(limits.stack, most // 2)


if __name__ == "__main__":
    main()
