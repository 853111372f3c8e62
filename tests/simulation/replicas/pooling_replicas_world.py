"""Replicas that pool, as those of `replicas_world` generate: in every order that a seed draws.

    python -m tests.simulation.replicas.pooling_replicas_world --seconds 60

A text that a lost replica had is computed again from its start. Each client gets one vector, the one of its text alone, whatever was lost.
"""

from collections import Counter
from typing import Any

import numpy as np

from tests.simulation.simulated_encoder import SimulatedEncoder, simulated_result
from tests.simulation.turns import SimulationFault, run_for_seconds
from trouper.actors.messages.controls import Pause
from trouper.actors.messages.requests import AdmitPooling, RequestOptions
from trouper.actors.messages.steps import PoolEntry, PoolPlan
from trouper.actors.scheduling.pooling_policy import PoolingPolicy, SharedPooling
from trouper.actors.scheduling.replicas import Replicas
from trouper.pooling import PoolingParams

from .replicas_world import VOCABULARY, ReplicasWorld, Scenario

SIZE = 3  # numbers of a vector


class PoolingReplicasScenario(Scenario):
    """Some replicas, with their texts."""

    def request(self, id: int) -> AdmitPooling:
        dice = self.dice
        return AdmitPooling(
            id=id,
            prompt_token_ids=tuple(
                dice.randrange(VOCABULARY) for _ in range(dice.choice((1, 2, 3, 3, 9, 20)))
            ),
            params=PoolingParams(task=dice.choice(("embed", "token_embed"))),
            slot=None,
            arrival_time=float(id),
            options=RequestOptions(
                priority=dice.randrange(2),
                data_parallel_rank=dice.choice(
                    (None, None, None, dice.randrange(self.num_replicas))
                ),
            ),
        )

    def expected(self, request: AdmitPooling, index: int = 0) -> Any:
        """Compute the vector of a text alone."""
        entry = PoolEntry(request.prompt_token_ids, None, request.params.task or "", None)
        return simulated_result(entry, SIZE)


class PoolingReplicasWorld(ReplicasWorld):
    """Runs a scenario to its end.

    Raises:
        SimulationFault: as of replicas that generate; or a pause counts as in full effect while a text that has begun waits.
    """

    scenario_class = PoolingReplicasScenario

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._begun: set[int] = set()
        self._to_leave = dict.fromkeys(self._to_leave, "abort")

    def make_replicas(self) -> Replicas[Any, Any]:
        config, shared = self._scenario.config, SharedPooling()
        policies = [PoolingPolicy(config, shared) for _ in range(self._scenario.num_replicas)]
        return Replicas(policies, config.max_num_scheduled_tokens)

    def make_device(self) -> SimulatedEncoder:
        return SimulatedEncoder(SIZE, self._scenario.config.max_steps_in_flight)

    def ghosts(self, policy: Any) -> set[int]:
        """None: a text that has ended is not computed again."""
        return set()

    def held(self, policy: PoolingPolicy) -> set[int]:
        return set(policy.unfinished)

    def suspects(self, policy: PoolingPolicy) -> set[int]:
        return set(policy._suspects)

    def owners(self, policy: PoolingPolicy) -> set[int]:
        return {admit.id for admit in policy.in_flight[0].group}

    def set_pause(self, pause: Pause) -> None:
        if pause is Pause.ALL and self._dice.random() < 0.5:
            pause = Pause.NO_NEW_REQUESTS
        super().set_pause(pause)

    def note_plan(self, replica: int, plan: PoolPlan) -> None:
        owners = {admit.id for admit in self.policies[replica].in_flight[-1].group}
        if self.pause is Pause.NO_NEW_REQUESTS and owners - self._begun:
            raise SimulationFault(f"{owners - self._begun} begin in a pause")
        flights = [flight for policy in self.policies for flight in policy.in_flight]
        in_flight = Counter(admit.id for flight in flights for admit in flight.group)
        if twice := [id for id, num in in_flight.items() if num > 1]:
            raise SimulationFault(f"{twice} are in two plans")
        self._begun |= owners

    def reset_prefix_cache(self) -> None:
        if not self.replicas.reset_prefix_cache():
            raise SimulationFault("there is nothing that a reset could not forget")

    def _check_places(self) -> None:
        super()._check_places()
        begun = self._begun & {id for policy in self.policies for id in self.held(policy)}
        if begun and not self.replicas.num_started:
            raise SimulationFault(f"{begun} have begun, and a pause would leave them")

    def take_outputs(self) -> None:
        news = self.replicas.take_outputs()
        for pooled in news.requests if news else ():
            id = pooled.admit.id
            self.check_open(id)
            self._ends[id] = "length" if pooled.error is None else pooled.error.code
            self._errors[id] = str(pooled.error or "")
            self._outputs[id] = pooled.array

    def check_empty(self, policy: PoolingPolicy) -> None:
        if policy.unfinished or policy.in_flight or policy.num_started:
            raise SimulationFault(f"something is left: {policy}")
        if policy.work() != (0, 0):
            raise SimulationFault(f"nothing is left, and it has work: {policy.work()}")

    def check_request(self, request: AdmitPooling) -> None:
        id, reason = request.id, self._ends.get(request.id)
        if reason == "length":
            wanted = self._scenario.expected(request, 0)
            if not np.array_equal(self._outputs[id], wanted):
                raise SimulationFault(f"{id} got {self._outputs[id]}, not {wanted}")
        self._check_reason(request, id, "abort" if reason == "aborted" else reason)


if __name__ == "__main__":
    run_for_seconds(PoolingReplicasWorld, __doc__)
