"""The interface between the scheduler actor and what it schedules, generation or pooling, and snapshots of their state.

The actor receives messages and waits; a policy decides.  A snapshot is plain data, so that metrics and the page can read it while the
scheduler goes on.
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
    """Places of all unfinished sequences; in an engine that pools, of requests.  Ids are in the order of service."""

    # With a request slot; of a pooling engine: in a plan in flight.
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
    """The state of the scheduler: the state of its policies, and the orders without an answer.

    It is plain data, taken between two turns of the scheduler's loop, so it is consistent.
    """

    policies: tuple[PolicySnapshot, ...]  # of each replica
    num_plans_due: int  # of a stepped engine: plans that were requested and not made
    num_pauses: int  # that are not in full effect yet


OutputsT = TypeVar("OutputsT", covariant=True)
RequestT = TypeVar("RequestT")


class SchedulingPolicy(Protocol[OutputsT]):
    """A pure state machine: events enter, plans and outputs come out; it has no waits, no clock and no channels.

    An event may come at any time, whatever is in flight.  An engine either generates or pools, so its policy never gets messages of
    the other kind.
    """

    @property
    def num_steps_in_flight(self) -> int:
        """Count the plans without an answer from the device.

        The scheduler limits it, so that a decision is never made too far ahead.
        """
        ...

    @property
    def num_started(self) -> int:
        """Count the unfinished sequences that may go on under `Pause.NO_NEW_REQUESTS`.

        The scheduler answers an order to pause when it is 0.
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

        It must be O(1), because the scheduler reads it in every turn.
        """
        ...

    @property
    def num_lost_tokens(self) -> int:
        """Count the tokens that had to be computed again after losses of the device.  It must be O(1), too."""
        ...

    def statistics(self) -> SchedulerStats:
        """Describe the state in numbers.

        It may read all tables, and is called for metrics only.
        """
        ...

    def snapshot(self) -> PolicySnapshot:
        """Describe where each unfinished sequence is: O(n log n), for tests and debugging.

        Ids are in the order of service.
        """
        ...

    def admit(self, admit: Admit | AdmitPooling) -> None:
        """Queue a new request.

        It is planned in one of the next steps.  Nothing is refused here; refusing is the task of admission.
        """

    def predict_first_token(self, id: RequestId, elapsed_s: float) -> Expected | None:
        """Predict the first token of a request without one.  Returns None before the first fit, and when nothing is planned now.

        Args:
            elapsed_s: seconds since the eldest plan in flight became the eldest.
        """
        ...

    def take_ratios(self) -> tuple[float, ...]:
        """Take the ratios of estimated to measured time of the steps with a prompt since the last call.

        A policy without learnt step times returns none.
        """
        ...

    def abort(self, id: RequestId) -> None:
        """End a request, in whatever state; unknown and finished ones are ignored.

        Its final output comes with the next `take_outputs`.
        """

    def stop(self, ids: tuple[SequenceId, ...]) -> None:
        """Drop sequences that a stop string has ended; they have no further output.

        Sequences of unknown ids are ignored, because they may have ended meanwhile.
        """

    def apply(self, done: StepDone | PoolDone) -> None:
        """Take the results of the eldest plan in flight.

        Answers arrive in the order of the plans; any other order is an error.
        """

    def fail_step(self, step: int, message: str, *, is_out_of_memory: bool = False) -> None:
        """Take the failure of the eldest plan in flight.

        The plans behind it were refused by the device and fail as well.
        """

    def lose_device(self, loss: DeviceLost) -> int:
        """Take the end of the device, with all plans in flight.  Nothing is planned until `return_device`.

        Returns:
            The number of losses that one request has caused, if this loss shows it.  That request has ended.  Otherwise 0.
        """
        ...

    def fail_device(self, message: str) -> None:
        """End the suspects of a lost device without a restart.

        Other requests can be moved to other replicas.
        """

    def return_device(self, *, keeps_memory: bool = False) -> None:
        """Plan again: the device has been loaded anew.

        Running sequences begin again from their tokens.  With `keeps_memory` they find the KV of all answered steps
        as cached prefixes.
        """

    def set_pause(self, pause: Pause) -> None:
        """Set what may be planned from now on.

        Plans in flight are not affected.
        """

    def preempt_all(self) -> None:
        """Free all KV blocks; running sequences are recomputed later, and results in flight count.

        Called before the memory of the device is released.
        """

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all prefixes.  Returns False, and changes nothing, while a sequence holds a block.

        With `reset_running`, running sequences are preempted first, so it always succeeds.
        """
        ...

    def plan(self) -> StepPlan | PoolPlan | None:
        """Make the next plan; it is in flight from now on.  Returns None if there is no plan to make now.

        It returns None, for example, if nothing is queued, if the engine is paused, or if an answer is needed first.
        """
        ...

    def next_grammar(self) -> PrepareGrammar | None:
        """Return a grammar for the device to prepare during its steps.  Returns None without one.

        It must be sent at once, because the policy counts its memory from now on.
        """
        ...

    def note_grammar(self, ready: GrammarReady) -> None:
        """Take the device's answer to `next_grammar`.

        Requests with this grammar can now start, or fail with its error.
        """

    def note_tier(self, answer: TierAnswer) -> None:
        """Take an answer of the tier on disk.

        Sequences that waited for its blocks may start.
        """

    def clear_tier(self) -> None:
        """Remove the files of this model from the tier on disk.

        Only the orders are made here; the device removes the files.
        """

    def take_tier_orders(self, now: float) -> Sequence[TierOrder]:
        """Return the orders to the tier on disk, to send before the next plan.

        Args:
            now: the time of the event loop's clock, from which sequences wait.
        """
        ...

    def take_tier_cancel(self) -> Sequence[TierOrder]:
        """Return the order to cancel earlier ones that planning has made necessary.

        It must reach the device before the plan.
        """
        ...

    @property
    def tier_deadline_s(self) -> float | None:
        """The time at which `expire_tier` must be called, or None."""
        ...

    def expire_tier(self, now: float) -> None:
        """Let the sequences start whose fetch takes too long.

        They compute what they waited for.
        """

    def take_outputs(self, answers: tuple[Promise[None], ...] = ()) -> OutputsT | None:
        """Take the outputs since the last call, with `answers`.  Returns None if there are neither."""
        ...


