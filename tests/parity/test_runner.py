"""What the runner promises the scheduler, on tiny models."""

import os
from pathlib import Path

import msgspec
import pytest
import torch

from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.steps import NewSequence, Sampling, StepPlan
from trouper.errors import ProfilerAlreadyActiveError, TrouperValidationError

from .driver import GREEDY, Driver, engine_config, random_prompts
from .test_architectures import VOCAB, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_model("Llama", {"num_hidden_layers": 2}, path)
    return path


@pytest.fixture
def runner(folder):
    runner = CpuRunner(engine_config(folder))
    runner.load()
    return runner


@pytest.fixture(scope="module")
def answers(folder):
    """The greedy answers to three prompts, each alone."""
    runner = CpuRunner(engine_config(folder))
    return [Driver(runner).run([prompt], 10)[0].token_ids for prompt in PROMPTS]


PROMPTS = random_prompts((9, 20, 3), VOCAB, seed=3)


def row_of(row, tokens, blocks, *, num_prompt=None, sampling=GREEDY):
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    return NewSequence(row, SequenceId(row), tuple(tokens), num_prompt, tuple(blocks), sampling)


def plan_of(*columns, **changes):
    """Entries are (slot, computed, scheduled, sampled)."""
    return StepPlan(0, 0, *map(tuple, zip(*columns, strict=True)), **changes)


def test_chunks_without_samples_need_no_kernels(folder):
    # torch computes this dtype.
    runner = CpuRunner(engine_config(folder, dtype="float16"))
    prompts = PROMPTS[1:2]
    whole, cut = (Driver(runner, chunk=chunk).run(prompts, 4)[0] for chunk in (64, 12))
    assert cut.token_ids == whole.token_ids


def test_plans_are_made_before_results_of_earlier_ones_are_known(runner, answers):
    """Ten plans, none of which says what a token is, then their results."""
    plans = [plan_of((2, 0, 9, 1), new_sequences=(row_of(2, PROMPTS[0], (5, 4, 9)),))]
    plans += [plan_of((2, 9 + i, 1, 1)) for i in range(9)]
    assert [runner.execute(plan).token_ids[0][0] for plan in plans] == answers[0]


def test_same_request_is_same_in_crowd(runner, answers):
    found = Driver(runner, chunk=4, shuffle=2, stagger=3).run(PROMPTS, 10)
    assert [s.token_ids for s in found] == answers


def test_sampled_answer_is_same_in_crowd(folder):
    sampling = [
        Sampling(seed=1),
        Sampling(seed=2, top_k=20, top_p=0.9),
        Sampling(seed=3, min_p=0.01, presence_penalty=0.5),
    ]
    runner = CpuRunner(engine_config(folder))
    alone = [
        Driver(runner).run([p], 10, s)[0].token_ids for p, s in zip(PROMPTS, sampling, strict=True)
    ]
    crowd = Driver(runner, chunk=5, shuffle=4, stagger=2).run(PROMPTS, 10, sampling)
    assert [s.token_ids for s in crowd] == alone


def test_row_is_given_to_another_sequence_by_very_next_plan(runner, answers):
    runner.execute(plan_of((0, 0, 20, 1), new_sequences=(row_of(0, PROMPTS[1], (1, 2, 3)),)))
    plans = [plan_of((0, 0, 9, 1), new_sequences=(row_of(0, PROMPTS[0], (3, 1)),))]
    plans += [plan_of((0, 9 + i, 1, 1)) for i in range(5)]
    assert [runner.execute(plan).token_ids[0][0] for plan in plans] == answers[0][:6]


def test_preempted_sequence_comes_back_with_what_it_had_generated(runner, answers):
    tokens = [*PROMPTS[0], *answers[0][:4]]
    row = row_of(1, tokens, (7, 8), num_prompt=len(PROMPTS[0]))
    done = runner.execute(plan_of((1, 0, len(tokens), True), new_sequences=(row,)))
    assert done.token_ids == ((answers[0][4],),)


