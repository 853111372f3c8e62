"""A device that computes nothing and forgets nothing: for simulations, tests and dry runs.

It is a paged KV cache of *facts*.  The entry of a position is a hash of its token and of every entry
before it, read through the block table that the scheduler gave; the next token is a hash of all entries,
read back through the table, with the seed and the position.  Blocks are poisoned when they are given to
a row for writing.  So a wrong table, a use after free, a stale prefix hit, a copy that was forgotten or
two writers of one block change tokens, and `simulated_tokens` says what they should have been.

If layers have windows, each group of layers has tables and entries of its own, and a query reads no entry behind its window.  What it
reads and should not be there changes all tokens that follow; the null block is never written, so it is always wrong.

With rows of states it is a recurrent model too: the state of a slot is the hash of all entries so far.  A step that begins with
another state than that of its position mixes it into all entries that follow, so a stale, torn or foreign state changes tokens.

Time is `anyio.sleep`: virtual when the clock is a mock.
"""

import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from trouper.actors.executor.device import DeviceEvent, DeviceInfo, StepResult, timed
from trouper.actors.messages.controls import DeviceAction, LoadAdapter, Sleep, Wake
from trouper.actors.messages.requests import GrammarReady, PrepareGrammar, SequenceId
from trouper.actors.messages.steps import (
    EntryFailure,
    NewSequence,
    PoolPlan,
    Sampling,
    StepDone,
    StepFailed,
    StepPlan,
    TierAnswer,
    TierOrder,
    TokenLogprobs,
    is_state,
)
from trouper.config.kv_layout import KVLayout

if TYPE_CHECKING:
    from .simulated_tier import SimulatedTier

ENTRY_BYTES = 8
POISON = b"\xee" * ENTRY_BYTES
MEMORY = frozenset({"weights", "kv_cache"})
UNKNOWN = -1  # a token id that no step has sampled
Plan = TypeVar("Plan", StepPlan, PoolPlan)


class StepError(msgspec.Struct, frozen=True):
    """An error that the device survives, after `num_columns` of the step have been computed."""

    message: str
    num_columns: int = 0


class Conditions:
    """Faults and durations of steps; the default has no faults and a constant speed.

    A subclass may be asked in any order, but once a plan: `duration_s`, then `error`, then the rest.
    """

    def __init__(self, step_s: float = 0.01, load_s: float = 0.0) -> None:
        self.step_s = step_s
        self.load_s = load_s

    def duration_s(self, plan: StepPlan | PoolPlan) -> float:
        return self.step_s

    def call_s(self, method: str) -> float:
        """The duration of anything but a step; an exception raised here goes to the task that asked for it."""
        return self.step_s

    def prepare_s(self, order: PrepareGrammar) -> float:
        """How long a grammar takes to be compiled."""
        return self.step_s

    def error(
        self, plan: StepPlan | PoolPlan, sequences: tuple[SequenceId, ...]
    ) -> StepError | None:
        """An error to survive, or an exception raised for one that the device does not survive."""
        return None

    def num_right(self, sequence: SequenceId, num_drafts: int) -> int:
        """How many of the drafts behind a sampled token are right."""
        return num_drafts

    def is_finite(self, sequence: SequenceId, position: int) -> bool:
        """Whether the logits that yield the token at `position` are; of a text that is pooled, its result."""
        return True


