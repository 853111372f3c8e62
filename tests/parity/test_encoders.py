"""Hidden states and logits of each encoder, and of decoders that pool, equal those of transformers."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from trouper import LLM
from trouper.actors.executor.device import PendingResult
from trouper.actors.executor.models.encoder import Encoder, rounded
from trouper.actors.executor.models.families.registry import encoder_traits
from trouper.actors.executor.runners.cpu import pooling_runner
from trouper.actors.executor.runners.cpu.pooling_runner import (
    FEW_TOKENS,
    LEAST_TOKENS,
    SLICE_TOKENS,
    PoolingRunner,
    slices,
)
from trouper.actors.executor.workers import model_host
from trouper.actors.messages.steps import PoolEntry, PoolPlan
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.kernels.codegen import units

SMALL = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 1,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 96}
DISTIL = {
    "vocab_size": 97, "dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
T5 = {
    "vocab_size": 97, "d_model": 48, "d_ff": 80, "d_kv": 12, "num_layers": 3, "num_heads": 4, "n_positions": 64,
    "relative_attention_num_buckets": 8, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
ENCODERS = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1}),
    "distilbert": ("DistilBert", DISTIL),
    "mpnet": ("MPNet", {}),
    "deberta-v3": ("DebertaV2", {
        "relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "pos_att_type": "p2c|c2p", "position_biased_input": False, "type_vocab_size": 0}),
    "deberta-v2": ("DebertaV2", {
        "relative_attention": True, "pos_att_type": ["c2p"], "max_relative_positions": 12, "type_vocab_size": 2}),
    "modernbert": ("ModernBert", {"local_attention": 8, "num_hidden_layers": 4}),
    "nomic": ("NomicBert", {}),
    "gte": ("Gte", {}),
    "xlm-roberta-xl": ("XLMRobertaXL", {"type_vocab_size": 1}),
    "data2vec": ("Data2VecText", {"type_vocab_size": 1}),
    "megatron-bert": ("MegatronBert", {}),
    "electra": ("Electra", {"embedding_size": 32}),
    "electra-unprojected": ("Electra", {"embedding_size": 48}),
    "albert": ("Albert", {"embedding_size": 32}),
    "eurobert": ("EuroBert", {}),
    "eurobert-grouped": ("EuroBert", {"num_key_value_heads": 2, "head_dim": 16}),
    "jina-v3": ("JinaEmbeddingsV3", {"type_vocab_size": 1}),
    "t5": ("T5", T5),
    "t5-gated": ("T5", T5 | {"feed_forward_proj": "gated-gelu", "d_kv": 8}),
    "mt5": ("MT5", T5 | {"relative_attention_max_distance": 20}),
    "umt5": ("UMT5", T5 | {"relative_attention_max_distance": 20}),
}  # fmt: skip
DECODERS = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "mistral-windowed": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 6}),
    "gemma2": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6}),
}  # fmt: skip
BOTH_WAYS = {
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "is_causal": False}),
    "llama": ("Llama", {"num_key_value_heads": 1, "is_causal": False, "head_dim": 16}),
    "mistral-windowed": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 6, "is_causal": False}),
    "embeddinggemma": ("Gemma3Text", {
        "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 12, "use_bidirectional_attention": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
}  # fmt: skip
# T5's classifiers read the decoder half.
CLASSIFYING = [kind for kind in ENCODERS if "t5" not in kind]
# Sizes for the native kernels under the names of families that have names of their own.
NARROW = {
    "distilbert": {"dim": 64, "hidden_dim": 96},
    **{key: {"d_model": 64, "d_ff": 96, "d_kv": 16} for key in ("t5", "t5-gated", "mt5", "umt5")},
}
LENGTHS = (1, 3, 3, 9, 20, 20, 20, 41)


def save_tiny(kind, auto, folder, **more):
    name, changes = (ENCODERS | DECODERS | {f"both-{n}": c for n, c in BOTH_WAYS.items()})[kind]
    given = {**(changes if kind in NARROW else SMALL | changes), **more}
    config = getattr(transformers, f"{name}Config")(**given)
    torch.manual_seed(0)
    auto = getattr(transformers, f"{name}EncoderModel", auto)  # the encoder half of T5
    make = getattr(auto, "from_config", None) or auto._from_config
    model = make(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
        else:
            parameter.data = torch.randn_like(parameter) * 1.2 / parameter.shape[1] ** 0.5
    model.save_pretrained(folder)
    return model


def prompts():
    random = np.random.default_rng(0)
    return [tuple(random.integers(3, 97, length).tolist()) for length in LENGTHS]


def run(folder, task, type_ids=None, texts=None, columns=None, is_alone=False, **options):
    config = resolve(
        EngineArgs(model=str(folder), runner="pooling", skip_tokenizer_init=True, **options)
    )
    runner = PoolingRunner(config)
    runner.load()
    columns = columns or [
        PoolEntry(ids, type_ids and type_ids(ids), task) for ids in texts or prompts()
    ]
    plans = [(column,) for column in columns] if is_alone else [tuple(columns)]
    try:
        return [array for plan in plans for array in result(runner.execute(PoolPlan(1, 0, plan)))]
    finally:
        runner.close()


def in_a_thread(function):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def result(answer):
    return (answer.finish() if isinstance(answer, PendingResult) else answer).arrays


@pytest.mark.parametrize("kind", [*ENCODERS, *DECODERS])
def test_hidden_states_equal_those_of_transformers(kind, tmp_path):
    model = save_tiny(kind, AutoModel, tmp_path)
    for ids, mine in zip(prompts(), run(tmp_path, "token_embed"), strict=True):
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", BOTH_WAYS)
def test_decoders_that_see_ahead_equal_transformers(kind, tmp_path):
    model = save_tiny(f"both-{kind}", AutoModel, tmp_path)
    for ids, mine in zip(prompts(), run(tmp_path, "token_embed"), strict=True):
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4)


def test_decoders_that_see_ahead_do_not_generate(tmp_path):
    save_tiny("both-qwen2", AutoModelForCausalLM, tmp_path)
    with pytest.raises(UnsupportedFeatureError, match="cannot generate"):
        LLM(str(tmp_path), skip_tokenizer_init=True, device="cpu")


@pytest.mark.parametrize("kind", ENCODERS)
def test_hidden_states_by_native_kernels_equal_those_of_transformers(kind, tmp_path):
    """Heads of 16 numbers, rows of whole registers."""
    model = save_tiny(kind, AutoModel, tmp_path, **NARROW.get(kind, WIDE))
    for ids, mine in zip(prompts(), run(tmp_path, "token_embed"), strict=True):
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", ["bert", "mpnet", "modernbert"])
def test_in_bfloat16_nobody_else_in_batch_changes_bit(kind, tmp_path):
    save_tiny(kind, AutoModel, tmp_path, **WIDE)
    if not units.can_multiply():
        pytest.skip("this machine does not multiply bfloat16")
    together = run(tmp_path, "token_embed", dtype="bfloat16")
    for ids, mine in zip(prompts(), together, strict=True):
        (alone,) = run(tmp_path, "token_embed", texts=[ids], dtype="bfloat16")
        np.testing.assert_array_equal(alone, mine)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("num_tokens", "num_threads"), [(FEW_TOKENS, 1), (FEW_TOKENS + 1, 2)])
def test_step_of_few_tokens_runs_on_one_thread(num_tokens, num_threads, tmp_path, monkeypatch):
    save_tiny("bert", AutoModel, tmp_path)
    right, counts, elsewhere = Encoder.forward, [], []

    def forward(*given):
        counts.append(torch.get_num_threads())
        elsewhere.append(in_a_thread(torch.get_num_threads))
        return right(*given)

    monkeypatch.setattr(Encoder, "forward", forward)
    run(tmp_path, "embed", texts=[(5,) * num_tokens])
    assert set(counts) == {num_threads}
    assert set(elsewhere) == {2}


@given(
    sizes=st.lists(st.integers(1, 2 * SLICE_TOKENS), min_size=1, max_size=40),
    num_threads=st.integers(1, 4),
)
def test_plan_is_cut_into_passes_of_about_equal_tokens(sizes, num_threads):
    columns = tuple(PoolEntry((7,) * size, None, "embed") for size in sizes)
    parts = slices(columns, num_threads)
    assert tuple(column for part in parts for column in part) == columns
    lengths = [sum(len(column.token_ids) for column in part) for part in parts]
    assert all(length < SLICE_TOKENS + max(sizes) for length in lengths)
    if sum(sizes) < num_threads * LEAST_TOKENS:
        assert len(parts) <= -(-sum(sizes) // SLICE_TOKENS)


def test_equal_texts_are_as_many_in_each_threads_pass():
    column = PoolEntry((7,) * LEAST_TOKENS, None, "embed")
    assert [len(part) for part in slices((column,) * 6, 2)] == [3, 3]
    assert [len(part) for part in slices((column,) * 2, 2)] == [1, 1]
    assert [len(part) for part in slices((column,), 2)] == [1]


@pytest.mark.usefixtures("two_threads")
def test_who_is_done_with_plan_begins_next(tmp_path, monkeypatch):
    """One pass of the first plan waits for a pass of the second."""
    save_tiny("bert", AutoModel, tmp_path)
    config = resolve(
        EngineArgs(model=str(tmp_path), runner="pooling", skip_tokenizer_init=True, dtype="float32")
    )
    runner = PoolingRunner(config)
    runner.load()
    right, has_begun, told = runner._run, threading.Event(), threading.Event()

    def run(columns, rows=()):
        if len(columns[0].token_ids) == 10:
            has_begun.set()
        elif columns[0].token_ids[0] == 5:
            assert has_begun.wait(30)
        return right(columns)

    monkeypatch.setattr(runner, "_run", run)

    def plan(step, first, length):
        columns = [PoolEntry((first, *(7,) * (length - 1)), None, "embed")] * 20
        return PoolPlan(step, 0, (*columns, *[PoolEntry((6,) * length, None, "embed")] * 20))

    try:
        first, second = runner.execute(plan(1, 5, 20)), runner.execute(plan(2, 6, 10))
        first.when_ready(told.set)
        assert told.wait(30)
        alone = runner._run([PoolEntry((6,) * 20, None, "embed")])
        arrays = [result(answer) for answer in (first, second)]
        assert [len(found) for found in arrays] == [40, 40]
        np.testing.assert_allclose(arrays[0][-1], alone[0], atol=1e-5)
    finally:
        runner.close()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_side_by_side_give_what_each_text_gives_alone(dtype, tmp_path, monkeypatch):
    save_tiny("bert", AutoModel, tmp_path, **WIDE)
    alone = run(tmp_path, "token_embed", dtype=dtype, is_alone=True)
    monkeypatch.setattr(pooling_runner, "LEAST_TOKENS", 1)
    monkeypatch.setattr(pooling_runner, "SLICE_TOKENS", 20)
    for _ in range(5):
        for mine, theirs in zip(run(tmp_path, "token_embed", dtype=dtype), alone, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.usefixtures("two_threads")
def test_pass_that_raises_fails_step_when_others_have_ended(tmp_path, monkeypatch):
    save_tiny("bert", AutoModel, tmp_path)
    monkeypatch.setattr(pooling_runner, "LEAST_TOKENS", 1)
    finish = PoolingRunner._finish

    def fail(runner, hidden, columns, groups):
        if columns[0].token_ids == (5, 6, 13):
            raise ArithmeticError("of one pass")
        return finish(runner, hidden, columns, groups)

    monkeypatch.setattr(PoolingRunner, "_finish", fail)
    texts = [(5, 6, 7), (5, 6, 13)]
    before = threading.active_count()
    for _ in range(5):
        with pytest.raises(ArithmeticError):
            run(tmp_path, "embed", texts=texts)
    assert threading.active_count() == before


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("tiny_bytes", [0, 2**20])
def test_threads_that_begin_later_compute_with_as_many_as_before(tmp_path, monkeypatch, tiny_bytes):
    save_tiny("bert", AutoModel, tmp_path)
    monkeypatch.setattr(model_host, "num_physical_cores", lambda: 1)
    monkeypatch.setattr(pooling_runner, "TINY_BYTES", tiny_bytes)
    options = {"runner": "pooling", "skip_tokenizer_init": True, "dtype": "float32"}
    with LLM(str(tmp_path), **options) as llm:
        llm.embed([{"prompt_token_ids": [5, 6, 7]}] * 20, use_tqdm=False)
        assert in_a_thread(torch.get_num_threads) == 2
    assert in_a_thread(torch.get_num_threads) == 2


def test_batches_come_in_few_sizes():
    sizes = [rounded(n) for n in range(1, 4097)]
    assert all(n <= size <= n * 17 / 16 for n, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 160


@pytest.mark.parametrize("kind", [*CLASSIFYING, "qwen3"])
def test_sequence_logits_equal_those_of_transformers(kind, tmp_path):
    model = save_tiny(kind, AutoModelForSequenceClassification, tmp_path, num_labels=3)
    for ids, mine in zip(prompts(), run(tmp_path, "classify"), strict=True):
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([ids])).logits[0]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4)


class Experts(torch.nn.Module):
    """Nomic's experts, one token and one expert at a time."""

    def __init__(self, num, hidden, wide):
        super().__init__()
        self.router = torch.nn.Linear(hidden, num, bias=False)
        self.w1, self.w2 = (torch.nn.Parameter(torch.randn(num, wide, hidden) / 7) for _ in "ab")
        self.bias = torch.nn.Parameter(torch.randn(hidden))

    def forward(self, x):
        shares, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for place in np.ndindex(x.shape[:2]):
            for share, number in zip(shares[place], chosen[place], strict=True):
                wide = torch.nn.functional.gelu(self.w1[number] @ x[place])
                out[place] += share * (wide @ self.w2[number])
        return out + self.bias

    def tensors(self):
        return {
            "router.layer.weight": self.router.weight,
            "experts.mlp.w1": self.w1.flatten(0, 1),
            "experts.mlp.w2": self.w2.flatten(0, 1),
            "experts.bias": self.bias,
        }


