"""The tier on disk: the policy with a paged device, whose thread and disk may do anything that a real one may do.

A block of the device contains its token ids, and so does a file.  Each sample reads its whole sequence through the block table, so a page
that was fetched wrongly, used too early or overwritten fails at once.  A disk that hangs may delay a sequence until its deadline only.

With rows of states, a row contains all tokens that the state has seen, and a step that goes on from another row than it should fails at once.
"""

import random
from collections import deque

import msgspec
import pytest

from tests.scheduling.test_policy_model import POISON, PagedDevice, next_token
from trouper.actors.messages.controls import Pause
from trouper.actors.messages.requests import Admit, RequestOptions
from trouper.actors.messages.steps import (
    DeviceLost,
    StepDone,
    TierAnswer,
    TierOrder,
    is_state,
    state_of,
)
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.actors.scheduling.state.sequence import State
from trouper.actors.scheduling.state.state_snapshots import SnapshotRows, StateSnapshots
from trouper.actors.scheduling.state.tier import MAX_ORDERS, MAX_QUEUED, Tier, _Sought
from trouper.config.engine_config import SchedulerConfig
from trouper.params import SamplingParams

SIZE, MOST = 2, 24


class StatefulDevice(PagedDevice):
    """A paged device of a recurrent model: the state of a row is the list of the tokens that it has seen."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.states = {}

    def run(self, plan):
        for new in plan.new_sequences:
            if new.state_row >= 0:
                self.states[new.request_slot] = list(self.states[new.state_row])
        tokens = super().run(plan)
        columns = plan.request_slots, plan.num_computed_tokens, plan.num_scheduled_tokens
        for slot, start, count in zip(*columns, strict=True):
            seen, mine = self.states.get(slot, []) if start else [], self.rows[slot].tokens
            assert seen == mine[:start], "the state has seen the tokens in front of the step"
            self.states[slot] = mine[: start + count]
        for slot, row, position in plan.saves:
            self.states[row] = self.rows[slot].tokens[:position]
        return tokens


class World:
    """A policy, a device, its thread and a disk.  `files` survive the device and, given to another world, the engine."""

    def __init__(self, seed, files=None, num_blocks=20, num_rows=0):
        self.random = random.Random(seed)
        self.files = {} if files is None else files
        self.is_hanging = False
        self.blocks = KVBlocks(num_blocks, SIZE, True)
        self.states = None
        if num_rows:
            self.states = StateSnapshots(
                4, num_rows, SIZE, has_cache=True, interval=SIZE, spacing=SIZE
            )
        self.tier = Tier(self.blocks, self.states)
        config = SchedulerConfig(
            max_num_seqs=4, max_num_active_seqs=4, max_num_scheduled_tokens=self.random.choice((4, 32)),
            max_steps_in_flight=2, max_model_len=MOST, max_step_ms=self.random.choice((0, None)),
            policy=self.random.choice(("fcfs", "priority")),
        )  # fmt: skip
        self.policy = Policy(config, self.blocks, states=self.states, tier=self.tier)
        self.device = (
            StatefulDevice(num_blocks, SIZE) if num_rows else PagedDevice(num_blocks, SIZE)
        )
        self.now = 0.0
        # Frames to the device in order, its answers, and the orders of its thread.
        self.frames, self.answers, self.thread = deque(), deque(), deque()
        self.num_unanswered = 0
        self.outputs, self.admits = {}, {}
        self.num_losses = 0
        self.news = [TierAnswer(0, is_anew=True, added=tuple(self.files))]

    def admit(self, prompt, **params):
        id = len(self.admits)
        self.admits[id] = admit = Admit(
            id=id, prompt_token_ids=tuple(prompt), eos_token_id=None, stop_token_ids=(), options=RequestOptions(),
            params=SamplingParams(**{"temperature": 0, "seed": 0, "max_tokens": 3, **params}), arrival_time=float(id),
        )  # fmt: skip
        self.policy.admit(admit)

    def turn(self):
        """One turn of the scheduler."""
        if (deadline := self.policy.tier_deadline_s) is not None and deadline <= self.now:
            self.policy.expire_tier(self.now)
        self._send(self.policy.take_tier_orders(self.now))
        while (plan := self.policy.plan()) is not None:
            self._send(self.policy.take_tier_cancel())
            self.frames.append(plan)
        if (outputs := self.policy.take_outputs()) is not None:
            for update in outputs.sequences:
                found, _ = self.outputs.get(update.id, ([], None))
                self.outputs[update.id] = found + list(update.token_ids), update.finish_reason

    def _send(self, orders):
        self.num_unanswered += len(orders)
        assert self.num_unanswered <= MAX_ORDERS, "the channel to the device has room"
        self.frames.extend(orders)

    def compute(self):
        """The device takes its next frame."""
        frame = self.frames.popleft()
        if isinstance(frame, TierOrder) and frame.epoch != self.num_losses:
            return
        if not isinstance(frame, TierOrder):
            tokens = tuple(self.device.run(frame))
            self.answers.append(StepDone(frame.step, tokens, seconds=0.01))
            return
        if frame.kind in ("cancel", "clear"):
            self.answers.extend(TierAnswer(order.number) for order in self.thread)
            self.thread.clear()
        if frame.kind == "cancel":
            self.answers.append(TierAnswer(frame.number))
        else:
            self.thread.append(frame)

    def perform(self):
        """The thread performs one of its orders."""
        order = self.thread.popleft()
        num_done, added, removed = 0, (), ()
        if order.kind == "store":
            (place,), (name,) = order.blocks, order.names
            if not order.parent or order.parent in self.files:
                self.files[name] = tuple(self.memory_of(name)[place])
                num_done = 1
        elif order.kind == "fetch":
            for place, name in zip(order.blocks, order.names, strict=True):
                if (content := self.files.get(name)) is None or POISON in content:
                    self.files.pop(name, None)
                    break
                self.memory_of(name)[place] = list(content)
                num_done += 1
        elif order.kind == "clear":
            self.files.clear()
        elif order.kind == "remove":
            self.files.pop(order.names[0], None)
        self.answers.append(
            TierAnswer(order.number, num_done, 0.001, order.kind == "clear", added, removed)
        )

    def memory_of(self, name):
        return self.device.states if is_state(name) else self.device.memory

    def answer(self):
        """The policy takes the next answer."""
        found = self.answers.popleft() if self.answers else self.news.pop()
        if isinstance(found, TierAnswer):
            self.num_unanswered -= found.number > 0
            self.policy.note_tier(found)
        else:
            self.policy.apply(found)

    def lose(self, *, keeps_memory):
        self.num_losses += 1
        # A call may hold up orders until the device is back.
        self.frames = deque(frame for frame in self.frames if isinstance(frame, TierOrder))
        self.answers.clear()
        self.thread.clear()
        self.num_unanswered = 0
        self.policy.lose_device(DeviceLost("killed", is_from_outside=True))
        self.device.rows.clear()
        if not keeps_memory:
            for page in self.device.memory:
                page[:] = [POISON] * SIZE
            if self.states is not None:
                self.device.states.clear()
        self.policy.return_device(keeps_memory=keeps_memory)
        self.news = [TierAnswer(0, is_anew=True, added=tuple(self.files))]

    def damage(self):
        if self.files:
            name = self.random.choice(list(self.files))
            if self.random.random() < 0.5:
                del self.files[name]
            else:
                self.files[name] = (POISON,) * SIZE

    def move(self):
        """Let something happen that can."""
        moves = [self.turn]
        moves += [self.compute] * (2 * bool(self.frames))
        moves += [self.answer] * (2 * bool(self.answers or self.news))
        moves += [self.perform] * bool(self.thread and not self.is_hanging)
        self.random.choice(moves)()
        self.now += self.random.choice((0.0, 0.0, 0.01))

    def trouble(self):
        """Let something happen that may."""
        draw = self.random.random()
        if draw < 0.3:
            self.damage()
        elif draw < 0.4:
            self.lose(keeps_memory=self.random.random() < 0.5)
        elif draw < 0.55:
            self.policy.reset_prefix_cache(self.random.random() < 0.5)
        elif draw < 0.6:
            self.policy.clear_tier()
        elif draw < 0.7:
            self.is_hanging = not self.is_hanging
        elif draw < 0.8:
            self.policy.abort(self.random.randrange(len(self.admits) + 1))
        elif draw < 0.9:
            self.policy.set_pause(self.random.choice(list(Pause)))
        else:
            self.tier._block_s = self.random.choice((0.0, 1e-4, 10.0))

    def finish(self):
        """Play to the end of all requests, with the disk as it is."""
        self.policy.set_pause(Pause.NONE)
        for _ in range(20_000):
            if not self.policy.table.sequences:
                return self.turn()
            before = len(self.frames), len(self.answers)
            self.turn()
            if self.frames:
                self.compute()
            if self.thread and not self.is_hanging:
                self.perform()
            if self.answers or self.news:
                self.answer()
            if before == (len(self.frames), len(self.answers)):
                self.now += 0.5
        return pytest.fail("a request did not end")

    def check(self):
        for id, admit in self.admits.items():
            found, reason = self.outputs[id]
            tokens = list(admit.prompt_token_ids)
            for _ in range(admit.params.max_tokens):
                tokens.append(next_token(tokens, 0))
            expected = tokens[len(admit.prompt_token_ids) :]
            assert found == expected[: len(found)]
            assert reason == "abort" or found == expected

    def play(self, heads):
        for _ in range(self.random.randrange(20, 120)):
            draw = self.random.random()
            if draw < 0.12 and len(self.admits) < 12:
                tail = [self.random.randrange(2, 40) for _ in range(self.random.randrange(1, 4))]
                head = self.random.choice(heads)[: self.random.randrange(17)]
                self.admit(head + tail, max_tokens=self.random.randrange(1, 6))
            elif draw < 0.2:
                self.trouble()
            else:
                self.move()
        self.finish()
        self.check()
        return self


def play_lives(seed, num_rows=0):
    """Let three engines follow each other with one disk.  Returns how many blocks they fetched."""
    draw, files, count = random.Random(-seed - 1), {}, 0
    heads = [[draw.randrange(2, 40) for _ in range(16)] for _ in range(2)]
    for life in range(3):
        num_blocks = draw.choice((13, 20))
        world = World(3 * seed + life, files, num_blocks, num_rows and draw.choice((2, num_rows)))
        count += world.play(heads).tier.counts["hit"]
        check_rows(world)
    return count


def check_rows(world):
    """No row is lost: each is free, offered, or held by an order without an answer."""
    if world.states is not None:
        rows, fetch = world.states.rows, world.tier._fetch
        assert rows.num_taken == len(rows._withdrawn) + (
            fetch is not None and fetch.row is not None
        )
        held = {place for place, name, _ in world.tier._stores.values() if is_state(name)}
        assert rows._held == held


def settle(world):
    """Let the thread finish what is queued."""
    for _ in range(200):
        world.turn()
        for act, has_work in (
            (world.compute, world.frames), (world.perform, world.thread), (world.answer, world.answers or world.news)
        ):  # fmt: skip
            if has_work:
                act()


def run_one(prompt, files=None, **options):
    world = World(1, files, **options)
    settle(world)
    world.admit(prompt)
    world.finish()
    world.check()
    settle(world)
    return world


PROMPT = list(range(2, 15))


def test_any_schedule_gives_right_tokens():
    assert sum(map(play_lives, range(60))) > 120


def test_any_schedule_with_states_gives_right_tokens():
    assert sum(play_lives(seed, num_rows=8) for seed in range(24)) > 30


def states_in(files):
    """Return how many tokens each state on the disk has seen."""
    return sorted(len(content) for name, content in files.items() if is_state(name))


def test_state_is_fetched_with_its_blocks():
    first = run_one(PROMPT, num_rows=8)
    # The last boundary of the prompt, and the first behind it.
    assert states_in(first.files) == [12, 14]
    second = run_one(PROMPT, first.files, num_rows=8)
    assert second.tier.counts["hit"] == 6
    assert second.policy.statistics().prefix_cache_hits == 12


def test_blocks_behind_the_deepest_state_stay_on_the_disk():
    files = run_one(PROMPT, run_one(PROMPT[:7], num_rows=8).files, num_rows=8).files
    for name in [name for name in files if is_state(name) and len(files[name]) > 6]:
        del files[name]
    world = run_one(PROMPT, files, num_rows=8)
    assert world.tier.counts["hit"] == 3
    assert world.policy.statistics().prefix_cache_hits == 6


@pytest.mark.parametrize("damage", ["gone", "bad"])
def test_damaged_state_costs_a_computation(damage):
    files = run_one(PROMPT, num_rows=8).files
    for name in [name for name in files if is_state(name)]:
        files[name] = (POISON,)
        if damage == "gone":
            del files[name]
    # The second engine believes that the files are there.
    world = World(1, files, num_rows=8)
    world.news[0] = TierAnswer(0, is_anew=True, added=tuple({*files, *map(state_of, files)}))
    settle(world)
    world.admit(PROMPT)
    world.finish()
    world.check()
    assert world.policy.statistics().prefix_cache_hits == 0


def test_next_deepest_state_serves_instead_of_a_damaged_one():
    files = run_one(PROMPT, run_one(PROMPT[:7], num_rows=8).files, num_rows=8).files
    for name in [name for name in files if is_state(name) and len(files[name]) > 6]:
        files[name] = (POISON,)
    world = run_one(PROMPT, files, num_rows=8)
    assert world.tier.counts["hit"] == 6
    assert world.policy.statistics().prefix_cache_hits == 6


def test_distrusted_state_is_not_fetched_again():
    files = run_one(PROMPT, num_rows=8).files
    world = World(1, files, num_rows=8)
    settle(world)
    for name in files:
        if is_state(name):
            world.tier.distrust(name[:-1])
    world.admit(PROMPT)
    world.finish()
    assert world.policy.statistics().prefix_cache_hits == 0


@pytest.mark.parametrize("is_lost", [False, True])
def test_file_of_a_distrusted_state_is_removed(is_lost):
    world = World(1, run_one(PROMPT, num_rows=8).files, num_rows=8)
    settle(world)
    for name in [name for name in world.files if is_state(name)]:
        world.tier.distrust(name[:-1])
    if is_lost:
        world.turn()
        world.lose(keeps_memory=False)
    settle(world)
    assert states_in(world.files) == []
    assert not any(map(is_state, world.tier._known))
    # States of the same blocks that are computed later are stored again.
    world.admit(PROMPT)
    world.finish()
    settle(world)
    assert states_in(world.files) == [12, 14]


def test_prompt_is_fetched_after_a_restart():
    first = run_one(PROMPT)
    assert first.tier.counts["stored"] == 7
    second = run_one(PROMPT, first.files)
    assert second.tier.counts["hit"] == 6
    assert second.policy.statistics().prefix_cache_hits == 12
    assert second.blocks.num_free == second.blocks.num_usable


def test_bad_file_costs_what_follows_it():
    files = run_one(PROMPT).files
    names = list(files)
    files[names[3]] = (POISON,) * SIZE
    second = run_one(PROMPT, files)
    assert second.tier.counts["hit"] == 3
    # The file was removed, and written again.
    assert files[names[3]] == (8, 9)


def test_hanging_disk_delays_until_the_deadline():
    files = run_one(PROMPT).files
    world = World(1, files)
    settle(world)
    world.is_hanging = True
    world.admit(PROMPT)
    world.turn()
    assert world.policy.table.waiting.num_fresh == 1
    deadline = world.policy.tier_deadline_s
    assert deadline == world.now + 2.0
    world.now = deadline
    world.finish()
    world.check()
    # The next prompt does not wait for the same disk.
    world.admit(PROMPT[:-1])
    assert world.policy.tier_deadline_s is None
    world.is_hanging = False
    world.finish()
    settle(world)
    assert world.blocks.num_free == world.blocks.num_usable


def test_blocks_of_a_hanging_disk_are_given_back():
    """The disk holds most blocks; a prompt that needs all of them takes them back at once."""
    files = run_one(PROMPT).files
    world = World(1, files, num_blocks=12)
    settle(world)
    world.is_hanging = True
    world.admit(PROMPT)
    world.turn()
    assert world.blocks.num_free < 6
    world.admit([30 + i for i in range(19)])
    world.now += 5
    world.finish()
    world.check()


def test_slow_disk_is_left_alone_and_tried_again():
    world = World(1, run_one(PROMPT).files)
    settle(world)
    world.tier._block_s, world.tier._token_s = 1.0, 1e-3
    num_tries = 0
    while not world.tier._sought:
        world.admit(PROMPT)
        num_tries += 1
    assert 20 < num_tries < 200
    assert world.tier.skipped["slow"] == num_tries - 1


def test_deadline_allows_for_sequences_in_front():
    prompts = [[head, *PROMPT] for head in range(2, 5)]
    files = run_one(PROMPT).files
    for prompt in prompts:
        run_one(prompt, files)
    world = World(1, files, num_blocks=40)
    settle(world)
    world.tier._block_s, world.tier._token_s = 1 / 8, 1.0
    for prompt in prompts:
        world.admit(prompt)
    world.turn()
    # Six blocks each: the time of fetching those in front as well, at most the time of computing its own.
    assert [sought.deadline_s for sought in world.tier._sought] == [6.0, 12.0, 12.0]


@pytest.mark.parametrize("is_lost", [False, True])
def test_clear_waits_until_the_folder_is_open(is_lost):
    """The thread may read all weights before it knows its folder, also after a loss of the device."""
    world = World(1, dict(run_one(PROMPT).files))
    world.policy.clear_tier()
    if is_lost:
        world.turn()
        world.lose(keeps_memory=False)
    settle(world)
    assert not world.files


class CountingSet(set):
    num_lookups = 0

    def __contains__(self, name):
        self.num_lookups += 1
        return super().__contains__(name)


def test_each_block_on_the_disk_is_looked_up_once():
    """A long prompt has thousands of them, and is fetched in hundreds of orders."""
    names = [number.to_bytes(32, "big") for number in range(100)]
    tier = Tier(KVBlocks(4, SIZE, True))
    tier.note(TierAnswer(0, is_anew=True, added=tuple(names[:60])))
    known = tier._known = CountingSet(tier._known)
    sought = _Sought(None, names)
    assert [tier._reach(sought)[2] for _ in range(3)] == [60] * 3
    assert known.num_lookups == 63
    tier.note(TierAnswer(0, added=tuple(names[60:70])))
    assert tier._reach(sought)[2] == 70
    assert known.num_lookups == 74
    tier.note(TierAnswer(0, removed=(names[5],)))
    assert tier._reach(sought)[2] == 5


def test_queue_of_stores_has_a_bound():
    tier = Tier(KVBlocks(4, SIZE, True))
    for number in range(MAX_QUEUED + 5):
        tier.offer(number.to_bytes(32, "big"), bytes(32))
    assert tier.skipped["full"] == 5


def test_reset_of_the_cache_does_not_wait_for_the_disk():
    world = World(1)
    settle(world)
    world.admit(PROMPT)
    world.is_hanging = True
    world.finish()
    world.turn()
    assert world.blocks.num_free < world.blocks.num_usable
    assert world.policy.reset_prefix_cache()
    assert world.blocks.num_free == world.blocks.num_usable


def offered_before_its_answer(self, order):
    if order is not None:
        for block, name in zip(order.blocks, order.names, strict=True):
            self._blocks.register(block, name)
    return order


def every_page_counts(answer):
    return TierAnswer(answer.number, 99, answer.seconds, answer.is_anew, answer.added)


class EveryEpoch(int):
    """An epoch with which no device refuses an order."""

    def __ne__(self, other):
        return False


BUGS = {
    "fetched page offered before its answer": (
        "_next_fetch", lambda right: lambda self: offered_before_its_answer(self, right(self))
    ),
    "every fetched page counts": (
        "_take_in", lambda right: lambda self, fetch, answer: right(self, fetch, every_page_counts(answer))
    ),
    "cancel is not sent": ("take_cancel", lambda right: lambda self: right(self) and []),
    "no deadline": ("expire", lambda right: lambda self, now: None),
    "orders from before a loss are performed": (
        "_order", lambda right: lambda self, *given: msgspec.structs.replace(right(self, *given), epoch=EveryEpoch())
    ),
    "pages are not given back": ("cancel", lambda right: lambda self: False),
    "waiting sequences are forgotten with the device": (
        "lose", lambda right: lambda self: (self._sought.clear(), right(self))
    ),
}  # fmt: skip


def name_of_another_state(right):
    """Fetch the state behind the first block in place of that behind the last one."""

    def fetch(self, sought, prefix):
        order = right(self, sought, prefix)
        if order is None or state_of(sought.names[0]) not in self._known:
            return order
        return msgspec.structs.replace(order, names=(state_of(sought.names[0]),))

    return fetch


def state_offered_at_once(right):
    def fetch(self, sought, prefix):
        order = right(self, sought, prefix)
        if order is not None:
            self._states.rows.offer(order.blocks[0], sought.names[len(prefix) - 1])
        return order

    return fetch


STATE_BUGS = {
    "state of another block": (Tier, "_fetch_state", name_of_another_state),
    "fetched state offered before its answer": (Tier, "_fetch_state", state_offered_at_once),
    "every fetched state counts": (
        Tier, "_take_in_state", lambda right: lambda self, fetch, row, answer: right(self, fetch, row, every_page_counts(answer))
    ),
    "row of a stored state is written": (
        SnapshotRows, "hold", lambda right: lambda self, name: self._offered.get(name, -1)
    ),
}  # fmt: skip


RARE = "every fetched state counts"


@pytest.mark.parametrize(
    "name",
    [
        *BUGS,
        *(name for name in STATE_BUGS if name != RARE),
        pytest.param(RARE, marks=pytest.mark.slow),
    ],
)
def test_planted_bug_is_found(name, monkeypatch):
    if name in BUGS:
        (method, make), owner, num_rows = BUGS[name], Tier, 0
    else:
        (owner, method, make), num_rows = STATE_BUGS[name], 8
    monkeypatch.setattr(owner, method, make(getattr(owner, method)))
    for seed in range(500):
        try:
            play_lives(seed, num_rows)
        except (AssertionError, KeyError, pytest.fail.Exception):
            return
    pytest.fail("not found within 500 schedules")


def test_ended_sequence_is_not_fetched_for():
    world = World(1, run_one(PROMPT).files)
    settle(world)
    world.admit(PROMPT)
    (sequence,) = world.policy.table.sequences.values()
    world.policy.abort(0)
    assert sequence.state is State.FINISHED
    settle(world)
    assert world.tier.counts["hit"] == 0
