"""Snapshots of recurrent states: the rows, the worked case, and random schedules on a device of hashed states."""

import hashlib
import random

import msgspec
import pytest

from trouper.actors.messages.requests import Admit, RequestOptions
from trouper.actors.messages.steps import DeviceLost, StepDone
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.actors.scheduling.state.running import Running
from trouper.actors.scheduling.state.state_snapshots import SnapshotRows, StateSnapshots
from trouper.config.engine_config import SchedulerConfig
from trouper.params import SamplingParams

VOCAB = 50


def digest(*parts):
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()


def next_token(state, keys):
    return int.from_bytes(digest(state, keys)) % VOCAB


def expected_tokens(prompt, count):
    """What any schedule must yield: each token depends on the state, and on the keys of all positions."""
    tokens, state, keys = list(prompt), b"", []
    for position in range(len(prompt) + count - 1):
        state = digest(state, tokens[position])
        keys.append(state)
        if position >= len(prompt) - 1:
            tokens.append(next_token(state, keys))
    return tokens[len(prompt) :]


class StepError(Exception):
    pass


class HashedDevice:
    """Computes plans in order, and checks nothing: a wrong state or a wrong block changes tokens."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.rows, self.keys, self.slots, self.ends = {}, {}, {}, {}
        # The states inside the last step, by slot and position.
        self.passed = {}
        self.refused_epoch = -1

    def run(self, plan, *, fails=False, poisoned=()):
        if plan.epoch == self.refused_epoch:
            raise StepError
        self.passed = {}
        for new in plan.new_sequences:
            self.slots[new.request_slot] = [new.sequence, list(new.token_ids), [*new.block_ids]]
            if new.state_row >= 0:
                self.rows[new.request_slot] = self.rows.get(new.state_row, b"nothing")
        for slot, blocks in plan.new_blocks:
            self.slots[slot][2].extend(blocks)
        for source, target in plan.copies:
            for offset in range(self.block_size):
                self.keys[target, offset] = self.keys.get((source, offset))
        nothing = (0,) * len(plan.request_slots)
        unknown = plan.num_unknown_tokens or nothing
        starts = [
            self.ends[slot] if more else start
            for slot, start, more in zip(
                plan.request_slots, plan.num_computed_tokens, unknown, strict=True
            )
        ]
        columns = plan.request_slots, starts, plan.num_scheduled_tokens
        entries = list(zip(*columns, plan.num_sampled_tokens, strict=True))
        sampled = [self._compute(*entry) for entry in entries]
        if fails or any(self.slots[slot][0] in poisoned for slot, *_ in entries):
            self.refused_epoch = plan.epoch
            raise StepError
        self._save(plan)
        rooms = plan.num_lookahead_tokens or nothing
        return tuple(
            (*run, *self._verify(slot, start + count, room)) if run else ()
            for run, (slot, start, count, _), room in zip(sampled, entries, rooms, strict=True)
        )

    def _save(self, plan):
        for slot, row, position in plan.saves:
            self.rows[row] = self.passed[slot, position]

    def _compute(self, slot, start, count, num_sampled):
        _, tokens, table = self.slots[slot]
        state = self.rows.get(slot, b"nothing") if start else b""
        for position in range(start, start + count):
            state = digest(state, tokens[position])
            self.keys[self._place(table, position)] = state
            self.passed[slot, position + 1] = state
        self.rows[slot] = state
        self.ends[slot] = start + count
        return (self._sample(slot, start + count),) if num_sampled else ()

    def _verify(self, slot, end, room):
        """Verify drafts behind position `end`, most of them right; the state moves over those."""
        _, tokens, table = self.slots[slot]
        found = []
        for position in range(end, end + room):
            is_right = digest(self.rows[slot], "draft")[0] < 180
            guess = tokens[position] if is_right else VOCAB
            state = digest(self.rows[slot], guess)
            self.keys[self._place(table, position)] = state
            if not is_right:
                break
            self._replay(slot, state)
            found.append(self._sample(slot, position + 1))
        self.ends[slot] = end + len(found)
        return found

    def _replay(self, slot, state):
        self.rows[slot] = state

    def _sample(self, slot, end):
        _, tokens, table = self.slots[slot]
        keys = [self.keys.get(self._place(table, position)) for position in range(end)]
        tokens[end:] = [next_token(self.rows[slot], keys)]
        return tokens[end]

    def _place(self, table, position):
        return table[position // self.block_size], position % self.block_size


class World:
    """A policy and a hashed device under random events."""

    def __init__(
        self,
        seed,
        *,
        num_rows=5,
        num_blocks=24,
        block_size=4,
        budget=13,
        cache=True,
        drafts=0,
        spacing=96,
    ):
        self.random = random.Random(seed)
        self.states = StateSnapshots(
            4, num_rows, block_size, has_cache=cache, interval=8, spacing=spacing
        )
        config = SchedulerConfig(
            max_num_seqs=4,
            max_model_len=2000,
            max_num_scheduled_tokens=budget,
            max_steps_in_flight=2,
            enable_prefix_caching=cache,
            num_speculative_tokens=drafts,
        )
        blocks = KVBlocks(num_blocks, block_size, cache)
        self.policy = Policy(config, blocks, states=self.states)
        self.device = HashedDevice(block_size)
        self.flights, self.plans, self.requests, self.news = [], [], {}, {}
        self.ends, self.aborted, self.poisoned = {}, set(), set()
        self.longest = 20 if drafts else 12
        self.num_admitted, self.num_rows = 0, num_rows
        self.shared = [self.random.randrange(VOCAB) for _ in range(30)]

    def admit(self, prompt=None, n=1, max_tokens=6):
        id = self.num_admitted * 8
        self.num_admitted += 1
        params = SamplingParams(n=n, max_tokens=max_tokens, temperature=1.0)
        self.requests[id] = tuple(prompt), n, max_tokens
        self.policy.admit(
            Admit(
                id=id,
                prompt_token_ids=tuple(prompt),
                params=params,
                eos_token_id=None,
                stop_token_ids=(),
                options=RequestOptions(),
                arrival_time=float(id),
                cache_salt=None,
                adapter=None,
            )
        )
        return id

    def plan(self):
        plan = self.policy.plan()
        if plan is not None:
            self.flights.append(plan)
            self.plans.append(plan)
        return plan

    def land(self, *, fails=False):
        plan = self.flights.pop(0)
        try:
            tokens = self.device.run(plan, fails=fails, poisoned=self.poisoned)
        except StepError:
            self.policy.fail_step(plan.step, "boom")
        else:
            drafts = plan.num_lookahead_tokens
            self.policy.apply(StepDone(plan.step, tokens, num_draft_tokens=drafts))
        self.take()

    def take(self):
        news = self.policy.take_outputs()
        for entry in news.sequences if news else ():
            self.news.setdefault(entry.id, []).extend(entry.token_ids)
            if entry.finish_reason is not None:
                self.ends[entry.id] = entry.finish_reason

    def drain(self, limit=4000):
        for _ in range(limit):
            while self.plan() is not None:
                pass
            if not self.flights:
                break
            self.land()
        assert not self.flights, "it never ends"

    def step(self):
        """One random event."""
        draw = self.random.random
        kind = draw()
        if kind < 0.15 and len(self.requests) < 14:
            length = self.random.choice([0, 3, 8, 17, 24, 30])
            tail = [self.random.randrange(VOCAB) for _ in range(self.random.randint(1, 9))]
            n = self.random.choice([1, 1, 1, 2, 3])
            head = self.shared[:length]
            if self.longest > 12 and self.news and draw() < 0.5:
                id = self.random.choice([*self.news])
                prompt = self.requests.get(id, ((),))[0]
                head = [*prompt, *self.news[id]][:40]
            self.admit([*head, *tail], n, self.random.randint(1, self.longest))
        elif kind < 0.2 and self.requests:
            id = self.random.choice(list(self.requests))
            self.aborted.add(id)
            self.policy.abort(id)
            self.take()
        elif kind < 0.22:
            self.policy.preempt_all()
        elif kind < 0.24:
            self.policy.reset_prefix_cache()
        elif kind < 0.26:
            self.flights.clear()
            self.policy.lose_device(DeviceLost("lost", is_from_outside=True))
            self.device = HashedDevice(self.device.block_size)
            self.policy.return_device()
        elif kind < 0.6:
            self.plan()
        elif self.flights:
            # A second failure of a suspect's own step would condemn it.
            self.land(fails=draw() < 0.06 and not self.policy.is_searching)

    def check(self):
        """All tokens are right, all requests have ended, and each row has one owner."""
        for id, (prompt, n, max_tokens) in self.requests.items():
            right = expected_tokens(prompt, max_tokens)
            for sequence in range(id, id + n):
                found, end = self.news.get(sequence, []), self.ends.get(sequence)
                assert end is not None or id in self.aborted, "a sequence has not ended"
                assert end != "error" or sequence in self.poisoned, "an innocent has failed"
                assert found == (right if end == "length" else right[: len(found)])
        self.check_rows()
        assert not self.states._forks

    def check_rows(self):
        rows, marks = self.states.rows, self.policy.table.running.snapshot()
        pending = [row for sequence in marks for row in sequence.marks.saving.values()]
        owned = [*rows._free, *rows._offered.values(), *pending, *self.states._forks.values()]
        assert sorted(owned) == list(range(4, 4 + self.num_rows)), "a row without one owner"


def play(seed, num_events=160):
    budget, num_rows = (7, 13, 40)[seed % 3], (2, 5)[seed % 2]
    drafts = (0, 3)[seed // 3 % 2]
    spacing = (8, 96)[seed // 2 % 2]
    options = {"cache": seed % 5 > 0, "drafts": drafts, "spacing": spacing}
    world = World(seed, budget=budget, num_rows=num_rows, **options)
    for _ in range(num_events):
        world.step()
        world.check_rows()
    world.drain()
    world.check()
    return world


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_any_schedule_yields_tokens_of_the_model(first):
    worlds = [play(seed) for seed in range(first, first + 20)]
    assert sum(world.policy.table.running.num_hits for world in worlds) > 100
    assert any(plan.saves for world in worlds for plan in world.plans)
    assert any(plan.num_unknown_tokens for world in worlds for plan in world.plans)
    assert sum(world.policy.statistics().num_accepted_tokens for world in worlds) > 100


@pytest.mark.parametrize("seed", range(4))
def test_poisoned_request_fails_alone(seed):
    world = World(seed)
    ids = [world.admit([*world.shared[:9], seed, i], max_tokens=5) for i in range(4)]
    world.poisoned = {ids[seed]}
    world.drain(limit=60)
    world.check()
    assert world.ends[ids[seed]] == "error"


# One request after another: chunks as (start, end), and the ends behind which states are saved.


def trace(world, prompt, n=1):
    first = len(world.plans)
    id = world.admit(prompt, n, max_tokens=10)
    world.drain()
    world.check()
    chunks, saved = [], []
    for plan in world.plans[first:]:
        columns = plan.request_slots, plan.num_computed_tokens, plan.num_scheduled_tokens
        for slot, start, count in zip(*columns, strict=True):
            if start < len(prompt):
                chunks.append((start, start + count))
            saved += [position for other, _, position in plan.saves if other == slot]
    return id, chunks, saved


def cases_world(**options):
    world = World(0, block_size=16, budget=48, num_blocks=60, **options)
    world.states._interval = 64
    return world


def tokens(seed, count):
    return [random.Random(seed).randrange(VOCAB) for _ in range(count)]


def test_worked_case_of_a_shared_prompt():
    world = cases_world()
    first = tokens(1, 93)
    id, *found = trace(world, first)
    assert found == [[(0, 48), (48, 93)], [80]]
    assert trace(world, first)[1:] == ([(80, 93)], [])
    # Others have computed the keys of 64 tokens, but there is no state.
    assert trace(world, first[:70] + tokens(2, 30))[1:] == (
        [(0, 48), (48, 96), (96, 100)],
        [64, 96],
    )
    assert trace(world, first[:70] + tokens(3, 41))[1][0][0] == 64
    assert world.states.num_state_misses == 64
    answer = world.news[id]
    assert trace(world, first + answer + tokens(4, 20))[1][0][0] == 80


def test_siblings_begin_with_the_state_before_last_prompt_token():
    world = cases_world()
    _, chunks, saved = trace(world, tokens(5, 45), n=4)
    assert chunks == [(0, 45), *[(44, 45)] * 3]
    assert sorted(saved) == [32, 44]


def test_second_prompt_finds_nine_tenths_of_what_it_shares():
    world = World(2, block_size=16, budget=1024, num_blocks=400, num_rows=40)
    for length in (300, 1000):
        shared = tokens(length, length)
        trace(world, shared + tokens(8, 50))
        (start, _), *_ = trace(world, shared + tokens(9, 30))[1]
        assert 0.9 * length <= start <= length


def test_guesses_displace_guesses_only():
    rows = SnapshotRows(4, 2)
    rows.offer(rows.take(b"a"), b"a")
    rows.offer(rows.take(b"b", is_guess=True), b"b", is_guess=True)
    rows.offer(rows.take(b"c", is_guess=True), b"c", is_guess=True)
    assert [rows.find([name])[0] for name in (b"a", b"b", b"c")] == [1, 0, 1]
    rows.touch(b"c")
    assert rows.take(b"d", is_guess=True) == -1
    assert rows.take(b"d") >= 0
    assert rows.find([b"a"])[0] == 0


def test_guesses_of_a_chunk_leave_half_of_the_rows():
    world = World(3, block_size=4, budget=400, num_blocks=200, num_rows=6, spacing=8)
    prompt = tokens(3, 199)
    _, chunks, saved = trace(world, prompt)
    assert chunks == [(0, 199)]
    # The answer reaches the next boundary.
    assert saved == [196, 8, 16, 204]
    assert trace(world, prompt)[1] == [(196, 199)]


def test_drafts_miss_no_snapshot_of_an_answer():
    world = World(0, block_size=16, budget=48, num_blocks=60, drafts=3)
    world.states._interval = 64
    saved, right = [], world.device._save

    def save(plan):
        saved.extend(position for _, _, position in plan.saves)
        right(plan)

    world.device._save = save
    id = world.admit(tokens(6, 20), max_tokens=160)
    world.drain()
    world.check()
    assert saved == [16, 80, 144]
    assert any(plan.num_unknown_tokens for plan in world.plans)
    follow_up = tokens(6, 20) + world.news[id] + tokens(7, 5)
    assert trace(world, follow_up)[1][0][0] == 144


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33])
@pytest.mark.parametrize("cache", [True, False])
def test_siblings_of_any_prompt_are_right(length, cache):
    trace(cases_world(cache=cache), tokens(length, length), n=3)


# The rows


def test_least_recently_used_snapshot_gives_way():
    rows = SnapshotRows(4, 2)
    for name in (b"a", b"b"):
        rows.offer(rows.take(name), name)
    rows.touch(b"a")
    assert rows.take(b"a") == -1
    row = rows.take(b"c")
    assert rows.find([b"a", b"b"]) == (1, 4 if row == 5 else 5)
    rows.offer(row, b"c")
    assert rows.num_evictions == 1


def test_snapshot_goes_with_its_block():
    rows = SnapshotRows(4, 2)
    blocks = KVBlocks(3, 4, enable_prefix_caching=True)
    blocks.on_forget = rows.drop
    block = blocks.allocate(1)
    blocks.register(block[0], b"a")
    rows.offer(rows.take(b"a"), b"a")
    blocks.free(block)
    blocks.allocate(2)
    assert (rows.num_offered, rows.num_free) == (0, 2)


# Planted bugs, each of which random schedules must find


def never(*_):
    """Do nothing."""


def without_zeros(right):
    def run(self, slot, start, count, num_sampled):
        if start:
            return right(self, slot, start, count, num_sampled)
        tokens, table = self.slots[slot][1:]
        state = self.rows.get(slot, b"")
        for position in range(count):
            state = digest(state, tokens[position])
            self.keys[self._place(table, position)] = state
        self.rows[slot], self.ends[slot] = state, count
        return (self._sample(slot, count),) if num_sampled else ()

    return run


def rejected_drafts_stay(right):
    def verify(self, slot, end, room):
        found = right(self, slot, end, room)
        if len(found) < room:
            self.rows[slot] = digest(self.rows[slot], VOCAB)
        return found

    return verify


def saved_at_the_end(right):
    def save(self, plan):
        for slot, row, _ in plan.saves:
            self.rows[row] = self.rows[slot]

    return save


def saved_behind_drafts(right):
    def saved(self, plan):
        for slot, row, position in plan.saves:
            is_inside = (slot, position + 1) in self.passed
            self.rows[row] = self.passed[slot, position] if is_inside else self.rows[slot]

    def run(self, plan, **named):
        self._save = never
        try:
            done = right(self, plan, **named)
        finally:
            del self._save
        saved(self, plan)
        return done

    return run


def restored_late(right):
    def run(self, plan, **named):
        late = [new for new in plan.new_sequences if new.state_row >= 0]
        early = [
            new if new not in late else msgspec.structs.replace(new, state_row=-1)
            for new in plan.new_sequences
        ]
        done = right(self, msgspec.structs.replace(plan, new_sequences=tuple(early)), **named)
        for new in late:
            self.rows[new.request_slot] = self.rows.get(new.state_row, b"nothing")
        return done

    return run


def saved_early(right):
    def run(self, plan, **named):
        if plan.epoch != self.refused_epoch:
            for slot, row, _ in plan.saves:
                self.rows[row] = self.rows.get(slot, b"")
        return right(self, msgspec.structs.replace(plan, saves=()), **named)

    return run


def offered_at_planning(right):
    def save(self, sequence, start, end):
        saves = right(self, sequence, start, end)
        if saves and end <= sequence.num_tokens:
            self.land(sequence, end)
        return saves

    return save


def given_back_twice(right):
    def leave(self, sequence):
        for row in sequence.marks.saving.values():
            self.rows.give_back(row)
        right(self, sequence)

    return leave


def keys_without_state(right):
    def prefix(self, sequence):
        found = right(self, sequence)
        return found if not found.junction else found._replace(start=found.junction)

    return prefix


def name_of_another_block(right):
    return lambda self, sequence, end: right(self, sequence, max(4, end - 4))


def snapshot_survives(right):
    return lambda self: None


def fork_behind_the_prompt(right):
    def point(self, sequence):
        return right(self, sequence) and sequence.num_prompt

    return point


def fork_before_the_answer(right):
    def save(self, sequence, start, end):
        fork = self._fork_point(sequence)
        saves = right(self, sequence, start, end)
        if start < fork <= end and fork in sequence.marks.saving:
            self._forks[sequence.request.admit.id] = sequence.marks.saving.pop(fork)
        return saves

    return save


def bisection(right):
    def blame(self, failed, message, *, is_out_of_memory):
        suspects = self._undo(failed)
        undone = [sequence for later in self.in_flight for sequence in self._undo(later)]
        self._begin_again(self.states, suspects, undone)
        self._bisection.suspect(suspects)

    return blame


BUGS = {
    "a row is not zeroed at position 0": (HashedDevice, "_compute", without_zeros),
    "rejected drafts stay in the state": (HashedDevice, "_verify", rejected_drafts_stay),
    "right drafts are not replayed": (HashedDevice, "_replay", lambda _: never),
    "states are saved behind the drafts": (HashedDevice, "run", saved_behind_drafts),
    "a state inside a chunk is saved at its end": (HashedDevice, "_save", saved_at_the_end),
    "states are restored behind the pass": (HashedDevice, "run", restored_late),
    "states are saved before the pass": (HashedDevice, "run", saved_early),
    "a state is offered when it is planned": (StateSnapshots, "save", offered_at_planning),
    "a pending row is not given back": (StateSnapshots, "leave", lambda _: never),
    "a row is given back twice": (StateSnapshots, "leave", given_back_twice),
    "a cancelled save keeps its row": (StateSnapshots, "undo", lambda _: never),
    "a hit is longer than its state": (Running, "_prefix", keys_without_state),
    "a state has the name of another block": (StateSnapshots, "_name", name_of_another_block),
    "snapshots survive a loss": (StateSnapshots, "reset", snapshot_survives),
    "a failed step is repeated in place": (Policy, "_begin_again", lambda _: never),
    "siblings begin behind the prompt": (StateSnapshots, "_fork_point", fork_behind_the_prompt),
    "a fork exists before its step is answered": (StateSnapshots, "save", fork_before_the_answer),
    "a fork is never given back": (StateSnapshots, "close", lambda _: never),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_found(name, monkeypatch):
    owner, attribute, make = BUGS[name]
    monkeypatch.setattr(owner, attribute, make(getattr(owner, attribute)))
    for seed in range(500):
        try:
            play(seed)
        except (AssertionError, IndexError, KeyError, RuntimeError, ValueError):
            return
    pytest.fail("not found in 500 schedules")


def test_bisection_would_never_find_the_poisoned_request(monkeypatch):
    monkeypatch.setattr(Policy, "_blame", bisection(Policy._blame))
    with pytest.raises(AssertionError, match="it never ends"):
        test_poisoned_request_fails_alone(0)