@pytest.mark.parametrize("sizes", [{}, WIDE], ids=["torch", "native"])
def test_nomic_s_experts_equal_a_loop_over_tokens(sizes, tmp_path):
    more = {"activation_function": "gelu", "moe_every_n_layers": 2, "num_experts": 4}
    model = save_tiny("nomic", AutoModel, tmp_path, **sizes)
    hidden, wide = model.config.hidden_size, model.config.intermediate_size
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    for i, layer in enumerate(model.layers):
        if i % 2:
            layer.mlp = Experts(4, hidden, wide)
            own = layer.mlp.tensors()
        else:
            first, second = torch.nn.Linear(hidden, wide), torch.nn.Linear(wide, hidden)
            layer.mlp = torch.nn.Sequential(first, torch.nn.GELU(), second)
            own = {f"fc1.{n}": t for n, t in first.named_parameters()}
            own |= {f"fc2.{n}": t for n, t in second.named_parameters()}
        tensors |= {f"encoder.layers.{i}.mlp.{name}": tensor for name, tensor in own.items()}
    save_file(
        {n: t.detach().contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors"
    )
    config = json.loads((tmp_path / "config.json").read_text())
    del config["hidden_act"]  # the original's config has another name for it
    (tmp_path / "config.json").write_text(json.dumps(config | more | {"moe_top_k": 2}))
    for ids, mine in zip(prompts(), run(tmp_path, "token_embed"), strict=True):
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4)


