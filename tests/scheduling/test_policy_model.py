"""The policy on a paged fake device, against an oracle that knows of no schedule.

The fake's next token is a hash of the ids that it reads *through the block table*, of the seed and of the
position.  A block is poisoned when it is handed out.  So a wrong table, a use after free, a missed copy, a
stale prefix or a step lost in a failure changes tokens.
"""

import zlib
from array import array
from collections import deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.requests import Admit, LoadedAdapter, RequestOptions
from trouper.actors.messages.steps import DeviceLost, StepDone
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.config.engine_config import SchedulerConfig
from trouper.config.kv_layout import KVLayout
from trouper.params import SamplingParams

EOS, SECOND_EOS, VOCABULARY, POISON = 0, 1, 40, -7
MAX_MODEL_LEN = 24
# Of the groups of layers.
WINDOWS = (None,), (None, 3), (None, 5, 5, 2), (4,), (None, 9)


def next_token(token_ids, seed):
    key = array("q", [*token_ids, seed]).tobytes()
    return zlib.crc32(key) % VOCABULARY


def oracle(admit, seed, limit):
    """(output tokens, finish reason, stop reason) of the sequence, alone in the world."""
    tokens, params = list(admit.prompt_token_ids), admit.params
    output = []
    while True:
        token = next_token(tokens, seed)
        tokens.append(token)
        output.append(token)
        if len(output) >= params.min_tokens:
            if token == EOS:
                return output, "stop", None
            if token == SECOND_EOS:
                return output, "stop", SECOND_EOS
        if len(tokens) >= limit:
            return output, "length", None


class Row:
    def __init__(self, new):
        self.sequence = new.sequence
        self.tokens = list(new.token_ids)
        self.table = list(new.block_ids)
        self.seed = new.sampling.seed
        self.adapter = new.adapter_slot

    def entry(self, position):
        """What the cache holds of a position: its token, as this adapter computes it."""
        return self.tokens[position] + 1000 * self.adapter


