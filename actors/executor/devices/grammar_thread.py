"""A thread in which grammars are compiled while the device computes.

It is nicer than those that compute and than the event loop, and the compiler does not hold the interpreter, so streams go on.
"""

import queue
import threading
from collections.abc import Callable

from trouper.actors.executor.runners.cpu.process_resources import be_nice
from trouper.actors.messages.grammar import GrammarReady


class GrammarThread:
    """Does one piece of work after another; begins at the first.

    Args:
        answer: is told of each grammar, in the thread.
    """

    def __init__(self, answer: Callable[[GrammarReady], None]) -> None:
        self._answer = answer
        # One grammar at a time, and a vocabulary.
        self._works: queue.SimpleQueue[tuple[bytes, Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<GrammarThread: {self._works.qsize()} to do>"

    def do(self, work: Callable[[], object], key: bytes = b"") -> None:
        """Have something done; of a grammar, whose key it is, the end is told."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="trouper-grammars", daemon=True
            )
            self._thread.start()
        self._works.put((key, work))

    def close(self) -> None:
        """End the thread when its work is done, which takes half a second at most."""
        if self._thread is not None:
            self._works.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        be_nice()
        while (work := self._works.get()) is not None:
            key, compile = work
            error = None
            try:
                compile()
            except BaseException as raised:  # noqa: ASYNC103  # it is the request's; a panic of the library is no Exception
                error = f"{type(raised).__name__}: {raised}"
            if key:
                self._answer(GrammarReady(key, error))