TASKS = ["retrieval.query", "text-matching"]


def with_adapters(tensors):
    """The tensors as the first files of jina-embeddings-v3 hold them, and with the second task merged."""
    random = torch.Generator().manual_seed(1)
    stored, merged = {}, {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if tensor.ndim == 1:
            stored[f"roberta.{name}"] = merged[name] = tensor
            continue
        num_rows, width = tensor.shape
        left, right = (
            torch.randn(2, *shape, generator=random) for shape in ((num_rows, 2), (2, width))
        )
        a, b = (left, right) if "embeddings" in name else (right, left)
        place = f"roberta.{stem}.parametrizations.weight"
        stored |= {f"{place}.original": tensor, f"{place}.0.lora_A": a, f"{place}.0.lora_B": b}
        merged[name] = tensor + 0.5 * left[1] @ right[1]
    return stored, merged


@pytest.mark.parametrize("task", [None, TASKS[1]])
def test_jina_s_first_files_equal_those_with_task_merged(task, tmp_path):
    save_tiny("jina-v3", AutoModel, tmp_path, type_vocab_size=1)
    stored, merged = with_adapters(load_file(tmp_path / "model.safetensors"))
    if task is not None:
        save_file(merged, tmp_path / "model.safetensors")
    model = AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "rotary_emb_base": 20000.0,
        "lora_adaptations": TASKS, "lora_rank": 2, "lora_alpha": 1, "position_embedding_type": "rotary",
    }  # fmt: skip
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    how = {} if task is None else {"hf_overrides": {"default_task": task}}
    for ids, mine in zip(prompts(), run(tmp_path, "token_embed", **how), strict=True):
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=2e-4)
    with pytest.raises(TrouperValidationError, match="default_task"):
        run(tmp_path, "token_embed", hf_overrides={"default_task": "separation"})