class PagedDevice:
    """Rows of tokens and block tables, and a KV cache that stores the token ids themselves.

    Each group of layers has its own entries in the tables, and reads no further back than its window.
    """

    def __init__(self, num_blocks, block_size, windows=(None,)):
        self.block_size, self.windows = block_size, windows
        self.memory = [[POISON] * block_size for _ in range(num_blocks)]
        self.rows = {}

    def place(self, row, group, position):
        """(block, offset) of a position for one group."""
        block, offset = divmod(position, self.block_size)
        return row.table[block * len(self.windows) + group], offset

    def check(self, row, position):
        """Read what a query at this position sees."""
        for group, window in enumerate(self.windows):
            for p in range(0 if window is None else max(0, position - window + 1), position + 1):
                block, offset = self.place(row, group, p)
                assert block != 0, "no query sees the null block"
                assert self.memory[block][offset] == row.entry(p) + 10**6 * group, (
                    "the cache holds the sequence's own tokens, by its own adapter and group"
                )

    def run(self, plan):
        size = self.block_size
        starts = dict(zip(plan.request_slots, plan.num_computed_tokens, strict=True))
        for source, target in plan.copies:
            self.memory[target][:] = self.memory[source]
        for new in plan.new_sequences:
            row = self.rows[new.request_slot] = Row(new)
            for position in range(
                starts[new.request_slot], len(row.table) // len(self.windows) * size
            ):
                self.spoil(row, position)
        for row, blocks in plan.new_blocks:
            self.rows[row].table += blocks
            for block in blocks:
                self.memory[block] = [POISON] * size
        for row, start, count in zip(
            plan.request_slots, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            state = self.rows[row]
            for position in range(start, start + count):
                for group in range(len(self.windows)):
                    block, offset = self.place(state, group, position)
                    assert block != 0, "nobody writes the null block"
                    self.memory[block][offset] = state.entry(position) + 10**6 * group
                self.check(state, position)
        columns = zip(
            plan.request_slots,
            plan.num_computed_tokens,
            plan.num_scheduled_tokens,
            plan.num_sampled_tokens,
            strict=True,
        )
        return [self._sample(*column) for column in columns]

    def _sample(self, row, start, count, num_sampled):
        state, end = self.rows[row], start + count
        assert num_sampled == (end == len(state.tokens)), "num_sampled_tokens is right"
        if not num_sampled:
            return ()
        token = next_token(state.tokens, state.seed)
        state.tokens.append(token)
        return (token,)

    def spoil(self, row, position):
        for group in range(len(self.windows)):
            block, offset = self.place(row, group, position)
            self.memory[block][offset] = POISON

    def crash(self, plan):
        """Half of it may have happened: neither these rows nor what they write is to be relied on."""
        for new in plan.new_sequences:
            self.rows[new.request_slot] = Row(new)
        rows = {row: self.rows.pop(row) for row in plan.request_slots}
        for row, blocks in plan.new_blocks:
            rows[row].table += blocks
        for row, start, count in zip(
            plan.request_slots, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            for position in range(start, start + count):
                self.spoil(rows[row], position)


class PolicyMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def build(self, data):
        def draw(*values):
            return data.draw(st.sampled_from(values))

        seats = draw(1, 2, 3, 5)
        self.config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=5,
            max_num_active_seqs=seats,
            max_num_scheduled_tokens=draw(5, 8, 16, 24),
            enable_chunked_prefill=draw(True, False),
            long_prefill_token_threshold=draw(0, 3),
            long_prefill_token_threshold_adaptive=draw(False, True),
            policy=draw("priority", "fcfs"),
            reserve_full_isl=draw(True, False),
            watermark=draw(0.0, 0.2),
            max_steps_in_flight=draw(1, 2, 3),
            max_loras=draw(None, 1, 2),
        )
        num_blocks, size = draw(9, 6, 14, 40), draw(4, 3, 2, 1)
        self.windows = draw(*WINDOWS)
        chunk = self.config.max_num_scheduled_tokens
        chunk = min(chunk, draw(2, 24)) if self.config.enable_chunked_prefill else chunk
        layout = KVLayout(size, self.windows, chunk)
        self.blocks = KVBlocks(num_blocks * len(self.windows), size, draw(True, False), layout)
        self.capacity = self.blocks.capacity
        self.policy = Policy(self.config, self.blocks)
        self.start_device()
        self.flights = deque()
        self.doomed_below = 0  # plans of an earlier epoch are refused
        self.pause = Pause.NONE
        self.is_lost = False
        self.next_id = 100
        self.admits = {}
        self.seeds = {}
        self.told = {}
        self.reasons = {}
        self.stopped = set()
        self.poison = set()
        self.row_owner = {}
        self.owners = {}  # step -> sequences

    def start_device(self):
        self.device = PagedDevice(self.blocks.num_blocks, self.blocks.block_size, self.windows)

    @property
    def unfinished(self):
        return [id for id in self.admits if id not in self.reasons and id not in self.stopped]

    def limit(self, id):
        admit = self.admits[id]
        longest = len(admit.prompt_token_ids) + admit.params.max_tokens
        return min(longest, MAX_MODEL_LEN, self.capacity + 1)

    # What the world does

    @rule(
        count=st.integers(1, 4),
        length=st.integers(1, 14),
        family=st.integers(0, 1),
        n=st.sampled_from([1, 1, 3]),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 2),
        priority=st.integers(0, 2),
        adapter=st.sampled_from([0, 0, 1, 2, 3]),
    )
    def admit(self, count, length, family, n, max_tokens, min_tokens, priority, adapter):
        for i in range(count):
            params = SamplingParams(
                n=n,
                seed=self.next_id,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
            )
            admit = Admit(
                id=self.next_id,
                prompt_token_ids=tuple((7 * family + k) % VOCABULARY for k in range(length)),
                params=params,
                eos_token_id=EOS,
                stop_token_ids=(SECOND_EOS,),
                options=RequestOptions(priority=priority + i % 2),
                arrival_time=self.next_id / 7,
                adapter=LoadedAdapter(adapter, bytes([adapter]) * 32, str(adapter))
                if adapter
                else None,
            )
            for child in range(n):
                self.admits[self.next_id + child] = admit
                self.seeds[self.next_id + child] = self.next_id + child
                self.told[self.next_id + child] = []
            self.next_id += n
            self.policy.admit(admit)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data(), kind=st.sampled_from(["abort", "stop", "poison"]))
    def pick_on_one(self, data, kind):
        id = data.draw(st.sampled_from(self.unfinished))
        if kind == "poison":
            self.poison.add(id)  # from now on every step with this sequence raises
        elif kind == "abort" or not self.told[id]:
            self.policy.abort(self.admits[id].id)
        else:  # the Detokenizer has seen text of it
            self.stopped.add(id)
            self.policy.stop((id,))

    @rule(pause=st.sampled_from([Pause.NONE, Pause.NONE, Pause.NO_NEW_REQUESTS, Pause.ALL]))
    def set_pause(self, pause):
        self.pause = pause
        self.policy.set_pause(pause)

    @rule(kind=st.sampled_from(["preempt", "reset", "reset running"]))
    def disturb_the_cache(self, kind):
        if kind == "preempt":
            self.policy.preempt_all()
        is_held = self.blocks.num_free != self.blocks.num_usable
        is_reset = self.policy.reset_prefix_cache(reset_running=kind == "reset running")
        assert is_reset == (kind == "reset running" or not is_held)

    @rule()
    def plan(self):
        running, preemptions = (
            set(self.policy.table.running.ids),
            self.policy.statistics().num_preemptions,
        )
        is_searching = self.policy.is_searching
        plan = self.policy.plan()
        if plan is None:
            nothing_to_do = self.pause is not Pause.NONE or self.flights or self.is_lost
            assert nothing_to_do or not self.policy.table.sequences, "nothing runnable is forgotten"
            return
        assert not self.is_lost, "no plan without a device"
        if not is_searching and self.policy.statistics().num_preemptions > preemptions:
            started = {new.sequence for new in plan.new_sequences} - running
            assert not started, "nobody starts in a step that preempted somebody"
        if not is_searching and self.config.max_loras is not None:
            used = {self.admits[id].adapter for id in self.policy.table.running.ids} - {None}
            assert len(used) <= self.config.max_loras, "no more adapters run than may"
        self.check_plan(plan)
        self.flights.append(plan)

    @precondition(lambda self: self.flights)
    @rule(fault=st.sampled_from([None, None, "passing", "not finite", "out of memory"]))
    def land(self, fault=None):
        plan = self.flights.popleft()
        if plan.epoch < self.doomed_below:
            self.policy.fail_step(plan.step, "refused")
            return
        if fault == "out of memory":
            self.device.crash(plan)
            self.doomed_below = plan.epoch + 1
            self.policy.fail_step(plan.step, "out of memory", is_out_of_memory=True)
            return
        if fault == "passing" or self.poison & set(self.owners[plan.step]):
            self.device.crash(plan)
            self.doomed_below = plan.epoch + 1
            self.policy.fail_step(plan.step, "the device raised")
            return
        tokens = self.device.run(plan)
        failed = ()
        if fault == "not finite":
            failed, tokens[0] = ((0, "not_finite"),), ()
        self.policy.apply(StepDone(plan.step, tuple(tokens), failed=failed))

    @rule()
    def lose_the_device(self):
        step = self.flights[0].step if self.flights else None
        self.flights.clear()
        self.start_device()
        self.is_lost = True
        self.policy.lose_device(DeviceLost("it died", step))

    @rule()
    def return_the_device(self):
        self.is_lost = False
        self.policy.return_device()

    @rule(times=st.integers(1, 12), depth=st.integers(1, 3))
    def work(self, times, depth):
        for _ in range(times):
            for _ in range(depth):
                self.plan()
            if self.flights:
                self.land()
            self.take_outputs()

    @rule()
    def take_outputs(self):
        news = self.policy.take_outputs()
        if news is None:
            return
        ids = [entry.id for entry in news.sequences]
        assert len(ids) == len(set(ids)), "one entry for each sequence"
        for entry in news.sequences:
            self.hear(entry)

    # What must hold

    def hear(self, entry):
        id = entry.id
        assert id not in self.reasons, "nothing after the end"
        assert id not in self.stopped, "no news of what was stopped"
        is_first = not self.told[id] and bool(entry.token_ids)
        assert (entry.num_cached_tokens is not None) == is_first
        self.told[id] += entry.token_ids
        admit = self.admits[id]
        if len(admit.prompt_token_ids) >= self.capacity:
            assert entry.finish_reason == "error"
            assert entry.error.code == "kv_cache_exhausted"
        else:
            output, reason, stop_reason = oracle(admit, self.seeds[id], self.limit(id))
            assert self.told[id] == output[: len(self.told[id])], "tokens of the oracle"
            if entry.finish_reason in ("stop", "length"):
                assert (self.told[id], entry.finish_reason) == (output, reason)
                assert entry.stop_reason == stop_reason
        assert (entry.error is not None) == (entry.finish_reason == "error")
        if entry.finish_reason is not None:
            self.reasons[id] = entry.finish_reason

    def check_plan(self, plan):
        config = self.config
        assert sum(plan.num_scheduled_tokens) <= config.max_num_scheduled_tokens, (
            "the token budget holds"
        )
        assert min(plan.num_scheduled_tokens) > 0
        assert len(set(plan.request_slots)) == len(plan.request_slots) <= config.max_num_active_seqs
        assert set(plan.request_slots) <= set(range(config.max_num_seqs))
        self.row_owner.update({new.request_slot: new.sequence for new in plan.new_sequences})
        self.owners[plan.step] = [self.row_owner[row] for row in plan.request_slots]
        by_row = {
            sequence.request_slot: sequence for sequence in self.policy.table.running.snapshot()
        }
        for row, start, count in zip(
            plan.request_slots, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            sequence, size = by_row[row], self.blocks.block_size
            assert sequence.id == self.row_owner[row]
            assert sequence.id in self.unfinished or sequence.is_ghost, "no work after the end"
            assert start + count < self.limit(sequence.id), "no work beyond the limit"
            num = len(self.windows)
            end = (start + count - 1) // size + 1
            written = sequence.blocks[start // size * num : end * num]
            assert all(self.blocks.num_references(block) == 1 for block in written), "one writer"
        assert {row for row, _ in plan.new_blocks} <= set(plan.request_slots)
        assert len(self.flights) < config.max_steps_in_flight

    @invariant()
    def blocks_are_conserved(self):
        if not hasattr(self, "policy"):
            return
        holders = [0] * self.blocks.num_blocks
        running = self.policy.table.running.snapshot()
        for sequence in running:
            for i, block in enumerate(sequence.blocks):
                if block == 0:
                    continue
                holders[block] += 1
                if self.blocks.num_references(block) > 1:
                    assert (
                        i // len(self.windows) + 1
                    ) * self.blocks.block_size <= sequence.num_computed_on_device, "full and landed"
        found = map(self.blocks.num_references, range(1, self.blocks.num_blocks))
        assert holders[1:] == [*found]
        assert self.blocks.num_free == self.blocks.num_usable - sum(map(bool, holders))
        assert len(running) <= self.config.max_num_active_seqs

    @invariant()
    def numbers_agree(self):
        if not hasattr(self, "policy"):
            return
        stats = self.policy.statistics()
        in_queues = len(self.policy.table.waiting.ids)
        assert stats.num_running + stats.num_waiting + stats.num_deferred == len(
            self.policy.table.sequences
        )
        assert in_queues <= stats.num_waiting
        assert stats.num_steps_in_flight == len(self.flights)
        assert 0 <= self.policy.num_started <= len(self.policy.table.sequences)

    def teardown(self):
        """Whatever happened, everything ends, in a bounded number of steps, and nothing stays."""
        if not hasattr(self, "policy"):
            return
        self.return_the_device()
        self.set_pause(Pause.NONE)
        for _ in range(5000):
            self.plan()
            if not self.flights:
                break
            self.land()
            self.take_outputs()
        self.take_outputs()
        assert not self.policy.table.sequences
        for id in self.admits:
            assert (id in self.reasons) != (id in self.stopped), "exactly one end"
        stats = self.policy.statistics()
        assert (stats.num_running, stats.num_waiting, stats.num_deferred) == (0, 0, 0)
        assert stats.num_blocks_free == stats.num_blocks_total
        assert self.policy.reset_prefix_cache()


PolicyMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestPolicyAgainstTheOracle = PolicyMachine.TestCase
