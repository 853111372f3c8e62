"""The policy, one behaviour at a time.  The worked numbers are in test_policy_cases, the rest in _model."""

import math

import pytest

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.requests import Admit, LoadedAdapter, RequestOptions
from trouper.actors.messages.steps import StepDone, TokenLogprobs
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.actors.scheduling.state.sequence import State
from trouper.config.engine_config import SchedulerConfig
from trouper.params import SamplingParams

EOS = 99


class Desk:
    """A policy and the answers of a device that says `token`; news are kept by sequence."""

    def __init__(self, num_usable=100, block_size=4, prefix_caching=True, **config):
        config.setdefault("max_num_seqs", 8)
        self.blocks = KVBlocks(num_usable + 1, block_size, prefix_caching)
        self.policy = Policy(SchedulerConfig(**config), self.blocks)
        self.row_owner = {}
        self.flights = []
        self.news = []

    def admit(
        self,
        id=0,
        prompt=(1, 2, 3),
        eos=EOS,
        stop_token_ids=(),
        salt=None,
        priority=0,
        adapter=None,
        resumed=(),
        **params,
    ):
        self.policy.admit(
            Admit(
                id=id,
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(**params),
                eos_token_id=eos,
                stop_token_ids=stop_token_ids,
                options=RequestOptions(priority=priority, resumed_token_ids=resumed),
                arrival_time=float(id),
                cache_salt=salt,
                adapter=None
                if adapter is None
                else LoadedAdapter(adapter, bytes([adapter]) * 32, f"adapter {adapter}"),
            )
        )

    def plan(self):
        plan = self.policy.plan()
        if plan is not None:
            self.row_owner.update({new.request_slot: new.sequence for new in plan.new_sequences})
            self.flights.append(plan)
        return plan

    def owners(self, plan):
        return [self.row_owner[row] for row in plan.request_slots]

    def land(self, token=7, **done):
        plan = self.flights.pop(0)
        tokens = tuple((token,) * num for num in plan.num_sampled_tokens)
        self.policy.apply(StepDone(plan.step, tokens, **done))
        return self.take()

    def fail(self, message="boom", **how):
        self.policy.fail_step(self.flights.pop(0).step, message, **how)
        return self.take()

    def take(self):
        news = self.policy.take_outputs()
        entries = list(news.sequences) if news else []
        self.news += entries
        return entries

    def step(self, token=7, **done):
        assert self.plan() is not None
        return self.land(token, **done)

    def ends(self):
        return {e.id: (e.finish_reason, e.stop_reason) for e in self.news if e.finish_reason}

    def assert_idle(self):
        stats = self.policy.statistics()
        assert (stats.num_running, stats.num_waiting, stats.num_deferred) == (0, 0, 0)
        assert stats.num_blocks_free == stats.num_blocks_total
        assert not self.policy.table.sequences


# What a plan says


def test_prompt_is_computed_in_chunks_and_only_last_yields_token():
    desk = Desk(max_num_scheduled_tokens=4)
    desk.admit(prompt=range(10))
    plans = [
        (p.num_computed_tokens, p.num_scheduled_tokens, p.num_sampled_tokens) for p in [desk.plan()]
    ]
    for _ in range(2):
        desk.land()
        plan = desk.plan()
        plans.append((plan.num_computed_tokens, plan.num_scheduled_tokens, plan.num_sampled_tokens))
    assert plans == [((0,), (4,), (False,)), ((4,), (4,), (False,)), ((8,), (2,), (True,))]


def test_row_is_reported_once_and_then_only_what_is_new():
    desk = Desk()
    desk.admit(prompt=(1, 2, 3), max_tokens=8, seed=5)
    plan = desk.plan()
    (new,) = plan.new_sequences
    assert (new.sequence, new.token_ids, new.num_prompt, new.block_ids) == (0, (1, 2, 3), 3, (1,))
    assert new.sampling.seed == 5
    desk.land()
    plan = desk.plan()
    assert (plan.new_sequences, plan.new_blocks) == ((), ())
    desk.land()
    assert desk.plan().new_blocks == ((new.request_slot, (2,)),)


def test_second_step_in_flight_counts_unknown_token_as_placeholder():
    desk = Desk(max_steps_in_flight=2)
    desk.admit(max_tokens=3)
    first, second = desk.plan(), desk.plan()
    assert (first.num_computed_tokens, second.num_computed_tokens, second.num_scheduled_tokens) == (
        (0,),
        (3,),
        (1,),
    )
    assert desk.plan() is None  # two are out


