"""Write log lines to stderr in a thread, and make the lines of the access log.

A blocked reader of stderr must not delay requests, so the event loop only queues the lines.  In the access log, one line describes
one response, and no input of a client can forge another line.
"""

import contextlib
import logging
import re
from collections.abc import Generator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from threading import Thread

from trouper.frontends.server.http.context import RequestContext

STOP_S = 1.0  # for the last lines
# Queued lines; further ones are dropped.
MAX_LINES = 10_000


class _Dropping(QueueHandler):
    """Queue lines for the writer.  If the queue is full, lines are dropped, and a later line reports their number."""

    _num_dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            if self._num_dropped:
                words = f"{self._num_dropped} lines were dropped: stderr is not read fast enough"
                self.queue.put_nowait(logging.makeLogRecord({"msg": words, "name": record.name}))
                self._num_dropped = 0
            self.queue.put_nowait(record)
        except Full:
            self._num_dropped += 1


@contextmanager
def log_lines(name: str, level: str) -> Generator[None]:
    """Write the lines of a logger from this level on, in a thread, while the block runs.

    If the queue is full, lines are dropped and counted instead of delaying requests.
    """
    lines: Queue[logging.LogRecord] = Queue(MAX_LINES)
    writer = logging.StreamHandler()
    writer.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    handler, listener = _Dropping(lines), QueueListener(lines, writer)
    log = logging.getLogger(name)
    level_before, propagated = log.level, log.propagate
    log.setLevel(level.upper())
    log.propagate = False
    log.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level_before)
        log.propagate = propagated
        stopping = Thread(target=_stop, args=(listener,), daemon=True)
        stopping.start()
        stopping.join(STOP_S)


def _stop(listener: QueueListener) -> None:
    """Stop the thread.  It may wait forever for the reader of stderr, so this does not wait for it."""
    with contextlib.suppress(Full):
        listener.stop()


# Characters shown of an unknown path.
MAX_PATH = 128
UNSAFE_IN_PATH = re.compile(r"[^A-Za-z0-9._~:@!$&'()*+,;=/-]")


def access_line(context: RequestContext, route: str | None) -> str:
    """Return client, method, path, status, duration, tokens of prompt and answer, and the request's ids.

    The query is omitted because it may contain secrets.  In an unknown path, characters are replaced that could start
    another line or move the cursor of a terminal.
    """
    path = route or UNSAFE_IN_PATH.sub("_", context.path[:MAX_PATH])
    tokens = "-"
    if context.ticket is not None:
        num_prompt, num_output = context.ticket.cost
        tokens = f"{num_prompt}+{num_output} tokens"
    method = UNSAFE_IN_PATH.sub("_", context.method[:8])
    ids = context.id if context.client_id is None else f"{context.id} {context.client_id}"
    status = context.status or "left"
    return f"{context.client} {method} {path} {status} {context.age_s:.3f} s {tokens} {ids}"
