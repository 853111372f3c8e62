"""A hybrid in a whole engine: chunks, prefixes, preemption, siblings, sleep and failed steps change no token."""

import random

import pytest
import torch

from trouper import LLM, SamplingParams
from trouper.actors.executor.models.hf_decoder import HfDecoder
from trouper.actors.executor.steps.cache_memory import StatePool
from trouper.errors import (
    ExecutionError,
    GenerationError,
    TrouperValidationError,
    UnsupportedFeatureError,
)
from trouper.inputs import TokensPrompt

from .hf_families import VOCAB, tiny_model

ENGINE = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 200, "block_size": 16, "max_num_seqs": 4,
    "max_num_batched_tokens": 48, "device": "cpu", "kv_cache_memory_bytes": 2**25, "model_impl": "transformers",
}  # fmt: skip
POISON = 7


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """The folder of a tiny LFM2, and the greedy tokens of its full forward pass."""
    folder = tmp_path_factory.mktemp("hybrid")
    model = tiny_model("lfm2", folder)

    @torch.no_grad()
    def greedy(prompt, count=8):
        tokens = list(prompt)
        for _ in range(count):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    return str(folder), greedy


@pytest.fixture(scope="module")
def engine(hybrid):
    with LLM(hybrid[0], **ENGINE) as llm:
        yield llm


def tokens(seed, count):
    generator = random.Random(seed)
    return [generator.randrange(POISON + 1, VOCAB) for _ in range(count)]


def generate(llm, prompts, count=8, **params):
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    options = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **params}
    return llm.generate(inputs, SamplingParams(**options), use_tqdm=False)


def check(llm, greedy, prompts, count=8):
    """All answers are those of the full forward pass. Returns the cached tokens of each prompt."""
    outputs = generate(llm, prompts, count)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == greedy(prompt, count)
    return [output.num_cached_tokens for output in outputs]


def test_metrics_count_snapshots(hybrid):
    with LLM(hybrid[0], **ENGINE, disable_log_stats=False) as llm:
        first = tokens(1, 93)
        for prompt in (first, first, first[:70] + tokens(2, 30)):
            generate(llm, [prompt])
        metrics = {(m.name, *m.labels.values()): m for m in llm.get_metrics()}
    found = {
        name: next(m.value for key, m in metrics.items() if key[0] == f"trouper:{name}")
        for name in ("state_snapshot_saves", "state_snapshot_hits", "prefix_cache_state_misses")
    }
    assert found == {
        "state_snapshot_saves": 3,
        "state_snapshot_hits": 1,
        "prefix_cache_state_misses": 64,
    }
    states = {key[-1]: m.value for key, m in metrics.items() if key[0] == "trouper:state_snapshots"}
    assert states["offered"] == 3
    assert states["pending"] == 0
    assert states["free"] > 0


def test_prefixes_are_found_where_states_are(engine, hybrid):
    greedy, first = hybrid[1], tokens(1, 93)
    assert check(engine, greedy, [first]) == [0]
    assert check(engine, greedy, [first]) == [80]
    assert check(engine, greedy, [first[:70] + tokens(2, 30)]) == [0]
    assert check(engine, greedy, [first[:70] + tokens(3, 41)]) == [64]
    crowd = [tokens(seed, 3 + 11 * seed) for seed in range(7)]
    check(engine, greedy, [*crowd, first[:70] + tokens(4, 5)])
    assert engine.reset_prefix_cache()
    assert check(engine, greedy, [first]) == [0]


@pytest.mark.parametrize("length", [1, 16, 45])
def test_siblings_equal_their_leader(engine, hybrid, length):
    prompt = tokens(length, length)
    output = generate(engine, [prompt], n=3, temperature=1.0, top_k=1)[0]
    assert [list(c.token_ids) for c in output.outputs] == [hybrid[1](prompt)] * 3


@pytest.mark.parametrize("level", [1, 2])
def test_states_do_not_survive_sleep(engine, hybrid, level):
    prompt = tokens(9, 40)
    check(engine, hybrid[1], [prompt])
    engine.sleep(level)
    engine.wake_up()
    assert check(engine, hybrid[1], [prompt]) == [0]


