"""Layers with a window give their KV blocks back: less memory, the same tokens and logprobs as transformers computes.

python -m tests.parity.test_windows prints the memory of published models of 32,768 tokens, as a share of what all layers in full take.
"""

import pytest
import torch

from trouper import LLM, SamplingParams
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.messages.steps import Sampling
from trouper.config.engine_config import SchedulerConfig
from trouper.config.kv_layout import KVLayout, group_size, short_step, tables_of
from trouper.inputs import TokensPrompt

from .driver import Driver, engine_config, random_prompts
from .test_architectures import VOCAB, check_against, tiny_model

LENGTH, BLOCK = 600, 16
LAYERS = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
GEMMA = ("Gemma3Text", {
    "sliding_window": 40, "head_dim": 32, "query_pre_attn_scalar": 24, "num_hidden_layers": 7, "layer_types": LAYERS,
    "max_position_embeddings": 1024,
})  # fmt: skip
# All layers have the window.
MISTRAL = ("Mistral", {"sliding_window": 40, "max_position_embeddings": 1024})
GPT_OSS = ("GptOss", {
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "head_dim": 32, "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
})  # fmt: skip
# Layers with a window, layers without, the window, and the share of the memory.
PUBLISHED = {
    "gemma-3-1b": (22, 4, 512, 0.20), "gemma-3-4b": (29, 5, 1024, 0.20), "gemma-3-12b": (40, 8, 1024, 0.21),
    "gpt-oss-20b": (12, 12, 128, 0.52), "OLMo-3-7B": (24, 8, 4096, 0.37),
}  # fmt: skip


def open_llm(folder, share, num_layers, **options):
    """An engine with this share of the KV memory that a sequence of LENGTH tokens takes with all layers in full."""
    # Keys and values of two heads of 32 numbers in float32.
    token = num_layers * 2 * 2 * 32 * 4
    return LLM(
        str(folder), dtype="float32", skip_tokenizer_init=True, block_size=BLOCK, max_model_len=LENGTH,
        max_num_seqs=4, kv_cache_memory_bytes=int(share * token * -(-LENGTH // BLOCK) * BLOCK),
        **{"max_num_batched_tokens": 64, **options},
    )  # fmt: skip


def answers(llm, prompts, **wishes):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, "logprobs": 0, "ignore_eos": True, "detokenize": False, **wishes})  # fmt: skip
    given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return llm.generate(given, params, use_tqdm=False)


@torch.no_grad()
def check(model, outputs):
    """Compare each token and its logprob with one pass of transformers over the whole text."""
    for output in outputs:
        for one in output.outputs:
            prompt, ids = list(output.prompt_token_ids), list(one.token_ids)
            expected = model(torch.tensor([prompt + ids]), use_cache=False).logits[0]
            rows = expected.log_softmax(-1)[len(prompt) - 1 : -1]
            found = [
                logprobs[token].logprob for token, logprobs in zip(ids, one.logprobs, strict=True)
            ]
            torch.testing.assert_close(
                torch.tensor(found), rows[torch.arange(len(ids)), ids], atol=2e-4, rtol=0
            )


@pytest.mark.parametrize(("family", "share"), [
    (GEMMA, 0.35), pytest.param(GEMMA, 0.5, marks=pytest.mark.slow), pytest.param(MISTRAL, 0.3, marks=pytest.mark.slow),
    pytest.param(GPT_OSS, 0.65, marks=pytest.mark.slow),
])  # fmt: skip
def test_answers_equal_transformers_in_less_memory(family, share, tmp_path):
    """Long, short, found in the cache, of several completions, and preempted."""
    model = tiny_model(*family, tmp_path)
    long, other, short = random_prompts((560, 500, 30), VOCAB, seed=1)
    with open_llm(tmp_path, share, len(model.model.layers), disable_log_stats=False) as llm:
        (first,) = answers(llm, [long])
        check(model, [first])
        (again,) = answers(llm, [long])
        assert again.num_cached_tokens == 544
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        crowd = answers(llm, [other, long, short, short[:9]], max_tokens=24)
        check(model, crowd)
        assert crowd[1].outputs[0].token_ids[:12] == first.outputs[0].token_ids
        branches = answers(llm, [other], n=3, temperature=0.8, seed=5)
        check(model, branches)
        check(model, answers(llm, [long, short]))


