"""Record unanswered plans and calls of a device, and the state that restarted workers must restore.

A device in worker processes must survive the loss of its workers. After a loss, open calls fail and
unanswered plans are dropped and scheduled again; the sleep level, the trace and the adapters are set up again in
the new workers. Everything here is pure bookkeeping.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import Self

import msgspec

from trouper.actors.executor.workers.model_files import FileSample
from trouper.actors.executor.workers.wire import (
    Call,
    ErrorText,
    Load,
    Returned,
    WorkerAction,
    as_exception,
)
from trouper.actors.messages.controls import (
    LoadAdapter,
    ProbeDevice,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from trouper.actors.messages.steps import PoolPlan, StepPlan, TierAnswer
from trouper.actors.runtime.event_loop import Future
from trouper.config.adapters import AdapterFiles
from trouper.config.engine_config import EngineConfig


class SubmittedPlan(msgspec.Struct, frozen=True):
    """Record an unanswered plan: its size and time of submission determine the deadline of the step. Plans are answered in order."""

    step: int
    epoch: int
    num_tokens: int
    num_requests: int
    submitted_s: float

    @classmethod
    def of(cls, plan: StepPlan | PoolPlan, now: float) -> Self:
        """Record a plan sent at time `now`, in seconds of the event loop's clock."""
        if isinstance(plan, StepPlan):
            num_tokens, num_requests = sum(plan.num_scheduled_tokens), len(plan.request_slots)
        else:
            num_tokens = sum(len(entry.token_ids) for entry in plan.entries)
            num_requests = len(plan.entries)
        return cls(plan.step, plan.epoch, num_tokens, num_requests, now)


# Calls with a deadline. The others write traces, which may take arbitrarily long.
BOUNDED = (Sleep, Wake, LoadAdapter, ProbeDevice)
# Calls that must succeed or fail on all workers alike: with different weights or adapters their results would be wrong.
DECISIVE = (Sleep, Wake, LoadAdapter)


class OpenCall(msgspec.Struct):
    """Track a call to the workers, and their answers so far.

    When every worker has answered, its future is set, or fails with the first error.
    """

    call: Call
    future: Future[object]
    opened_s: float
    num_answers: int = 0
    errors: list[ErrorText] = []


class OpenCalls:
    """Track the open calls of a device by number. At most two are open: one of the lifecycle, and a health probe.

    `differ` describes a decisive call that only some workers performed. The device must then restart its workers.
    """

    def __init__(self) -> None:
        self._open: dict[int, OpenCall] = {}
        self._next = 0
        self.differ: str | None = None

    def __repr__(self) -> str:
        return f"<OpenCalls: {[open_call.call.action.name for open_call in self._open.values()]}>"

    @property
    def since_s(self) -> float:
        """Return when the oldest call with a deadline was opened, in seconds of the event loop's clock; infinite without one."""
        bounded = (c.opened_s for c in self._open.values() if isinstance(c.call.action, BOUNDED))
        return min(bounded, default=math.inf)

    def open(self, action: WorkerAction, now: float) -> OpenCall:
        """Open a call that performs an action, and expect an answer from each worker.

        Its deadline counts from `now`. The caller must `close` the call in any case.
        """
        open_call = OpenCall(Call(self._next, action), Future(), now)
        self._open[self._next] = open_call
        self._next += 1
        return open_call

    def close(self, open_call: OpenCall) -> None:
        """Remove a call after its answer, or when its caller was cancelled. Idempotent."""
        self._open.pop(open_call.call.number, None)

    def note(self, returned: Returned, num_workers: int) -> Call | None:
        """Count a worker's answer. The last answer completes the call, with the first error if any worker failed.

        Returns:
            The call, if every worker performed it; otherwise None.
        """
        open_call = self._open.get(returned.number)
        if open_call is None:
            return None
        open_call.num_answers += 1
        if returned.error is not None:
            open_call.errors.append(returned.error)
        if open_call.num_answers < num_workers:
            return None
        self.close(open_call)
        if open_call.errors:
            error, num_errors = open_call.errors[0], len(open_call.errors)
            if num_errors < num_workers and isinstance(open_call.call.action, DECISIVE):
                words = (
                    f"{num_errors} of {num_workers} workers failed to {open_call.call.action.name}"
                )
                self.differ = f"{words}: {error.kind}: {error.message}"
            open_call.future.fail(as_exception(error))
            return None
        open_call.future.set(None)
        return open_call.call

    def fail_all(self, error: Exception) -> None:
        """Fail all open calls after a loss of the workers. Their callers may retry after the restart."""
        for open_call in self._open.values():
            open_call.future.fail(error)
        self._open.clear()
        self.differ = None


ALL_MEMORY = frozenset({"weights", "kv_cache"})