def test_sequences_share_the_blocks_of_a_common_prefix(runner, answers):
    """Block size 8: the second sequence computes from position 16 on, over two foreign blocks."""
    runner.execute(plan_of((0, 0, 20, 0), new_sequences=(row_of(0, PROMPTS[1], (4, 2, 7)),)))
    plans = [plan_of((1, 16, 4, 1), new_sequences=(row_of(1, PROMPTS[1], (4, 2, 9)),))]
    plans += [plan_of((1, 20 + i, 1, 1)) for i in range(3)]
    assert [runner.execute(plan).token_ids[0][0] for plan in plans] == answers[1][:4]


def test_a_block_is_copied_before_anything_is_computed(runner, answers):
    """Copy-on-write: both sequences go on from the same half-full block, each in its own copy."""
    with torch.inference_mode():
        runner.model.memory.groups[0].fill_(torch.nan)
    runner.execute(plan_of((0, 0, 20, 0), new_sequences=(row_of(0, PROMPTS[1], (4, 2, 7)),)))
    other = [*PROMPTS[1], 17]
    plan = plan_of(
        (0, 19, 1, 1),
        (1, 20, 1, 1),
        new_sequences=(row_of(1, other, (4, 2, 9)),),
        copies=((7, 9),),
    )
    done = runner.execute(plan)
    assert done.token_ids[0] == (answers[1][0],)
    whole = runner.execute(plan_of((2, 0, 21, 1), new_sequences=(row_of(2, other, (10, 11, 12)),)))
    assert done.token_ids[1] == whole.token_ids[0]


def test_new_blocks_extend_a_row(runner, answers):
    plans = [plan_of((0, 0, 9, 1), new_sequences=(row_of(0, PROMPTS[0], (3, 1)),))]
    for i in range(9):
        new_blocks = ((0, (6,)),) if 9 + i == 16 else ()
        plans.append(plan_of((0, 9 + i, 1, 1), new_blocks=new_blocks))
    assert [runner.execute(plan).token_ids[0][0] for plan in plans] == answers[0]


def test_a_chunk_that_samples_nothing_yields_no_token(runner):
    plan = plan_of((0, 0, 5, 0), new_sequences=(row_of(0, PROMPTS[0], (1, 2)),))
    done = runner.execute(plan)
    assert (done.token_ids, done.logprobs, done.failed) == (((),), (), ())


def test_an_empty_plan_is_answered(runner):
    assert runner.execute(StepPlan(3, 0, (), (), (), ())).token_ids == ()


def test_column_whose_logits_are_not_finite_fails_alone(runner, answers):
    poisoned = 5
    with torch.inference_mode():
        runner.model.decoder._embedding[poisoned] = torch.nan
    prompt = [2, poisoned, 3]
    assert poisoned not in {*PROMPTS[0], *PROMPTS[1], *answers[0], *answers[1]}
    plan = plan_of(
        (0, 0, 9, 1),
        (1, 0, 3, 1),
        (2, 0, 20, 1),
        new_sequences=(
            row_of(0, PROMPTS[0], (1, 2)),
            row_of(1, prompt, (3,)),
            row_of(2, PROMPTS[1], (4, 5, 6)),
        ),
    )
    done = runner.execute(plan)
    assert done.token_ids == ((answers[0][0],), (), (answers[1][0],))
    assert done.failed == ((1, "not_finite"),)


def test_reused_block_with_nan_is_harmless(runner, answers):
    with torch.inference_mode():
        runner.model.memory.groups[0].fill_(torch.nan)
    plans = [plan_of((0, 0, 9, 1), new_sequences=(row_of(0, PROMPTS[0], (3, 1, 2)),))]
    plans += [plan_of((0, 9 + i, 1, 1)) for i in range(9)]
    assert [runner.execute(plan).token_ids[0][0] for plan in plans] == answers[0]