def test_sequence_sure_to_reach_its_limit_is_not_planned_again():
    desk = Desk(max_steps_in_flight=3)
    desk.admit(max_tokens=2)
    assert desk.plan() is not None
    assert desk.plan() is not None
    assert desk.plan() is None
    desk.land()
    desk.land()
    assert desk.ends() == {0: ("length", None)}
    desk.assert_idle()


def test_surplus_result_is_dropped_and_row_freed():
    desk = Desk(max_steps_in_flight=2, max_num_seqs=1, max_num_active_seqs=1)
    desk.admit(0, max_tokens=9)
    desk.admit(1, max_tokens=1)
    desk.plan()
    desk.plan()
    assert desk.land(EOS)[0].token_ids == (EOS,)
    assert desk.owners(desk.plan()) == [1]
    assert desk.land() == []  # the surplus
    desk.land()
    assert desk.ends() == {0: ("stop", None), 1: ("length", None)}


def test_answers_come_in_order_or_engine_is_broken():
    desk = Desk(max_steps_in_flight=2)
    desk.admit()
    desk.plan()
    second = desk.plan()
    with pytest.raises(RuntimeError, match="an answer to step 2"):
        desk.policy.apply(StepDone(second.step, ((7,),)))


def test_very_long_prompt_is_split_without_chunking():
    desk = Desk(enable_chunked_prefill=False, max_num_scheduled_tokens=8)
    desk.admit(prompt=range(20), max_tokens=1)
    while desk.policy.table.sequences:
        desk.step()
    assert desk.ends() == {0: ("length", None)}


# Stop conditions, spec 5.3


@pytest.mark.parametrize(
    ("token", "params", "end"),
    [
        (EOS, {}, ("stop", None)),
        (98, {}, ("stop", 98)),
        (EOS, {"max_tokens": 1}, ("stop", None)),
        (7, {"max_tokens": 1}, ("length", None)),
        (EOS, {"min_tokens": 2}, None),
        (98, {"min_tokens": 2}, None),
        (98, {"min_tokens": 1}, ("stop", 98)),
        (EOS, {"eos": None}, None),
        (7, {}, None),
    ],
)
def test_the_stop_conditions_are_checked_in_their_order(token, params, end):
    desk = Desk()
    desk.admit(stop_token_ids=(98,), **params)
    (entry,) = desk.step(token)
    assert entry.token_ids == (token,)
    assert (entry.finish_reason and (entry.finish_reason, entry.stop_reason)) == end


def test_the_context_ends_a_sequence_with_length():
    desk = Desk(max_model_len=5)
    desk.admit(max_tokens=16)
    desk.step()
    desk.step()
    assert desk.ends() == {0: ("length", None)}


def test_prompt_that_fills_context_ends_with_length_and_no_token():
    desk = Desk(max_model_len=3)
    desk.admit()
    assert desk.plan() is None
    (entry,) = desk.take()
    assert (entry.token_ids, entry.finish_reason) == ((), "length")


def test_unfittable_prompt_ends_with_error():
    desk = Desk(num_usable=2)
    desk.admit(0, prompt=range(8), n=2)
    desk.admit(10, prompt=range(7))
    assert [(e.id, e.finish_reason) for e in desk.take()] == [(0, "error"), (1, "error")]
    assert all(entry.error.code == "kv_cache_exhausted" for entry in desk.news)
    desk.step()
    desk.step()  # the 9th token needs no room of its own
    assert desk.ends()[10] == ("length", None)
    desk.assert_idle()


# The end of a request in every stage


def in_waiting(desk):
    desk.policy.set_pause(Pause.NO_NEW_REQUESTS)


def in_prefill(desk):
    desk.step()


def in_flight(desk):
    desk.plan()


def in_decode(desk):
    for _ in range(4):
        desk.step()


def preempted(desk):
    desk.step()
    desk.policy.preempt_all()


def preempted_in_flight(desk):
    in_decode(desk)
    desk.plan()
    desk.policy.preempt_all()


STAGES = [in_waiting, in_prefill, in_flight, in_decode, preempted, preempted_in_flight]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [1, 3])
def test_abort_frees_sequences_in_any_stage(stage, n):
    desk = Desk(max_num_scheduled_tokens=4)
    desk.admit(prompt=range(10), n=n)
    stage(desk)
    desk.policy.abort(0)
    desk.policy.abort(0)
    desk.policy.abort(12345)
    desk.assert_idle()
    while desk.flights:
        desk.land()
    desk.take()
    assert [e.id for e in desk.news if e.finish_reason == "abort"] == list(range(n))
    assert len(desk.ends()) == n


