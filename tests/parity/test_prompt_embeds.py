"""A prompt of embeddings answers as transformers does for the same `inputs_embeds`, whatever is around it."""

import base64
import io

import pytest
import torch
from safetensors.torch import load_file

from trouper import LLM, SamplingParams
from trouper.config.model import DEMO_MODEL
from trouper.errors import TrouperValidationError

from .driver import random_prompts
from .test_architectures import CASES, VOCAB, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def open_llm(folder, **changes):
    args = {
        "dtype": "float32", "block_size": 8, "max_num_seqs": 8, "max_model_len": 128,
        "kv_cache_memory_bytes": 2**24, "skip_tokenizer_init": True, "enable_prompt_embeds": True,
    }  # fmt: skip
    return LLM(str(folder), **{**args, **changes})


def tokens(llm, prompts, params=GREEDY):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@torch.no_grad()
def expected(model, rows, count=12):
    out = model.generate(
        inputs_embeds=rows[None], max_new_tokens=count, do_sample=False, use_cache=True
    )
    return out[0].tolist()


@pytest.mark.parametrize("case", ["qwen3-tied", "gemma2", "gemma3", "granite", "olmo2"])
def test_tokens_equal_those_of_transformers(case, tmp_path):
    model = tiny_model(*CASES[case], tmp_path)
    ids = random_prompts((5, 21, 40), VOCAB)
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        rows = [model.get_input_embeddings()(torch.tensor(prompt)) for prompt in ids]
    strange = [part + 0.1 * torch.randn(part.shape, generator=noise) for part in rows]
    with open_llm(tmp_path, max_num_batched_tokens=16) as llm:
        by_ids = tokens(llm, ids)
        mixed = [{"prompt_embeds": rows[0]}, ids[1], {"prompt_embeds": strange[2]}]
        got = tokens(llm, [*mixed, {"prompt_embeds": strange[1]}])
        again = llm.generate({"prompt_embeds": strange[2]}, GREEDY, use_tqdm=False)[0]
    assert got[:2] == by_ids[:2]  # the embeddings of tokens stand for these tokens
    assert got[2] == expected(model, strange[2])
    assert got[3] == expected(model, strange[1])
    assert again.outputs[0].token_ids == got[2]
    assert again.num_cached_tokens == 32  # whole blocks of its own kind
    assert again.prompt_token_ids == [0] * 40


def test_prefixes_are_shared_by_content_and_never_with_tokens(tmp_path):
    model = tiny_model("Qwen3", {}, tmp_path)
    (ids,) = random_prompts((20,), VOCAB)
    with torch.no_grad():
        rows = model.get_input_embeddings()(torch.tensor(ids))
    other = rows.clone()
    other[12] += 1  # in the second block

    def cached(llm, prompt):
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

    with open_llm(tmp_path) as llm:
        assert cached(llm, {"prompt_embeds": rows}) == 0
        assert cached(llm, {"prompt_token_ids": [0] * 20}) == 0
        assert cached(llm, {"prompt_embeds": other}) == 8
        assert cached(llm, {"prompt_embeds": rows, "cache_salt": "s"}) == 0
        assert cached(llm, {"prompt_embeds": rows}) == 16


def test_every_form_of_payload_is_one_prompt(tmp_path):
    model = tiny_model("Qwen3", {}, tmp_path)
    rows = torch.randn(9, 64)
    file = io.BytesIO()
    torch.save(rows, file)
    payload = file.getvalue()
    forms = [
        payload, {"prompt_embeds": payload}, {"prompt_embeds": base64.b64encode(payload).decode()},
        {"prompt_embeds": rows[None]}, {"prompt_embeds": rows.double(), "prompt": "told only"},
    ]  # fmt: skip
    with open_llm(tmp_path, enable_prefix_caching=False) as llm:
        assert tokens(llm, forms) == [expected(model, rows)] * len(forms)


def test_siblings_preemption_and_penalties_read_the_embeddings_too(tmp_path):
    tiny_model("Qwen3", {}, tmp_path)
    prompts = [{"prompt_embeds": torch.randn(20, 64)} for _ in range(6)]
    penalty = SamplingParams(temperature=0, max_tokens=40, repetition_penalty=1.5)
    pair = SamplingParams(temperature=1, seed=4, n=2, max_tokens=8)
    with open_llm(tmp_path) as llm:
        alone = [tokens(llm, prompt, penalty)[0] for prompt in prompts]
        one, two = llm.generate(prompts[0], pair, use_tqdm=False)[0].outputs
        assert one.token_ids != two.token_ids
        assert llm.generate(prompts[0], SamplingParams(temperature=1, seed=5, max_tokens=8),
                            use_tqdm=False)[0].outputs[0].token_ids == two.token_ids  # fmt: skip
    with open_llm(tmp_path, num_gpu_blocks_override=16) as llm:
        assert tokens(llm, prompts, penalty) == alone
        assert llm.llm_engine.statistics().scheduler.num_preemptions > 0


def test_a_row_that_is_not_finite_fails_alone(tmp_path):
    tiny_model("Qwen3", {}, tmp_path)
    bad = torch.randn(9, 64)
    bad[4, 3] = torch.nan
    good = {"prompt_embeds": torch.randn(9, 64)}
    with open_llm(tmp_path) as llm:
        before = tokens(llm, good)
        with pytest.raises(TrouperValidationError, match="not finite"):
            llm.generate([good, {"prompt_embeds": bad}], GREEDY, use_tqdm=False)
        assert tokens(llm, good) == before


