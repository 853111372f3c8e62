"""Implement the parts of a scheduling policy that generation and pooling share: plans in flight, failures, pauses and counters.

Both policies queue requests, send numbered plans to one device, and receive the answers in the same order, so they handle a failed step,
a lost device and a pause alike.  A subclass decides what a plan contains, and which request is to blame for a failure.

Rules.
1. When a step fails, all later plans in flight are cancelled: the device refuses them, and they have no results.
2. When the device is lost, all plans in flight are lost too.  Nothing is planned until `return_device`.
3. Every failure starts a new epoch.  The device refuses plans of earlier epochs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.outputs import SchedulerStats
from trouper.actors.messages.requests import Admit, AdmitPooling, RequestId, SequenceId
from trouper.actors.messages.steps import DeviceLost, TierAnswer, TierOrder
from trouper.actors.scheduling.scheduling_policy import PolicySnapshot
from trouper.actors.scheduling.state.step_builder import InFlight, InFlightPlan
from trouper.actors.scheduling.step_time import StepBudget
from trouper.config.engine_config import SchedulerConfig
from trouper.outputs import RequestError

PlanT = TypeVar("PlanT", bound=InFlightPlan)
RequestT = TypeVar("RequestT")


class StepTiming(Protocol):
    """The measured step times of a policy: `PromptTurns` or `PoolingTime`.

    A policy without them limits steps by number of tokens only.
    """

    budget: StepBudget

    def statistics(self) -> dict[str, Any]:
        """Return the state as fields of `SchedulerStats`, which become metrics."""
        ...

    def take_ratios(self) -> tuple[float, ...]:
        """Return and clear the ratios of estimated to measured step time since the last call.

        A ratio of 1 is a perfect estimate.  The observer exports the ratios as a histogram.
        """
        ...


class PolicyBase(ABC, Generic[PlanT, RequestT]):
    """Own the plans in flight, the pause and the device state of one replica.

    Tests read the public attributes; only the policy itself writes them.
    """

    def __init__(self, config: SchedulerConfig, in_flight: InFlight[PlanT]) -> None:
        self.config = config
        self.in_flight = in_flight
        self.pause = Pause.NONE
        # A lost device is being restarted.  A failed one will not be restarted.
        self.is_device_lost = False
        self.has_device_failed = False
        # None if steps are not limited by time.
        self.timing: StepTiming | None = None
        # With one step in flight, only one stage of a pipeline works at a time.
        self._num_stages = min(config.num_stages, config.max_steps_in_flight)
        self._step: int = 0
        self._epoch = 0
        self._num_prompt_tokens: int = 0

    @property
    def num_steps_in_flight(self) -> int:
        """Count the plans that the device has not answered.

        The scheduler plans ahead up to a limit, so that the device never waits for a plan.
        """
        return len(self.in_flight)

    @property
    def num_tokens(self) -> int:
        """Count the prompt tokens computed and the tokens sampled so far.

        Metrics and admission read this counter often, so it must be cheap.
        """
        return self._num_prompt_tokens

    @property
    def num_preemptions(self) -> int:
        """Count the preemptions so far.  A policy without a KV cache never preempts."""
        return 0

    @property
    def num_lost_tokens(self) -> int:
        """Count the tokens recomputed after losses of the device so far.  0 without a KV cache."""
        return 0

    @property
    def is_available(self) -> bool:
        """Whether a new request can be planned soon: the device is loaded, and no search for a culprit has precedence.

        The router prefers available replicas, because on others the request would wait.
        """
        return not (self.is_device_lost or self._has_suspects)

    def statistics(self) -> SchedulerStats:
        """Return all counters and gauges.  Reads every table, so it must not be called for every request."""
        timing = {} if self.timing is None else self.timing.statistics()
        return SchedulerStats(
            num_steps_in_flight=len(self.in_flight),
            num_steps=self._step,
            num_prompt_tokens=self._num_prompt_tokens,
            is_device_lost=self.is_device_lost,
            is_device_failed=self.has_device_failed,
            is_available=self.is_available,
            **self._counts(),
            **timing,
        )

    def snapshot(self) -> PolicySnapshot:
        """Describe where each unfinished sequence is, for tests and debugging.  Takes O(n log n).

        Contains ids of sequences, in the order in which they would be served.
        """
        running, waiting, other = self._ids_by_state()
        return PolicySnapshot(
            running=running,
            waiting=waiting,
            other=other,
            in_flight=tuple((plan.step, plan.ids) for plan in self.in_flight),
            suspects=self._suspect_ids,
            pause=self.pause,
            is_device_lost=self.is_device_lost,
        )

    # Events

    def admit(self, admit: Admit | AdmitPooling) -> None:
        """Queue a new request.

        A request that could never run ends at once: with the finish reason `length` and no token if its prompt fills the context,
        or with the error `kv_cache_exhausted` if its prompt and one token need more KV blocks than exist.
        """
        self.enter(self.open_request(admit))

    def take_ratios(self) -> tuple[float, ...]:
        """Return and clear the ratios of estimated to measured time of the steps with a prompt."""
        return () if self.timing is None else self.timing.take_ratios()

    def set_pause(self, pause: Pause) -> None:
        """Set which requests may be planned from now on.  Plans in flight are not affected."""
        self.pause = pause

    def fail_step(self, step: int, message: str, *, is_out_of_memory: bool = False) -> None:
        """Handle the failure of the oldest plan in flight: it raised on the device, or was refused because an earlier plan raised.

        Args:
            is_out_of_memory: whether a smaller step may succeed.
        """
        failed = self.in_flight.complete(step)
        if failed.is_cancelled:
            self._note_refused(failed)
            return
        self._epoch += 1
        self._blame(failed, message, is_out_of_memory=is_out_of_memory)
        for later in self.in_flight:
            later.is_cancelled = True

    def lose_device(self, loss: DeviceLost) -> int:
        """Drop all plans in flight, because the device was lost.  Nothing is planned until `return_device`.

        Returns:
            If this loss proves which request is the culprit, the number of losses that it has caused, including this one.
            The request then ends with an error.  Otherwise 0.
        """
        plans = list(self.in_flight)
        self.in_flight.clear()
        self._epoch += 1
        self.is_device_lost = True
        has_suspects = loss.step is not None and not loss.is_from_outside
        return self._lose_plans(plans, loss, has_suspects=has_suspects)

    def return_device(self, *, keeps_memory: bool = False) -> None:
        """Resume planning, because the device has been restarted.

        All sequences are recomputed from their tokens.  Suspects of the loss are tested first.

        Args:
            keeps_memory: whether the KV cache survived with all answered steps, so that cached prefixes stay usable.
        """
        if not keeps_memory:
            self._forget_memory()
        self.is_device_lost = False

    def fail_device(self, message: str) -> None:
        """End the suspects of a loss with an error, because the device will not be restarted.

        Otherwise they would move to other replicas and might kill their devices, too.
        """
        self.has_device_failed = True
        for id in tuple(self._requests_in_question):
            self._fail_request(id, RequestError("device_failed", message))

    # The tier on disk.  Policies without a prefix cache ignore it.

    def note_tier(self, answer: TierAnswer) -> None:
        """Apply an answer of the tier."""

    def clear_tier(self) -> None:
        """Remove the files of this model from the tier."""

    def take_tier_orders(self, now: float) -> Sequence[TierOrder]:
        """Return the orders to the tier, to send before the next plan."""
        return ()

    def take_tier_cancel(self) -> Sequence[TierOrder]:
        """Return the order that cancels earlier ones, if planning has taken back their blocks."""
        return ()

    @property
    def tier_deadline_s(self) -> float | None:
        """The time at which `expire_tier` must be called, or None."""
        return None

    def expire_tier(self, now: float) -> None:
        """Unpark the sequences whose fetch has missed its deadline."""

    # Planning

    def _must_wait(self) -> bool:
        """Whether no plan may be made, whatever is queued."""
        return (
            self.is_device_lost
            or self.pause is Pause.ALL
            or len(self.in_flight) >= self.config.max_steps_in_flight
            or self._waits_for_answer()
        )

    def _waits_for_answer(self) -> bool:
        """Whether a long plan is in flight.  The next plan waits for its answer, to include the requests that arrive until then."""
        if self.timing is None or self._num_stages > 1:
            return False
        for plan in self.in_flight:  # noqa: SIM110  # called for every step: a generator takes a microsecond
            if plan.is_long:
                return True
        return False

    def _flights_s(self) -> list[float]:
        """List the estimated seconds of the uncancelled plans in flight, the oldest first."""
        return [plan.estimate_s for plan in self.in_flight if not plan.is_cancelled]

    # What a subclass decides

    @abstractmethod
    def open_request(self, admit: Admit | AdmitPooling) -> RequestT:
        """Create a request that any replica may `enter`.  Until then it is in no queue."""

    @abstractmethod
    def enter(self, request: RequestT, replica: int = 0, num_expected: int = 0) -> None:
        """Queue a request, which another replica may have started."""

    @property
    @abstractmethod
    def _has_suspects(self) -> bool:
        """Whether a request is suspected of having killed the device."""

    @property
    @abstractmethod
    def _requests_in_question(self) -> Iterable[RequestId]:
        """The requests that may have killed the device."""

    @property
    @abstractmethod
    def _suspect_ids(self) -> tuple[SequenceId | RequestId, ...]:
        """The ids of all suspects, both of failed steps and of lost devices."""

    @abstractmethod
    def _counts(self) -> dict[str, Any]:
        """Return the fields of `SchedulerStats` that only this kind of policy counts."""

    @abstractmethod
    def _ids_by_state(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the ids of running and waiting sequences in the order of service, and of all others."""

    @abstractmethod
    def _note_refused(self, plan: PlanT) -> None:
        """Handle the device's refusal of a cancelled plan."""

    @abstractmethod
    def _blame(self, failed: PlanT, message: str, *, is_out_of_memory: bool) -> None:
        """Roll back a step that raised, and continue the search for the request that causes it."""

    @abstractmethod
    def _lose_plans(self, plans: Sequence[PlanT], loss: DeviceLost, *, has_suspects: bool) -> int:
        """Roll back all plans of a lost device.  If a request may have caused the loss, search for it in the oldest plan."""

    def _forget_memory(self) -> None:
        """Clear the prefix cache, because the device's memory is empty.  Does nothing in a policy without one."""

    @abstractmethod
    def _fail_request(self, id: RequestId, error: RequestError) -> None:
        """End a request with an error.  A finished request is ignored."""
