"""A pipeline of simulated stages under the real policy, in every order that a seed draws.

    python -m tests.simulation.stages.stages_world --seconds 60

Coordinator, stages and clients take their steps one at a time; which is next is drawn. A stage keeps what it computes in blocks, as a
model does: a value of each position, a hash of the stage's salt, of what the position is given and of the value before it. The
last stage's value is the token. So a wrong hidden state, or an id in a row that is not its own, changes what clients get.
In half of the schedules each stage also keeps a recurrent state of each row: a hash of all values of the stage so far. A stage that
begins with the state of another position is a fault, and another state changes what clients get.
"""

import random
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from tests.simulation.turns import SimulationFault, TurnsWorld, draw_prompt, run_for_seconds
from trouper.actors.messages.requests import Admit, RequestOptions
from trouper.actors.messages.steps import DeviceLost, NewSequence, StepDone, StepPlan
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.actors.scheduling.state.sequence import Sequence
from trouper.actors.scheduling.state.state_snapshots import StateSnapshots
from trouper.actors.stages import Feedback, is_due, num_ring_entries, sends_tokens
from trouper.config.engine_config import SchedulerConfig
from trouper.config.parallel import max_steps_in_flight
from trouper.params import SamplingParams

VOCABULARY = 1000
MAX_KILLS = 8  # of one schedule: slow workers killed more often would never end a step


class Rules(NamedTuple):
    """What planted bugs change; the defaults are right."""

    feedback: type[Feedback] = Feedback
    num_token_entries: int = 0  # more or fewer than there must be
    drains_only_to_read: bool = False
    waits_every_step: bool = False
    masks_by_itself: bool = False  # the last stage looks at what it knows, and not at the plan
    saves_at_ends: bool = False  # of steps, and not where the plan says