def test_final_news_of_abort_carry_tokens_nobody_has_heard_of():
    desk = Desk()
    desk.admit()
    plan = desk.plan()
    desk.policy.apply(StepDone(plan.step, ((7,),)))
    desk.policy.abort(0)
    (entry,) = desk.take()
    assert (entry.token_ids, entry.finish_reason, entry.num_cached_tokens) == ((7,), "abort", 0)


def test_sequence_that_finished_in_same_turn_keeps_its_own_reason():
    desk = Desk()
    desk.admit(max_tokens=1)
    plan = desk.plan()
    desk.policy.apply(StepDone(plan.step, ((7,),)))
    desk.policy.abort(0)
    assert [entry.finish_reason for entry in desk.take()] == ["length"]


def test_what_detokenizer_stopped_is_heard_of_no_more():
    desk = Desk(max_steps_in_flight=2)
    desk.admit()
    desk.plan()
    desk.plan()
    desk.land()
    desk.policy.stop((0, 0, 12345))
    assert desk.land() == []
    assert desk.ends() == {}
    desk.assert_idle()


# Preemption


def test_preempted_sequence_is_recomputed_with_what_it_had_generated():
    desk = Desk(prefix_caching=False)
    desk.admit(max_tokens=4)
    desk.step(7)
    desk.step(8)
    desk.policy.preempt_all()
    assert desk.policy.state(0) is State.PREEMPTED
    plan = desk.plan()
    assert (plan.num_computed_tokens, plan.num_scheduled_tokens) == ((0,), (5,))
    assert plan.new_sequences[0].token_ids == (1, 2, 3, 7, 8)
    assert plan.new_sequences[0].num_prompt == 3


def test_fcfs_preempts_last_and_starts_it_again_before_new():
    desk = Desk(num_usable=4, policy="fcfs", max_num_scheduled_tokens=64)
    desk.admit(0, prompt=range(8), max_tokens=9)
    desk.admit(1, prompt=range(50, 58), max_tokens=9)
    desk.step()
    desk.admit(2, prompt=(1,), priority=9)
    desk.step()
    assert desk.policy.table.running.ids == (0,)
    assert desk.policy.table.waiting.ids == (1, 2)


def test_cache_reset_resamples_steps_in_flight():
    desk = Desk(max_steps_in_flight=2)
    desk.admit(max_tokens=2)
    desk.step(7)
    desk.plan()
    assert not desk.policy.reset_prefix_cache()
    assert desk.policy.reset_prefix_cache(reset_running=True)
    again = desk.plan()
    assert again.new_sequences[0].token_ids == (1, 2, 3, 7)
    assert desk.land(8) == []
    assert desk.land(8)[0].token_ids == (8,)
    assert desk.ends() == {0: ("length", None)}


def test_watermark_keeps_blocks_free_for_those_who_run():
    desk = Desk(num_usable=10, watermark=0.3)
    desk.admit(0, prompt=range(16), max_tokens=2)
    desk.admit(1, prompt=range(50, 66), max_tokens=2)
    assert desk.owners(desk.plan()) == [0]  # 6 are free, 4 wanted, 3 must stay


@pytest.mark.parametrize(("reserve", "owners"), [(True, [0]), (False, [0, 1])])
def test_reserving_full_prompt_looks_beyond_first_chunk(reserve, owners):
    desk = Desk(num_usable=6, max_num_scheduled_tokens=16, reserve_full_isl=reserve)
    desk.admit(0, prompt=range(12))
    desk.admit(1, prompt=range(50, 66))
    assert desk.owners(desk.plan()) == owners


# Pauses


def test_nothing_is_planned_while_all_is_paused():
    desk = Desk()
    desk.admit()
    desk.policy.set_pause(Pause.ALL)
    assert desk.plan() is None
    desk.policy.set_pause(Pause.NONE)
    assert desk.plan() is not None


def test_pause_of_new_spares_started_requests():
    desk = Desk()
    desk.admit(0, n=3, max_tokens=2)
    desk.step()
    desk.policy.set_pause(Pause.NO_NEW_REQUESTS)
    desk.policy.preempt_all()
    desk.admit(10)
    assert desk.policy.num_started > 0
    while desk.policy.num_started:
        desk.step()
    assert set(desk.ends()) == {0, 1, 2}
    assert desk.plan() is None
    assert desk.policy.table.waiting.ids == (10,)


