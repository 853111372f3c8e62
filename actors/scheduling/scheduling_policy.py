"""State of the scheduler at one moment, as plain data.

The interface between the scheduler actor and what it schedules: generation or pooling.
"""

from typing import Protocol, TypeVar

import msgspec

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.outputs import Expected, SchedulerStats
from trouper.actors.messages.requests import (
    Admit,
    AdmitPooling,
    GrammarReady,
    PrepareGrammar,
    RequestId,
    SequenceId,
)
from trouper.actors.messages.sinks import Promise
from trouper.actors.messages.steps import DeviceLost, PoolDone, PoolPlan, StepDone, StepPlan
from trouper.actors.scheduling.routing import Demand


class PolicySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Places of all unfinished sequences; in an engine that pools, of requests.  Ids are in the order of service."""

    # With a request slot; of a pooling engine: in a plan that is in flight.
    running: tuple[int, ...]
    waiting: tuple[int, ...]  # for a request slot or for blocks
    # Preempted with a result in flight, or waiting for a leader's prompt; in no order.
    other: tuple[int, ...]
    # Eldest first: number of the step, and whose.
    in_flight: tuple[tuple[int, tuple[int, ...]], ...]
    suspects: tuple[int, ...]  # of a fault that a search is looking for
    pause: Pause
    is_device_lost: bool


class SchedulerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the scheduler: its policies', and what it has been asked and not answered yet."""

    policies: tuple[PolicySnapshot, ...]  # of each replica
    num_plans_due: int  # of a stepped engine: plans that were requested and not made
    num_pauses: int  # that are not in full effect yet


OutputsT = TypeVar("OutputsT", covariant=True)
RequestT = TypeVar("RequestT")


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

    def foretell(self, id: RequestId, elapsed_s: float) -> Expected | None:
        """Predict the first token of a request without one.  Returns None before the first fit, and when nothing is planned now.

        Args:
            elapsed_s: seconds since the eldest plan in flight became the eldest.
        """
        ...

    def take_ratios(self) -> tuple[float, ...]:
        """Take the ratios of estimated to measured time of the steps with a prompt since the last call."""
        ...

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

    def next_grammar(self) -> PrepareGrammar | None:
        """Return a grammar for the device to prepare during its steps.  Returns None without one."""
        ...

    def note_grammar(self, ready: GrammarReady) -> None:
        """Take the device's answer to `next_grammar`."""

    def take_outputs(self, answers: tuple[Promise[None], ...] = ()) -> OutputsT | None:
        """Take the outputs since the last call, with `answers`; None if there are neither."""
        ...


class ReplicaPolicy(SchedulingPolicy[OutputsT], Protocol[OutputsT, RequestT]):
    """The policy of one of several replicas: its requests may come from another, and go to one.

    All put out through what they have in common, so any of them takes the outputs of all.
    """

    @property
    def is_device_lost(self) -> bool:
        """Whether the device is being started again, or has failed."""
        ...

    @property
    def has_device_failed(self) -> bool:
        """Whether the device is not started again."""
        ...

    @property
    def is_available(self) -> bool:
        """Whether a new request is welcome: the device is there, and no search for a culprit goes on."""
        ...

    @property
    def holds_blocks(self) -> bool:
        """Whether a block of KV memory is held."""
        ...

    def open_request(self, admit: Admit | AdmitPooling) -> RequestT:
        """Make a request that any replica may take in."""
        ...

    def demand(self, request: RequestT) -> Demand:
        """Describe what a request asks of a replica."""
        ...

    def enter(self, request: RequestT, replica: int = 0, num_expected: int = 0) -> None:
        """Take a request in, with all that it has.

        Args:
            replica: the number of this one.
            num_expected: tokens that its cache should have.
        """

    def evacuate(self, *, only_fresh: bool = False) -> list[RequestT]:
        """Give up the requests that have nothing on the device, or have never begun; those in question stay."""
        ...

    def expect(self, request: RequestT, num_cached: int, elapsed_s: float) -> float | None:
        """Estimate the seconds until the first token of a request that entered now.  Returns None before the first fit, and when nothing is planned now.

        Args:
            num_cached: tokens of its prompt that the prefix cache should have.
            elapsed_s: seconds since the eldest plan in flight became the eldest.
        """
        ...

    def work(self) -> tuple[int, int]:
        """Count the tokens that are known and not computed, and the rows."""
        ...
