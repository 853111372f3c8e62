"""Schedule several replicas of a model: one policy for each, and one router that gives each request to a policy.

All policies have one owner, so a request moves from one to another between two events, and no message about it is on its way
meanwhile.  Like the policies, this is a pure state machine.

Laws:
1. Each unfinished request is with exactly one policy.
2. Orders for all replicas (a pause, a reset of the caches) reach all policies.
3. All policies share one table of outputs, so the outputs of a request stay in order when it moves.
4. The requests of a lost replica go to the others at once.  They wait for it only if no other replica is available.
   Suspects stay: the request that killed the replica is tested there, and kills no other.
5. A replica that becomes available takes its share of the requests without a start, and all requests of lost replicas.
6. A failed replica never returns.  The others go on as long as one remains.

`Probes` show that the engine makes progress: one answer from any device is enough.  A hanging device never answers, so at most one
probe is on its way to each device, and its inbox cannot fill up.
"""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.outputs import SchedulerStats, total
from trouper.actors.messages.requests import Admit, AdmitPooling, RequestId, SequenceId
from trouper.actors.messages.sinks import Promise
from trouper.actors.scheduling.routing import ReplicaLoad, Router
from trouper.actors.scheduling.scheduling_policy import ReplicaPolicy

OutputsT = TypeVar("OutputsT")
RequestT = TypeVar("RequestT")