# Prefix cache


def test_computed_prefix_is_shared_and_reported():
    desk = Desk()
    desk.admit(0, prompt=range(10))
    desk.plan()
    desk.admit(1, prompt=range(10))
    desk.land()
    plan = desk.plan()
    assert plan.num_computed_tokens == (10, 8)
    assert plan.new_sequences[0].block_ids[:2] == (1, 2)
    assert [entry.num_cached_tokens for entry in desk.land()] == [None, 8]
    stats = desk.policy.statistics()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (20, 8)


@pytest.mark.parametrize(
    ("salt", "params", "num_cached"),
    [(None, {}, 8), ("s", {}, 0), (None, {"skip_reading_prefix_cache": True}, 0)],
)
def test_salt_or_wish_keeps_request_away_from_cache(salt, params, num_cached):
    desk = Desk()
    desk.admit(0, prompt=range(10), max_tokens=1)
    desk.step()
    desk.admit(1, prompt=range(10), salt=salt, max_tokens=1, **params)
    assert desk.step()[0].num_cached_tokens == num_cached


def test_resumed_request_goes_on_behind_its_tokens():
    desk = Desk()
    desk.admit(0, prompt=range(10), resumed=(20, 21, 22), max_tokens=5)
    (new,) = desk.plan().new_sequences
    assert (new.token_ids, new.num_prompt) == ((*range(10), 20, 21, 22), 10)
    desk.land(7)
    desk.step()
    assert [token for entry in desk.news for token in entry.token_ids] == [7, 7]
    assert desk.ends() == {0: ("length", None)}


def test_resumed_request_may_have_ended_already():
    desk = Desk()
    desk.admit(0, prompt=range(4), resumed=(20, 21), max_tokens=2)
    assert desk.plan() is None
    desk.take()
    assert desk.ends() == {0: ("length", None)}


def test_block_names_outlive_the_process():
    """Names of blocks are kept beyond the process, so the same request must have the same names in every run."""
    desk = Desk()
    desk.admit(0, prompt=range(10), salt="s", adapter=3, max_tokens=1)
    desk.step()
    names = sorted(name.hex()[:16] for name in desk.policy.blocks.prefixes())
    assert names == ["4417b13ba78690b3", "f0b9918275b23f5a"]


def test_outputs_are_cached_and_preemption_lookups_separate():
    desk = Desk()
    desk.admit(prompt=range(6), max_tokens=9)
    for _ in range(4):
        desk.step()
    desk.policy.preempt_all()
    assert desk.plan().num_computed_tokens == (8,)
    stats = desk.policy.statistics()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (6, 0)
    assert (stats.recompute_cache_queries, stats.recompute_cache_hits) == (10, 8)


# n > 1


def test_siblings_fork_from_leader_when_its_prompt_has_landed():
    desk = Desk()
    desk.admit(0, prompt=range(10), n=3, seed=40, max_tokens=8)
    plan = desk.plan()
    assert desk.owners(plan) == [0]
    assert desk.policy.statistics().num_deferred == 2
    desk.land()
    plan = desk.plan()
    assert desk.owners(plan) == [0, 1, 2]
    assert (plan.num_computed_tokens, plan.num_scheduled_tokens) == ((10, 9, 9), (1, 1, 1))
    assert [new.block_ids for new in plan.new_sequences] == [(1, 2, 4), (1, 2, 5)]
    assert plan.copies == ((3, 4), (3, 5))
    assert [new.sampling.seed for new in plan.new_sequences] == [41, 42]
    assert all(plan.num_sampled_tokens)


def test_fork_at_start_of_block_copies_nothing():
    desk = Desk()
    desk.admit(0, prompt=range(9), n=2)
    desk.step()
    plan = desk.plan()
    assert (plan.num_computed_tokens, plan.copies) == ((9, 8), ())


def test_siblings_of_leader_that_has_ended_start_like_everybody():
    desk = Desk()
    desk.admit(0, prompt=range(10), n=2)
    desk.step(EOS)
    plan = desk.plan()
    assert (desk.owners(plan), plan.num_computed_tokens, plan.copies) == ([1], (8,), ())


# What the device is told about sampling


def test_unseeded_requests_have_own_seeds():
    desk = Desk()
    desk.admit(0, temperature=0.0)
    desk.admit(1)
    desk.admit(2)
    first, second, third = (new.sampling for new in desk.plan().new_sequences)
    assert (first.temperature, second.temperature) == (0.0, 1.0)
    assert second.seed != third.seed
    again = Desk()
    again.admit(1)
    assert again.plan().new_sequences[0].sampling.seed == second.seed