class RestoredState:
    """Record the sleep level, the trace and the adapters set by earlier calls, to restore them in restarted workers.

    Memory: the files of at most `num_slots` adapters, each as large as on disk.

    Args:
        files: a sample of the model's files, which every worker compares with its own.
    """

    def __init__(self, files: tuple[FileSample, ...] = ()) -> None:
        self._files = files
        self._sleep_level, self._woken = 0, ALL_MEMORY
        self._profile: tuple[str, str] | None = None
        self._adapters: dict[int, AdapterFiles] = {}  # by slot

    def __repr__(self) -> str:
        return f"<RestoredState: sleep level {self._sleep_level}, {len(self._adapters)} adapters>"

    @property
    def adapters(self) -> Mapping[int, AdapterFiles]:
        """Return the adapters by slot. Restarted workers receive them one by one after the load."""
        return self._adapters

    def load(self, config: EngineConfig, rank: int) -> Load:
        """Return the first frame for the worker of this rank, with the sleep level and the trace to restore."""
        woken = () if self._sleep_level == 0 else tuple(sorted(self._woken))
        return Load(config, rank, self._sleep_level, woken, self._profile, self._files)

    def follow(self, call: Call) -> None:
        """Record the lasting effect, if any, of a call that all workers have performed."""
        match call.action:
            case Sleep(level):
                self._sleep_level, self._woken = level, frozenset()
            case Wake(tags):
                self._woken |= tags
                if self._woken >= ALL_MEMORY:
                    self._sleep_level = 0
            case StartProfile(folder, prefix):
                self._profile = folder, prefix
            case StopProfile():
                self._profile = None
            case LoadAdapter(slot, files):
                self._adapters[slot] = files
            case ProbeDevice():
                pass


class _OpenOrder(msgspec.Struct):
    """Combine the answers to one order to the tier so far."""

    num_answers: int = 0
    num_done: int = 0
    seconds: float = 0.0


class TierParts:
    """Combine the answers of a device's workers about the tier on disk.

    Each worker stores its part of every block in its own files. A block can be used only if all parts exist, so the combined answer
    counts only blocks that every worker has stored or fetched. Nothing is answered until every worker has opened its folder.

    Memory: the names of each worker's files, and the orders in flight.
    """

    def __init__(self, num_workers: int) -> None:
        # The names of each worker's files; None until it has opened its folder.
        self._names: list[set[bytes] | None] = [None] * num_workers
        self._orders: dict[int, _OpenOrder] = {}
        # The part of the next `take`: orders that all workers have answered; blocks that appeared (True) or vanished (False);
        # whether to list all blocks instead; and whether there are changes without an order.
        self._done: deque[tuple[int, _OpenOrder]] = deque()
        self._changes: dict[bytes, bool] = {}
        self._is_anew = self._has_news = False
        self._refused: Counter[str] = Counter()
        self._sizes = 0, 0

    def __repr__(self) -> str:
        return f"<TierParts of {len(self._names)} workers: {len(self._orders)} orders>"

    def note(self, worker: int, answer: TierAnswer) -> None:
        """Record a worker's answer and its changes."""
        names = self._names[worker]
        if answer.is_anew or names is None:
            names = self._names[worker] = set()
            self._is_anew = True
        names.update(answer.added)
        names.difference_update(answer.removed)
        # If all blocks will be listed, the list contains these changes.
        if not self._is_anew:
            for name in answer.added:
                if all(name in (of or ()) for of in self._names):
                    self._changes[name] = True
            self._changes.update(dict.fromkeys(answer.removed, False))
        self._refused.update(dict(answer.refused))
        self._sizes = answer.num_bytes, answer.num_files
        if not answer.number:
            self._has_news = True
            return
        order = self._orders.setdefault(answer.number, _OpenOrder(num_done=answer.num_done))
        order.num_answers += 1
        order.num_done = min(order.num_done, answer.num_done)
        order.seconds = max(order.seconds, answer.seconds)
        if order.num_answers == len(self._names):
            self._done.append((answer.number, self._orders.pop(answer.number)))

    def take(self) -> TierAnswer | None:
        """Return the next combined answer of all workers, or None if there is none yet."""
        opened = [names for names in self._names if names is not None]
        if len(opened) < len(self._names) or not (self._done or self._has_news):
            return None
        number, order = self._done.popleft() if self._done else (0, _OpenOrder())
        is_anew, changes, refused = self._is_anew, self._changes, tuple(self._refused.items())
        if is_anew:
            changes = dict.fromkeys(set.intersection(*opened), True)
        self._is_anew = self._has_news = False
        self._changes, self._refused = {}, Counter()
        return TierAnswer(
            number,
            order.num_done,
            order.seconds,
            is_anew,
            tuple(name for name, is_here in changes.items() if is_here),
            tuple(name for name, is_here in changes.items() if not is_here),
            *self._sizes,
            refused,
        )