@pytest.mark.parametrize("pooling", ["bos", "mean", "late"])
def test_eurobert_classifies_before_or_behind_its_pooling(pooling, tmp_path):
    how = {"num_labels": 3, "classifier_pooling": pooling}
    model = save_tiny("eurobert", AutoModelForSequenceClassification, tmp_path, **how)
    for ids, mine in zip(prompts(), run(tmp_path, "classify"), strict=True):
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([ids])).logits[0]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", [*CLASSIFYING, "qwen3"])
def test_token_logits_equal_those_of_transformers(kind, tmp_path):
    model = save_tiny(kind, AutoModelForTokenClassification, tmp_path, num_labels=5)
    for ids, mine in zip(prompts(), run(tmp_path, "token_classify"), strict=True):
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([ids])).logits[0]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4)


def test_head_of_decoders_classifier_reads_each_token_too(tmp_path):
    model = save_tiny("qwen3", AutoModelForSequenceClassification, tmp_path, num_labels=3)
    for ids, mine in zip(prompts(), run(tmp_path, "token_classify"), strict=True):
        with torch.no_grad():
            hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state
            theirs = model.score(hidden)[0]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4)


def rename(folder, before, after):
    config = folder / "config.json"
    config.write_text(config.read_text().replace(before, after))


@pytest.mark.parametrize("kind", DECODERS)
def test_generating_model_with_score_matrix_becomes_classifier(kind, tmp_path):
    model = save_tiny(kind, AutoModelForSequenceClassification, tmp_path, num_labels=3)
    rename(tmp_path, "ForSequenceClassification", "ForCausalLM")
    for ids, mine in zip(prompts(), run(tmp_path, "classify", convert="classify"), strict=True):
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([ids])).logits[0]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_classifier_cannot_be_made_without_its_head(kind, tmp_path):
    save_tiny(kind, AutoModel, tmp_path)
    lacking = "score.weight" if kind in DECODERS else "classifier.weight"
    with pytest.raises(TrouperValidationError, match=f"lacks {lacking}.*parameter=model"):
        run(tmp_path, "classify", convert="classify")


