"""Define the interface between the scheduler actor and its policy, which is one of generation or pooling, and snapshots of their state.

The actor receives messages and waits; the policy decides.  Snapshots are plain data, so that metrics and the debug page can read them
while the scheduler continues.
"""

from collections.abc import Sequence
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
from trouper.actors.messages.steps import (
    DeviceLost,
    PoolDone,
    PoolPlan,
    StepDone,
    StepPlan,
    TierAnswer,
    TierOrder,
)
from trouper.actors.scheduling.routing import Demand


class PolicySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of all unfinished sequences (pooling: requests) by state, in the order of service."""

    # With a request slot.  In a pooling engine: in a plan in flight.
    running: tuple[int, ...]
    # Queued for a request slot or for KV blocks.
    waiting: tuple[int, ...]
    # Preempted with a result in flight, or waiting for the prompt of a sibling; unordered.
    other: tuple[int, ...]
    # Oldest first: the number of the step, and the ids in it.
    in_flight: tuple[tuple[int, tuple[int, ...]], ...]
    # Possible causes of a failed step or a lost device.
    suspects: tuple[int, ...]
    pause: Pause
    is_device_lost: bool


class SchedulerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the scheduler: its policies and its unanswered orders.

    It is taken between two iterations of the scheduler's loop, so it is consistent.
    """

    # One per replica.
    policies: tuple[PolicySnapshot, ...]
    # Plans that the caller of a stepped engine has requested and that are not made yet.
    num_plans_due: int
    # Pauses that have not taken full effect yet.
    num_pauses: int


OutputsT = TypeVar("OutputsT", covariant=True)
RequestT = TypeVar("RequestT")