class SimulatedSteps(ABC, Generic[Plan]):
    """Steps in virtual time, one after the other; what one computes is the subclass's."""

    _kind: ClassVar[type[Any]]  # of plan
    process_ids: tuple[int, ...] = ()

    def __init__(
        self, info: DeviceInfo, max_steps_in_flight: int, conditions: Conditions | None
    ) -> None:
        self._info = info
        self._conditions = conditions or Conditions()
        self._queue: deque[tuple[Plan, float]] = deque()
        self._max_steps_in_flight = max_steps_in_flight
        self._prepared: deque[tuple[GrammarReady, float]] = deque()  # and when; at most one
        self._grammars: set[bytes] = set()  # keys of those that are there
        self._released: deque[tuple[int, tuple[bytes, ...]]] = deque()  # behind these steps
        self._submitted = anyio.Event()
        self._answered = anyio.Event()
        self._absent: frozenset[str] = frozenset()  # memory that sleeps
        self._adapters: dict[int, bytes] = {}  # what the slots hold
        self._is_free_at = -math.inf
        # When the eldest plan began, and when it ends.
        self._head: tuple[float, float] | None = None
        self.tier: SimulatedTier | None = None
        self._tier_orders: deque[tuple[int, TierOrder]] = deque()  # behind these steps
        self._tier_answers: deque[TierAnswer] = deque()
        self._refused_epoch = -1
        self._is_closed = False

    @abstractmethod
    def _run(self, plan: Plan) -> StepResult: ...

    @abstractmethod
    def _forget(self) -> None:
        """The memory has gone to sleep."""

    async def load(self) -> DeviceInfo:
        await anyio.sleep(self._conditions.load_s)
        return self._info

    def submit(self, plan: StepPlan | PoolPlan) -> None:
        assert isinstance(plan, self._kind)
        if self._is_closed:
            raise RuntimeError("the device is closed")
        if self._absent:
            raise RuntimeError(f"a step while {sorted(self._absent)} are absent")
        if len(self._queue) >= self._max_steps_in_flight:
            raise RuntimeError(f"{len(self._queue)} steps are in flight already")
        self._queue.append((cast("Plan", plan), anyio.current_time()))
        self._submitted.set()

    def order_tier(self, order: TierOrder) -> None:
        if self.tier is None:
            raise NotImplementedError("there is no tier on disk")
        self.tier.open.add(order.number)
        self._tier_orders.append((self._queue[-1][0].step if self._queue else 0, order))
        if not self._queue:
            self._pass_orders(0)
        self._submitted.set()

    def _pass_orders(self, step: int) -> None:
        """Pass the orders behind this step to the tier, which takes them between two plans."""
        while self._tier_orders and self._tier_orders[0][0] <= step:
            _, order = self._tier_orders.popleft()
            assert self.tier is not None
            self.tier.order(order)

    def _note_tier(self, answer: TierAnswer) -> None:
        self._tier_answers.append(answer)
        self._submitted.set()

    def prepare(self, order: PrepareGrammar) -> None:
        if self._prepared:
            raise RuntimeError("a grammar is being prepared already")
        self._released.append((self._queue[-1][0].step if self._queue else 0, order.released))
        if not self._queue:
            self._release(0)
        ready_at = anyio.current_time() + self._conditions.prepare_s(order)
        self._prepared.append((GrammarReady(order.grammar.key), ready_at))
        self._submitted.set()

    async def receive(self) -> DeviceEvent:
        """A grammar that is ready while a step is computed is answered behind it."""
        while True:
            tier_at = math.inf if self.tier is None else self.tier.next_at
            if self.tier is not None and tier_at <= anyio.current_time():
                self.tier.finish()
            elif self._tier_answers:
                await anyio.lowlevel.checkpoint()
                return self._tier_answers.popleft()
            elif not self._queue:
                self._submitted = anyio.Event()
                ready_at = self._prepared[0][1] if self._prepared else math.inf
                with anyio.CancelScope(deadline=min(ready_at, tier_at)):
                    await self._submitted.wait()
                if anyio.current_time() >= ready_at:
                    return self._take_ready()
            elif self._prepared and self._prepared[0][1] <= anyio.current_time():
                return self._take_ready()
            elif (answer := await self._compute_eldest(tier_at)) is not None:
                return answer

    async def _compute_eldest(self, until_s: float) -> StepResult | None:
        """Compute the eldest plan.  Returns None if it ends later than the tier needs attention."""
        plan, submitted_at = self._queue[0]
        if self._head is None:
            begin = end = anyio.current_time()
            if plan.epoch > self._refused_epoch:
                begin = max(submitted_at, self._is_free_at)
                end = self._is_free_at = begin + self._conditions.duration_s(plan)
            self._head = begin, end
        begin, end = self._head
        if until_s < end:
            await anyio.sleep_until(until_s)
            return None
        if plan.epoch > self._refused_epoch:
            await anyio.sleep_until(end)
        else:
            await anyio.lowlevel.checkpoint()
        self._head = None
        self._queue.popleft()
        self._answered.set()
        result = self._run(plan)
        self._release(plan.step)
        self._pass_orders(plan.step)
        return timed(result, anyio.current_time() - begin)

    def _release(self, step: int) -> None:
        """Give up the grammars that no plan follows any more when this step is done."""
        while self._released and self._released[0][0] <= step:
            self._grammars -= set(self._released.popleft()[1])

    def _take_ready(self) -> GrammarReady:
        ready, _ = self._prepared.popleft()
        self._grammars.add(ready.key)
        return ready

    async def call(self, action: DeviceAction) -> object:
        """Asleep it refuses plans, and what its memory held is gone."""
        while self._queue:
            self._answered = anyio.Event()
            await self._answered.wait()
        await anyio.sleep(self._conditions.call_s(action.name))
        match action:
            case Sleep():
                self._absent = MEMORY
                if self.tier is not None:
                    self.tier.detach()
                self._forget()
            case Wake(tags):
                self._absent -= tags
                if "kv_cache" not in self._absent:
                    self._attach_tier()
            case LoadAdapter(slot, files):
                self._adapters[slot] = files.weights
            case _:
                pass  # there is nothing to profile
        return None

    def _attach_tier(self) -> None:
        """Give the memory to the tier, if there is one."""

    def drop_plans(self) -> None:
        """Forget all plans, also the one that is being computed."""
        self._queue.clear()
        self._head = None

    async def aclose(self) -> None:
        """Plans that have not been collected are forgotten."""
        self._is_closed = True
        if self.tier is not None:
            self.tier.close()
        self.drop_plans()
        await anyio.lowlevel.checkpoint()