@pytest.mark.parametrize(("kind", "place"), [("qwen3", -1), ("bert", 0), ("modernbert", 0)])
def test_a_classifier_embeds_when_asked_to(kind, place, tmp_path):
    model = save_tiny(kind, AutoModelForSequenceClassification, tmp_path, num_labels=3)
    for ids, mine in zip(prompts(), run(tmp_path, "embed", convert="embed"), strict=True):
        with torch.no_grad():
            theirs = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, place]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4)


EXPANDED = [
    PoolEntry(prompts()[-1][:length], None, "token_embed", num_keys)
    for length, num_keys in ((5, 3), (9, 9), (9, 6), (9, 6), (20, 17))
]


@pytest.mark.parametrize("sizes", [{}, WIDE], ids=["torch", "native"])
@pytest.mark.parametrize("kind", ["bert", "mpnet", "modernbert", "nomic"])
def test_tokens_behind_the_keys_are_what_transformers_masks(kind, sizes, tmp_path):
    model = save_tiny(kind, AutoModel, tmp_path, **sizes)
    mine = run(tmp_path, "token_embed", columns=EXPANDED)
    for column, hidden in zip(EXPANDED, mine, strict=True):
        ids = torch.tensor([column.token_ids])
        seen = (torch.arange(ids.shape[1]) < column.num_keys).long()[None]
        with torch.no_grad():
            theirs = model(input_ids=ids, attention_mask=seen).last_hidden_state[0]
        np.testing.assert_allclose(hidden, theirs.numpy(), atol=1e-4)