class ReplicaPolicy(SchedulingPolicy[OutputsT], Protocol[OutputsT, RequestT]):
    """The policy of one of several replicas.  Its requests may come from another replica and go to another one.

    All replicas share one table of outputs, so any of them takes the outputs of all.
    """

    @property
    def is_device_lost(self) -> bool:
        """Whether the device is being started again, or has failed.

        Nothing is planned meanwhile, and requests can be moved to other replicas.
        """
        ...

    @property
    def has_device_failed(self) -> bool:
        """Whether the device is not started again.

        Its requests must then be moved or ended.
        """
        ...

    @property
    def is_available(self) -> bool:
        """Whether a new request would be planned: the device is loaded, and no search for a culprit goes first.

        The router gives new requests to available replicas first.
        """
        ...

    @property
    def holds_blocks(self) -> bool:
        """Whether a block of KV memory is held.

        The prefix cache can be reset only if no replica holds any.
        """
        ...

    def open_request(self, admit: Admit | AdmitPooling) -> RequestT:
        """Make a request that any replica may take in.

        It has its number in the order of arrival, and is in no queue yet.
        """
        ...

    def demand(self, request: RequestT) -> Demand:
        """Describe the work of a request for the choice of a replica.

        It contains the number of tokens, the hashes of its prefix and the client's wishes.
        """
        ...

    def enter(self, request: RequestT, replica: int = 0, num_expected: int = 0) -> None:
        """Queue a request, with its outputs so far.

        Args:
            replica: the number of this replica.
            num_expected: tokens of the prompt that should be in its cache.
        """

    def evacuate(self, *, only_fresh: bool = False) -> list[RequestT]:
        """Remove and return the requests without state on the device, for other replicas.  Suspects stay.

        Args:
            only_fresh: remove only requests that never ran.
        """
        ...

    def expect(self, request: RequestT, num_cached: int, elapsed_s: float) -> float | None:
        """Estimate the seconds until the first token of a request that entered now.  Returns None before the first fit, and when nothing is planned now.

        Args:
            num_cached: tokens of its prompt that the prefix cache should have.
            elapsed_s: seconds since the eldest plan in flight became the eldest.
        """
        ...

    def work(self) -> tuple[int, int]:
        """Count the known uncomputed tokens, and the rows.

        The router uses these numbers if it has no estimate in seconds.
        """
        ...
