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
from trouper.config.adapters import AdapterFiles


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


class _Action(msgspec.Struct, frozen=True):
    @property
    def name(self) -> str:
        """Return the tag of this kind of action, such as "load_adapter", for errors, logs and snapshots."""
        return str(self.__struct_config__.tag)


class Sleep(_Action, frozen=True, tag="sleep"):
    """Release memory: at level 1 the KV cache, with the weights kept in host memory; at level 2 both."""

    level: int


class Wake(_Action, frozen=True, tag="wake"):
    """Bring memory back; tags name its parts, `weights` and `kv_cache`."""

    tags: frozenset[str]


class LoadAdapter(_Action, frozen=True, tag="load_adapter"):
    """Check an adapter and load it into a slot; the files are the last field, see `wire.encode_adapter`."""

    slot: int
    files: AdapterFiles


class StartProfile(_Action, frozen=True, tag="start_profile"):
    """Begin a trace of the device, written later as `folder/prefix-….json`."""

    folder: str
    prefix: str


class StopProfile(_Action, frozen=True, tag="stop_profile"):
    """End the trace and write it."""


class ProbeDevice(_Action, frozen=True, tag="probe"):
    """Do nothing; the answer shows that the device is alive and has reached this call."""


class ExplainLosses(_Action, frozen=True, tag="explain"):
    """Mark the last losses of the device as explained: the request that caused them was found and removed."""

    num_losses: int


DeviceAction = Sleep | Wake | LoadAdapter | StartProfile | StopProfile | ProbeDevice | ExplainLosses


class DeviceCall(msgspec.Struct, frozen=True):
    """Frontend, Scheduler → Executor: an action other than a step, performed after the plans already sent.

    An error is delivered to the caller, and the engine goes on.
    """

    action: DeviceAction
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
