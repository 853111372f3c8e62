"""Types of the messages that each actor may receive."""

from trouper.actors.messages.controls import (
    DeviceCall,
    Flush,
    Probe,
    ResetPrefixCache,
    SetPause,
    Step,
)
from trouper.actors.messages.grammar import GrammarReady, PrepareGrammar
from trouper.actors.messages.outputs import Pooled, StepTokens, Stop
from trouper.actors.messages.plans import PoolPlan, StepPlan
from trouper.actors.messages.requests import Abort, Admit, AdmitPooling, Render, Track
from trouper.actors.messages.results import (
    DeviceBack,
    DeviceLost,
    PoolDone,
    ReplicaEvent,
    StepDone,
    StepFailed,
)
from trouper.actors.messages.stats import GrammarStats, OutputStats, StepStats

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
