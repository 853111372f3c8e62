"""`LLMEngine`: the step loop of vLLM's users, on the bundled model."""

import asyncio
import threading

import pytest
import trio

from trouper import EngineArgs, LLMEngine, SamplingParams
from trouper.errors import EngineDeadError, TrouperValidationError

SMALL = {"max_model_len": 256, "max_num_seqs": 16, "num_gpu_blocks_override": 32}


@pytest.fixture(scope="module")
def engine():
    with LLMEngine.from_engine_args(EngineArgs(dtype="float32", **SMALL)) as engine:
        yield engine


def greedy(max_tokens=6, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def drain(engine):
    final = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in final
                final[output.request_id] = output
    return final


def test_add_request_returns_none_and_step_yields_until_finished(engine):
    assert engine.add_request("a", "def f(", greedy()) is None
    assert engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == 1
    final = drain(engine)
    assert len(final["a"].outputs[0].token_ids) == 6
    assert engine.get_num_unfinished_requests() == 0
    assert engine.step() == []


def test_nothing_is_computed_before_step(engine):
    engine.add_request("a", "def f(", greedy())
    assert engine.statistics().scheduler.num_steps_in_flight == 0
    assert engine.statistics().scheduler.num_waiting == 1
    drain(engine)


def test_each_step_adds_one_token(engine):
    engine.add_request("a", "def f(", greedy(4))
    assert [len(engine.step()[0].outputs[0].token_ids) for _ in range(4)] == [1, 2, 3, 4]
    assert not engine.has_unfinished_requests()


def test_ids_are_checked(engine):
    with pytest.raises(TypeError, match="request_id must be a string"):
        engine.add_request(1, "x", greedy())
    engine.add_request("same", "x", greedy())
    with pytest.raises(ValueError, match="in flight"):
        engine.add_request("same", "x", greedy())
    drain(engine)
    engine.add_request("same", "x", greedy())
    drain(engine)


def test_bad_prompt_raises_from_add_request_and_leaves_nothing(engine):
    for prompt, params in (("", greedy()), ([10**9], greedy()), ("x " * 2000, greedy())):
        with pytest.raises(TrouperValidationError):
            engine.add_request("bad", prompt, params)
    assert not engine.has_unfinished_requests()
    assert engine.statistics().num_open_requests == 0


def test_three_of_ten_are_aborted_after_five_steps(engine):
    for i in range(10):
        engine.add_request(f"request-{i}", f"# article {i}\n", greedy(20, ignore_eos=True))
    for _ in range(5):
        engine.step()
    engine.abort_request(["request-3", "request-4", "request-5", "unknown"])
    final = drain(engine)
    reasons = {id: output.outputs[0].finish_reason for id, output in final.items()}
    aborted = {"request-3", "request-4", "request-5"}
    assert {id for id, reason in reasons.items() if reason == "abort"} == aborted
    assert {id for id, reason in reasons.items() if reason == "length"} == reasons.keys() - aborted
    assert len(final) == 10


def test_the_larger_priority_is_scheduled_first():
    args = EngineArgs(dtype="float32", **{**SMALL, "max_num_seqs": 1})
    with LLMEngine.from_engine_args(args) as engine:
        for i in range(3):
            engine.add_request(f"low-{i}", "x", greedy(2))
        engine.add_request("urgent", "x", greedy(2), priority=10)
        order = [o.request_id for _ in range(20) for o in engine.step() if o.finished]
    assert order == ["urgent", "low-0", "low-1", "low-2"]


def test_n_completions_count_as_n_unfinished(engine):
    engine.add_request("a", "def f(", SamplingParams(n=3, seed=1, max_tokens=4))
    assert engine.get_num_unfinished_requests() == 3
    drain(engine)


def test_requests_may_be_added_and_aborted_from_other_threads(engine):
    def add(number):
        engine.add_request(f"t{number}", "def f(", greedy(8))
        if number % 2:
            engine.abort_request(f"t{number}")

    threads = [threading.Thread(target=add, args=(n,)) for n in range(6)]
    final = {}
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads) or engine.has_unfinished_requests():
        final.update({o.request_id: o for o in engine.step() if o.finished})
    for thread in threads:
        thread.join()
    assert sorted(final) == [f"t{n}" for n in range(6)]


def test_paused_steps_yield_nothing_and_requests_are_kept(engine):
    engine.add_request("a", "def f(", greedy(4))
    engine.step()
    with engine.paused():
        assert engine.is_sleeping()
        assert engine.step() == []
        assert engine.step() == []
    assert len(drain(engine)["a"].outputs[0].token_ids) == 4


def test_abort_by_sleep_is_delivered_by_next_step(engine):
    engine.add_request("a", "def f(", greedy(50, ignore_eos=True))
    engine.step()
    engine.sleep(0, mode="abort")
    assert engine.has_unfinished_requests()
    assert [o.outputs[0].finish_reason for o in engine.step()] == ["abort"]
    engine.wake_up()


def test_dummy_batch_of_data_parallelism_is_executed_once(engine):
    engine.should_execute_dummy_batch = True
    assert engine.step() == []
    assert not engine.should_execute_dummy_batch


def test_a_closed_engine_says_so():
    engine = LLMEngine.from_engine_args(EngineArgs(dtype="float32", **SMALL))
    engine.close()
    engine.close()
    for call in (engine.step, engine.statistics, lambda: engine.add_request("a", "x", greedy())):
        with pytest.raises(EngineDeadError, match="closed"):
            call()


def test_engine_inside_trio_never_blocks():
    before = threading.active_count()
    made_outside = LLMEngine.from_engine_args(EngineArgs(dtype="float32", **SMALL))

    async def main():
        with pytest.raises(RuntimeError, match="AsyncLLMEngine"):
            LLMEngine.from_engine_args(EngineArgs(**SMALL))
        with pytest.raises(RuntimeError, match="AsyncLLMEngine"):
            made_outside.add_request("a", "def f(", greedy())
        made_outside.close()

    trio.run(main)
    for thread in threading.enumerate():
        if thread.name == "closing":
            thread.join()
    assert threading.active_count() == before


def test_a_task_of_asyncio_may_wait(engine):  # as in a notebook
    async def main():
        engine.add_request("a", "def f(", greedy())
        return drain(engine)

    assert len(asyncio.run(main())["a"].outputs[0].token_ids) == 6


def test_an_engine_dropped_open_warns_and_ends():
    engine = LLMEngine.from_engine_args(EngineArgs(dtype="float32", **SMALL))
    with pytest.warns(ResourceWarning, match="not closed before deletion"):
        del engine
