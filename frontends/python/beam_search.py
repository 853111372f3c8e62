"""Beam search over any function that generates: every beam grows by one token a round.

The shared prefixes of the beams are computed once, by the prefix cache.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import msgspec

from trouper.errors import TrouperValidationError
from trouper.inputs import PromptType, TokensPrompt
from trouper.outputs import RequestOutput
from trouper.params import MAX_LOGPROB_TOKEN_IDS, BeamSearchParams, SamplingParams

Generate = Callable[[Sequence[PromptType], SamplingParams], Sequence[RequestOutput]]
Decode = Callable[[list[int], bool], str]  # the flag drops special tokens

EXTRAS = ("cache_salt", "mm_processor_kwargs")  # of a prompt dict; they hold for every beam


class BeamSearchSequence(msgspec.Struct):
    """One beam: `tokens` are prompt and output ids, `text` is the decoded output."""

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class BeamSearchOutput(msgspec.Struct):
    """The best beams, best first."""

    sequences: list[BeamSearchSequence]


class SearchLimits(NamedTuple):
    """The limits of the engine and the model that a search keeps to."""

    max_logprobs: int  # of one position; -1 is the vocabulary
    max_model_len: int
    eos_token_ids: Sequence[int]


def beam_search(
    prompt: PromptType,
    params: BeamSearchParams,
    limits: SearchLimits,
    *,
    generate: Generate,
    decode: Decode,
) -> BeamSearchOutput:
    """Return the `beam_width` completions with the highest score.

    score = cumulative logprob / max(1, generated tokens) ** length_penalty; a final EOS counts as a
    generated token, the prompt does not.

    Args:
        generate: runs one request for each prompt, and returns their final outputs in order.
        decode: turns the generated tokens of a beam into its text.
    """
    check_params(params, limits.max_logprobs)
    step = _one_token(params, limits.max_logprobs)
    eos = limits.eos_token_ids[:1]
    done: list[BeamSearchSequence] = []
    beams: list[BeamSearchSequence] = []
    num_prompt = 0
    for round_number in range(params.max_tokens):
        prompts: Sequence[PromptType] = [_as_prompt(beam, prompt) for beam in beams] or [prompt]
        outputs = generate(prompts, step)
        if round_number == 0:
            beams = [BeamSearchSequence(tokens=list(outputs[0].prompt_token_ids))]
            num_prompt = len(beams[0].tokens)
        candidates = [
            new
            for beam, output in zip(beams, outputs, strict=True)
            for new in _grow(beam, output, params)
        ]
        beams = []
        for candidate in sorted(candidates, key=lambda beam: -beam.cum_logprob):
            if candidate.tokens[-1] in eos and not params.ignore_eos:
                candidate.finish_reason = "stop"
                done.append(candidate)
            elif len(beams) < params.beam_width:
                beams.append(candidate)
        if not beams or num_prompt + round_number + 1 >= limits.max_model_len:
            break
    for beam in beams:
        beam.finish_reason = "length"
    best = sorted([*done, *beams], key=lambda beam: -_score(beam, num_prompt, params))
    for beam in best[: params.beam_width]:
        beam.text = _text(beam, num_prompt, params, decode)
    return BeamSearchOutput(best[: params.beam_width])


def _one_token(params: BeamSearchParams, max_logprobs: int) -> SamplingParams:
    """Return the parameters of one round; logprobs are the model's own, not only those of allowed tokens."""
    allowed = params.allowed_token_ids
    width: dict[str, Any] = {"logprobs": 2 * params.beam_width}
    if allowed is not None:
        is_few = len(set(allowed)) <= MAX_LOGPROB_TOKEN_IDS
        width = (
            {"logprob_token_ids": sorted(set(allowed))} if is_few else {"logprobs": max_logprobs}
        )
    return SamplingParams(
        **width,
        max_tokens=1,
        temperature=params.temperature,
        allowed_token_ids=allowed,
        ignore_eos=True,  # EOS is a candidate like any other; the search itself ends the beam
        detokenize=False,
    )


def _as_prompt(beam: BeamSearchSequence, prompt: PromptType) -> TokensPrompt:
    """Return the beam so far as a prompt, with the other fields of the first prompt."""
    extras = {name: prompt[name] for name in EXTRAS if name in prompt} if _is_dict(prompt) else {}
    return cast("TokensPrompt", {**extras, "prompt_token_ids": beam.tokens})


def _is_dict(prompt: PromptType) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(prompt, Mapping)


def _grow(
    beam: BeamSearchSequence, output: RequestOutput, params: BeamSearchParams
) -> list[BeamSearchSequence]:
    logprobs = output.outputs[0].logprobs
    if not logprobs:
        return []
    candidates = list(logprobs[0].items())
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        candidates = [item for item in candidates if item[0] in allowed]
        candidates = sorted(candidates, key=lambda item: -item[1].logprob)[: 2 * params.beam_width]
    return [
        BeamSearchSequence([*beam.tokens, token], beam.cum_logprob + candidate.logprob)
        for token, candidate in candidates
    ]


def _score(beam: BeamSearchSequence, num_prompt: int, params: BeamSearchParams) -> float:
    return beam.cum_logprob / max(1, len(beam.tokens) - num_prompt) ** params.length_penalty


def _text(
    beam: BeamSearchSequence, num_prompt: int, params: BeamSearchParams, decode: Decode
) -> str:
    tokens = beam.tokens[num_prompt:]
    if beam.finish_reason == "stop" and not params.include_stop_str_in_output:
        tokens = tokens[:-1]
    return decode(tokens, params.skip_special_tokens)


def check_params(params: BeamSearchParams, max_logprobs: int) -> None:
    """Check the parameters of a search.

    Raises:
        TrouperValidationError: the engine gives fewer than `2 × beam_width` logprobs.
        TypeError: not BeamSearchParams.
    """
    if not isinstance(params, BeamSearchParams):  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
        raise TypeError(f"params must be BeamSearchParams, not {type(params).__name__}")
    if max_logprobs != -1 and 2 * params.beam_width > max_logprobs:
        raise TrouperValidationError(
            f"needs 2 × beam_width logprobs, and max_logprobs is {max_logprobs}",
            parameter="beam_width",
            value=params.beam_width,
        )