def test_recorded_text_may_have_keys_of_any_number(tmp_path):
    save_tiny("bert", AutoModel, tmp_path, **WIDE)
    if not units.can_multiply():
        pytest.skip("this machine does not multiply bfloat16")
    how = {"columns": EXPANDED, "dtype": "bfloat16"}
    together = run(tmp_path, "token_embed", **how)
    for one, other in zip(
        run(tmp_path, "token_embed", is_alone=True, **how), together, strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert (together[1] != together[2]).any()


def test_what_expands_a_query_must_see_it(tmp_path):
    save_tiny("modernbert", AutoModel, tmp_path)  # 4 tokens to each side
    (tmp_path / "modules.json").write_text('[{"path": "dense", "type": "x.Dense"}]')
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "config.json").write_text('{"in_features": 48, "out_features": 4}')
    (tmp_path / "config_sentence_transformers.json").write_text('{"query_length": 7}')
    with pytest.raises(UnsupportedFeatureError, match="query expansion"):
        run(tmp_path, "token_embed")


def test_model_with_fewer_positions_than_its_config_says_is_refused(tmp_path):
    save_tiny("roberta", AutoModel, tmp_path)
    config = tmp_path / "config.json"
    told = json.loads(config.read_text())
    del told["model_type"]  # so nobody knows that two of the 64 positions are nobody's
    config.write_text(json.dumps(told))
    with pytest.raises(TrouperValidationError, match=r"at most 62.*parameter=max_model_len"):
        run(tmp_path, "embed")
    assert len(run(tmp_path, "embed", max_model_len=62)) == len(LENGTHS)


def test_second_text_of_pair_has_its_own_token_type(tmp_path):
    def types(ids):
        return tuple(int(i >= len(ids) // 2) for i in range(len(ids)))

    model = save_tiny("bert", AutoModel, tmp_path)
    for ids, mine in zip(prompts(), run(tmp_path, "token_embed", types), strict=True):
        with torch.no_grad():
            theirs = model(
                input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types(ids)])
            ).last_hidden_state[0]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("mode", "reduce"),
    [("cls", lambda x: x[0]), ("mean", lambda x: x.mean(0)), ("lasttoken", lambda x: x[-1])],
)
def test_sentence_transformers_folder_decides_how_to_pool_and_project(mode, reduce, tmp_path):
    model = save_tiny("bert", AutoModel, tmp_path)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")]
    listed = [{"path": p, "type": f"sentence_transformers.models.{t}"} for p, t in modules]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "2_Dense").mkdir()
    flag = {
        "mean": "pooling_mode_mean_tokens",
        "cls": "pooling_mode_cls_token",
        "lasttoken": "pooling_mode_lasttoken",
    }
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({flag[mode]: True}))
    weight, bias = torch.randn(7, 48) / 7, torch.randn(7)
    save_file(
        {"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors"
    )
    dense = {
        "in_features": 48,
        "out_features": 7,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(dense))
    for ids, mine in zip(prompts(), run(tmp_path, "embed"), strict=True):
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        theirs = torch.tanh(weight @ reduce(hidden) + bias)
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4)


