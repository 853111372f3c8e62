"""The interface between the scheduler actor and what it schedules: generation or pooling."""

from typing import Protocol, TypeVar

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.identifiers import RequestId, SequenceId
from trouper.actors.messages.plans import PoolPlan, StepPlan
from trouper.actors.messages.promise import Promise
from trouper.actors.messages.requests import Admit, AdmitPooling
from trouper.actors.messages.results import DeviceLost, PoolDone, StepDone
from trouper.actors.messages.stats import SchedulerStats
from trouper.actors.scheduling.snapshot import PolicySnapshot

OutputsT = TypeVar("OutputsT", covariant=True)


class SchedulingPolicy(Protocol[OutputsT]):
    """A pure state machine: events in, plans and outputs out; no waits, no clock, no channels.

    An event may come at any time, whatever is in flight.  An engine has requests of one kind, and its
    policy is never given messages of the other.
    """

    @property
    def num_steps_in_flight(self) -> int:
        """Plans that have been made and not been answered."""
        ...

    @property
    def num_started(self) -> int:
        """Unfinished work that `Pause.NO_NEW_REQUESTS` lets run on."""
        ...

    @property
    def num_tokens(self) -> int:
        """Prompt tokens computed and tokens sampled, so far."""
        ...

    def statistics(self) -> SchedulerStats:
        """Describe the state in numbers."""
        ...

    def snapshot(self) -> PolicySnapshot:
        """Describe where each unfinished sequence is: O(n log n), for tests and debugging."""
        ...

    def admit(self, admit: Admit | AdmitPooling) -> None:
        """Queue a new request."""

    def abort(self, id: RequestId) -> None:
        """End a request, in whatever state; unknown and finished ones are ignored."""

    def stop(self, ids: tuple[SequenceId, ...]) -> None:
        """Drop sequences that a stop string has ended; they have no further output."""

    def apply(self, done: StepDone | PoolDone) -> None:
        """Take the results of the eldest plan in flight."""

    def fail_step(self, step: int, message: str, *, is_out_of_memory: bool = False) -> None:
        """Take the failure of the eldest plan in flight."""

    def lose_device(self, loss: DeviceLost) -> int:
        """Take the end of the device, with all plans in flight: nothing is planned until `return_device`.

        Returns:
            How many losses, this one included, have been found to be one request's doing; it has ended.
        """
        ...

    def fail_device(self, message: str) -> None:
        """The device, lost before, is not started again: requests that may have killed it end."""

    def return_device(self) -> None:
        """The device takes plans again; what it kept is gone."""

    def set_pause(self, pause: Pause) -> None:
        """Set what may be planned from now on."""

    def preempt_all(self) -> None:
        """Free all KV blocks; running sequences are recomputed later, and results in flight count."""

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all prefixes; False, and nothing changes, while a block is held."""
        ...

    def plan(self) -> StepPlan | PoolPlan | None:
        """Make the next plan, which is in flight from now on; None if there is none to make now."""
        ...

    def take_outputs(self, answers: tuple[Promise[None], ...] = ()) -> OutputsT | None:
        """Take the outputs since the last call, with `answers`; None if there are neither."""
        ...
