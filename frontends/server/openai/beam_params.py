"""The fields of a request that asks for a beam search -> `BeamSearchParams`.  Pure."""

from collections.abc import Mapping
from typing import Any

from trouper.errors import UnsupportedFeatureError, invalid
from trouper.frontends.server.openai.adapter import BeamRequest
from trouper.frontends.server.openai.requests import ChatRequest, CompletionRequest, Generating
from trouper.frontends.server.openai.sampling import OPENAI_MAX_TOKENS, check_common, check_length
from trouper.frontends.server.openai.structured import GUIDED
from trouper.params import BeamSearchParams, RequestOutputKind, SamplingParams

# What a search does not follow; a value that asks for nothing is allowed.
SAMPLING = (
    "min_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "stop", "stop_token_ids", "logit_bias", "bad_words", "prompt_logprobs", "logprob_token_ids",
    "thinking_token_budget", "repetition_detection", "prompt_embeds", "suffix",
)  # fmt: skip
NEUTRAL = {
    "min_tokens": (0,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "thinking_token_budget": (-1,),
}  # fmt: skip
FORMATS = ("response_format", "structured_outputs", *(f"guided_{name}" for name in GUIDED))
FOLLOWED = (
    "ignore_eos", "length_penalty", "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids",
)  # fmt: skip
NO_GRAMMAR = "not with use_beam_search: a search chooses among the likeliest tokens, of which a grammar may allow none"


def completion_beams(
    request: CompletionRequest, defaults: Mapping[str, Any], max_model_len: int
) -> BeamRequest:
    """Return the search of a completion.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: naming the field.
    """
    if request.echo and request.logprobs is not None:
        raise invalid("echo", "not with logprobs and use_beam_search")
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens", OPENAI_MAX_TOKENS)
    return _beams(request, defaults, max_tokens, max_model_len, request.logprobs)


def chat_beams(
    request: ChatRequest, defaults: Mapping[str, Any], max_model_len: int
) -> BeamRequest:
    """Return the search of a chat.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: naming the field.
    """
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs")
    given = (request.max_completion_tokens, request.max_tokens, defaults.get("max_tokens"))
    max_tokens = next((num for num in given if num is not None), max_model_len)
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _beams(request, defaults, max_tokens, max_model_len, num_logprobs)


def choices_of(beams: BeamRequest) -> SamplingParams:
    """Return parameters that count as many choices and tokens as the search yields."""
    params = beams.params
    return SamplingParams(
        n=params.beam_width,
        max_tokens=params.max_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _beams(
    request: Generating,
    defaults: Mapping[str, Any],
    max_tokens: int,
    max_model_len: int,
    num_logprobs: int | None,
) -> BeamRequest:
    if request.stream:
        raise invalid("stream", "not with use_beam_search")
    check_common(request)
    _check_followed(request)
    if num_logprobs is not None and num_logprobs < -1:
        raise invalid("logprobs", "must be at least 0, or -1 for all", num_logprobs)
    temperature = request.temperature
    if temperature is None:
        temperature = defaults.get("temperature", 1.0)
    SamplingParams(temperature=temperature)  # its range
    fields = {name: value for name in FOLLOWED if (value := getattr(request, name)) is not None}
    width = 1 if request.n is None else request.n
    params = BeamSearchParams(width, max_tokens, temperature=temperature, **fields)
    check_length(request, max_tokens, max_model_len)
    return BeamRequest(params, num_logprobs)


def _check_followed(request: Generating) -> None:
    """Refuse what would change the answer of sampling and has no meaning for a search."""
    for name in SAMPLING:
        value = getattr(request, name, None)
        if value not in (None, "", [], {}, *NEUTRAL.get(name, ())):
            raise invalid(name, "not with use_beam_search")
    for name in FORMATS:
        value = getattr(request, name)
        is_text = name == "response_format" and value is not None and value.type == "text"
        if value is not None and not is_text:
            raise UnsupportedFeatureError(f"{name}: {NO_GRAMMAR}", parameter=name)