def test_stop_ids_are_told_only_where_min_tokens_masks_them():
    desk = Desk()
    desk.admit(0, stop_token_ids=(98,))
    desk.admit(1, stop_token_ids=(98,), min_tokens=2)
    assert [new.sampling.stop_ids for new in desk.plan().new_sequences] == [(), (98, 99)]


def test_seeds_of_children_wrap_around_in_64_bits():
    desk = Desk()
    desk.admit(0, n=2, seed=2**63 - 1)
    desk.step()
    assert desk.plan().new_sequences[0].sampling.seed == -(2**63)


# Logprobs


def test_logprobs_travel_with_their_tokens():
    desk = Desk()
    desk.admit(logprobs=0)
    entry = TokenLogprobs((7,), (-0.5,), 1)
    assert desk.step(logprobs=((entry,),))[0].logprobs == (entry,)


def test_tokens_behind_one_that_ends_sequence_are_dropped():
    desk = Desk()
    desk.admit(logprobs=0, stop_token_ids=(8,))
    plan = desk.plan()
    entries = tuple(TokenLogprobs((token,), (-0.5,), 1) for token in (7, 8, 9))
    desk.policy.apply(StepDone(plan.step, ((7, 8, 9),), (entries,)))
    (told,) = desk.take()
    assert (told.token_ids, told.finish_reason, told.stop_reason) == ((7, 8), "stop", 8)
    assert told.logprobs == entries[:2]
    assert desk.policy.statistics().num_generation_tokens == 2


def test_prompt_logprobs_come_once_despite_recomputation():
    desk = Desk(max_num_scheduled_tokens=4)
    desk.admit(prompt=range(6), prompt_logprobs=1)
    entries = [TokenLogprobs((i,), (-1.0,), 1) for i in range(6)]
    assert desk.step(prompt_logprobs=((0, tuple(entries[1:5])),)) == []
    desk.policy.preempt_all()
    assert desk.step(prompt_logprobs=((0, tuple(entries[1:5])),)) == []
    (news,) = desk.step(prompt_logprobs=((0, tuple(entries[5:])),))
    assert news.prompt_logprobs == tuple(entries[1:])
    desk.policy.preempt_all()
    assert desk.plan().new_sequences[0].sampling.prompt_logprobs is None


# Failures


def test_row_not_finite_ends_alone_and_leaves_nothing_in_cache():
    desk = Desk()
    desk.admit(0, prompt=range(10))
    desk.admit(1, prompt=range(50, 60))
    desk.step()
    entries = desk.step(failed=((0, "not_finite"),))
    assert [(e.id, e.finish_reason, e.token_ids) for e in entries] == [
        (0, "error", ()),
        (1, None, (7,)),
    ]
    assert entries[0].error.code == "numerical_error"
    desk.admit(2, prompt=range(10))
    assert desk.plan().num_computed_tokens == (11, 0)


def test_storm_of_better_requests_evicts_nobody_more_than_eight_times():
    # Each better one starts beside the first, halves the room that it has left, and then evicts it.
    desk = Desk(num_usable=256)
    desk.admit(0, max_tokens=1000)
    id = 1
    while 0 not in desk.ends():
        if len(desk.policy.table.sequences) < 2 and desk.policy.state(0) is State.RUNNING:
            desk.admit(id, prompt=[id] * 100, max_tokens=900, priority=1)
            id += 1
        desk.step()
    assert desk.ends()[0] == ("length", None)
    assert max(entry.num_preemptions for entry in desk.news if entry.id == 0) == 8
    assert id > 8


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_small_cache_serves_crowd_with_few_recomputations(policy):
    desk = Desk(num_usable=24, max_num_seqs=16, policy=policy)
    for id in range(16):
        desk.admit(id, max_tokens=60)
    while desk.policy.table.sequences:
        desk.step()
    assert set(desk.ends().values()) == {("length", None)}
    counts = [max(e.num_preemptions for e in desk.news if e.id == id) for id in range(16)]
    assert max(counts) <= 8
    desk.assert_idle()