class Scenario:
    """One drawn pipeline, with its requests."""

    NUM_STAGES = (2, 2, 3, 3, 4)
    # Rows of snapshots behind the states of running sequences; 0 for a model without states.
    NUM_SNAPSHOTS = (0, 0, 4, 9)

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.num_stages = dice.choice(self.NUM_STAGES)
        self.hidden_entries = dice.choice((1, 2))
        self.slow_stage = dice.choice((None, *range(self.num_stages)))
        self.kill_share = dice.choice((0.0, 0.0, 0.002))
        self.block_size = dice.choice((2, 4))
        longest = 24
        plans_ahead = dice.random() < 0.8
        self.config = SchedulerConfig(
            max_model_len=longest,
            max_num_seqs=dice.choice((1, 2, 3, 8)),
            max_num_scheduled_tokens=dice.choice((3, 8, 32)),
            policy=dice.choice(("priority", "fcfs")),
            num_stages=self.num_stages,
            max_steps_in_flight=max_steps_in_flight(self.num_stages, plans_ahead=plans_ahead),
        )
        self.num_blocks = dice.choice((longest // self.block_size, 60))
        self.prefix_caching = dice.random() < 0.5
        self.requests = [self._request(id) for id in range(dice.randint(1, 10))]
        self.aborts = {id: dice.random() < 0.25 for id in range(len(self.requests))}
        # Dice of their own, so that all other choices stay those of the seed.
        self.num_snapshots = random.Random(seed).choice(self.NUM_SNAPSHOTS)

    def expected_tokens(self, request: Admit) -> list[int]:
        """Compute the tokens of a request alone, without blocks, steps or rings."""
        tokens, memory = list(request.prompt_token_ids), {}
        num_prompt = len(tokens)
        end = min(num_prompt + (request.params.max_tokens or 0), self.config.max_model_len)
        position = 0
        while len(tokens) < end:
            given = tokens[position]
            for stage in range(self.num_stages):
                given = self.stage_value(stage, given, memory)
            position += 1
            if position == len(tokens):
                tokens.append(given % VOCABULARY)
        return tokens[num_prompt:]

    def stage_value(self, stage: int, given: int, memory: dict[Hashable, int]) -> int:
        """Return a stage's value of the next position of a sequence; `memory` is of its positions before."""
        before = memory.get(stage, 0)
        if self.num_snapshots:
            state = memory.get((stage, "state"), 0)
            before = mixed("state", state, before)
        memory[stage] = mixed(stage, given, before)
        if self.num_snapshots:
            memory[stage, "state"] = mixed("state", memory[stage], state)
        return memory[stage]

    def _request(self, id: int) -> Admit:
        dice = self.dice
        return Admit(
            id=id,
            prompt_token_ids=draw_prompt(dice, VOCABULARY),
            params=SamplingParams(max_tokens=dice.choice((1, 1, 2, 5)), ignore_eos=True),
            eos_token_id=None,
            stop_token_ids=(),
            options=RequestOptions(priority=dice.randrange(2)),
            arrival_time=float(id),
        )


def mixed(stage: Hashable, given: int, before: int) -> int:
    """Return a stage's value of a position."""
    return hash((stage, given, before)) & 0xFFFFFFFF


def note_plan(feedback: Feedback, plan: StepPlan) -> None:
    """Note which rows of a plan will get tokens, and at which positions."""
    ends = map(sum, zip(plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True))
    feedback.note_plan(
        plan.step,
        new_rows=[new.request_slot for new in plan.new_sequences],
        rows=plan.request_slots,
        ends=list(ends),
        num_wanted=plan.num_sampled_tokens,
    )


class SimulatedStage:
    """Rows, block tables and the cache of one stage."""

    def __init__(
        self,
        index: int,
        block_size: int,
        *,
        keeps_states: bool = False,
        saves_at_ends: bool = False,
    ) -> None:
        self.index, self._block_size = index, block_size
        self._keeps_states, self._saves_at_ends = keeps_states, saves_at_ends
        # By row, and by row of a snapshot: how many tokens the state has seen, and the state.
        self._states: dict[int, tuple[int, int]] = {}
        self.tokens: dict[int, dict[int, int]] = {}  # by row, by position
        self._tables: dict[int, list[int]] = {}
        self._cache: dict[tuple[int, int], int] = {}
        self.plans: deque[StepPlan] = deque()
        self.output: tuple[StepPlan, list[list[int]]] | None = None  # computed and not passed on

    def apply(self, plan: StepPlan) -> None:
        for new in plan.new_sequences:
            self._place(new)
        for row, blocks in plan.new_blocks:
            self._tables[row].extend(blocks)
        for source, target in plan.copies:
            for offset in range(self._block_size):
                if (source, offset) in self._cache:
                    self._cache[target, offset] = self._cache[source, offset]

    def _place(self, new: NewSequence) -> None:
        self.tokens[new.request_slot] = dict(enumerate(new.token_ids))
        self._tables[new.request_slot] = list(new.block_ids)
        if new.state_row >= 0:
            self._states[new.request_slot] = self._states[new.state_row]

    def write_tokens(self, feedback: Feedback, step: int, token_ids: list[int]) -> None:
        """Put the tokens of a step into the rows that still have their sequences."""
        for write in feedback.take(step, token_ids):
            if write.row in self.tokens:
                self.tokens[write.row][write.position] = write.token_id

    def compute(self, plan: StepPlan, given: list[list[int]] | None) -> list[list[int]]:
        """Return the values of each entry's positions, from the stage before or from the tokens."""
        found: list[list[int]] = []
        entries = zip(
            plan.request_slots, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        )
        for entry, (row, start, count) in enumerate(entries):
            values: list[int] = []
            state = self._state_at(row, start, plan)
            for position in range(start, start + count):
                if given is None and position not in self.tokens[row]:
                    raise SimulationFault(f"step {plan.step} reads a token that has not come")
                value = (
                    self.tokens[row][position] if given is None else given[entry][position - start]
                )
                before = self._cache.get(self._place_of(row, position - 1), -1) if position else 0
                if self._keeps_states:
                    before = mixed("state", state, before)
                kept, value = self.value_of(value, before)
                self._cache[self._place_of(row, position)] = kept
                values.append(value)
                if self._keeps_states:
                    state = mixed("state", kept, state)
                    self._save(
                        row, position + 1, state, plan, is_last=position + 1 == start + count
                    )
            found.append(values)
        return found

    def _state_at(self, row: int, start: int, plan: StepPlan) -> int:
        """Return the state with which an entry begins."""
        if not self._keeps_states or not start:
            return 0
        position, state = self._states.get(row, (-1, 0))
        if position != start:
            rule = f"stage {self.index} has a state at {position}, and step {plan.step} begins at {start}"
            raise SimulationFault(rule)
        return state

    def _save(self, row: int, position: int, state: int, plan: StepPlan, *, is_last: bool) -> None:
        """Keep the state of a row behind its last token, and copy it to the rows that the plan names."""
        for slot, target, at in plan.saves:
            if slot == row and (is_last if self._saves_at_ends else at == position):
                self._states[target] = (at, state)
        if is_last:
            self._states[row] = (position, state)

    def value_of(self, given: int, before: int) -> tuple[int, int]:
        """Return what is kept of a position, and what is passed on."""
        value = mixed(self.index, given, before)
        return value, value

    def _place_of(self, row: int, position: int) -> tuple[int, int]:
        return self._tables[row][position // self._block_size], position % self._block_size


class StagesWorld(TurnsWorld):
    """Runs a scenario to its end.

    Raises:
        SimulationFault: a deadlock, a wrong token, an end too many, or a row planned before its turn.
    """

    def __init__(
        self, seed: int, rules: Rules | None = None, scenario: Scenario | None = None
    ) -> None:
        scenario = scenario or Scenario(seed)
        super().__init__(scenario)
        self._rules = rules or Rules()
        blocks = KVBlocks(scenario.num_blocks + 1, scenario.block_size, scenario.prefix_caching)
        states = None
        if scenario.num_snapshots:
            sizes = scenario.config.max_num_seqs, scenario.num_snapshots, scenario.block_size
            states = StateSnapshots(
                *sizes,
                has_cache=scenario.prefix_caching,
                interval=scenario.block_size,
                spacing=scenario.block_size,
            )
        self.policy = Policy(scenario.config, blocks, states=states)
        self._to_abort = [id for id, is_aborted in scenario.aborts.items() if is_aborted]
        self._num_kills = 0
        self._start_stages()

    def _start_stages(self) -> None:
        scenario, num = self._scenario, self._scenario.num_stages
        self._stages = [
            SimulatedStage(
                index,
                scenario.block_size,
                keeps_states=scenario.num_snapshots > 0,
                # Only the last stage has the bug.
                saves_at_ends=self._rules.saves_at_ends and index == num - 1,
            )
            for index in range(num)
        ]
        self._hidden: list[deque[tuple[int, list[list[int]]]]] = [deque() for _ in range(num - 1)]
        self._token_ring: deque[tuple[int, list[int]]] = deque()
        self._num_token_entries = num_ring_entries(num) + self._rules.num_token_entries
        self._feedback = self._rules.feedback()
        self._answers: deque[StepDone] = deque()
        self._sampled: list[int] = [0]  # steps of this pipeline that have sent tokens
        self._num_read = 0  # the newest step whose tokens the first stage has

    @property
    def subject(self) -> Policy:
        return self.policy

    def take_turns(self) -> bool:
        turns = [self._front, *(lambda s=s: self._stage(s) for s in self._stages)]
        self._dice.shuffle(turns)
        is_busy = self._clients() or any(turn() for turn in turns)
        if (
            is_busy
            and self._dice.random() < self._scenario.kill_share
            and self._num_kills < MAX_KILLS
        ):
            self._num_kills += 1
            self._kill()
        return is_busy

    def _clients(self) -> bool:
        """Admit or abort, now and then."""
        if self._to_admit and self._dice.random() < 0.3:
            self.policy.admit(self._to_admit.popleft())
            return True
        if self._to_abort and self._dice.random() < 0.1:
            self.policy.abort(self._to_abort.pop())
            self.take_outputs()
            return True
        return bool(self._to_admit)

    def _front(self) -> bool:
        if self._answers:
            self.policy.apply(self._answers.popleft())
            self.take_outputs()
            return True
        running = self.policy.table.running.snapshot()
        due = [s.id for s in running if self._is_due(s)]
        plan = self.policy.plan()
        self.take_outputs()
        if plan is None:
            return False
        is_early = plan.reads > 0 and plan.step - plan.reads < self._scenario.num_stages
        if is_early and due and set(due) <= set(self.policy.table.running.ids):  # none made room
            raise SimulationFault(f"{plan} is early, while {due} are due")
        for stage in self._stages:
            stage.plans.append(plan)
        return True

    def _is_due(self, sequence: Sequence) -> bool:
        """Whether a plan may take it that waits for nothing."""
        step = self.policy.statistics().num_steps + 1
        known = sequence.num_tokens + sequence.num_in_flight
        waits = sequence.num_in_flight and not is_due(
            step - 1 - sequence.sampling_step, self._scenario.num_stages
        )
        return known < sequence.limit and not waits

    def _stage(self, stage: SimulatedStage) -> bool:
        if stage.index == self._scenario.slow_stage and self._dice.random() < 0.8:
            return bool(stage.plans or stage.output)  # it is only late
        if stage.output is not None:
            return self._pass_on(stage, *stage.output)
        if not stage.plans:
            return False
        plan = stage.plans[0]
        if stage.index > 0:
            ring = self._hidden[stage.index - 1]
            if not ring:
                return False
            step, given = ring.popleft()
            if step != plan.step:
                raise SimulationFault(f"hidden states of step {step} at step {plan.step}")
        else:
            given = None
            if not self._read_tokens(plan):
                return False
        stage.plans.popleft()
        stage.apply(plan)
        stage.output = plan, stage.compute(plan, given)
        return True

    def _read_tokens(self, plan: StepPlan) -> bool:
        """Take what has come; False while a token is missing that the plan reads."""
        feedback, rules = self._feedback, self._rules
        if self._noted != plan.step:
            note_plan(feedback, plan)
            self._noted = plan.step
        reads = plan.step - 1 if rules.waits_every_step else plan.reads
        while self._token_ring and (
            not rules.drains_only_to_read or feedback.must_wait(min(reads, plan.step - 1))
        ):
            step, token_ids = self._token_ring.popleft()
            self._stages[0].write_tokens(feedback, step, token_ids)
            self._num_read = step
        if rules.waits_every_step:
            return self._num_read >= reads
        return not feedback.must_wait(min(reads, plan.step - 1))

    _noted = 0

    def _pass_on(self, stage: SimulatedStage, plan: StepPlan, values: list[list[int]]) -> bool:
        if stage.index < self._scenario.num_stages - 1:
            ring = self._hidden[stage.index]
            if len(ring) >= self._scenario.hidden_entries:
                return False
            ring.append((plan.step, values))
            stage.output = None
            return True
        wanted = plan.num_sampled_tokens
        token_ids = [
            found[-1] % VOCABULARY if num else -1 for found, num in zip(values, wanted, strict=True)
        ]
        sends = sends_tokens(wanted)
        if self._rules.masks_by_itself:  # it has seen which sequences are still planned
            sends = sends and any(
                row in p.request_slots for p in stage.plans for row in plan.request_slots
            )
        if sends:
            if len(self._token_ring) >= self._num_token_entries:
                return False
            self._token_ring.append((plan.step, token_ids))
        answer = tuple((token,) if token >= 0 else () for token in token_ids)
        self._answers.append(StepDone(plan.step, answer))
        stage.output = None
        return True

    def _kill(self) -> None:
        """All stages end together, and new ones take their place."""
        in_flight = self.policy.in_flight
        step = in_flight[0].step if in_flight else None
        self.policy.lose_device(DeviceLost("killed", step, is_from_outside=True))
        self._start_stages()
        self._noted = 0
        self.policy.return_device()

    def check_end(self) -> None:
        scenario = self._scenario
        if len(self._ends) < len(scenario.requests):
            raise SimulationFault(f"deadlock: {self.policy}, {self._feedback}, {self._token_ring}")
        for request in scenario.requests:
            is_whole = self._ends[request.id] == "length"
            self.check_tokens(request.id, scenario.expected_tokens(request), is_whole=is_whole)
        blocks = self.policy.blocks
        if blocks.num_free != blocks.num_usable:
            raise SimulationFault(f"blocks are left: {blocks}")
        if self.policy.statistics().num_state_rows_pending:
            raise SimulationFault(f"rows of states are left: {self.policy.states}")


if __name__ == "__main__":
    run_for_seconds(StagesWorld, __doc__)