class SimulatedPages:
    """The blocks of a simulated device as bytes, in place of a KV cache."""

    codec = None

    def __init__(self, cache: bytearray, block_bytes: int) -> None:
        self._cache, self.num_bytes = cache, block_bytes

    def copy_out(self, block: int, raw: NDArray[np.uint8]) -> None:
        start = block * self.num_bytes
        raw[:] = np.frombuffer(bytes(self._cache[start : start + self.num_bytes]), np.uint8)

    def copy_in(self, block: int, raw: NDArray[np.uint8]) -> None:
        start = block * self.num_bytes
        self._cache[start : start + self.num_bytes] = raw.tobytes()


class SimulatedStates:
    """The rows of states of a simulated device as bytes, in place of a `StatePool`."""

    codec, num_bytes = None, ENTRY_BYTES

    def __init__(self, states: dict[int, bytes]) -> None:
        self._states = states

    def copy_out(self, row: int, raw: NDArray[np.uint8]) -> None:
        raw[:] = np.frombuffer(self._states.get(row, POISON), np.uint8)

    def copy_in(self, row: int, raw: NDArray[np.uint8]) -> None:
        self._states[row] = raw.tobytes()


class _Row:
    """State of one sequence on the device."""

    def __init__(self, new: NewSequence) -> None:
        self.slot = new.request_slot
        self.sequence = new.sequence
        self.token_ids = list(new.token_ids)
        self.num_prompt = new.num_prompt
        self.table = list(new.block_ids)
        self.sampling = new.sampling
        self.adapter_slot = new.adapter_slot
        self.end = 0  # of its last entry, and of the drafts that were right