def test_after_failure_rows_are_told_again_from_what_has_landed():
    desk = Desk(max_steps_in_flight=2)
    desk.admit(max_tokens=4)
    desk.step(7)
    old = desk.plan()
    desk.plan()
    desk.fail()
    assert desk.plan() is None  # the refused one is still out, and suspects run alone
    desk.fail("refused")
    plan = desk.plan()
    assert (plan.num_computed_tokens, plan.num_scheduled_tokens, plan.epoch) == (
        (3,),
        (1,),
        old.epoch + 1,
    )
    assert plan.new_sequences[0].token_ids == (1, 2, 3, 7)
    desk.land(8)
    assert [entry.token_ids for entry in desk.news] == [(7,), (8,)]


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5, 8, 16])
def test_poison_is_found_in_logarithmic_steps(num_sequences):
    for poison in range(num_sequences):
        desk = Desk(max_steps_in_flight=2, max_num_seqs=16)
        for id in range(num_sequences):
            desk.admit(id, max_tokens=3)
        desk.step()
        num_extra = -1  # the first failure is not extra
        while desk.policy.table.sequences or desk.flights:
            while desk.plan() is not None:
                pass
            if poison not in desk.owners(desk.flights[0]):
                num_extra += (
                    len(desk.flights[0].request_slots) < num_sequences and poison not in desk.ends()
                )
                desk.land()
                continue
            num_extra += 1
            epoch = desk.flights[0].epoch
            while desk.flights and desk.flights[0].epoch == epoch:
                desk.fail("poisoned_request: boom")
        assert num_extra <= math.ceil(math.log2(num_sequences)) + 1
        assert desk.ends() == {
            id: ("error", None) if id == poison else ("length", None) for id in range(num_sequences)
        }
        assert [str(e.error) for e in desk.news if e.error] == [
            "execution_error: poisoned_request: boom"
        ]
        for id in range(num_sequences):
            tokens = [t for e in desk.news if e.id == id for t in e.token_ids]
            assert tokens == ([7] if id == poison else [7, 7, 7])
        desk.assert_idle()


def test_a_passing_failure_ends_nobody():
    desk = Desk()
    for id in range(5):
        desk.admit(id, max_tokens=3)
    desk.plan()
    desk.fail()
    while desk.policy.table.sequences:
        desk.step()
    assert desk.ends() == dict.fromkeys(range(5), ("length", None))


def test_a_device_that_always_fails_ends_everybody():
    desk = Desk()
    for id in range(5):
        desk.admit(10 * id, n=2)
    while desk.policy.table.sequences:
        desk.plan()
        desk.fail()
    assert {reason for reason, _ in desk.ends().values()} == {"error"}
    assert len(desk.ends()) == 10
    desk.assert_idle()


# Adapters


def test_sequence_without_adapter_slot_is_passed():
    desk = Desk(max_loras=1)
    for id, adapter in enumerate((1, 2, 1, None)):
        desk.admit(id, adapter=adapter, max_tokens=1)
    assert desk.owners(desk.plan()) == [0, 2, 3]
    desk.land()
    assert desk.owners(desk.plan()) == [1]


def test_adapter_wait_is_bounded(monkeypatch):
    monkeypatch.setattr("trouper.actors.scheduling.state.sequence_table.MAX_PASSES", 3)
    desk = Desk(max_loras=1, max_num_seqs=2)
    desk.admit(0, adapter=1, max_tokens=1)
    desk.admit(1, adapter=2, max_tokens=1)
    started = []
    for id in range(2, 12):
        desk.admit(id, adapter=1, max_tokens=1)
        started += desk.owners(desk.plan())
        desk.land()
    assert started.index(1) <= 5


def test_those_that_were_passed_keep_their_order():
    desk = Desk(max_loras=1)
    for id, adapter in enumerate((1, 2, 3, 2)):
        desk.admit(id, adapter=adapter, max_tokens=1)
    desk.plan()
    assert desk.policy.table.waiting.ids == (1, 2, 3)


def test_prefix_is_shared_by_requests_of_one_adapter_alone():
    desk = Desk()
    for id, (adapter, num_cached) in enumerate([(1, 0), (2, 0), (None, 0), (1, 8), (None, 8)]):
        desk.admit(id, prompt=range(12), adapter=adapter, max_tokens=1)
        plan = desk.plan()
        assert plan.num_computed_tokens == (num_cached,)
        assert plan.new_sequences[0].adapter_slot == (adapter or 0)
        desk.land()


def test_statistics_name_adapters_that_run_and_that_wait():
    desk = Desk(max_loras=1)
    for id, adapter in enumerate((2, 1, 2, None)):
        desk.admit(id, adapter=adapter)
    desk.plan()
    found = desk.policy.statistics().adapters
    assert (found.running, found.waiting) == (("adapter 2",), ("adapter 1",))
    assert Desk().policy.statistics().adapters is None