@pytest.mark.parametrize("kinds", [
    "PN", "PDN", "PND", "PNDN", "PDD", "PDND", "PN-D", "PD-N",
])  # fmt: skip
def test_modules_run_in_the_order_of_the_folder(kinds, tmp_path):
    """P pooling, N normalize, D dense, - dropout."""
    model = save_tiny("bert", AutoModel, tmp_path)
    torch.manual_seed(1)
    names = {"P": "Pooling", "N": "Normalize", "D": "Dense", "-": "Dropout"}
    listed, layers = [{"path": "", "type": "st.Transformer"}], []
    for i, letter in enumerate(kinds):
        folder = tmp_path / f"{i}_{names[letter]}"
        folder.mkdir()
        listed.append({"path": folder.name, "type": f"st.{names[letter]}"})
        config = {"pooling_mode_mean_tokens": True} if letter == "P" else {}
        if letter == "N":
            layers.append(lambda x: torch.nn.functional.normalize(x, dim=0))
        if letter == "D":
            weight = torch.randn(48, 48) / 7
            save_file({"linear.weight": weight}, folder / "model.safetensors")
            config = {"in_features": 48, "out_features": 48, "bias": False}
            # The activation is tanh where the file leaves it out, as in the library.
            layers.append(lambda x, weight=weight: torch.tanh(weight @ x))
        (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    options = resolve(EngineArgs(model=str(tmp_path), skip_tokenizer_init=True))
    for ids, mine in zip(prompts(), run(tmp_path, "embed"), strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
        for layer in layers:
            expected = layer(expected)
        # The last Normalize is the postprocessor's, so that a request can switch it off.
        found = torch.tensor(mine)
        if options.pooler.normalizes:
            found = torch.nn.functional.normalize(found, dim=0)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kinds", "word"), [
    (("Dense", "Pooling"), "Dense"), (("Normalize", "Pooling"), "Normalize"), (("Pooling", "Pooling"), "Pooling"),
])  # fmt: skip
def test_modules_in_front_of_the_pooling_are_refused(kinds, word, tmp_path):
    save_tiny("bert", AutoModel, tmp_path)
    listed = [{"path": "", "type": "st.Transformer"}]
    for i, kind in enumerate(kinds):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "config.json").write_text(
            json.dumps({"in_features": 48, "out_features": 48, "pooling_mode_cls_token": True})
        )
        listed.append({"path": str(i), "type": f"st.{kind}"})
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(UnsupportedFeatureError, match=f"{word}.*before Pooling"):
        run(tmp_path, "embed")


@pytest.mark.parametrize(
    ("field", "given"), [("norm_rel_ebd", "no_layer_norm"), ("pos_att_type", "p2c|c2pp")]
)
def test_words_that_only_contain_a_known_one_are_refused(field, given):
    with pytest.raises(UnsupportedFeatureError, match=f"{field}='{given[:3]}"):
        encoder_traits({**SMALL, "relative_attention": True, field: given}, "DebertaV2Model")


@pytest.mark.parametrize("name", ["BertGenerationEncoder"])
def test_names_that_only_begin_alike_are_refused(name):
    with pytest.raises(UnsupportedFeatureError, match=f"{name}: "):
        encoder_traits(SMALL, name)
