"""The access log: a line for each answer, on stderr.  Whoever does not read it holds up nobody."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue

MAX_LINES = 10_000  # that nobody has read; what comes then is dropped


class _Dropping(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            pass


@contextmanager
def access_lines() -> Iterator[None]:
    """A thread writes them while the block runs."""
    lines: Queue[logging.LogRecord] = Queue(MAX_LINES)
    writer = logging.StreamHandler()
    writer.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    handler, listener = _Dropping(lines), QueueListener(lines, writer)
    log = logging.getLogger("trouper.access")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        log.removeHandler(handler)
        listener.stop()
