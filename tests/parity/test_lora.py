"""Adapters against peft, in float32; many in a batch against each alone, bit by bit."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trouper import LLM, BeamSearchParams, LoRARequest, SamplingParams
from trouper.inputs import TokensPrompt

from .driver import random_prompts
from .test_architectures import CASES, RECURRENT, VOCAB, tiny_model

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft
NUM_OUTPUTS = 16
PROMPTS = random_prompts((9, 33, 3, 20), VOCAB, seed=3)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rank-stabilised": {"r": 16, "lora_alpha": 12, "use_rslora": True, "target_modules": ALL},
    "patterns": {
        "r": 2, "lora_alpha": 4, "target_modules": ALL, "rank_pattern": {"down_proj": 5},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 9}},
    "one-layer": {"r": 8, "lora_alpha": 16, "target_modules": ALL, "layers_to_transform": [1]},
    "rank-1": {"r": 1, "lora_alpha": 2, "target_modules": ["gate_proj", "o_proj"]},
    "mlp": {"r": 8, "lora_alpha": 8, "target_modules": ["up_proj", "down_proj"]},
    "wide": {"r": 20, "lora_alpha": 20, "target_modules": ALL},
    "expressions": {
        "r": 2, "lora_alpha": 4, "target_modules": ALL,
        "rank_pattern": {r".*\.1\..*\.(q|down)_proj": 5, r"^model\.layers\.0\.self_attn.*": 3},
        "alpha_pattern": {r"layers\.[01]\.mlp\.up_proj": 9, "(k|v)_proj": 7}},
}  # fmt: skip
QUICK = ("all", "rank-stabilised", "patterns", "expressions")  # the others run with the slow tests
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True, logprobs=-1)
OPTIONS = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, "block_size": 64, "max_logprobs": -1,
    "num_gpu_blocks_override": 64, "max_num_seqs": 12, "enable_lora": True, "max_lora_rank": 32,
}  # fmt: skip


def save_adapter(model_folder, folder, options, seed=0):
    """An adapter whose B is not zeros, as peft saves it."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data = torch.randn_like(parameter) * 0.3 / parameter.shape[1] ** 0.5
    model.save_pretrained(folder)


