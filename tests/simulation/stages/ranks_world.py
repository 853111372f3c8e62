"""Stages whose layers are cut into ranks, under the real policy, in every order that a seed draws.

    python -m tests.simulation.stages.ranks_world --seconds 60

To `stages_world` come the ranks of each stage. A rank keeps a value of each position for its head of keys, by a hash that is the
head's, and its part is a hash that is the rank's. The sum of all parts is the stage's value, so a missing or foreign part
changes tokens. Ranks add up in memory of the rules of `kernels/cpu/rank_sums.py`: two places in turn, a number of each rank, a
label of each part; one rank takes a step at a time, and a sum is read part by part.
"""

from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from tests.simulation.turns import SimulationFault, run_for_seconds
from trouper.actors.executor.models.sharding import Shard
from trouper.actors.messages.steps import StepDone, StepPlan
from trouper.actors.stages import Feedback, num_ring_entries, sends_tokens

from .stages_world import VOCABULARY, Rules, Scenario, SimulatedStage, StagesWorld, mixed, note_plan

Values = list[list[int]]
HeadOf = Callable[[int, int, int], int]


def head_of(rank: int, num_ranks: int, num_heads: int) -> int:
    """Return the first KV head of a rank, as the real weights are cut."""
    return Shard(rank, num_ranks).kv_heads(num_heads)[0]


class RankRules(NamedTuple):
    """What planted bugs change; the defaults are right."""

    num_places: int = 2  # of the parts of a rank
    head_of: HeadOf = head_of
    skips_by_itself: bool = (
        False  # a rank looks at what it knows, and leaves out a sum that only feeds tokens
    )
    tells_rank_0_alone: bool = (
        False  # tokens go to the first rank of the first stage, and to no other
    )
    writes_late: bool = False  # the number is told before the part is there


class RanksScenario(Scenario):
    """One drawn model in stages and ranks, with its requests."""

    NUM_STAGES = (1, 1, 2, 2, 3)
    # Ranks keep no states.
    NUM_SNAPSHOTS = (0,)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.num_ranks = self.dice.choice((2, 2, 3, 4))
        divisors = [n for n in range(1, self.num_ranks + 1) if self.num_ranks % n == 0]
        self.num_heads = self.dice.choice(divisors)

    def stage_value(self, stage: int, given: int, memory: dict[Hashable, int]) -> int:
        total = 0
        for rank in range(self.num_ranks):
            head = rank * self.num_heads // self.num_ranks
            kept = mixed((stage, head), given, memory.get((stage, rank), 0))
            memory[stage, rank] = kept
            total += mixed((stage, rank, 1), kept, 0)
        return total


class Exchange:
    """The shared memory of the ranks of one stage."""

    def __init__(self, num_ranks: int, num_places: int) -> None:
        self.numbers = [0] * num_ranks
        self._parts: list[list[Values]] = [[[]] * num_ranks for _ in range(num_places)]
        self._labels = [[0] * num_ranks for _ in range(num_places)]

    def write(self, rank: int, number: int, label: int, part: Values) -> None:
        place = number % len(self._parts)
        self._parts[place][rank], self._labels[place][rank] = part, label

    def read(self, peer: int, number: int, label: int) -> Values | None:
        """Return a peer's part; None: it has not come."""
        if self.numbers[peer] < number:
            return None
        place = number % len(self._parts)
        if self.numbers[peer] > number + 1 or self._labels[place][peer] != label:
            raise SimulationFault(f"ranks disagree: step {label}, {self._labels[place][peer]}")
        return self._parts[place][peer]


class SimulatedRank(SimulatedStage):
    """One rank of a stage: what it does with a plan takes several turns."""

    def __init__(self, stage: int, rank: int, scenario: RanksScenario, rules: RankRules) -> None:
        super().__init__(stage, scenario.block_size)
        self.rank = rank
        self._head = rules.head_of(rank, scenario.num_ranks, scenario.num_heads)
        self.feedback = Feedback()
        self.tokens_in: deque[tuple[int, list[int]]] = deque()
        self.hidden_in: deque[tuple[int, Values]] = deque()
        self.number, self.noted = 0, 0
        self.plan: StepPlan | None = None  # whose part is computed, and not yet added up
        self.part: Values = []
        self.parts: list[Values] = []  # of all ranks, in their order, as far as they are read
        self.has_told = False

    def value_of(self, given: int, before: int) -> tuple[int, int]:
        kept = mixed((self.index, self._head), given, before)
        return kept, mixed((self.index, self.rank, 1), kept, 0)


