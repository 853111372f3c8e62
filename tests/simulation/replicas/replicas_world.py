"""Replicas of simulated devices under the real policies and routing, in every order that a seed draws.

    python -m tests.simulation.replicas.replicas_world --seconds 60

Clients, plans, answers, losses and returns come one at a time; which is next is drawn. A device that is lost takes its memory and
all steps with it, and may never come back. Some requests kill each device that computes one of their positions. What every client gets is compared with
the tokens that its request has alone.
"""

import random
from collections import Counter, deque
from typing import Any

from tests.simulation.simulated_device import Conditions, SimulatedDevice, simulated_tokens
from tests.simulation.turns import SimulationFault, TurnsWorld, draw_prompt, run_for_seconds
from trouper.actors.messages.controls import Pause
from trouper.actors.messages.requests import Admit, RequestOptions
from trouper.actors.messages.steps import DeviceLost, Sampling, StepFailed
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.replicas import Replicas
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.actors.scheduling.state.sequence_table import Shared
from trouper.config.engine_config import SchedulerConfig
from trouper.params import SamplingParams

VOCABULARY = 40
MAX_LOSSES = 8  # drawn ones, of one schedule


class Drafters(Conditions):
    """Drafts of which as many are right as is drawn."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice

    def num_right(self, sequence: int, num_drafts: int) -> int:
        return self._dice.choice((0, num_drafts, self._dice.randint(0, num_drafts)))


class Scenario:
    """Some replicas, with their requests."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.num_replicas = dice.choice((2, 2, 3, 4))
        self.kill_share = dice.choice((0.0, 0.01, 0.05, 0.2))
        self.return_share = dice.choice((0.02, 0.2, 0.9))
        self.fail_share = dice.choice((0.0, 0.0, 0.05, 0.3))
        self.pause_share = dice.choice((0.0, 0.0, 0.05))
        self.block_size = dice.choice((2, 4))
        longest = 24
        drafts = random.Random(f"{seed}:drafts")
        self.drafters = Drafters(drafts)
        self.config = SchedulerConfig(
            max_model_len=longest,
            max_num_seqs=dice.choice((1, 2, 3, 8)),
            max_num_scheduled_tokens=dice.choice((3, 8, 32)),
            policy=dice.choice(("priority", "fcfs")),
            max_steps_in_flight=dice.choice((1, 2)),
            enable_prefix_caching=dice.random() < 0.7,
            num_speculative_tokens=drafts.choice((0, 0, 3, 7)),
        )
        self.num_blocks = dice.choice((longest // self.block_size + 1, 60))
        self.requests: list[Any] = [self.request(10 * i) for i in range(dice.randint(1, 14))]
        self.leaving = {r.id for r in self.requests if dice.random() < 0.2}
        num_killers = dice.choice((0, 0, 1, 1, 2))
        self.killers = {
            r.id for r in dice.sample(self.requests, min(num_killers, len(self.requests)))
        }

    def request(self, id: int) -> Any:
        dice = self.dice
        return Admit(
            id=id,
            prompt_token_ids=draw_prompt(dice, VOCABULARY),
            params=SamplingParams(
                n=dice.choice((1, 1, 1, 3)),
                max_tokens=dice.choice((1, 2, 5, 9)),
                ignore_eos=True,
                seed=dice.randrange(1000),
            ),
            eos_token_id=None,
            stop_token_ids=(),
            arrival_time=float(id),
            options=RequestOptions(
                priority=dice.randrange(2),
                data_parallel_rank=dice.choice(
                    (None, None, None, dice.randrange(self.num_replicas))
                ),
                session_id=dice.choice((None, None, "a", "b")),
            ),
        )

    def expected(self, request: Admit, index: int) -> list[int]:
        """Compute the tokens of one sequence alone."""
        params = request.params
        num_prompt = len(request.prompt_token_ids)
        num_tokens = min(params.max_tokens or 0, self.config.max_model_len - num_prompt)
        sampling = Sampling(temperature=1.0, seed=(params.seed or 0) + index)
        return simulated_tokens(request.prompt_token_ids, sampling, num_tokens, VOCABULARY)


class ReplicasWorld(TurnsWorld):
    """Runs a scenario to its end.  What is told of a policy here is read from its state, not asked of it.

    Raises:
        SimulationFault: a wrong, lost or doubled token, an end too many, a request in two places or in none, a plan that
            must not be, a replica that must not be chosen, a bystander's end, or a deadlock.
    """

    scenario_class: type[Scenario] = Scenario

    def __init__(self, seed: int) -> None:
        scenario = self.scenario_class(seed)
        super().__init__(scenario)
        self.replicas = self.make_replicas()
        self._devices = [self.make_device() for _ in self.policies]
        self._plans: list[deque[Any]] = [deque() for _ in self.policies]
        self._to_leave = {id: scenario.dice.choice(("abort", "stop")) for id in scenario.leaving}
        self._admitted: dict[int, Any] = {}
        self._stopped: set[int] = set()
        self._killed_by: dict[int, set[int]] = {id: set() for id in scenario.killers}
        self._failed: set[int] = set()  # replicas, for good
        self._given_up: set[int] = set()  # in question when they failed
        self.pause = Pause.NONE
        self.num_losses = self.num_moves = 0
        # One loss of every second schedule has no cause that can be seen: the requests in its step are suspects, and innocent.
        self._may_be_unexplained = seed % 2 == 1

    @property
    def policies(self) -> tuple[Any, ...]:
        return self.replicas.policies

    def make_replicas(self) -> Replicas[Any, Any]:
        scenario, shared = self._scenario, Shared()
        config, size = scenario.config, scenario.block_size
        policies = [
            Policy(
                config, KVBlocks(scenario.num_blocks, size, config.enable_prefix_caching), shared
            )
            for _ in range(scenario.num_replicas)
        ]
        return Replicas(policies, config.max_num_scheduled_tokens, size)

    def make_device(self) -> Any:
        scenario = self._scenario
        return SimulatedDevice(
            scenario.num_blocks,
            scenario.block_size,
            VOCABULARY,
            scenario.config.max_steps_in_flight,
            scenario.drafters,
        )

    def held(self, policy: Any) -> set[int]:
        """Requests that have not ended there."""
        return set(policy.table.requests)

    def ghosts(self, policy: Any) -> set[int]:
        """Requests that have ended, and are computed on as suspects of a loss, without outputs."""
        return {ghost.request.admit.id for ghost in policy.table.ghosts.values()}

    def suspects(self, policy: Any) -> set[int]:
        """Requests that a search is about."""
        return {suspect.sequence.request.admit.id for suspect in policy._quarantine._suspects}

    def owners(self, policy: Any) -> set[int]:
        """Requests of the eldest plan."""
        return {entry[0].request.admit.id for entry in policy.in_flight[0].entries}

    def is_available(self, policy: Any) -> bool:
        """Whether a replica would plan a new request."""
        return not policy.is_device_lost and not self.suspects(policy)

    @property
    def subject(self) -> Replicas[Any, Any]:
        return self.replicas

    def take_turns(self) -> bool:
        turns = [self._clients, self._controls]
        for replica in range(len(self.policies)):
            turns += [
                lambda r=replica: self._answer(r),
                lambda r=replica: self._plan(r),
                lambda r=replica: self._kill(r),
                lambda r=replica: self._return(r),
            ]
        self._dice.shuffle(turns)
        # Each of them has its turn, unlike with `any`.
        return sum(turn() for turn in turns) > 0

    def _clients(self) -> bool:
        """Admit, abort or stop, now and then."""
        is_waiting = bool(self._to_admit) or any(id in self._admitted for id in self._to_leave)
        if self._to_admit and self._dice.random() < 0.3:
            request = self._to_admit.popleft()
            self._admitted[request.id] = request
            self.replicas.admit(request)
            self._check_choice(request)
            self.take_outputs()
        leaving = [id for id in self._to_leave if id in self._admitted]
        if leaving and self._dice.random() < 0.1:
            id = self._dice.choice(leaving)
            if self._to_leave.pop(id) == "abort":
                self.replicas.abort(id)
                if any(id in self.held(policy) - self.ghosts(policy) for policy in self.policies):
                    raise SimulationFault(f"{id} goes on after its abort")
            else:
                sequences = [id + i for i in range(self._admitted[id].params.n)]
                self._stopped |= set(sequences) - set(self._ends)
                self.replicas.stop(tuple(sequences))
            self.take_outputs()
        return is_waiting

    def _check_choice(self, request: Any) -> None:
        place = [r for r, p in enumerate(self.policies) if request.id in self.held(p)]
        if not place:  # it has ended at once
            return
        (replica,) = place
        living = [r for r in range(len(self.policies)) if r not in self._failed]
        if replica not in living:
            raise SimulationFault(f"{request.id} was given to {replica}, which has failed")
        available = [r for r, p in enumerate(self.policies) if self.is_available(p)]
        if available and replica not in available:
            raise SimulationFault(f"{request.id} was given to {replica}, which is not available")
        candidates, rank = available or living, request.options.data_parallel_rank
        if rank in candidates and replica != rank:
            raise SimulationFault(f"{request.id} was not given to the replica it names")

    def _controls(self) -> bool:
        was_paused = self.pause is not Pause.NONE
        if was_paused or self._dice.random() < self._scenario.pause_share:
            self.set_pause(Pause.NONE if was_paused else Pause.ALL)
            if self._dice.random() < 0.3:
                self.replicas.preempt_all()
            if self._dice.random() < 0.3:
                self.reset_prefix_cache()
        return was_paused or self.pause is not Pause.NONE

    def set_pause(self, pause: Pause) -> None:
        self.pause = pause
        self.replicas.set_pause(pause)

    def reset_prefix_cache(self) -> None:
        before = [policy.blocks.prefixes() for policy in self.policies]
        is_refused = not self.replicas.reset_prefix_cache()
        if is_refused and before != [p.blocks.prefixes() for p in self.policies]:
            raise SimulationFault("a reset that was refused has forgotten prefixes")

    def _plan(self, replica: int) -> bool:
        policy = self.policies[replica]
        plan = policy.plan()
        has_moved = self.replicas.rebalance()  # a search may have ended
        self.take_outputs()
        self._check_places()
        self._check_waits()
        if plan is None:
            return has_moved
        if policy.is_device_lost or self.pause is Pause.ALL:
            raise SimulationFault(f"a plan while lost or paused: {plan}")
        self._plans[replica].append(plan)
        self.note_plan(replica, plan)
        return True

    def note_plan(self, replica: int, plan: Any) -> None:
        """Look at a plan that has just been made."""

    def _answer(self, replica: int) -> bool:
        """Compute the eldest plan, or die of it."""
        plans, policy = self._plans[replica], self.policies[replica]
        if not plans:
            return False
        killers = self.owners(policy) & self._killed_by.keys()
        if killers:
            for id in killers:
                self._killed_by[id].add(replica)
            self._lose(replica, DeviceLost("killed", plans[0].step, cause="signal"))
            return True
        done = self._devices[replica]._run(plans.popleft())
        if isinstance(done, StepFailed):
            raise SimulationFault(f"a step has failed: {done}")
        policy.apply(done)
        self.replicas.note_change(replica)
        self.take_outputs()
        return True

    def _kill(self, replica: int) -> bool:
        is_due = self._dice.random() < self._scenario.kill_share and self.num_losses < MAX_LOSSES
        if is_due and not self.policies[replica].is_device_lost:
            step = self._plans[replica][0].step if self._plans[replica] else None
            # A second one, or one beside a search, could condemn a request by bad luck.
            is_unexplained = self._may_be_unexplained and not any(map(self.suspects, self.policies))
            self._may_be_unexplained &= not is_unexplained
            is_from_outside = not is_unexplained
            self._lose(replica, DeviceLost("killed", step, is_from_outside=is_from_outside))
            return True
        return False

    def _lose(self, replica: int, loss: DeviceLost) -> None:
        before = self.held(self.policies[replica])
        self.num_losses += 1
        self._plans[replica].clear()
        self._devices[replica] = self.make_device()
        self.policies[replica].lose_device(loss)
        self.replicas.note_loss(replica)
        self.replicas.note_change(replica)
        self.num_moves += len(before - self.held(self.policies[replica]))
        self.take_outputs()
        self._check_places()

    def _return(self, replica: int) -> bool:
        policy = self.policies[replica]
        if not policy.is_device_lost or replica in self._failed:
            return False
        has_others = len(self._failed) + 1 < len(self.policies)
        if has_others and self._dice.random() < self._scenario.fail_share:
            self._failed.add(replica)
            self._given_up |= self.suspects(policy)
            policy.fail_device("spent")
            self.replicas.note_failure(replica)
            self.take_outputs()
            if waits := self.held(policy):
                raise SimulationFault(f"{waits} wait for what never comes back")
        elif self._dice.random() < self._scenario.return_share:
            policy.return_device()
            self.replicas.rebalance()
        self._check_places()
        return True

    def _check_places(self) -> None:
        """Each unfinished request has one place."""
        places = Counter(id for policy in self.policies for id in self.held(policy))
        wrong = [id for id, num in places.items() if num != 1]
        ended = {id - id % 10 for id in self._ends}
        lost = [id for id in self._admitted if id not in places and id not in ended]
        lost = [id for id in lost if not {id + i for i in range(3)} & self._stopped]
        if wrong or lost:
            raise SimulationFault(f"in two places: {wrong}, in none: {lost}")

    def _check_waits(self) -> None:
        """No request waits for a lost replica while another would take it: from one look at them all to the next."""
        if any(self.is_available(policy) for policy in self.policies):
            for policy in self.policies:
                waits = self.held(policy) - self.suspects(policy)
                if policy.is_device_lost and waits:
                    raise SimulationFault(f"{waits} wait for a lost replica")

    def check_open(self, id: int) -> None:
        super().check_open(id)
        if id in self._stopped:
            raise SimulationFault(f"an output of {id} after its client has stopped it")

    def check_end(self) -> None:
        scenario = self._scenario
        for request in scenario.requests:
            self.check_request(request)
        for id, replicas in self._killed_by.items():
            if len(replicas) > len(self._killed_by):  # a verdict frees the other suspects
                raise SimulationFault(f"{id} has killed {replicas}")
        for policy in self.policies:
            self.check_empty(policy)

    def check_empty(self, policy: Any) -> None:
        if policy.table.sequences or policy.blocks.num_free != policy.blocks.num_usable:
            raise SimulationFault(f"something is left: {policy}")
        if policy.table.waiting.ids or policy.table.num_deferred:
            raise SimulationFault(f"something waits: {policy.table.waiting.ids}")

    def check_request(self, request: Any) -> None:
        for index in range(request.params.n):
            id = request.id + index
            reason = self._ends.get(id, "stop" if id in self._stopped else None)
            wanted = self._scenario.expected(request, index)
            self.check_tokens(id, wanted, is_whole=reason == "length")
            self._check_reason(request, id, reason)

    def _check_reason(self, request: Any, id: int, reason: str | None) -> None:
        """It ended as it should, was left by its client, or was in question."""
        may_leave = request.id in self._scenario.leaving
        if self._errors.get(id, "").startswith("device_failed") and request.id in self._given_up:
            return
        is_poison = self._errors.get(id, "").startswith("poisoned_request")
        if reason == "length" or (may_leave and reason in ("abort", "stop")):
            return
        if not (is_poison and request.id in self._scenario.killers):
            raise SimulationFault(f"sequence {id} ended with {reason}: {self._errors.get(id)}")


if __name__ == "__main__":
    run_for_seconds(ReplicasWorld, __doc__)
