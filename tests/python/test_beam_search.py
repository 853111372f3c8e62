"""Beam search: what it asks of `generate`, and what it makes of the answers."""

import math

import pytest

from trouper import LLM, BeamSearchParams, SamplingParams
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.python.beam_search import BeamSearch, SearchLimits, beam_search
from trouper.outputs import CompletionOutput, Logprob, RequestOutput

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


def test_what_salted_search_computed_is_not_found_without_salt(llm):
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


EOS = (0, 1)  # of a vocabulary of four
LIMITS = SearchLimits(max_logprobs=-1, max_model_len=100, eos_token_ids=EOS)


def next_logprobs(tokens):
    """A model of four tokens: what is likely depends on all tokens before."""
    weights = [1.5 + math.sin(7 * token + 3 * sum(tokens) + len(tokens)) for token in range(4)]
    return [math.log(weight / sum(weights)) for weight in weights]


def answer(prompt, finish_reason="length"):
    tokens = prompt["prompt_token_ids"]
    position = {i: Logprob(logprob) for i, logprob in enumerate(next_logprobs(tokens))}
    completion = CompletionOutput(0, "", [0], logprobs=[position], finish_reason=finish_reason)
    return RequestOutput("r", None, tokens, None, [completion], finished=True)


def all_outputs(num_tokens, prompt):
    """Every output that ends, with its logprob: at an EOS, or after so many tokens."""
    open_outputs, ended = [((), 0.0)], []
    for i in range(num_tokens):
        grown = [
            ((*tokens, token), total + logprob)
            for tokens, total in open_outputs
            for token, logprob in enumerate(next_logprobs([*prompt, *tokens]))
        ]
        ended += [each for each in grown if each[0][-1] in EOS or i == num_tokens - 1]
        open_outputs = [each for each in grown if each[0][-1] not in EOS]
    return ended


@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 1.0, 3.0])
def test_beams_as_wide_as_space_are_best_of_all_outputs(length_penalty):
    params = BeamSearchParams(beam_width=24, max_tokens=4, length_penalty=length_penalty)
    prompt = {"prompt_token_ids": [2, 3]}
    found = beam_search(
        prompt, params, LIMITS,
        generate=lambda prompts, _: [answer(each) for each in prompts],
        decode=lambda tokens, _: " ".join(map(str, tokens)),
    )  # fmt: skip
    best = sorted(
        all_outputs(4, [2, 3]), key=lambda each: -each[1] / len(each[0]) ** length_penalty
    )
    assert [tuple(beam.tokens[2:]) for beam in found.sequences] == [each[0] for each in best[:24]]
    for beam, (tokens, logprob) in zip(found.sequences, best, strict=False):
        is_stopped = tokens[-1] in EOS
        assert beam.cum_logprob == pytest.approx(logprob)
        assert beam.text == " ".join(map(str, tokens[:-1] if is_stopped else tokens))
        assert beam.finish_reason == ("stop" if is_stopped else "length")
        assert beam.stop_reason == (tokens[-1] if is_stopped else None)
        assert [
            position[token].logprob for position, token in zip(beam.logprobs, tokens, strict=True)
        ]


def test_what_has_ended_is_bounded_by_the_width():
    search = BeamSearch({"prompt_token_ids": [2]}, BeamSearchParams(2, 50), LIMITS)
    while not search.is_over:
        search.take([answer(prompt) for prompt in search.prompts])
        assert len(search._done) <= 2
        assert len(search._beams) <= 2
    assert search.num_tokens == (1, 1 + 49 * 2)


def test_search_aborted_ends_with_its_beams_so_far():
    search = BeamSearch({"prompt_token_ids": [2]}, BeamSearchParams(2, 50, ignore_eos=True), LIMITS)
    search.take([answer(prompt) for prompt in search.prompts])
    search.take([answer(prompt, "abort") for prompt in search.prompts])
    assert search.is_over
    found = search.best(lambda tokens, _: "").sequences
    assert [(len(beam.tokens), beam.finish_reason) for beam in found] == [(2, "abort")] * 2


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_embeds": b"x"},
        {"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "data": "x"}]}]},
    ],
    ids=["prompt", "part of a chat"],
)
def test_embeddings_are_no_prompt_of_a_search(prompt):
    with pytest.raises(
        UnsupportedFeatureError, match="prompt_embeds is not supported with beam search"
    ):
        BeamSearch(prompt, BeamSearchParams(2, 2), LIMITS)