class SimulatedDevice(SimulatedSteps[StepPlan]):
    """A `Device` of `num_blocks` KV blocks, the null block included, on a model of `vocab_size` tokens."""

    _kind = StepPlan

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        max_steps_in_flight: int,
        conditions: Conditions | None = None,
        *,
        num_slots: int = 0,
        num_snapshots: int = 0,
        layout: KVLayout | None = None,
        tier: "SimulatedTier | None" = None,
    ) -> None:
        """Make a device; with snapshots, its model keeps recurrent states, of which the first rows belong to the slots.

        Args:
            layout: the groups of layers; without it there is one, which sees all tokens.
            tier: of blocks on disk, for one group of layers.
        """
        info = DeviceInfo(num_blocks, block_size, "float32", "simulated", layout=layout)
        self._windows = info.kv_layout.windows
        if num_snapshots:
            info = msgspec.structs.replace(
                info, num_state_rows=num_slots, num_snapshots=num_snapshots, state_bytes=ENTRY_BYTES
            )
        super().__init__(info, max_steps_in_flight, conditions)
        self.tier = tier
        self._states: dict[int, bytes] = {}
        # Of each slot and position in the step: the rows that are saved there.
        self._saves: dict[tuple[int, int], list[int]] = {}
        self._vocab_size = vocab_size
        self._stride = block_size * ENTRY_BYTES
        self._cache = bytearray(POISON * (block_size * num_blocks))
        self._rows: dict[int, _Row] = {}

    def __repr__(self) -> str:
        return f"<SimulatedDevice {len(self._rows)} rows, {len(self._queue)} steps out>"

    def _forget(self) -> None:
        self._rows.clear()
        self._states.clear()
        self._poison(range(self._info.num_blocks))

    async def load(self) -> DeviceInfo:
        info = await super().load()
        if self.tier is not None:
            self.tier.start(self._poison_fetched, self._note_tier)
            self._attach_tier()
        return info

    def _attach_tier(self) -> None:
        if self.tier is not None:
            pages, states = SimulatedPages(self._cache, self._stride), SimulatedStates(self._states)
            self.tier.attach(pages, states)

    async def aclose(self) -> None:
        self._rows.clear()
        await super().aclose()

    def _run(self, plan: StepPlan) -> StepDone | StepFailed:
        if plan.epoch <= self._refused_epoch:
            return self._refuse(plan, "an earlier step failed")
        self._apply(plan)
        rows = [self._rows[row] for row in plan.request_slots]
        error = self._conditions.error(plan, tuple(row.sequence for row in rows))
        num_columns = len(rows) if error is None else min(error.num_columns, len(rows))
        tokens: list[tuple[int, ...]] = []
        logprobs: list[tuple[TokenLogprobs, ...]] = []
        prompt_logprobs: list[tuple[int, tuple[TokenLogprobs, ...]]] = []
        failed: list[tuple[int, EntryFailure]] = []
        starts = self._starts(plan, rows)
        for i, (row, start, count) in enumerate(
            zip(rows, starts, plan.num_scheduled_tokens, strict=True)
        ):
            if i >= num_columns:
                self._spoil(row, start, start + count)
                continue
            if known := self._compute(row, start, start + count):
                prompt_logprobs.append((i, known))
            if plan.num_sampled_tokens[i]:
                num_drafts = plan.num_lookahead_tokens[i] if plan.num_lookahead_tokens else 0
                tokens.append(self._sample_run(row, start, start + count, num_drafts))
            else:
                tokens.append(())
            if plan.num_sampled_tokens[i] and not tokens[-1]:
                failed.append((i, "not_finite"))
            row.end = start + count + max(len(tokens[-1]) - 1, 0)
            logprobs.append(self._token_logprobs(row, start + count, tokens[-1]))
        if error is not None:
            self._refused_epoch = plan.epoch
            return self._refuse(plan, error.message)
        return StepDone(
            plan.step,
            tuple(tokens),
            tuple(logprobs) if any(logprobs) else (),
            tuple(prompt_logprobs),
            tuple(failed),
            plan.num_lookahead_tokens,
        )

    def _starts(self, plan: StepPlan, rows: Sequence[_Row]) -> Sequence[int]:
        """Return where the entries begin: where drafts were in flight, as far behind as they were right."""
        if not plan.num_unknown_tokens:
            return plan.num_computed_tokens
        starts = [
            row.end if unknown else start
            for row, start, unknown in zip(
                rows, plan.num_computed_tokens, plan.num_unknown_tokens, strict=True
            )
        ]
        most = map(sum, zip(plan.num_computed_tokens, plan.num_unknown_tokens, strict=True))
        for first, start, last in zip(plan.num_computed_tokens, starts, most, strict=True):
            if not first <= start <= last:
                raise ValueError(f"step {plan.step}: an entry at {start}, not {first} to {last}")
        return starts

    def _refuse(self, plan: StepPlan, message: str) -> StepFailed:
        """Fail the step and forget its request slots: their contents are undefined, so they must be given again."""
        for row in plan.request_slots:
            self._rows.pop(row, None)
        return StepFailed(plan.step, message)

    def _apply(self, plan: StepPlan) -> None:
        """Rows, tables and copies: everything that comes before the computation."""
        self._check(plan)
        starts = dict(zip(plan.request_slots, plan.num_computed_tokens, strict=True))
        self._saves.clear()
        for slot, row, position in plan.saves:
            self._saves.setdefault((slot, position), []).append(row)
        for new in plan.new_sequences:
            self._rows[new.request_slot] = _Row(new)
            if new.state_row >= 0:
                self._states[new.request_slot] = self._states.get(new.state_row, POISON)
            num_shared = -(-starts[new.request_slot] // self._info.block_size)
            self._poison(new.block_ids[num_shared * len(self._windows) :])
        for row, blocks in plan.new_blocks:
            self._rows[row].table.extend(blocks)
            self._poison(blocks)
        stride = self._stride
        for source, target in plan.copies:
            entries = self._cache[source * stride : (source + 1) * stride]
            self._cache[target * stride : (target + 1) * stride] = entries

    def _check(self, plan: StepPlan) -> None:
        """A plan that breaks the protocol is a bug of its maker."""
        known = self._rows.keys() | {new.request_slot for new in plan.new_sequences}
        starts = dict(zip(plan.request_slots, plan.num_computed_tokens, strict=True))
        given = [
            block
            for new in plan.new_sequences
            for place, block in enumerate(new.block_ids)
            if block or not self._is_behind(place, starts.get(new.request_slot, 0))
        ]
        given += [block for _, blocks in plan.new_blocks for block in blocks]
        given += [block for _, target in plan.copies for block in (target,)]
        problems = {
            "entries of different lengths": len(
                {
                    len(plan.request_slots),
                    len(plan.num_computed_tokens),
                    len(plan.num_scheduled_tokens),
                    len(plan.num_sampled_tokens),
                }
            )
            > 1,
            "a slot twice": len(set(plan.request_slots)) < len(plan.request_slots),
            "a slot that no sequence has": not known >= set(plan.request_slots),
            "a new sequence without work": not {new.request_slot for new in plan.new_sequences}
            <= set(plan.request_slots),
            "an entry without tokens": min(plan.num_scheduled_tokens, default=1) < 1,
            "a grammar that is not ready": not {
                new.grammar.key for new in plan.new_sequences if new.grammar and new.grammar.key
            }
            <= self._grammars,
            "no such block": not all(0 < block < self._info.num_blocks for block in given),
        }
        if found := [problem for problem, is_there in problems.items() if is_there]:
            raise ValueError(f"step {plan.step}: {', '.join(found)}")

    def _poison_fetched(self, order: TierOrder) -> None:
        if is_state(order.names[0]):
            self._states[order.blocks[0]] = POISON
        else:
            self._poison(order.blocks)

    def _poison(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            at = block * self._stride
            self._cache[at : at + self._stride] = POISON * self._info.block_size

    def _is_behind(self, place: int, start: int) -> bool:
        """Whether no query from `start` on sees a token of the block at this place of a table."""
        block, group = divmod(place, len(self._windows))
        window = self._windows[group]
        return window is not None and (block + 1) * self._info.block_size <= start - window + 1

    def _read(self, row: _Row, num_positions: int) -> bytes:
        """The entries of the first positions, through the block table."""
        if self._info.kv_layout.has_windows:
            truth = _truth(row, num_positions, self._adapters)
            wrong = self._wrong(row, truth, num_positions - 1, num_positions)
            return b"".join((*truth, wrong))
        stride = self._stride
        num_blocks = -(-num_positions // self._info.block_size)
        pages = [self._cache[b * stride : (b + 1) * stride] for b in row.table[:num_blocks]]
        return b"".join(pages)[: num_positions * ENTRY_BYTES]

    def _wrong(self, row: _Row, truth: Sequence[bytes], query: int, end: int) -> bytes:
        """What the query at a position sees before `end`, and should not be there, in any group."""
        found: list[bytes] = []
        for group, window in enumerate(self._windows):
            for position in range(0 if window is None else max(0, query - window + 1), end):
                at = self._place(row, group, position)
                entry = bytes(self._cache[at : at + ENTRY_BYTES])
                if entry != _of_group(truth[position], group):
                    found.append(entry)
        return b"".join(found)

    def _place(self, row: _Row, group: int, position: int) -> int:
        """Where the entry of a position is in the cache, for one group."""
        block, offset = divmod(position, self._info.block_size)
        return row.table[block * len(self._windows) + group] * self._stride + offset * ENTRY_BYTES

    def _write(self, row: _Row, position: int, entry: bytes) -> None:
        for group in range(len(self._windows)):
            at = self._place(row, group, position)
            if at < self._stride and entry != POISON:
                raise ValueError(
                    f"{row.sequence}: position {position} is written to the null block"
                )
            mine = entry if entry == POISON else _of_group(entry, group)
            self._cache[at : at + ENTRY_BYTES] = mine

    def _compute(self, row: _Row, start: int, end: int) -> tuple[TokenLogprobs, ...]:
        """Write the entries of positions start … end - 1; answer the prompt logprobs they yield."""
        size = self._info.block_size
        if end > len(row.table) // len(self._windows) * size:
            raise ValueError(f"{row.sequence}: position {end - 1} has no block")
        if end > len(row.token_ids):
            raise ValueError(f"{row.sequence}: position {end - 1} has no token")
        state = hashlib.blake2b(self._read(row, start), digest_size=ENTRY_BYTES)
        adapter = self._adapters[row.adapter_slot] if row.adapter_slot else b""
        if self._info.state_bytes and start:
            found = self._states.get(row.slot, POISON)
            state.update(found if found != state.digest() else b"")
        has_windows = self._info.kv_layout.has_windows
        truth = _truth(row, end, self._adapters) if has_windows else []
        for position in range(start, end):
            if has_windows:
                state = hashlib.blake2b(b"".join(truth[:position]), digest_size=ENTRY_BYTES)
                state.update(self._wrong(row, truth, position, position))
            entry = _entry(state, row.token_ids[position], position, adapter)
            self._write(row, position, entry)
            state.update(entry)
            for target in self._saves.get((row.slot, position + 1), ()):
                self._states[target] = state.digest()
        self._states[row.slot] = state.digest()
        wanted = row.sampling.prompt_logprobs
        if wanted is None:
            return ()
        return tuple(
            simulated_logprobs(row.token_ids[position], position, wanted, self._vocab_size)
            for position in range(start + 1, min(end + 1, row.num_prompt))
        )

    def _sample(self, row: _Row, start: int, position: int) -> int:
        """Choose the token at `position`, and put it into the row for the next step to read.

        Where the logits are not finite, neither is the KV that led to them.
        """
        is_finite = UNKNOWN not in row.token_ids[:position]
        if is_finite and self._conditions.is_finite(row.sequence, position):
            num_outputs = position - row.num_prompt
            context = self._read(row, position)
            token = _choose(context, position, row.sampling, num_outputs, self._vocab_size)
        else:
            token = UNKNOWN
            self._spoil(row, start, position)
        row.token_ids[position : position + 1] = (token,)
        return token

    def _sample_run(self, row: _Row, start: int, end: int, num_drafts: int) -> tuple[int, ...]:
        """Choose the token at `end`, and those behind drafts that are right; what the others wrote stays in the cache."""
        if end + num_drafts > len(row.table) // len(self._windows) * self._info.block_size:
            raise ValueError(f"{row.sequence}: no blocks for {num_drafts} drafts behind {end}")
        num_right = self._conditions.num_right(row.sequence, num_drafts) if num_drafts else 0
        run = [self._sample(row, start, end)]
        for position in range(end, end + num_right):
            if run[-1] == UNKNOWN:
                break
            self._compute(row, position, position + 1)
            run.append(self._sample(row, position, position + 1))
        self._spoil(row, end + len(run) - 1, end + num_drafts)
        return tuple(run[:-1] if run[-1] == UNKNOWN else run)

    def _spoil(self, row: _Row, start: int, end: int) -> None:
        """Poison these positions of the sequence's cache."""
        most = len(row.table) // len(self._windows) * self._info.block_size
        for position in range(start, min(end, most)):
            self._write(row, position, POISON)

    def _token_logprobs(
        self, row: _Row, position: int, tokens: tuple[int, ...]
    ) -> tuple[TokenLogprobs, ...]:
        wanted = row.sampling.logprobs
        if wanted is None:
            return ()
        return tuple(
            simulated_logprobs(token, position + i, wanted, self._vocab_size)
            for i, token in enumerate(tokens)
        )


def simulated_tokens(
    prompt_token_ids: Sequence[int],
    sampling: Sampling,
    num_tokens: int,
    vocab_size: int,
    adapter: bytes = b"",
) -> list[int]:
    """Compute the tokens that a `SimulatedDevice` must yield for a sequence, however it is scheduled."""
    state = hashlib.blake2b(digest_size=ENTRY_BYTES)
    context = bytearray()
    tokens = list(prompt_token_ids)
    for position in itertools.count():
        if position >= len(prompt_token_ids):
            num_outputs = position - len(prompt_token_ids)
            if num_outputs == num_tokens:
                break
            tokens.append(_choose(context, position, sampling, num_outputs, vocab_size))
        entry = _entry(state, tokens[position], position, adapter)
        state.update(entry)
        context += entry
    return tokens[len(prompt_token_ids) :]


def _truth(row: _Row, num_positions: int, adapters: dict[int, bytes]) -> list[bytes]:
    """The entries of the first positions as the row's tokens have them, whatever the cache contains."""
    adapter = adapters[row.adapter_slot] if row.adapter_slot else b""
    state, found = hashlib.blake2b(digest_size=ENTRY_BYTES), list[bytes]()
    for position, token in enumerate(row.token_ids[:num_positions]):
        found.append(_entry(state, token, position, adapter))
        state.update(found[-1])
    return found


def _of_group(entry: bytes, group: int) -> bytes:
    """What a group of layers keeps of a position: no two groups keep the same."""
    return bytes((entry[0] ^ group, *entry[1:]))


def _entry(before: hashlib.blake2b, token: int, position: int, adapter: bytes) -> bytes:
    state = before.copy()
    state.update(b"%d,%d%b" % (token, position, adapter))
    return state.digest()


def _choose(
    context: bytes | bytearray, position: int, sampling: Sampling, num_outputs: int, vocab_size: int
) -> int:
    seed = 0 if sampling.temperature == 0 else sampling.seed
    allowed = sampling.allowed_token_ids or range(vocab_size)
    masked = sampling.stop_ids if num_outputs < sampling.min_tokens else ()
    for attempt in range(64 * vocab_size):
        state = hashlib.blake2b(context, digest_size=ENTRY_BYTES)
        state.update(b";%d;%d;%d" % (seed, position, attempt))
        token = allowed[int.from_bytes(state.digest()) % len(allowed)]
        if token not in masked:
            return token
    raise ValueError("every token is masked")


def simulated_logprobs(
    token: int, position: int, num_candidates: int, vocab_size: int
) -> TokenLogprobs:
    """Make logprobs that depend on the arguments alone: the token first, then its neighbours."""
    if num_candidates < 0:
        num_candidates = vocab_size - 1
    others = [(token + 1 + i) % vocab_size for i in range(min(num_candidates, vocab_size - 1))]
    first = -1.0 - position / 8
    return TokenLogprobs((token, *others), (first, *(first - 1 - i for i in range(len(others)))), 1)