def test_prompt_logprobs_come_chunk_by_chunk(folder):
    sampling = Sampling(temperature=0.0, prompt_logprobs=1)
    whole = Driver(CpuRunner(engine_config(folder))).run([PROMPTS[1]], 2, sampling)
    parts = Driver(CpuRunner(engine_config(folder)), chunk=3).run([PROMPTS[1]], 2, sampling)
    assert len(whole[0].prompt_logprobs) == len(PROMPTS[1]) - 1
    for a, b in zip(whole[0].prompt_logprobs, parts[0].prompt_logprobs, strict=True):
        assert (a.token_ids, a.rank) == (b.token_ids, b.rank)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_logprobs_are_empty_when_nobody_asked_and_per_column_otherwise(runner):
    asking = msgspec.structs.replace(GREEDY, logprobs=0)
    plan = plan_of(
        (0, 0, 9, 1),
        (1, 0, 3, 1),
        new_sequences=(row_of(0, PROMPTS[0], (1, 2)), row_of(1, PROMPTS[2], (3,), sampling=asking)),
    )
    done = runner.execute(plan)
    assert done.logprobs[0] == ()
    assert done.logprobs[1][0].token_ids == done.token_ids[1]


def test_sleep_and_wake_give_the_same_answers(runner, answers):
    for level in (1, 2):
        runner.sleep(level)
        with pytest.raises(RuntimeError, match="not loaded"):
            runner.execute(plan_of((0, 0, 9, 1), new_sequences=(row_of(0, PROMPTS[0], (1, 2)),)))
        runner.wake(frozenset({"weights"}))
        runner.wake(frozenset({"kv_cache"}))
        plan = plan_of((0, 0, 9, 1), new_sequences=(row_of(0, PROMPTS[0], (1, 2)),))
        assert runner.execute(plan).token_ids == ((answers[0][0],),)


@pytest.mark.filterwarnings("ignore")  # the profiler's own
def test_a_profile_is_written_on_stop(runner, tmp_path):
    runner.start_profile(str(tmp_path / "traces"), "mine")
    with pytest.raises(ProfilerAlreadyActiveError):
        runner.start_profile(str(tmp_path), "other")
    runner.execute(plan_of((0, 0, 9, 1), new_sequences=(row_of(0, PROMPTS[0], (1, 2)),)))
    runner.stop_profile()
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name.startswith("mine-")
    runner.stop_profile()


def test_kv_memory_is_bounded_by_use(folder):
    assert CpuRunner(engine_config(folder, num_gpu_blocks_override=40)).load().num_blocks == 41
    useful = CpuRunner(engine_config(folder, kv_cache_memory_bytes=2**30)).load()
    assert useful.num_blocks == 8 * 256 // 8 + 1  # 8 sequences of 256 tokens
    block_bytes = 2 * 2 * 2 * 16 * 8 * 4
    by_bytes = CpuRunner(engine_config(folder, kv_cache_memory_bytes=50 * block_bytes + 1)).load()
    assert by_bytes.num_blocks == 51


def test_kv_pages_take_memory_on_first_use(folder):
    """A cache of 2 GiB costs nothing at start: its pages are zero until a sequence writes to them."""
    block_bytes = 2 * 2 * 2 * 16 * 8 * 4
    before = resident_bytes()
    runner = CpuRunner(engine_config(folder, num_gpu_blocks_override=2**31 // block_bytes))
    assert runner.load().num_blocks > 2**17
    assert resident_bytes() - before < 2**28
    runner.close()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_sequence_that_cannot_fit_is_refused_with_length_that_could(folder):
    config = engine_config(folder, num_gpu_blocks_override=31, max_model_len=256)
    with pytest.raises(TrouperValidationError, match=r"largest max_model_len that fits is 248"):
        CpuRunner(config).load()
    CpuRunner(engine_config(folder, num_gpu_blocks_override=31, max_model_len=248)).load()