def greedy_of_peft(model_folder, folder, prompts):
    """(ids, logprobs) of each prompt's greedy continuation."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = base if folder is None else peft.PeftModel.from_pretrained(base, folder)
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids, logprobs = list(prompt), []
            for _ in range(NUM_OUTPUTS):
                logits = model(torch.tensor([ids])).logits[0, -1]
                logprobs.append(logits.log_softmax(-1))
                ids.append(int(logits.argmax()))
            found.append((ids[len(prompt) :], torch.stack(logprobs)))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    tiny_model("Qwen3", {"num_hidden_layers": 2, "head_dim": 32}, folder)
    return folder


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory):
    """A request for each variant."""
    found = []
    for number, (name, options) in enumerate(VARIANTS.items(), 1):
        folder = tmp_path_factory.mktemp(name)
        save_adapter(model, folder, options, seed=number)
        found.append(LoRARequest(name, number, str(folder)))
    return found


@pytest.fixture(scope="module")
def llm(model):
    with LLM(str(model), max_loras=8, **OPTIONS) as llm:
        yield llm


def run(llm, prompts, lora_request=None, params=GREEDY):
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return llm.generate(inputs, params, use_tqdm=False, lora_request=lora_request)


def compare(outputs, expected):
    for output, (ids, logprobs_PV) in zip(outputs, expected, strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == ids
        for found, logprobs_V in zip(completion.logprobs, logprobs_PV, strict=True):
            mine = torch.tensor([found[token].logprob for token in range(VOCAB)])
            torch.testing.assert_close(mine, logprobs_V, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for number, name in enumerate(VARIANTS)
    ],
)
def test_adapter_gives_tokens_and_logprobs_of_peft(llm, model, adapters, number):
    adapter = adapters[number]
    expected = greedy_of_peft(model, adapter.lora_path, PROMPTS[:2])
    compare(run(llm, PROMPTS[:2], adapter), expected)


@pytest.fixture(scope="module")
def headed(model, tmp_path_factory):
    """An adapter with a head of its own."""
    folder = tmp_path_factory.mktemp("headed")
    options = {"r": 4, "target_modules": ["q_proj", "up_proj"], "modules_to_save": ["lm_head"]}
    save_adapter(model, folder, options, seed=77)
    return LoRARequest("headed", 77, str(folder))


def test_adapter_replaces_head_for_its_own_rows(llm, model, adapters, headed):
    expected = greedy_of_peft(model, headed.lora_path, PROMPTS)
    compare(run(llm, PROMPTS, headed), expected)
    requests = [headed, None, adapters[1], headed]
    mixed = run(llm, PROMPTS, requests)
    compare([mixed[0], mixed[3]], [expected[0], expected[3]])
    for at in (1, 2):
        (alone,) = run(llm, [PROMPTS[at]], requests[at])
        assert mixed[at].outputs == alone.outputs


def test_own_head_gives_logprobs_of_prompts_and_draws(llm, model, headed):
    folder = headed.lora_path
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits = peft.PeftModel.from_pretrained(base, folder)(torch.tensor([PROMPTS[0]])).logits[0]
    params = SamplingParams(max_tokens=4, seed=3, ignore_eos=True, prompt_logprobs=0)
    (first,) = run(llm, [PROMPTS[0]], headed, params)
    logprobs = logits.log_softmax(-1)
    for at, token in enumerate(PROMPTS[0][1:]):
        found = first.prompt_logprobs[at + 1][token].logprob
        assert found == pytest.approx(float(logprobs[at, token]), abs=1e-4)
    # Without logprobs the tokens of a recorded step must not be drawn from the model's own head.
    plain = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)
    (again,) = run(llm, [PROMPTS[0]], headed, plain)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("style", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("has_tower", [False, True])
def test_adapter_of_larger_model_is_read_by_its_own_names(
    model, tmp_path, caplog, style, has_tower
):
    """PEFT's names lead through `language_model` where the adapter was trained on a model that also sees."""
    alone, inner = tmp_path / "alone", tmp_path / "inner"
    save_adapter(model, alone, VARIANTS["expressions"])
    inner.mkdir()
    config = (alone / "adapter_config.json").read_text()
    config = config.replace(r"^model\\.layers", "^" + style.replace(".", r"\\.") + "layers")
    (inner / "adapter_config.json").write_text(config)
    tensors = load_file(alone / "adapter_model.safetensors")
    plain, own = "base_model.model.model.", f"base_model.model.{style}"
    renamed = {own + name.removeprefix(plain): x for name, x in tensors.items()}
    if has_tower:
        for side in "AB":
            tower = f"base_model.model.model.visual.blocks.0.attn.qkv.lora_{side}.weight"
            renamed[tower] = torch.ones(2, 2)
    save_file(renamed, inner / "adapter_model.safetensors")
    with caplog.at_level("INFO", logger="trouper"), LLM(str(model), **OPTIONS) as llm:
        found = [
            values(run(llm, PROMPTS[:1], LoRARequest(str(number), number, str(folder))))
            for number, folder in enumerate((alone, inner), 1)
        ]
    assert found[0] == found[1]
    assert ("changes 1 modules of vision or audio towers" in caplog.text) == has_tower


TURNED = {
    "gpt2": ("GPT2", {}, ["c_attn", "c_proj", "c_fc"]),
    "gpt-neox": ("GPTNeoX", {}, ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]),
}


@pytest.mark.parametrize("case", TURNED)
def test_adapters_of_turned_and_grouped_matrices_equal_peft(case, tmp_path):
    name, changes, modules = TURNED[case]
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    tiny_model(name, {"num_hidden_layers": 2, **changes}, folder)
    options = {"r": 4, "lora_alpha": 8, "target_modules": modules}
    save_adapter(folder, adapter, options | {"fan_in_fan_out": name == "GPT2"})
    expected = greedy_of_peft(folder, adapter, PROMPTS[:1])
    with LLM(str(folder), **OPTIONS) as llm:
        compare(run(llm, PROMPTS[:1], LoRARequest("one", 1, str(adapter))), expected)