@pytest.mark.parametrize("options", [
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    pytest.param({"max_num_batched_tokens": 33}, marks=pytest.mark.slow),
    pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    pytest.param({"enforce_eager": True, "enable_prefix_caching": False}, marks=pytest.mark.slow),
])  # fmt: skip
def test_no_option_changes_the_tokens(options, tmp_path):
    tiny_model(*GEMMA, tmp_path)
    prompts = [*random_prompts((300, 90), VOCAB), [5, 9, 7] * 60]
    found = []
    for share, own in ((3.0, {}), (0.4, options)):
        with open_llm(tmp_path, share, 7, **own) as llm:
            outputs = answers(llm, prompts, max_tokens=40, seed=1, temperature=0.7)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.mark.slow
def test_draft_model_reads_the_first_table(tmp_path):
    family, changes = GEMMA
    kinds = ["sliding_attention", "full_attention"] * 4
    model = tiny_model(family, {**changes, "num_hidden_layers": 8, "layer_types": kinds}, tmp_path)
    draft = tmp_path / "draft"
    tiny_model("Mistral", {"num_hidden_layers": 1, "max_position_embeddings": 1024}, draft)
    drafts = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    prompts = [*random_prompts((300, 90), VOCAB), [5, 9, 7] * 60]
    # All layers of both models in full take a share of 9 / 8.
    with open_llm(tmp_path, 0.9, 8, speculative_config=drafts) as llm:
        check(model, answers(llm, prompts, max_tokens=40))
        check(model, answers(llm, prompts, max_tokens=60))


class GivingBack(Driver):
    """A driver that fills each block behind a window with NaN, and the null block too."""

    def __init__(self, runner, **options):
        super().__init__(runner, **options)
        self.windows = runner.load().kv_layout.windows
        self.fill(0)

    @torch.inference_mode()
    def fill(self, block):
        for tensor in self.runner.model.memory.groups:
            tensor.narrow(3, block * self.block_size, self.block_size).fill_(torch.nan)

    def advance(self, sequences):
        done = super().advance(sequences)
        for s in sequences:
            for group, window in enumerate(self.windows):
                end = 0 if window is None else max(0, s.num_computed - window + 1)
                for i in range(end // self.block_size):
                    self.fill(s.blocks[i * len(self.windows) + group])
        return done


@pytest.mark.parametrize(("family", "block_size"), [
    (GEMMA, 16), pytest.param(GEMMA, 4, marks=pytest.mark.slow), pytest.param(MISTRAL, 128, marks=pytest.mark.slow),
    pytest.param(GPT_OSS, 16, marks=pytest.mark.slow),
])  # fmt: skip
@torch.no_grad()
def test_no_kernel_reads_behind_a_window(family, block_size, tmp_path):
    """Prompts in chunks of any size, tokens by themselves, and steps with both."""
    model = tiny_model(*family, tmp_path)
    config = engine_config(
        tmp_path,
        block_size=block_size,
        max_model_len=1000,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=250,
    )
    driver = GivingBack(CpuRunner(config), chunk=37, shuffle=1, stagger=3)
    assert driver.windows != (None,)
    prompts = random_prompts((200, 9, 61), VOCAB)
    check_against(model, driver.run(prompts, 60, Sampling(temperature=0.0, logprobs=-1)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_take_share_of_memory(name):
    *_, most = PUBLISHED[name]
    assert share_of(name) <= most


def share_of(name, num_tokens=32_768, block_size=128):
    """The blocks of one sequence over those that all layers in full take."""
    num_windowed, num_full, window, _ = PUBLISHED[name]
    windows = [window] * num_windowed + [None] * num_full
    step = short_step(SchedulerConfig(max_num_scheduled_tokens=1024))
    tables = tables_of(windows, num_tokens, block_size, step)
    by_table = dict(zip(tables, windows, strict=True))
    layout = KVLayout(block_size, tuple(by_table[table] for table in sorted(by_table)), step)
    size = group_size([num_full, num_windowed])
    return layout.num_blocks(num_tokens) * size / (len(windows) * -(-num_tokens // block_size))


if __name__ == "__main__":
    for name in PUBLISHED:
        print(f"{name}: {share_of(name):.3f}")
