"""Models of the transformers library through this engine's attention equal those of its own eager attention."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from trouper import LLM, LoRARequest, SamplingParams
from trouper.actors.executor.models.hf_attention import window_of
from trouper.actors.executor.weights import hf_check
from trouper.actors.executor.weights.checkpoint import Checkpoint
from trouper.actors.executor.weights.schemes import read_scheme
from trouper.actors.messages.steps import Sampling
from trouper.config.checkpoint.recurrent import state_bytes
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.inputs import TokensPrompt

from .driver import Driver, engine_config, hf_runner, random_prompts
from .hf_families import FAMILIES, HYBRIDS, REFUSED, VOCAB, architecture_of, tiny_model

# One of each kind: experts; learned positions and turned weights; sinks and windows; keys and values of other widths;
# layers of other shapes.
QUICK = ("flex_olmo", "gpt2", "gpt_oss", "deepseek_v3", "gemma4_text")
ALL_LOGPROBS = Sampling(temperature=0.0, logprobs=-1)


def families(chosen, quick):
    return [pytest.param(f, marks=() if f in quick else pytest.mark.slow) for f in chosen]


@torch.no_grad()
def logprobs_of(model, s):
    """Those of the answer's tokens, [outputs, vocabulary], by the library's eager attention."""
    token_ids = [*s.prompt, *s.token_ids]
    positions = torch.arange(len(token_ids))[None]
    logits = model(torch.tensor([token_ids]), position_ids=positions, use_cache=False).logits[0]
    return logits.log_softmax(-1)[len(s.prompt) - 1 : -1]


def check(model, sequences):
    """Errors are 1e-5 of the largest logprob, or four times what float32 does to the library's own."""
    expected = [logprobs_of(model, s) for s in sequences]
    model.double()
    for s, logprobs in zip(sequences, expected, strict=True):
        assert s.token_ids == logprobs.argmax(-1).tolist()
        found = torch.full_like(logprobs, torch.nan)
        for i, position in enumerate(s.logprobs):
            found[i, list(position.token_ids)] = torch.tensor(position.logprobs)
        exact = logprobs_of(model, s).float()
        tolerance = max(1e-5 * float(exact.abs().max()), 4 * float((logprobs - exact).abs().max()))
        torch.testing.assert_close(found, exact, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", families(FAMILIES, QUICK))
def test_chunks_and_batches_equal_eager_attention(family, tmp_path):
    model = tiny_model(family, tmp_path)
    runner = hf_runner(engine_config(tmp_path, model_impl="transformers", max_model_len=128))
    driver = Driver(runner, chunk=11, shuffle=1, stagger=2)
    sequences = driver.run(random_prompts((1, 7, 40, 23), VOCAB), 12, ALL_LOGPROBS)
    assert all(len(s.token_ids) == 12 for s in sequences)
    check(model, sequences)


@pytest.mark.parametrize("family", families(HYBRIDS, ("qwen3_5_text", "jamba")))
def test_recurrent_models_equal_their_full_forward(family, tmp_path):
    model = tiny_model(family, tmp_path)
    runner = hf_runner(engine_config(tmp_path, model_impl="transformers", max_model_len=128))
    driver = Driver(runner, chunk=11, shuffle=1, stagger=2)
    config = json.loads((tmp_path / "config.json").read_text())
    assert runner.load().state_bytes == state_bytes(config, 4)
    sequences = driver.run(random_prompts((1, 7, 40, 23), VOCAB), 12, ALL_LOGPROBS)
    check(model, sequences)
    # The slots are used again, by sequences in another order.
    check(model.float(), driver.run(random_prompts((31, 2, 9), VOCAB), 8, ALL_LOGPROBS))


@pytest.mark.parametrize("family", families(REFUSED, ("bert", "falcon", "rwkv")))
def test_other_families_are_refused_by_name(family, tmp_path):
    tiny_model(family, tmp_path)
    runner = hf_runner(engine_config(tmp_path, max_model_len=64, runner="generate"))
    with pytest.raises(UnsupportedFeatureError, match=REFUSED[family]) as caught:
        runner.load()
    assert architecture_of(family) in str(caught.value)


def test_refused_field_of_native_family_is_named(tmp_path):
    """Neither way computes the model; the error names the field that keeps it from the native one."""
    tiny_model("lfm2", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"layer_types": ["conv", "mamba", "conv", "conv"]}))
    runner = hf_runner(engine_config(tmp_path, max_model_len=64))
    with pytest.raises(UnsupportedFeatureError, match=r"layer_types has \['mamba'\]") as error:
        runner.load()
    assert error.value.parameter == "layer_types"


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A mixture of experts without own code."""
    folder = tmp_path_factory.mktemp("foreign")
    tiny_model("flex_olmo", folder)
    return str(folder)


ENGINE = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "block_size": 4, "max_num_seqs": 4,
    "max_num_batched_tokens": 16, "device": "cpu",
}  # fmt: skip


def generate(llm, prompts, **params):
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    options = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, **params}
    return llm.generate(inputs, SamplingParams(**options), use_tqdm=False)


def test_prefix_cache_preemption_and_copies_change_no_token(foreign):
    prompts = random_prompts((13, 11, 10, 9), VOCAB)
    with LLM(foreign, **ENGINE, num_gpu_blocks_override=64) as roomy:
        alone = [
            generate(roomy, [prompt], max_tokens=24)[0].outputs[0].token_ids for prompt in prompts
        ]
        again = generate(roomy, prompts, max_tokens=24)
        assert [output.outputs[0].token_ids for output in again] == alone
        assert all(output.num_cached_tokens > 0 for output in again)
        drawn = {"temperature": 1.0, "seed": 3, "n": 3}
        copies = [c.token_ids for c in generate(roomy, prompts[:1], **drawn)[0].outputs]
        assert len(set(map(tuple, copies))) == 3
    # 20 blocks of 4 tokens for four sequences of 33 tokens and more
    with LLM(foreign, **ENGINE, num_gpu_blocks_override=20, disable_log_stats=False) as tight:
        assert [
            output.outputs[0].token_ids for output in generate(tight, prompts, max_tokens=24)
        ] == alone
        assert [c.token_ids for c in generate(tight, prompts[:1], **drawn)[0].outputs] == copies
        metrics = {metric.name: metric for metric in tight.get_metrics()}
        assert metrics["trouper:num_preemptions"].value > 0


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("family", ["flex_olmo", "mixtral"])  # mixtral has own code
def test_rounded_weights_are_those_of_the_kernels(family, fmt, tmp_path):
    (prompt,) = random_prompts((12,), VOCAB)
    tiny_model(family, tmp_path)
    folder = str(tmp_path)
    with LLM(folder, **ENGINE) as plain:
        expected = generate(plain, [prompt], max_tokens=1, logprobs=5)[0].outputs[0].logprobs[0]
    with LLM(folder, **ENGINE, quantization=fmt) as rounded:
        found = generate(rounded, [prompt], max_tokens=1, logprobs=5)[0].outputs[0].logprobs[0]
    shared = found.keys() & expected.keys()
    differences = [abs(found[i].logprob - expected[i].logprob) for i in shared]
    assert len(shared) >= 3
    assert 1e-4 < max(differences) < 1.5


def e2m1(shape):
    """Two values to a byte, with one power of two for 32 of them, as gpt-oss stores its experts."""
    experts, num_in, num_out = shape
    blocks = torch.randint(0, 256, (experts, num_out, num_in // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(119, 123, (experts, num_out, num_in // 32), dtype=torch.uint8)


def quantise(name, weight):
    """The stored tensors of one matrix: e4m3 in blocks, or of experts in three dimensions e2m1."""
    if weight.ndim == 3:
        blocks, powers = e2m1(weight.shape)
        return {f"{name}_blocks": blocks, f"{name}_scales": powers}
    scales = torch.full([-(-n // 32) for n in weight.shape], float(weight.abs().max()) / 448)
    return {name: (weight / scales[0, 0]).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


@pytest.mark.parametrize(
    ("family", "method"), [("deepseek_v3", {"weight_block_size": [32, 32]}), ("gpt_oss", {})]
)
def test_quantised_checkpoint_has_answers_of_its_plain_weights(family, method, tmp_path):
    plain, narrow = tmp_path / "plain", tmp_path / "narrow"
    tiny_model(family, plain)
    narrow.mkdir()
    stored = load_file(plain / "model.safetensors")
    kept = {}
    for name, tensor in stored.items():
        is_matrix = name.endswith(".weight") and "_proj" in name
        chosen = is_matrix if method else tensor.ndim == 3
        kept |= quantise(name, tensor) if chosen else {name: tensor}
    save_file(kept, narrow / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8" if method else "mxfp4", **method}
    (narrow / "config.json").write_text(json.dumps(config))
    scheme = read_scheme(config)
    dense = {name: x.contiguous() for name, x in Checkpoint(narrow, scheme=scheme).plain()}
    assert dense.keys() == stored.keys()
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    found = []
    for folder in (plain, narrow):
        runner = hf_runner(engine_config(folder, model_impl="transformers", max_model_len=64))
        found.append(Driver(runner).run(random_prompts((7, 23), VOCAB), 6, ALL_LOGPROBS))
    for expected, sequence in zip(*found, strict=True):
        assert sequence.token_ids == expected.token_ids
        wanted = torch.tensor([p.logprobs for p in expected.logprobs])
        torch.testing.assert_close(torch.tensor([p.logprobs for p in sequence.logprobs]), wanted)


def test_own_models_run_this_way_on_request(tmp_path):
    tiny_model("qwen3", tmp_path)
    (prompt,) = random_prompts((20,), VOCAB)
    answers = []
    for choice in ("auto", "transformers"):
        with LLM(str(tmp_path), **ENGINE, model_impl=choice) as llm:
            answers.append(generate(llm, [prompt])[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_own_code_alone_refuses_model_that_it_does_not_know(foreign):
    with pytest.raises(UnsupportedFeatureError, match="FlexOlmoForCausalLM"):
        LLM(foreign, **ENGINE, model_impl="trouper")
    with pytest.raises(TrouperValidationError, match="model_impl"):
        LLM(foreign, **ENGINE, model_impl="vllm")


def test_refusal_for_rounding_names_another_dtype(foreign, monkeypatch):
    monkeypatch.setitem(hf_check.TOLERANCES, torch.bfloat16, 0.0)
    with pytest.raises(UnsupportedFeatureError, match="dtype='float32' works"):
        LLM(foreign, **ENGINE | {"dtype": "bfloat16"})


def test_a_checkpoint_that_lacks_a_tensor_is_refused(foreign, tmp_path):
    from safetensors.torch import load_file, save_file

    for path in Path(foreign).glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(Path(foreign) / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrouperValidationError, match=r"lacks 1 tensors: .*1\.self_attn\.k_proj"):
        LLM(str(tmp_path), **ENGINE)


@pytest.mark.parametrize(
    ("sees", "window"),
    [
        (lambda b, h, q, k: k <= q, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 8), 8),
        (lambda b, h, q, k: (k <= q) & (k > q - 100), None),
    ],
)
def test_windows_are_read_from_masks(sees, window):
    assert window_of(sees, 100) == window


@pytest.mark.parametrize(
    "sees",
    [
        lambda b, h, q, k: k <= q + 1,
        lambda b, h, q, k: k >= 0,
        lambda b, h, q, k: (k <= q) & (k // 16 == q // 16),
        lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k == 0)),
        lambda b, h, q, k: (k <= q) | ((k < 10) & (q < 10)),
    ],
    ids=["next", "both directions", "chunks", "first key", "prefix"],
)
def test_other_masks_are_refused(sees):
    with pytest.raises(UnsupportedFeatureError, match="causal"):
        window_of(sees, 100)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
def test_an_adapter_equals_peft(foreign, tmp_path):
    """Experts are matrices of their own kind, and take none."""
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(foreign, dtype=torch.float32)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.3 / parameter.shape[1] ** 0.5
    adapted.save_pretrained(tmp_path)
    (prompt,) = random_prompts((20,), VOCAB)
    with torch.inference_mode():
        expected = adapted(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    with LLM(foreign, **ENGINE, enable_lora=True, max_logprobs=-1) as llm:
        request = LoRARequest("mine", 1, str(tmp_path))
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
        inputs = [TokensPrompt(prompt_token_ids=prompt)] * 2
        for which, is_equal in ((request, True), (None, False)):
            outputs = llm.generate(inputs, params, use_tqdm=False, lora_request=which)
            found = outputs[0].outputs[0].logprobs[0]
            logprobs = torch.tensor([found[i].logprob for i in range(VOCAB)])
            assert torch.allclose(logprobs, expected, atol=1e-4) == is_equal


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

open({mark!r}, "w").close()

class OwnConfig(LlamaConfig):
    model_type = "own-llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def folder_with_code(tmp_path):
    """A Llama whose class is code in its folder, and a file that exists once the code has run."""
    tiny_model("llama", tmp_path)
    mark = tmp_path / "has-run"
    fields = json.loads((tmp_path / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    fields |= {"model_type": "own-llama", "architectures": ["OwnForCausalLM"], "auto_map": names}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "own.py").write_text(CODE.format(mark=str(mark)))
    return tmp_path, mark


def test_code_of_folder_runs_only_when_it_is_allowed(folder_with_code, tmp_path, monkeypatch):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, mark = folder_with_code
    with pytest.raises(UnsupportedFeatureError, match="trust_remote_code"):
        hf_runner(engine_config(folder, max_model_len=64)).load()
    assert not mark.exists()
    runner = hf_runner(engine_config(folder, max_model_len=64, trust_remote_code=True))
    (s,) = Driver(runner, chunk=5).run(random_prompts((12,), VOCAB), 4)
    assert mark.exists()
    assert len(s.token_ids) == 4


def test_code_that_lies_elsewhere_never_runs(folder_with_code):
    folder, mark = folder_with_code
    fields = json.loads((folder / "config.json").read_text())
    fields["auto_map"]["AutoModelForCausalLM"] = "other/repo--own.OwnForCausalLM"
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedFeatureError, match="other/repo--own"):
        hf_runner(engine_config(folder, max_model_len=64, trust_remote_code=True)).load()
    assert not mark.exists()


def test_embeddings_stand_for_tokens(foreign):
    (prompt,) = random_prompts((23,), VOCAB)
    table = transformers.AutoModelForCausalLM.from_pretrained(foreign).get_input_embeddings()
    embeds = table.weight.detach()[prompt].float()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(foreign, **ENGINE, enable_prompt_embeds=True) as llm:
        inputs = [TokensPrompt(prompt_token_ids=prompt), {"prompt_embeds": embeds}]
        ids, rows = (o.outputs[0].token_ids for o in llm.generate(inputs, params, use_tqdm=False))
    assert ids == rows


def test_embeddings_are_refused_where_layers_look_up_ids(tmp_path):
    tiny_model("gemma4_text", tmp_path)
    runner = hf_runner(engine_config(tmp_path, max_model_len=64, enable_prompt_embeds=True))
    with pytest.raises(UnsupportedFeatureError, match="enable_prompt_embeds"):
        runner.load()


def test_the_kv_cache_may_wake_before_the_weights(tmp_path):
    """What layers keep is known after the first load, so memory does not wait for the weights."""
    tiny_model(next(iter(QUICK)), tmp_path)
    runner = hf_runner(engine_config(tmp_path, model_impl="transformers", max_model_len=64))
    driver = Driver(runner)
    expected = [s.token_ids for s in driver.run([[5, 6, 7]], 4)]
    runner.sleep(2)
    runner.wake(frozenset({"kv_cache"}))
    runner.wake(frozenset({"weights"}))
    assert [s.token_ids for s in driver.run([[5, 6, 7]], 4)] == expected
