"""The record of a plan that the workers of a device have not answered.

The calls to a device that not all of its workers have answered.

The state that calls have brought the workers into, and that their successors are brought into.  Pure.
"""

import math
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
from trouper.actors.messages.steps import PoolPlan, StepPlan
from trouper.actors.runtime.future import Future
from trouper.config.adapters import AdapterFiles
from trouper.config.resolve import EngineConfig


class SubmittedPlan(msgspec.Struct, frozen=True):
    """A plan that was sent, and its size."""

    step: int
    num_tokens: int
    num_requests: int
    submitted_s: float

    @classmethod
    def of(cls, plan: StepPlan | PoolPlan, now: float) -> Self:
        """Note a plan that is sent now."""
        if isinstance(plan, StepPlan):
            num_tokens, num_requests = sum(plan.num_scheduled_tokens), len(plan.request_slots)
        else:
            num_tokens = sum(len(entry.token_ids) for entry in plan.entries)
            num_requests = len(plan.entries)
        return cls(plan.step, num_tokens, num_requests, now)


BOUNDED = (Sleep, Wake, LoadAdapter, ProbeDevice)  # a trace may take any time to be written
DECISIVE = (Sleep, Wake, LoadAdapter)  # workers that differ in these compute something else


class OpenCall(msgspec.Struct):
    """A call, and the answers so far."""

    call: Call
    future: Future[object]
    opened_s: float
    num_answers: int = 0
    errors: list[ErrorText] = []


class OpenCalls:
    """The open calls by number; few, since the lifecycle has one at a time, and a probe another."""

    def __init__(self) -> None:
        self._open: dict[int, OpenCall] = {}
        self._next = 0
        self.differ: str | None = None  # a call that some workers have done and others have not

    def __repr__(self) -> str:
        return f"<OpenCalls: {[open_call.call.action.name for open_call in self._open.values()]}>"

    @property
    def since_s(self) -> float:
        """Moment from which the eldest call waits that a worker must answer in time; infinite without one."""
        bounded = (c.opened_s for c in self._open.values() if isinstance(c.call.action, BOUNDED))
        return min(bounded, default=math.inf)

    def open(self, action: WorkerAction, now: float) -> OpenCall:
        """Make a call of a device into one that can be sent, and expect its answers."""
        open_call = OpenCall(Call(self._next, action), Future(), now)
        self._open[self._next] = open_call
        self._next += 1
        return open_call

    def close(self, open_call: OpenCall) -> None:
        """Forget a call, whose task has left or has its answer.  Idempotent."""
        self._open.pop(open_call.call.number, None)

    def note(self, returned: Returned, num_workers: int) -> Call | None:
        """Count a worker's answer; the last one settles the call, with an error if there was any.

        Returns:
            The call, if all workers have done it.
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
        """End all, since no worker is left to answer."""
        for open_call in self._open.values():
            open_call.future.fail(error)
        self._open.clear()
        self.differ = None


ALL_MEMORY = frozenset({"weights", "kv_cache"})


class RestoredState:
    """The state that is in force: how deep the workers sleep, their trace, and their adapters.

    Memory: the files of at most `num_slots` adapters, each as large as it lay on the disk.

    Args:
        files: of the model, a sample of what every worker is to have.
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
        """The adapters by slot, which go to a successor one by one once it is loaded."""
        return self._adapters

    def load(self, config: EngineConfig, rank: int) -> Load:
        """Make the first frame to the worker of a rank."""
        woken = () if self._sleep_level == 0 else tuple(sorted(self._woken))
        return Load(config, rank, self._sleep_level, woken, self._profile, self._files)

    def follow(self, call: Call) -> None:
        """Take note of a call that all workers have done."""
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
