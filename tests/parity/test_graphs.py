"""A decode step replayed is the step computed eagerly, bit by bit."""

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModel

from trouper.actors.executor.device import PendingResult
from trouper.actors.executor.runners.cpu import pooling_runner, recorded_steps
from trouper.actors.executor.runners.cpu.pooling_runner import PoolingRunner
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.executor.steps.batch import make_batch
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.steps import PoolEntry, PoolPlan, Sampling
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.kernels.codegen import units
from trouper.kernels.codegen.recording import Recording
from trouper.kernels.cpu.attention import decode

from .driver import Driver, engine_config, random_prompts
from .test_architectures import CASES, LAYER_NORMED, SPARSE, VOCAB, tiny_model
from .test_encoders import WIDE, save_tiny
from .test_runner import plan_of, row_of

pytestmark = pytest.mark.skipif(not units.can_multiply(), reason="needs native products")
ALL_LOGITS = Sampling(temperature=0.0, logprobs=-1)
PROMPTS = random_prompts((9, 20, 3, 30, 1), VOCAB, seed=3)
PROMPTS_OF_FEW = random_prompts((2, 8, 3, 5, 1), VOCAB, seed=4)
DEFAULT = ("llama-biased-llama3", "mistral-windowed", "qwen3-tied", "gemma2", "olmo2")
EVEN = {"vocab_size": 224}  # whose head is a kernel's, too
QUANTIZED = {"int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_model("Llama", {"num_hidden_layers": 2, **EVEN}, path)
    return path


def runner_of(path, dtype="bfloat16", **changes):
    return CpuRunner(engine_config(path, dtype=dtype, max_num_seqs=5, **changes))


def bits_of(path, prompts=PROMPTS, **changes):
    """All logits of a crowd that grows from one to five rows and shrinks again; and the recorded steps it took."""
    driver = Driver(runner_of(path, **changes), shuffle=1, stagger=4)
    found = driver.run(prompts, 24, ALL_LOGITS)
    return [(s.token_ids, s.logprobs) for s in found], driver.runner.steps.recorded


def sizes_of(made):
    return sorted({num_rows for num_rows, _ in made._steps})


def check(path, **changes):
    expected, nothing = bits_of(path, enforce_eager=True, **changes)
    assert nothing is None
    found, made = bits_of(path, **changes)
    assert found == expected
    assert sizes_of(made) == [1, 2, 3, 4, 5]
    assert all(step.recording.result[1] is not None for step in made._steps.values())


@pytest.mark.parametrize(
    "case", [c if c in DEFAULT else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_every_architecture_is_replayed(case, tmp_path):
    name, changes = CASES[case]
    tiny_model(name, changes | EVEN, tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("case", ["gpt2", "phi-normed", "stablelm-parallel", "olmo"])
def test_layer_norms_parallel_layers_and_learnt_positions_are_replayed(case, tmp_path):
    name, changes = LAYER_NORMED[case]
    tiny_model(name, changes | EVEN, tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("changes", QUANTIZED.values(), ids=QUANTIZED)
def test_rounded_weights_are_replayed(folder, changes):
    check(folder, **changes)


@pytest.mark.parametrize("changes", [{}, *QUANTIZED.values()], ids=["plain", *QUANTIZED])
@pytest.mark.parametrize("case", ["qwen3-moe", "gpt-oss"])
def test_experts_are_replayed(case, changes, tmp_path):
    name, fields = SPARSE[case]
    tiny_model(name, fields | EVEN, tmp_path)
    check(tmp_path, **changes)


def test_contexts_of_several_spans_by_several_threads(folder, monkeypatch):
    monkeypatch.setattr(decode, "SPAN", 16)
    alone = bits_of(folder)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        check(folder)
        assert bits_of(folder)[0] == alone[0]
    finally:
        torch.set_num_threads(before)


def test_short_prompts_are_replayed_among_those_who_decode(folder):
    expected, _ = bits_of(folder, PROMPTS_OF_FEW, enforce_eager=True)
    found, made = bits_of(folder, PROMPTS_OF_FEW)
    assert found == expected
    assert max(sizes_of(made)) > 5


DRAWN = Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.3, seed=5)


@pytest.mark.parametrize(
    ("sampling", "are_drawn"),
    [
        ((DRAWN, Sampling(temperature=0.0)), {True}),
        ((DRAWN, Sampling(temperature=1.0, presence_penalty=1.5)), {True, False}),
        ((DRAWN, Sampling(temperature=0.5, logprobs=2)), {True, False}),
    ],
    ids=["plain", "edited", "told"],
)
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS_OF_FEW], ids=["long", "few"])
def test_tokens_are_drawn_in_recording_unless_row_needs_more(folder, sampling, are_drawn, prompts):
    each = [sampling[i == 3] for i in range(5)]
    found, made = [], None
    for is_eager in (True, False):
        driver = Driver(runner_of(folder, enforce_eager=is_eager), shuffle=1, stagger=4)
        found.append([(s.token_ids, s.logprobs) for s in driver.run(prompts, 24, each)])
        made = driver.runner.steps.recorded
    assert found[0] == found[1]
    assert {is_drawn for _, is_drawn in made._steps} == are_drawn


def test_steps_of_sequence_and_its_drafts_are_recorded_at_load(folder):
    runner = runner_of(folder, speculative_config={"method": "suffix", "num_speculative_tokens": 4})
    runner.load()
    assert sizes_of(runner.steps.recorded) == [1, 2, 3, 4, 5]
    assert all(is_drawn for _, is_drawn in runner.steps.recorded._steps)
    runner.close()


def test_recorded_step_expires_with_weights_and_memory(folder):
    runner = runner_of(folder)
    driver = Driver(runner)
    expected = [s.token_ids for s in driver.run(PROMPTS[:2], 10)]
    for level in (1, 2):
        assert sizes_of(runner.steps.recorded) == [2]
        runner.sleep(level)
        assert runner.steps is None
        garbage = [torch.full((2**20,), 1e30) for _ in range(4)]
        runner.wake(frozenset({"kv_cache"}))
        runner.wake(frozenset({"weights"}))
        assert [s.token_ids for s in driver.run(PROMPTS[:2], 10)] == expected
        del garbage


def test_step_that_fails_before_its_replay_can_be_done_again(folder, monkeypatch):
    runner = runner_of(folder)
    (expected,) = Driver(runner).run([PROMPTS[0]], 4)
    runner.execute(plan_of((0, 0, 9, 1), new_sequences=(row_of(0, PROMPTS[0], (3, 1)),)))
    with monkeypatch.context() as patched:
        patched.setattr(Recording, "replay", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.execute(plan_of((0, 9, 1, 1)))
    again = [runner.execute(plan_of((0, 9 + i, 1, 1))).token_ids[0][0] for i in range(3)]
    assert again == expected.token_ids[1:]


def test_rows_preempted_share_blocks_and_take_copies(folder):
    """The same plans, whose decode steps read foreign blocks and rows that came back elsewhere."""
    answers = []
    for is_eager in (True, False):
        runner = runner_of(folder, enforce_eager=is_eager)
        runner.load()
        tokens = [*PROMPTS[1], 7, 8, 9]
        plans = [
            plan_of(
                (0, 0, 20, 1),
                new_sequences=(row_of(0, PROMPTS[1], (4, 2, 7), sampling=ALL_LOGITS),),
            ),
            plan_of(
                (0, 20, 1, 1),
                (1, 19, 1, 1),
                new_sequences=(row_of(1, PROMPTS[1], (4, 2, 9), sampling=ALL_LOGITS),),
                copies=((7, 9),),
            ),
            plan_of((0, 21, 1, 1), (1, 20, 1, 1)),
            plan_of(
                (2, 0, 23, 1), new_sequences=(row_of(2, tokens, (5, 6, 3), sampling=ALL_LOGITS),)
            ),
            plan_of((2, 23, 1, 1), (1, 21, 1, 1)),
            plan_of((1, 22, 1, 1), (2, 24, 1, 1), new_blocks=((2, (8,)),)),
        ]
        answers.append([runner.execute(plan) for plan in plans])
    assert answers[0] == answers[1]
    assert sizes_of(runner.steps.recorded) == [2]


def test_head_that_torch_multiplies_leaves_layers_recorded(tmp_path):
    tiny_model("Llama", {"num_hidden_layers": 2}, tmp_path)
    expected, _ = bits_of(tmp_path, enforce_eager=True)
    found, made = bits_of(tmp_path)
    assert found == expected
    assert all(step.recording.result[1] is None for step in made._steps.values())


def test_more_logits_than_are_kept_are_not_recorded(folder, monkeypatch):
    expected, _ = bits_of(folder, enforce_eager=True)
    monkeypatch.setattr(recorded_steps, "MAX_LOGITS", 3 * EVEN["vocab_size"])
    found, made = bits_of(folder)
    assert found == expected
    for (num_rows, _), step in made._steps.items():
        assert (step.recording.result[1] is None) == (num_rows > 3)


def test_what_is_not_recorded(folder, monkeypatch):
    """Prompts, more rows than the limit, models in whose steps torch computes."""
    monkeypatch.setattr(recorded_steps, "MAX_ROWS", 2)
    made = bits_of(folder)[1]
    assert sizes_of(made) == [1, 2]
    assert repr(made).startswith("<RecordedDecoderSteps of [(1, False), (2, False)] in <Arena of ")
    plan = plan_of((0, 3, 1, 1), (1, 5, 1, 1))
    batch = make_batch(plan, RequestSlots(2, 16, 8), (None,), made._decoder.plan)
    assert made.can_forward(batch)
    assert not made.can_forward(msgspec.structs.replace(batch, embeds=((0, torch.ones(1, 64)),)))
    with monkeypatch.context() as patched:
        patched.setattr(units, "can_multiply", lambda: False)
        assert bits_of(folder, dtype="float32")[1] is None
    monkeypatch.setattr(units, "is_available", lambda: False)
    assert bits_of(folder)[1] is None


@pytest.mark.parametrize("kind", ["bert", "mpnet", "distilbert"])
def test_short_texts_of_an_encoder_are_replayed(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(recorded_steps, "MAX_TOKENS", 40)
    sizes = {"dim": 64, "hidden_dim": 96} if kind == "distilbert" else WIDE
    save_tiny(kind, AutoModel, tmp_path, **sizes)
    eager, replayed = (encoder_runner(tmp_path, enforce_eager=eager) for eager in (True, False))
    for length in (1, 5, 40, 5, 41):
        ids = tuple(range(3, 3 + length))
        columns = (PoolEntry(ids, None, "token_embed"),)
        expected, found = (pooled(runner, columns).arrays[0] for runner in (eager, replayed))
        assert found.tobytes() == expected.tobytes()
    (made,) = replayed._recorded_steps.values()  # of this thread
    assert sorted(made._short) == [1, 5, 40]
    replayed.sleep(2)
    assert not replayed._recorded_steps


@pytest.mark.usefixtures("two_threads")
def test_passes_of_several_texts_are_replayed_whatever_their_lengths(tmp_path, monkeypatch):
    monkeypatch.setattr(pooling_runner, "LEAST_TOKENS", 1)
    monkeypatch.setattr(pooling_runner, "SLICE_TOKENS", 100)
    save_tiny("bert", AutoModel, tmp_path, **WIDE)
    eager, replayed = (encoder_runner(tmp_path, enforce_eager=eager) for eager in (True, False))
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, 60, 12)
        columns = tuple(PoolEntry((7,) * n, None, "token_embed") for n in sorted(lengths))
        expected, found = (pooled(runner, columns) for runner in (eager, replayed))
        for one, other in zip(expected.arrays, found.arrays, strict=True):
            assert one.tobytes() == other.tobytes()
    assert 1 <= len(replayed._recorded_steps) <= torch.get_num_threads()  # who is first takes all
    for made in replayed._recorded_steps.values():
        assert all(rows % 16 == tiles % 8 == 0 for rows, tiles in made._passes)
    for runner in (eager, replayed):
        runner.close()


def test_recorded_passes_serve_sizes_and_expire(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded_steps, "MAX_PASSES", 2)
    save_tiny("bert", AutoModel, tmp_path, **WIDE)
    eager, replayed = (encoder_runner(tmp_path, enforce_eager=eager) for eager in (True, False))
    sizes: list[list[tuple[int, int]]] = []
    for lengths in ((5, 9), (3, 4, 6), (40, 50), (7, 9), (30, 40, 50), (1, 2)):
        columns = tuple(PoolEntry((7,) * n, None, "token_embed") for n in lengths)
        expected, found = (pooled(runner, columns) for runner in (eager, replayed))
        for one, other in zip(expected.arrays, found.arrays, strict=True):
            assert one.tobytes() == other.tobytes()
        (made,) = replayed._recorded_steps.values()
        sizes.append(list(made._passes))
    small, middle, large = (16, 8), (96, 8), (128, 8)
    assert sizes == [
        [small], [small], [small, middle], [small, middle], [middle, large], [large, small]
    ]  # fmt: skip


def test_encoder_in_whose_steps_torch_computes_is_not_recorded(tmp_path):
    save_tiny("modernbert", AutoModel, tmp_path, **WIDE)
    runner = encoder_runner(tmp_path, enforce_eager=False)
    runner.execute(PoolPlan(1, 0, (PoolEntry((5, 6, 7), None, "token_embed"),)))
    assert not runner._is_recorded


def pooled(runner, columns):
    answer = runner.execute(PoolPlan(1, 0, columns))
    return answer.finish() if isinstance(answer, PendingResult) else answer


def encoder_runner(folder, **options):
    args = EngineArgs(
        model=str(folder), runner="pooling", skip_tokenizer_init=True, dtype="bfloat16", **options
    )
    runner = PoolingRunner(resolve(args))
    runner.load()
    return runner