class RanksWorld(StagesWorld):
    """Runs a scenario to its end.

    Raises:
        SimulationFault: a deadlock, a wrong token, an end too many, or ranks that disagree.
    """

    def __init__(self, seed: int, rules: RankRules | None = None) -> None:
        self._rank_rules = rules or RankRules()
        super().__init__(seed, Rules(), RanksScenario(seed))

    def _start_stages(self) -> None:
        super()._start_stages()
        scenario, rules = self._scenario, self._rank_rules
        assert isinstance(scenario, RanksScenario)
        self._exchanges = [
            Exchange(scenario.num_ranks, rules.num_places) for _ in range(scenario.num_stages)
        ]
        self._ranks = [
            SimulatedRank(stage, rank, scenario, rules)
            for stage in range(scenario.num_stages)
            for rank in range(scenario.num_ranks)
        ]
        self._stages = list(self._ranks)  # each is given every plan, and has turns
        self._sampler = self._ranks[-scenario.num_ranks]

    def _stage(self, stage: SimulatedStage) -> bool:
        assert isinstance(stage, SimulatedRank)
        if stage.index == self._scenario.slow_stage and self._dice.random() < 0.8:
            return bool(stage.plans or stage.output or stage.plan)  # it is only late
        if stage.output is not None:
            return self._pass_on(stage, *stage.output)
        if stage.plan is not None:
            return self._add_up(stage, stage.plan)
        return bool(stage.plans) and self._begin(stage, stage.plans[0])

    def _begin(self, worker: SimulatedRank, plan: StepPlan) -> bool:
        """Compute this rank's part, if all that it is made of has come."""
        given = None
        if (
            worker is not self._sampler
            and worker.index == 0
            and not self._take_tokens(worker, plan)
        ):
            return False
        if worker.index > 0:
            if not worker.hidden_in:
                return False
            step, given = worker.hidden_in.popleft()
            if step != plan.step:
                raise SimulationFault(f"hidden states of step {step} at step {plan.step}")
        worker.plans.popleft()
        worker.apply(plan)
        worker.plan, worker.part, worker.parts = plan, worker.compute(plan, given), []
        worker.has_told = False
        if self._rank_rules.skips_by_itself and worker.rank and not any(plan.num_sampled_tokens):
            worker.output, worker.plan = (plan, worker.part), None
        return True

    def _take_tokens(self, worker: SimulatedRank, plan: StepPlan) -> bool:
        """Take what has come; False while a token is missing that the plan reads."""
        feedback = worker.feedback
        if worker.noted != plan.step:
            note_plan(feedback, plan)
            worker.noted = plan.step
        while worker.tokens_in:
            worker.write_tokens(feedback, *worker.tokens_in.popleft())
        return not feedback.must_wait(min(plan.reads, plan.step - 1))

    def _add_up(self, worker: SimulatedRank, plan: StepPlan) -> bool:
        """Write the part, tell its number, then read one part a turn."""
        exchange, rules = self._exchanges[worker.index], self._rank_rules
        if not worker.has_told:
            worker.number += 1
            worker.has_told = True
            exchange.numbers[worker.rank] = worker.number
            if not rules.writes_late:
                exchange.write(worker.rank, worker.number, plan.step, worker.part)
            return True
        if rules.writes_late and not worker.parts:
            exchange.write(worker.rank, worker.number, plan.step, worker.part)
        part = exchange.read(len(worker.parts), worker.number, plan.step)
        if part is None:
            return False
        worker.parts.append(part)
        if len(worker.parts) == len(exchange.numbers):
            worker.plan, worker.output = None, (plan, _sums(worker.parts))
        return True

    def _pass_on(self, stage: SimulatedStage, plan: StepPlan, values: Values) -> bool:
        assert isinstance(stage, SimulatedRank)
        if stage.index < self._scenario.num_stages - 1:
            following = self._ranks[self._ranks.index(stage) + self._num_ranks]
            if len(following.hidden_in) >= self._scenario.hidden_entries:
                return False
            following.hidden_in.append((plan.step, values))
        elif stage is self._sampler and not self._sample(plan, values):
            return False
        stage.output = None
        return True

    def _sample(self, plan: StepPlan, values: Values) -> bool:
        wanted = plan.num_sampled_tokens
        ids = [v[-1] % VOCABULARY if num else -1 for v, num in zip(values, wanted, strict=True)]
        receivers = [w for w in self._ranks if w.index == 0 and w is not self._sampler]
        if self._rank_rules.tells_rank_0_alone:
            receivers = [w for w in receivers if w.rank == 0]
        if sends_tokens(wanted):
            entries = num_ring_entries(self._scenario.num_stages)
            if any(len(worker.tokens_in) >= entries for worker in receivers):
                return False
            for worker in receivers:
                worker.tokens_in.append((plan.step, ids))
        if self._scenario.num_stages == 1:  # rank 0 samples what it embeds
            self._write_own(plan, ids)
        answer = tuple((token,) if token >= 0 else () for token in ids)
        self._answers.append(StepDone(plan.step, answer))
        return True

    def _write_own(self, plan: StepPlan, ids: list[int]) -> None:
        entries = zip(
            plan.request_slots,
            plan.num_computed_tokens,
            plan.num_scheduled_tokens,
            ids,
            strict=True,
        )
        for row, start, count, token_id in entries:
            if token_id >= 0:
                self._sampler.tokens[row][start + count] = token_id

    @property
    def _num_ranks(self) -> int:
        return len(self._exchanges[0].numbers)


def _sums(parts: list[Values]) -> Values:
    return [
        [sum(numbers) for numbers in zip(*entry, strict=True)] for entry in zip(*parts, strict=True)
    ]


if __name__ == "__main__":
    run_for_seconds(RanksWorld, __doc__)
