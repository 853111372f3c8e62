"""Orders to the engine as a whole, such as a pause or a sleep, and the type of each actor's inbox.

Every order carries a promise, so its sender learns when the order has taken full effect, or why it failed.
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
    TierAnswer,
    TierOrder,
)
from trouper.config.adapters import AdapterFiles


class Pause(Enum):
    """Restrict the sequences that the scheduler may plan.

    It is ordered: each value permits less than the one before.
    """

    NONE = "none"
    # Started sequences go on; no other one starts.
    NO_NEW_REQUESTS = "no new requests"
    # No sequence is planned.
    ALL = "all"


class SetPause(msgspec.Struct, frozen=True):
    """Frontend → Scheduler: restrict planning from now on.

    It is answered when it has taken full effect: no step is in flight, all outputs are handed over, and with
    `Pause.NO_NEW_REQUESTS` every sequence that may go on has ended.
    """

    pause: Pause
    answer: Promise[None]


class ResetPrefixCache(msgspec.Struct, frozen=True):
    """Frontend → Scheduler: forget all prefixes.  The answer is False, and nothing changes, while a sequence holds a KV block.

    `preempt` frees the blocks first: `"recompute"` keeps results in flight, `"resample"` drops them.
    """

    preempt: Literal["no", "recompute", "resample"]
    answer: Promise[bool]
    # Whether the files of this model in the tier on disk are removed, too.
    clears_tier: bool = False


class Step(msgspec.Struct, frozen=True):
    """Frontend → Scheduler: run one iteration, in an engine without its own loop.

    It is answered when the outputs are in the reply slots.
    """

    answer: Promise[None]


class Probe(msgspec.Struct, frozen=True):
    """Frontend → Scheduler: make a round trip to the device and back.  It continues as a `DeviceCall`.

    The device answers it in order with its plans, so the answer proves that the earlier ones have been processed.
    """

    answer: Promise[object]


class _Action(msgspec.Struct, frozen=True):
    @property
    def name(self) -> str:
        """Return the tag of this kind of action, such as "load_adapter", for errors, logs and snapshots."""
        return str(self.__struct_config__.tag)


class Sleep(_Action, frozen=True, tag="sleep"):
    """Release the device's memory.

    Level 1 releases the KV cache and keeps the weights in host memory; level 2 releases both. The device refuses
    plans meanwhile.
    """

    level: int


class Wake(_Action, frozen=True, tag="wake"):
    """Load the memory that `Sleep` released.

    `tags` names the parts, `weights` and `kv_cache`, so that a program can load them at different times. The
    scheduler continues when both are loaded.
    """

    tags: frozenset[str]


class LoadAdapter(_Action, frozen=True, tag="load_adapter"):
    """Check an adapter and load it into a slot.

    The files are the last field, because they are large and sent separately: see `wire.encode_adapter`.
    """

    slot: int
    files: AdapterFiles


class StartProfile(_Action, frozen=True, tag="start_profile"):
    """Begin a trace of the device, written later as `folder/prefix-….json`.

    Recording makes all steps slower until the trace ends.
    """

    folder: str
    prefix: str


class StopProfile(_Action, frozen=True, tag="stop_profile"):
    """End the trace and write it to the folder given at its start.

    Writing a long trace takes seconds, during which the device computes nothing.
    """


class ProbeDevice(_Action, frozen=True, tag="probe"):
    """Do nothing; the answer shows that the device is alive and has reached this call.

    A worker without an answer within its time limit is treated as lost.
    """


class ExplainLosses(_Action, frozen=True, tag="explain"):
    """Mark the last losses of the device as explained: the request that caused them was found and removed.

    Explained losses do not count against the number of restarts that an unexplained fault may cause.
    """

    num_losses: int


DeviceAction = Sleep | Wake | LoadAdapter | StartProfile | StopProfile | ProbeDevice | ExplainLosses


class DeviceCall(msgspec.Struct, frozen=True):
    """Frontend, Scheduler → Executor: an action other than a step, performed after the plans already sent.

    An error is delivered to the caller, and the engine goes on.
    """

    action: DeviceAction
    answer: Promise[object]


class Flush(msgspec.Struct, frozen=True):
    """Frontend → Observer: count everything reported before this message, then answer.

    Statistics are sent without waiting, so a reader needs it to see its own request counted.
    """

    answer: Promise[None]


RendererInbox = Render
SchedulerInbox = (
    Admit | AdmitPooling | Abort | Stop | StepDone | PoolDone | StepFailed
    | DeviceLost | DeviceBack | ReplicaEvent | GrammarReady | TierAnswer | SetPause | ResetPrefixCache | Step | Probe
)  # fmt: skip
ExecutorInbox = StepPlan | PoolPlan | PrepareGrammar | TierOrder | DeviceCall
DetokenizerInbox = Track | StepTokens
PoolerInbox = Pooled
ObserverInbox = (
    StepStats | OutputStats | GrammarStats | DeviceLost | DeviceBack | ReplicaEvent | Flush
)
