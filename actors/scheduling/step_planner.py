"""Choose the sequences of the next step and the number of tokens that each of them computes, and predict first tokens.

Decoding sequences go first, because each of them costs one token and its reader waits for it.  Prompts fill the rest of the step:
in the fluid order while step times are learnt, else in the order of arrival.  A search for the request that killed the device
replaces this order: then a step contains only suspects.

The planner owns what limits a step: the token budget, which shrinks when the device is out of memory, and the number of drafts.
`FirstTokens` predicts from the same rules when a request gets its first token, and records the errors of its predictions.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence

from trouper.actors.messages.outputs import Expected
from trouper.actors.scheduling.culprit_search import Quarantine
from trouper.actors.scheduling.prompt_turns import PromptTurns
from trouper.actors.scheduling.state.sequence import Sequence as Grown
from trouper.actors.scheduling.state.sequence_table import SequenceTable, start_waiting
from trouper.actors.scheduling.state.step_builder import (
    InFlightSteps,
    Lookahead,
    StepBuilder,
    take_turns,
)
from trouper.actors.scheduling.step_time import TokenBudget, remaining_s
from trouper.actors.stages import max_chunk
from trouper.config.engine_config import SchedulerConfig

# Later requests pass a prompt with more tokens to compute than this, so its prediction is a lower bound.
LONG = 2048
# The number of comparisons to keep, and the number needed before an error is known.
NUM_KEPT, NUM_NEEDED = 256, 64
# Open prompts of a replica that a new request is compared with, at a microsecond each.  Behind more, replicas are chosen by tokens.
MOST_COMPARED = 512
# The quantile of the errors that deadlines allow for.
RANK = 0.9


def predict_first_token(
    turns: PromptTurns, sequence: Grown, flights_s: Sequence[float], elapsed_s: float
) -> tuple[float, bool] | None:
    """Return the seconds until the first token of a sequence, and whether this is a lower bound.  Returns None before the first fit.

    Args:
        flights_s: estimates of the plans in flight, the eldest first.
        elapsed_s: seconds since the first of them became the eldest.
    """
    turns.refresh()
    times = turns.times
    if not times.is_known:
        return None
    left_s = remaining_s(flights_s, elapsed_s)
    job = turns.fluid.open.get(sequence.id)
    if job is None:  # a plan in flight has the end of its prompt
        return left_s, False
    work_s = 0.0
    for other in turns.in_order():
        work_s += times.cost(turns.start_of(other), other.num_tokens)
        if other is job:
            break
    return left_s + turns.seconds_until(work_s), job.num_tokens > LONG


def expect(
    turns: PromptTurns, sequence: Grown, start: int, flights_s: Sequence[float], elapsed_s: float
) -> float | None:
    """Return the seconds until the first token of a sequence that entered now.  Returns None before the first fit, or when too many prompts are open.

    Args:
        start: the first position that it would compute.
        flights_s, elapsed_s: as `predict_first_token` takes them.
    """
    turns.refresh()
    times = turns.times
    if not times.is_known or len(turns.fluid.open) > MOST_COMPARED:
        return None
    work_s = times.cost(start, sequence.num_tokens - start)
    for other in turns.ahead_of(sequence, sequence.num_tokens - start):
        work_s += times.cost(turns.start_of(other), other.num_tokens)
    return remaining_s(flights_s, elapsed_s) + turns.seconds_until(work_s)


class FirstTokens:
    """Keep the open predictions of first tokens, and the errors of the past ones.

    The scheduler promises a time to each client, and this measures how good the promises are.
    """

    def __init__(self) -> None:
        # By sequence: the time of the prediction, and the predicted seconds.  Each ends with its sequence.
        self._open: dict[int, tuple[float, float]] = {}
        # |predicted / true - 1|
        self._errors: deque[float] = deque(maxlen=NUM_KEPT)
        # predicted / true, until `take_ratios`
        self.ratios: list[float] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def error(self) -> float | None:
        """The relative error of the worst in ten predictions.  None before enough have been compared.

        It accompanies later predictions, so a client can judge them.
        """
        if len(self._errors) < NUM_NEEDED:
            return None
        return sorted(self._errors)[int(RANK * len(self._errors))]

    def note(self, expected: Expected, now: float) -> None:
        """Keep a prediction for comparison.  Lower bounds are not compared.

        A lower bound is no claim about the time, so it would distort the error.
        """
        if not expected.is_least:
            self._open[expected.id] = now, expected.seconds

    def compare(self, ids: Iterable[tuple[int, bool]], now: float) -> None:
        """Compare predictions with the sequences of an output, each with whether it has a token.

        A sequence that ends without a token has no true time, and its prediction is dropped.
        """
        for id, has_token in ids:
            found = self._open.pop(id, None)
            if found is None or not has_token:
                continue
            began, seconds = found
            true_s = now - began
            if 0 < true_s < math.inf:
                self._errors.append(abs(seconds / true_s - 1))
                self.ratios.append(seconds / true_s)

    def take_ratios(self) -> tuple[float, ...]:
        """Take the ratios of predicted to true seconds since the last call.

        The observer shows them as a histogram; 1 is a perfect prediction.
        """
        ratios, self.ratios = tuple(self.ratios), []
        return ratios


class StepPlanner:
    """Fill the steps of one policy.

    Args:
        turns: the order and the seconds of prompts.  None computes prompts in the order of arrival.
        num_stages: pipeline stages that can work at the same time.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        table: SequenceTable,
        turns: PromptTurns | None,
        num_stages: int,
    ) -> None:
        self.token_budget = TokenBudget(config.max_num_scheduled_tokens)
        self.lookahead = Lookahead(config.num_speculative_tokens)
        self._config = config
        self._table = table
        self._turns = turns
        self._num_stages = num_stages
        self._max_num_running = min(config.max_num_seqs, config.max_num_active_seqs)

    def begin(self, in_flight: InFlightSteps) -> StepBuilder:
        """Open an empty step behind the steps in flight.

        Its budget is that of the device's memory and of the configuration.
        """
        table = self._table
        num_competing = len(table.running) + len(table.waiting)
        builder = StepBuilder(self._config, num_competing, self.token_budget.num_tokens)
        builder.unknown = in_flight.unknown_tokens()
        builder.states = table.running.states
        if num_competing == 1:
            builder.max_count = min(builder.max_count, self._longest_lone_chunk())
        return builder

    def _longest_lone_chunk(self) -> int:
        """Return the chunk size of a prompt without others: small enough to keep all stages busy."""
        budget, table = self.token_budget.num_tokens, self._table
        if self._num_stages == 1 or not self._config.enable_chunked_prefill:
            return budget
        alone = [
            *table.running.snapshot(),
            *filter(None, (table.waiting.head(only_returning=False),)),
        ]
        if len(alone) != 1:
            return budget
        return max_chunk(alone[0].num_tokens, self._num_stages, budget)

    def fill(self, builder: StepBuilder, step: int, *, only_returning: bool) -> None:
        """Plan for running sequences, then for waiting ones.

        Args:
            step: the number of the step.
            only_returning: start only sequences that ran before.
        """
        if self._config.enable_chunked_prefill:
            builder.encode_s = self._config.encode_s
        if self._turns is not None and self._turns.has_prompts:
            self._fill_in_turns(builder, self._turns, step, only_returning=only_returning)
            return
        running, num_stages = self._table.running, self._num_stages
        if num_stages == 1:
            builder.max_lookahead = self.lookahead.per_sequence(
                len(running), self.token_budget.num_tokens
            )
            running.schedule(builder, running.snapshot())
            if not builder.has_preempted:
                self._start_waiting(builder, only_returning=only_returning)
            return
        running.schedule(builder, take_turns(running.snapshot(), step, num_stages))
        if not builder.has_preempted:
            self._start_waiting(builder, only_returning=only_returning)
        # A preemption may have made room, so the others are tried again.
        num_before = len(running) + 1
        while not builder.sequences and len(running) < num_before:
            num_before = len(running)
            running.schedule(
                builder, take_turns(running.snapshot(), step, num_stages, is_early=True)
            )

    def _fill_in_turns(
        self, builder: StepBuilder, turns: PromptTurns, step: int, *, only_returning: bool
    ) -> None:
        """Plan for decoding sequences, then for running and waiting prompts in the fluid order."""
        running, num_stages = self._table.running, self._num_stages
        rows = turns.rows()
        if num_stages == 1:
            builder.max_lookahead = self.lookahead.per_sequence(
                len(running), self.token_budget.num_tokens
            )
            turns.limit_drafts(builder, len(rows))
        else:
            rows = take_turns(rows, step, num_stages)
        running.schedule(builder, rows)
        turns.fill(builder, only_returning=only_returning)
        # A preemption may have made room, so the others are tried again.
        num_before = len(running) + 1
        while num_stages > 1 and not builder.sequences and len(running) < num_before:
            num_before = len(running)
            early = take_turns(turns.rows(), step, num_stages, is_early=True)
            running.schedule(builder, early)

    def _start_waiting(self, builder: StepBuilder, *, only_returning: bool) -> None:
        start_waiting(self._table, builder, self._max_num_running, only_returning=only_returning)

    def fill_with_suspects(
        self, builder: StepBuilder, quarantine: Quarantine, in_flight: InFlightSteps
    ) -> bool:
        """Plan only for the suspects under test.  Returns False if there is nothing to plan for them now.

        Other sequences must not share a step with them, because the next loss could then have two causes.
        """
        table, ids_in_flight = self._table, in_flight.sequence_ids()
        while quarantine:
            group = quarantine.group(ids_in_flight)
            due = [suspect.sequence for suspect in group if suspect.is_due]
            table.running.schedule(builder, [s for s in due if s.request_slot >= 0])
            for sequence in due:
                # A sequence preempted with a sample in flight does not wait yet (law 3 of the policy).
                is_waiting = sequence.request_slot < 0 and sequence.num_in_flight == 0
                is_ready = table.grammars.is_ready(sequence.request.admit)
                may_start = is_waiting and is_ready and not builder.has_preempted
                if may_start and builder.budget > 0 and len(table.running) < self._max_num_running:
                    if not table.running.start(sequence, builder):
                        break
                    table.waiting.take(sequence)
                    if not sequence.is_ghost:
                        table.outputs.add_start(sequence.id)
            if builder.sequences:
                return True
            if in_flight or not all(
                table.grammars.is_ready(s.sequence.request.admit) for s in group
            ):
                return False
            # Suspects make room for the others after the test.
            table.running.preempt_all()
            builder.has_preempted = False
            if not group:
                quarantine.advance()
        return False