def test_preempted_sequences_are_recomputed(hybrid):
    folder, greedy = hybrid
    few = ENGINE | {"max_model_len": 128, "disable_log_stats": False}
    with LLM(folder, **few, num_gpu_blocks_override=9) as llm:
        check(llm, greedy, [tokens(seed, 30) for seed in range(4)], count=30)
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        assert metrics["trouper:num_preemptions"].value > 0


@pytest.mark.parametrize("number", [3, 6, 12])
def test_failed_step_changes_no_token(engine, hybrid, number, monkeypatch):
    steps, right = iter(range(1, 10**6)), HfDecoder.forward

    def forward(self, *args, **named):
        hidden = right(self, *args, **named)
        if next(steps) == number:
            raise RuntimeError("once")
        return hidden

    monkeypatch.setattr(HfDecoder, "forward", forward)
    check(engine, hybrid[1], [tokens(20 + seed, 10 + 20 * seed) for seed in range(4)], count=12)


def test_poisoned_request_fails_alone(engine, hybrid, monkeypatch):
    right = HfDecoder.forward

    def forward(self, step_tokens, *args, **named):
        hidden = right(self, step_tokens, *args, **named)
        if POISON in step_tokens.ids_T.tolist():
            raise RuntimeError("poison")
        return hidden

    monkeypatch.setattr(HfDecoder, "forward", forward)
    good = [tokens(30 + seed, 10 + 20 * seed) for seed in range(4)]
    with pytest.raises(ExecutionError, match="poison"):
        generate(engine, [[*tokens(40, 20), POISON]])
    check(engine, hybrid[1], good)


def test_logits_not_finite_fail_no_step(tmp_path, caplog):
    """The plan behind the failed one finds a state to go on from, although its tokens are dropped."""
    model = tiny_model("lfm2", tmp_path)
    model.get_input_embeddings().weight.data[POISON] = torch.nan
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().nan_to_num())
    model.save_pretrained(tmp_path)
    options = ENGINE | {"model_impl": "trouper", "max_num_batched_tokens": 200}
    good = [tokens(30 + seed, 10 + 20 * seed) for seed in range(3)]
    with LLM(str(tmp_path), **options) as llm:
        wanted = [output.outputs[0].token_ids for output in generate(llm, good)]
        with pytest.raises(GenerationError, match="not finite"):
            generate(llm, [*good, [*tokens(40, 20), POISON]])
        assert [output.outputs[0].token_ids for output in generate(llm, good)] == wanted
    assert "failed" not in caplog.text


def test_snapshot_of_another_position_is_withdrawn(engine, hybrid, monkeypatch):
    greedy, prompt = hybrid[1], tokens(50, 60)
    right, wrong = StatePool.copy, iter([True])

    def copy(self, source, target):
        right(self, source, target)
        if next(wrong, False):
            self.positions[target] += 1

    monkeypatch.setattr(StatePool, "copy", copy)
    check(engine, greedy, [prompt])
    check(engine, greedy, [prompt])


def test_states_that_do_not_fit_are_refused(hybrid):
    few = ENGINE | {"kv_cache_memory_bytes": 50_000, "max_model_len": 32, "max_num_seqs": 4000}
    with pytest.raises(TrouperValidationError, match="largest max_num_seqs that fits is") as error:
        LLM(hybrid[0], **few | {"max_num_batched_tokens": 4000})
    assert error.value.parameter == "max_num_seqs"


def test_open_number_of_sequences_is_lowered(hybrid, caplog):
    few = ENGINE | {"kv_cache_memory_bytes": 50_000, "max_model_len": 32}
    few.pop("max_num_seqs")
    with LLM(hybrid[0], **few) as llm:
        check(llm, hybrid[1], [tokens(seed, 12) for seed in range(20)], count=4)
    assert "at most 16 sequences run at once" in caplog.text


@pytest.mark.slow
def test_stages_of_library_are_refused_by_name(hybrid):
    with pytest.raises(UnsupportedFeatureError, match="does not support stages") as error:
        LLM(hybrid[0], **ENGINE, pipeline_parallel_size=2)
    assert error.value.parameter == "pipeline_parallel_size"


def test_drafts_are_refused_by_name(hybrid):
    with pytest.raises(UnsupportedFeatureError, match="computed by transformers") as error:
        LLM(hybrid[0], **ENGINE, speculative_config={"method": "ngram"})
    assert error.value.parameter == "speculative_config"
