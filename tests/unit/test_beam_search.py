"""Beam search: what it asks of `generate`, and what it makes of the answers."""

import math

import pytest

from trouper import LLM, BeamSearchParams, SamplingParams
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

SMALL = {
    "max_model_len": 256,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 64,
    "dtype": "float32",
    "block_size": 4,
}


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as llm:
        yield llm


def test_a_salted_prompt_stays_salted(llm, monkeypatch):
    seen = []
    generate = LLM.generate
    monkeypatch.setattr(
        LLM, "generate", lambda self, prompts, *a, **k: seen.extend(prompts) or generate(self, prompts, *a, **k)
    )  # fmt: skip
    prompt = {"prompt": "def f(", "cache_salt": "mine", "mm_processor_kwargs": {"a": 1}}
    llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=4))
    assert len(seen) > 4
    assert {p["cache_salt"] for p in seen} == {"mine"}
    assert all(p["mm_processor_kwargs"] == {"a": 1} for p in seen)


def test_what_a_salted_search_computed_is_not_found_without_the_salt(llm):
    llm.reset_prefix_cache()
    prompt = {"prompt_token_ids": list(range(40, 60)), "cache_salt": "mine"}
    best = llm.beam_search(prompt, BeamSearchParams(beam_width=1, max_tokens=6))[0].sequences[0]
    greedy = SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.generate([best.tokens], greedy, use_tqdm=False)
    assert output.num_cached_tokens == 0
    (output,) = llm.generate(
        [{"prompt_token_ids": best.tokens, "cache_salt": "mine"}], greedy, use_tqdm=False
    )
    assert output.num_cached_tokens > 0


@pytest.mark.parametrize("num_allowed", [3, 8, 200])
def test_only_allowed_tokens_are_candidates(llm, num_allowed):
    allowed = list(range(30, 30 + num_allowed))
    params = BeamSearchParams(beam_width=3, max_tokens=4, allowed_token_ids=allowed)
    prompt = llm.generate("def f(", SamplingParams(max_tokens=1), use_tqdm=False)[
        0
    ].prompt_token_ids
    beams = llm.beam_search("def f(", params)[0].sequences
    for beam in beams:
        assert set(beam.tokens[len(prompt) :]) <= set(allowed)
    if num_allowed <= 128:
        assert len(beams) == 3
    assert len({tuple(beam.tokens) for beam in beams}) == len(beams)


def test_one_allowed_token_is_one_beam(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=3, allowed_token_ids=[40])
    (beam,) = llm.beam_search("def f(", params)[0].sequences
    assert beam.tokens[-3:] == [40, 40, 40]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("length_penalty", "a"),
        ("length_penalty", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("length_penalty", True),
        ("beam_width", 0),
        ("max_tokens", 1.5),
        ("allowed_token_ids", "abc"),
        ("allowed_token_ids", []),
        ("ignore_eos", "no"),
    ],
)
def test_a_bad_parameter_is_named(name, value):
    with pytest.raises(TrouperValidationError, match=f"parameter={name}"):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, name: value})


def test_structured_outputs_are_accepted_at_their_default_only():
    BeamSearchParams(beam_width=2, max_tokens=2, structured_outputs=None)
    with pytest.raises(UnsupportedFeatureError, match="structured_outputs"):
        BeamSearchParams(beam_width=2, max_tokens=2, structured_outputs={"json": {}})


def test_params_of_another_kind_are_refused(llm):
    with pytest.raises(TypeError, match="params must be BeamSearchParams, not SamplingParams"):
        llm.beam_search("x", SamplingParams())