@pytest.mark.parametrize("case", ["glm4", "ernie4-5-biased", "hunyuan", "ministral3"])
def test_adapter_follows_order_of_rows_that_it_changes(case, tmp_path):
    """Rows of q and k are put into halves where they are stored in pairs."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny_model(*CASES[case], base)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    save_adapter(base, adapter, {"r": 8, "lora_alpha": 16, "target_modules": names})
    expected = greedy_of_peft(base, adapter, PROMPTS[:1])
    with LLM(str(base), max_loras=1, **OPTIONS) as llm:
        compare(run(llm, PROMPTS[:1], LoRARequest("one", 1, str(adapter))), expected)


MIXED = {
    "qwen3-5": ["q_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", "down_proj"],
    "lfm2": ["q_proj", "in_proj", "out_proj", "w2"],
    "granite-4-h": ["v_proj", "in_proj", "out_proj", "input_linear"],
    "qwen3-next": [
        "q_proj",
        "in_proj_qkvz",
        "out_proj",
    ],
    "lfm2-moe": ["k_proj", "in_proj", "0.feed_forward.w1", "0.feed_forward.w2"],
    "granite-4-h-moe": ["in_proj", "shared_mlp.input_linear", "output_linear"],
}


@pytest.mark.parametrize("case", MIXED)
def test_adapters_of_recurrent_mixers_equal_peft(case, tmp_path):
    tiny_model(*RECURRENT[case], tmp_path / "model")
    options = {"r": 4, "lora_alpha": 8, "target_modules": MIXED[case]}
    save_adapter(tmp_path / "model", tmp_path / "adapter", options)
    expected = greedy_of_peft(tmp_path / "model", tmp_path / "adapter", PROMPTS[:2])
    with LLM(str(tmp_path / "model"), **OPTIONS) as llm:
        request = LoRARequest("a", 1, str(tmp_path / "adapter"))
        compare(run(llm, PROMPTS[:2], request), expected)


def values(outputs):
    """Tokens and the bits of all logprobs."""
    return [
        (c.token_ids, [[p[t].logprob for t in range(VOCAB)] for p in c.logprobs])
        for output in outputs
        for c in output.outputs
    ]


def test_eight_adapters_in_batch_are_each_alone_bit_by_bit(llm, adapters):
    """Prompts of different lengths, and one without an adapter between them."""
    prompts = random_prompts((9, 33, 3, 20, 1, 14, 8, 26, 7), VOCAB, seed=5)
    params = GREEDY.clone()
    params.skip_reading_prefix_cache = True  # a prompt is computed in the same chunk both times
    chosen = [*adapters[:4], None, *adapters[4:8]]
    alone = [
        values(run(llm, [prompt], adapter, params))[0]
        for prompt, adapter in zip(prompts, chosen, strict=True)
    ]
    assert values(run(llm, prompts, chosen, params)) == alone
    assert len({tuple(ids) for ids, _ in alone}) > 1


def test_no_prefix_crosses_adapters(llm, adapters):
    (prompt,) = random_prompts((150,), VOCAB, seed=8)
    for adapter in (adapters[0], adapters[1], None):
        first, second = (run(llm, [prompt], adapter)[0] for _ in range(2))
        assert first.num_cached_tokens == 0
        assert second.num_cached_tokens == 128


def test_reloaded_adapter_finds_its_prefixes(llm, adapters):
    (prompt,) = random_prompts((150,), VOCAB, seed=9)
    first = run(llm, [prompt], adapters[3])[0]
    same = LoRARequest("another name", 99, adapters[3].lora_path)
    again = run(llm, [prompt], same)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 128)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_the_output_names_the_adapter(llm, adapters):
    (output,) = run(llm, PROMPTS[:1], adapters[2])
    assert output.lora_request == adapters[2]


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_are_there_after_a_sleep(llm, adapters, level):
    before = values(run(llm, PROMPTS, adapters[0]))
    llm.sleep(level)
    llm.wake_up()
    assert values(run(llm, PROMPTS, adapters[0])) == before


@pytest.mark.slow
def test_an_adapter_goes_with_weights_of_eight_bits(model, adapters):
    """Its product is added to that of the rounded base."""
    options = {**OPTIONS, "dtype": "bfloat16"}
    with LLM(str(model), max_loras=1, quantization="int8", **options) as llm:
        base, adapted = (run(llm, PROMPTS, adapter) for adapter in (None, adapters[0]))
    expected = greedy_of_peft(model, adapters[0].lora_path, PROMPTS)
    for with_it, without, (_, logprobs_PV) in zip(adapted, base, expected, strict=True):
        found, other = (
            torch.tensor([output.outputs[0].logprobs[0][t].logprob for t in range(VOCAB)])
            for output in (with_it, without)
        )
        near, far = ((x - logprobs_PV[0]).abs().mean() for x in (found, other))
        assert near < 0.25 * far


def test_adapters_are_loaded_and_unloaded_by_hand(llm, adapters):
    for number in llm.list_loras():
        llm.remove_lora(number)
    assert llm.add_lora(adapters[0])
    assert not llm.add_lora(adapters[0])
    assert llm.pin_lora(1)
    assert llm.list_loras() == {1}
    assert llm.remove_lora(1)
    assert llm.list_loras() == set()


def test_beam_search_has_adapter_of_its_prompt(llm, adapters):
    """One beam is the greedy answer."""
    params = BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True)
    for adapter in (adapters[0], None):
        greedy = run(llm, PROMPTS[:1], adapter)[0].outputs[0].token_ids[:6]
        prompt = TokensPrompt(prompt_token_ids=PROMPTS[0])
        (found,) = llm.beam_search([prompt], params, lora_request=adapter)
        assert found.sequences[0].tokens[len(PROMPTS[0]) :] == greedy