WORDS = load_file(DEMO_MODEL / "model.safetensors")["model.embed_tokens.weight"]


def part(ids):
    return {"type": "prompt_embeds", "data": WORDS[ids].clone()}


def chat(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize("num_batched", [16, 4096])
def test_parts_of_a_chat_stand_among_its_tokens(num_batched):
    first, second = list(range(300, 337)), [40, 50]
    messages = chat(["one " * 20, part(first), "two"], "three", [part(second)])
    args = {
        "dtype": "float32",
        "block_size": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": num_batched,
    }
    with LLM(enable_prompt_embeds=True, **args) as llm:
        mixed, other = llm.chat([messages, chat("other")], GREEDY, use_tqdm=False)
        ids, holes = mixed.prompt_token_ids, iter(first + second)
        assert ids.count(0) == len(first) + len(second)
        whole = llm.generate([[id or next(holes) for id in ids]], GREEDY, use_tqdm=False)[0]
        assert (
            mixed.outputs[0].token_ids == whole.outputs[0].token_ids != other.outputs[0].token_ids
        )
        assert whole.num_cached_tokens == ids.index(0) // 16 * 16  # what is before the first part
        again = llm.chat(messages, GREEDY, use_tqdm=False)[0]
        assert again.outputs[0].token_ids == mixed.outputs[0].token_ids
        assert again.num_cached_tokens == (len(ids) - 1) // 16 * 16
        assert "one one" in mixed.prompt
        assert "\U0010fffe" not in mixed.prompt


def test_part_may_be_put_anywhere_by_template_or_be_dropped():
    template = "{% for m in messages[1:] %}{% for p in m.content %}[{{ p.text | trim }}]{% endfor %}{% endfor %}"
    messages = chat([part([7] * 5)], [" a ", part([8] * 3), part([9]), "\U0010fffe0\U0010fffe"])
    with LLM(enable_prompt_embeds=True, dtype="float32") as llm:
        (output,) = llm.chat(messages, GREEDY, chat_template=template, use_tqdm=False)
        tokenizer = llm.llm_engine.async_engine.tokenizer
        items = [tokenizer.encode(text) for text in ("[a][", "][", "][0]")]
    assert output.prompt_token_ids == [*items[0], 0, 0, 0, *items[1], 0, *items[2]]
    assert output.prompt == "[a][][][0]"


@pytest.mark.parametrize(
    ("prompt", "params", "parameter"),
    [
        ({"prompt_embeds": torch.zeros(3, 65)}, GREEDY, "prompt_embeds"),
        ({"prompt_embeds": b"cos\nsystem\n"}, GREEDY, "prompt_embeds"),
        ({"prompt_embeds": torch.zeros(128, 64)}, GREEDY, "prompt"),
        ({"prompt_embeds": torch.zeros(3, 64)},
         SamplingParams(prompt_logprobs=1), "prompt_logprobs"),
        ({"prompt_embeds": torch.zeros(3, 64), "prompt_token_ids": [1]}, GREEDY, "prompt"),
    ],
    ids=["width", "pickle", "too long", "prompt_logprobs", "two prompts"],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(prompt, params, parameter, tmp_path):
    tiny_model("Qwen3", {}, tmp_path)
    with open_llm(tmp_path) as llm, pytest.raises(TrouperValidationError) as caught:
        llm.generate(prompt, params, use_tqdm=False)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("given", "options", "parameter"),
    [
        (part([1]), {"enable_prompt_embeds": False}, "prompt_embeds"),
        (part([1]), {"runner": "pooling"}, "prompt_embeds"),
        ({"type": "prompt_embeds"}, {}, "prompt_embeds"),
        ({"type": "prompt_embeds", "index": 0}, {}, "prompt_embeds"),
        ({"type": "prompt_embeds", "data": "AAAA"}, {}, "prompt_embeds"),
        ({"type": "prompt_embeds", "data": torch.zeros(3, 65)}, {}, "prompt_embeds"),
        (part([1] * 64), {"max_model_len": 64}, "prompt"),
    ],
    ids=["not enabled", "pooling", "no data", "a mark", "no tensor", "width", "too long"],
)
def test_bad_part_of_chat_is_refused_by_name(given, options, parameter):
    prompt = {"messages": chat(["one", given])}
    with (
        LLM(**{"enable_prompt_embeds": True, "dtype": "float32", **options}) as llm,
        pytest.raises(TrouperValidationError) as caught,
    ):
        if "runner" in options:
            llm.embed([prompt], use_tqdm=False)
        else:
            llm.generate([prompt], GREEDY, use_tqdm=False)
    assert caught.value.parameter == parameter


def test_without_the_option_they_are_refused(tmp_path):
    tiny_model("Qwen3", {}, tmp_path)
    with (
        open_llm(tmp_path, enable_prompt_embeds=False) as llm,
        pytest.raises(TrouperValidationError, match="enable_prompt_embeds"),
    ):
        llm.generate({"prompt_embeds": torch.zeros(3, 64)}, GREEDY, use_tqdm=False)