class SchedulingPolicy(Protocol[OutputsT]):
    """A pure state machine that turns events into plans and outputs, without waits, clock or channels.

    Every event is allowed at any time, whatever is in flight.  An engine either generates or pools, so its policy never receives
    messages of the other kind.
    """

    @property
    def num_steps_in_flight(self) -> int:
        """Count the plans that the device has not answered.

        The scheduler limits them, because a plan made early cannot include later arrivals.
        """
        ...

    @property
    def num_started(self) -> int:
        """Count the unfinished sequences that may continue under `Pause.NO_NEW_REQUESTS`.

        The scheduler acknowledges that pause when the count is 0.
        """
        ...

    @property
    def num_tokens(self) -> int:
        """Count the prompt tokens computed and the tokens sampled so far.

        It must be O(1), because every admission reads it.
        """
        ...

    @property
    def num_preemptions(self) -> int:
        """Count the preemptions so far.

        It must be O(1), because the scheduler reads it in every iteration of its loop.
        """
        ...

    @property
    def num_lost_tokens(self) -> int:
        """Count the tokens recomputed after losses of the device.  It must be O(1), too."""
        ...

    def statistics(self) -> SchedulerStats:
        """Return all counters and gauges.

        May read all tables, because it is called only for metrics.
        """
        ...

    def snapshot(self) -> PolicySnapshot:
        """List the unfinished sequences by state, for tests and debugging.  Takes O(n log n)."""
        ...

    def admit(self, admit: Admit | AdmitPooling) -> None:
        """Queue a new request.

        The queue is not limited here, because admission has already refused requests beyond the limits.
        """

    def predict_first_token(self, id: RequestId, elapsed_s: float) -> Expected | None:
        """Predict when a request's first token is due.  Returns None if it has one, if step times are unknown, or while nothing is planned.

        Args:
            elapsed_s: seconds since the oldest plan in flight became the oldest.
        """
        ...

    def take_ratios(self) -> tuple[float, ...]:
        """Return and clear the ratios of estimated to measured time of the steps with a prompt since the last call.

        Empty if the policy does not estimate step times.
        """
        ...

    def abort(self, id: RequestId) -> None:
        """End a request in any state.  Unknown and finished requests are ignored.

        The next `take_outputs` returns its final output.
        """

    def stop(self, ids: tuple[SequenceId, ...]) -> None:
        """End sequences that the detokenizer has stopped at a stop string, without further output.

        Unknown ids are ignored, because their sequences may have ended meanwhile.
        """

    def apply(self, done: StepDone | PoolDone) -> None:
        """Apply the device's answer to the oldest plan in flight.

        Answers must arrive in the order of the plans.
        """

    def fail_step(self, step: int, message: str, *, is_out_of_memory: bool = False) -> None:
        """Handle the failure of the oldest plan in flight.

        The device refuses all later plans in flight, so they fail too.
        """

    def lose_device(self, loss: DeviceLost) -> int:
        """Drop all plans in flight, because the device was lost.  Nothing is planned until `return_device`.

        Returns:
            If this loss proves which request is the culprit, the number of losses that it has caused.  The request then ends with an
            error.  Otherwise 0.
        """
        ...

    def fail_device(self, message: str) -> None:
        """End the suspects of a loss with an error, because the device will not be restarted.

        The remaining requests can be moved to other replicas.
        """

    def return_device(self, *, keeps_memory: bool = False) -> None:
        """Resume planning, because the device has been restarted.

        Running sequences are recomputed from their tokens.  With `keeps_memory` they find the KV of all answered steps
        in the prefix cache.
        """

    def set_pause(self, pause: Pause) -> None:
        """Set which requests may be planned from now on.

        Plans in flight are not affected.
        """

    def preempt_all(self) -> None:
        """Preempt all running sequences, which frees all KV blocks.  Results in flight still count.

        Called before the device releases its memory.
        """

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Clear the prefix cache.  Returns False, and changes nothing, while a sequence holds a block.

        With `reset_running`, running sequences are preempted first, so it always succeeds.
        """
        ...

    def plan(self) -> StepPlan | PoolPlan | None:
        """Make the next plan, which counts as in flight at once.

        Returns None if no plan can be made now, for example while the engine is paused or nothing is queued.
        """
        ...

    def next_grammar(self) -> PrepareGrammar | None:
        """Return the next grammar for the device to prepare during its steps, or None.

        The caller must send it at once, because the policy already counts its memory.
        """
        ...

    def note_grammar(self, ready: GrammarReady) -> None:
        """Apply the device's answer to `next_grammar`.

        Requests with this grammar can now start, or fail with its error.
        """

    def note_tier(self, answer: TierAnswer) -> None:
        """Apply an answer of the tier on disk.

        Sequences that were waiting for its blocks may start.
        """

    def clear_tier(self) -> None:
        """Queue an order to remove the files of this model from the tier on disk."""

    def take_tier_orders(self, now: float) -> Sequence[TierOrder]:
        """Return the orders to the tier on disk, to send before the next plan.

        Args:
            now: the event loop's time, from which deadlines of new fetches count.
        """
        ...

    def take_tier_cancel(self) -> Sequence[TierOrder]:
        """Return the order that cancels earlier ones, if planning has taken back their blocks.

        It must reach the device before the plan.
        """
        ...

    @property
    def tier_deadline_s(self) -> float | None:
        """The time at which `expire_tier` must be called, or None."""
        ...

    def expire_tier(self, now: float) -> None:
        """Unpark the sequences whose fetch has missed its deadline.

        They compute the missing tokens instead.
        """

    def take_outputs(self, answers: tuple[Promise[None], ...] = ()) -> OutputsT | None:
        """Return and clear the outputs since the last call, together with `answers`.  Returns None if there are neither."""
        ...


class ReplicaPolicy(SchedulingPolicy[OutputsT], Protocol[OutputsT, RequestT]):
    """The policy of one of several replicas, between which requests can be moved.

    All replicas share one table of outputs, so `take_outputs` of any replica returns the outputs of all.
    """

    @property
    def is_device_lost(self) -> bool:
        """Whether the device is being restarted, or has failed.

        Nothing is planned meanwhile, and requests can be moved to other replicas.
        """
        ...

    @property
    def has_device_failed(self) -> bool:
        """Whether the device will not be restarted.

        Its requests must then be moved or ended.
        """
        ...

    @property
    def is_available(self) -> bool:
        """Whether a new request can be planned soon: the device is loaded, and no search for a culprit has precedence.

        The router gives new requests to available replicas first.
        """
        ...

    @property
    def holds_blocks(self) -> bool:
        """Whether a sequence holds KV blocks.

        The prefix cache can be reset only if this is False on all replicas.
        """
        ...

    def open_request(self, admit: Admit | AdmitPooling) -> RequestT:
        """Create a request that any replica may `enter`.

        It receives its arrival number, but is in no queue yet.
        """
        ...

    def demand(self, request: RequestT) -> Demand:
        """Describe a request for the router's choice of a replica: its tokens, prefix hashes and routing options."""
        ...

    def enter(self, request: RequestT, replica: int = 0, num_expected: int = 0) -> None:
        """Queue a request, with its outputs so far.

        Args:
            replica: the number of this replica.
            num_expected: prompt tokens expected in its prefix cache.
        """

    def evacuate(self, *, only_fresh: bool = False) -> list[RequestT]:
        """Remove and return the requests without state on the device, to move them to other replicas.  Suspects stay.

        Args:
            only_fresh: remove only requests that never ran.
        """
        ...

    def expect(self, request: RequestT, num_cached: int, elapsed_s: float) -> float | None:
        """Estimate the seconds to first token for a request that entered now.

        Returns None if step times are unknown, or while nothing is planned.

        Args:
            num_cached: prompt tokens expected in the prefix cache.
            elapsed_s: seconds since the oldest plan in flight became the oldest.
        """
        ...

    def work(self) -> tuple[int, int]:
        """Return the numbers of known uncomputed tokens and of unfinished sequences.

        The router compares replicas by these numbers if it has no estimate in seconds.
        """
        ...
