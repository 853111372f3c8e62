"""Orders that steer the engine as a whole; each is answered.

Types of the messages that each actor may receive.
"""

from enum import Enum
from typing import Literal

import msgspec

from trouper.actors.messages.outputs import (
    GrammarStats,
    OutputStats,
    Pooled,
    StepStats,
    StepTokens,
    Stop,
)
from trouper.actors.messages.requests import (
    Abort,
    Admit,
    AdmitPooling,
    GrammarReady,
    PrepareGrammar,
    Render,
    Track,
)
from trouper.actors.messages.sinks import Promise
from trouper.actors.messages.steps import (
    DeviceBack,
    DeviceLost,
    PoolDone,
    PoolPlan,
    ReplicaEvent,
    StepDone,
    StepFailed,
    StepPlan,
)


class Pause(Enum):
    """Restriction on which sequences the scheduler may plan."""

    NONE = "none"
    NO_NEW_REQUESTS = "no new requests"  # what has run before runs on; nothing else starts
    ALL = "all"  # nothing is planned


class SetPause(msgspec.Struct, frozen=True):
    """Frontend → Scheduler: what may be planned from now on.

    Answered when it has taken full effect: no step is in flight, with `Pause.NO_NEW_REQUESTS` nothing is
    left that may still run, and all outputs have been handed over.
    """

    pause: Pause
    answer: Promise[None]


class ResetPrefixCache(msgspec.Struct, frozen=True):
    """Frontend → Scheduler: forget all prefixes.  Answered with False while a block is held.

    `preempt` frees the blocks first: `"recompute"` keeps results in flight, `"resample"` drops them.
    """

    preempt: Literal["no", "recompute", "resample"]
    answer: Promise[bool]


class Step(msgspec.Struct, frozen=True):
    """Frontend → Scheduler: one iteration, for an engine that is stepped by hand.

    Answered when its outputs are in the reply slots.
    """

    answer: Promise[None]


class Probe(msgspec.Struct, frozen=True):
    """Frontend → Scheduler: a round trip to the device and back.  Passed on as a `DeviceCall`."""

    answer: Promise[object]


class DeviceCall(msgspec.Struct, frozen=True):
    """Frontend, Scheduler → Executor: anything but a step, to be done after the plans already sent.

    An error goes to the caller, and the engine lives.
    """

    method: Literal[
        "sleep", "wake", "load_adapter", "start_profile", "stop_profile", "probe", "explain"
    ]  # fmt: skip
    args: tuple[object, ...]
    answer: Promise[object]


class Flush(msgspec.Struct, frozen=True):
    """Frontend → Observer: answered when everything reported before it has been counted."""

    answer: Promise[None]


RendererInbox = Render
SchedulerInbox = (
    Admit | AdmitPooling | Abort | Stop | StepDone | PoolDone | StepFailed
    | DeviceLost | DeviceBack | ReplicaEvent | GrammarReady | SetPause | ResetPrefixCache | Step | Probe
)  # fmt: skip
ExecutorInbox = StepPlan | PoolPlan | PrepareGrammar | DeviceCall
DetokenizerInbox = Track | StepTokens
PoolerInbox = Pooled
ObserverInbox = (
    StepStats | OutputStats | GrammarStats | DeviceLost | DeviceBack | ReplicaEvent | Flush
)