class Replicas(Generic[OutputsT, RequestT]):
    """Own the policies of all replicas.  Each policy plans for its own device.

    Args:
        step_tokens: the token budget of one step.
        block_size: tokens of one block of the prefix caches.
    """

    def __init__(
        self,
        policies: Sequence[ReplicaPolicy[OutputsT, RequestT]],
        step_tokens: int,
        block_size: int = 1,
    ) -> None:
        self.policies = tuple(policies)
        num_replicas = len(self.policies)
        self.router = Router(num_replicas, step_tokens)
        self._block_size = block_size
        # The availability at the last call of `rebalance`.
        self._were_available = [True] * num_replicas
        # Seconds since the eldest plan in flight of each replica became the eldest.  The scheduler sets them, because it has a clock.
        self.elapsed_s: Sequence[float] = [0.0] * num_replicas
        # Tokens and rows of each replica.  None asks for a new count.
        self._work: list[tuple[int, int] | None] = [None] * num_replicas

    def __repr__(self) -> str:
        return f"<Replicas {list(self.policies)}>"

    @property
    def num_steps_in_flight(self) -> int:
        """Count the plans in flight on all devices.

        A stepped engine waits until it is 0.
        """
        return sum(policy.num_steps_in_flight for policy in self.policies)

    @property
    def have_failed(self) -> bool:
        """Whether all replicas have failed.

        Then no request can be served any more, and the engine ends.
        """
        return all(policy.has_device_failed for policy in self.policies)

    @property
    def num_started(self) -> int:
        """Count the unfinished sequences that may go on under `Pause.NO_NEW_REQUESTS`.

        A pause of that kind has taken full effect when it is 0.
        """
        return sum(policy.num_started for policy in self.policies)

    def statistics(self) -> SchedulerStats:
        """Describe the state of all replicas together in numbers.

        Numbers are added, and shares are averaged; see `total`.
        """
        return total(self.replica_statistics())

    def replica_statistics(self) -> tuple[SchedulerStats, ...]:
        """Describe the state of each replica in numbers.

        Metrics show them with the number of the replica as a label.
        """
        return tuple(policy.statistics() for policy in self.policies)

    def admit(self, admit: Admit | AdmitPooling) -> None:
        """Give a new request to a replica.

        The router chooses it by the remaining work, the cached prefix and the wish of the request.
        """
        self._place(self.policies[0].open_request(admit))

    def abort(self, id: RequestId) -> None:
        """End a request on any replica.  Unknown and finished requests are ignored.

        Each policy is asked, because only the policies know the place of the request.
        """
        for policy in self.policies:
            policy.abort(id)
        self.note_change()

    def stop(self, ids: tuple[SequenceId, ...]) -> None:
        """Drop sequences that a stop string has ended; they have no further output."""
        for policy in self.policies:
            policy.stop(ids)
        self.note_change()

    def set_pause(self, pause: Pause) -> None:
        """Set what may be planned from now on.

        All replicas pause together, because clients see one engine.
        """
        for policy in self.policies:
            policy.set_pause(pause)

    def preempt_all(self) -> None:
        """Free all KV blocks; running sequences are recomputed later, and results in flight count.

        It applies to every replica at once.
        """
        for policy in self.policies:
            policy.preempt_all()

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all prefixes.  Returns False, and changes nothing, while a sequence holds a block on any replica."""
        if not reset_running and any(policy.holds_blocks for policy in self.policies):
            return False
        for replica, policy in enumerate(self.policies):
            policy.reset_prefix_cache(reset_running)
            self.router.prefixes.forget(replica)
        return True

    def clear_tier(self) -> None:
        """Remove the files of this model from the tier on disk."""
        for policy in self.policies:
            policy.clear_tier()

    def take_outputs(self, answers: tuple[Promise[None], ...] = ()) -> OutputsT | None:
        """Take the outputs of all since the last call, with `answers`.

        The policies share one list, so any of them can return it.
        """
        return self.policies[0].take_outputs(answers)

    def note_change(self, replica: int | None = None) -> None:
        """Count the work of a replica, or of all replicas, again before the next choice.

        The numbers are cached between choices, because counting takes longer than choosing.
        """
        if replica is None:
            self._work = [None] * len(self.policies)
        else:
            self._work[replica] = None

    def note_loss(self, replica: int) -> None:
        """Move the requests of a lost replica to the others.

        The suspects of the loss stay and are tested when the device is back.
        """
        self.note_change()
        # It may be back before the next call of `rebalance`.
        self._were_available[replica] = False
        self.router.prefixes.forget(replica)
        self._evacuate(replica)

    def note_failure(self, replica: int) -> None:
        """Move the requests of a failed replica to the others.

        If all replicas have failed, they end with the engine.
        """
        if not self.have_failed:
            self._place_again(self.policies[replica].evacuate())

    def rebalance(self) -> bool:
        """Let newly available replicas take their share: their device is back, or a search for a culprit has ended there.

        Returns:
            Whether anything may have moved.
        """
        available = [policy.is_available for policy in self.policies]
        before, self._were_available = self._were_available, available
        new = [now and not was for now, was in zip(available, before, strict=True)]
        if not any(new):
            return False
        for replica, policy in enumerate(self.policies):
            if policy.is_device_lost:
                self._evacuate(replica)
            elif not new[replica]:
                self._place_again(policy.evacuate(only_fresh=True))
        return True

    def _evacuate(self, replica: int) -> None:
        if any(policy.is_available for policy in self.policies):
            self._place_again(self.policies[replica].evacuate())

    def _place_again(self, requests: Sequence[RequestT]) -> None:
        self.note_change()
        for request in requests:
            self._place(request)

    def _place(self, request: RequestT) -> None:
        demand, size = self.policies[0].demand(request), self._block_size
        num_cached = [size * count for count in self.router.prefixes.match(demand.block_hashes)]
        loads = [
            self._load(replica, request, num_cached[replica])
            for replica in range(len(self.policies))
        ]
        replica = self.router.choose(
            loads, num_cached, rank=demand.rank, session_id=demand.session_id
        )
        self.router.prefixes.note(demand.block_hashes, replica)
        self.policies[replica].enter(request, replica, num_cached[replica])
        load = loads[replica]
        num_tokens = load.num_tokens + max(0, demand.num_tokens - num_cached[replica])
        self._work[replica] = num_tokens, load.num_rows + demand.num_rows

    def _load(self, replica: int, request: RequestT, num_cached: int) -> ReplicaLoad:
        policy, work = self.policies[replica], self._work[replica]
        if work is None:
            work = self._work[replica] = policy.work()
        expected_s = policy.expect(request, num_cached, self.elapsed_s[replica])
        return ReplicaLoad(*work, policy.is_available, policy.has_device_failed, expected_s)


class Probes:
    """Keep the promises without an answer, and the replicas with a probe on its way.

    A health check must succeed as long as one device answers, even if another one is stuck.
    """

    def __init__(self) -> None:
        # The engine sends one probe at a time, so the list is short.
        self._waiting: list[Promise[object]] = []
        self._under_way: set[int] = set()

    def __repr__(self) -> str:
        return f"<Probes: {len(self._waiting)} wait, under way to {sorted(self._under_way)}>"

    def begin(self, answer: Promise[object], replicas: Iterable[int]) -> list["ReplicaProbe"]:
        """Take a promise for the first answer.  Returns the probes to send.

        A replica with a probe under way gets no second one, so probes cannot pile up at a stuck device.
        """
        self._waiting.append(answer)
        sent = [
            ReplicaProbe(self, replica) for replica in replicas if replica not in self._under_way
        ]
        self._under_way.update(probe.replica for probe in sent)
        return sent

    def passed(self, replica: int, value: object) -> None:
        """Keep all promises, because a device has answered.

        One answer is enough, because any replica can serve.
        """
        self._under_way.discard(replica)
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer.set(value)

    def failed(self, replica: int, error: BaseException) -> None:
        """Note that a device has refused.  If no other probe is on its way, all promises fail."""
        self._under_way.discard(replica)
        if not self._under_way:
            waiting, self._waiting = self._waiting, []
            for answer in waiting:
                answer.fail(error)


class ReplicaProbe:
    """A probe on its way to one replica: the promise in the message to its executor."""

    def __init__(self, probes: Probes, replica: int) -> None:
        self.replica = replica
        self._probes = probes

    def set(self, value: object) -> None:
        """Note that the device has answered.

        All callers waiting for a sign of life get the answer.
        """
        self._probes.passed(self.replica, value)

    def fail(self, error: BaseException) -> None:
        """Note that the device has refused.

        Callers continue to wait for the probes of other replicas.
        """
        self._probes.failed(self.replica, error)
