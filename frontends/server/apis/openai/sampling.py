"""Convert the fields of completions and chats to `SamplingParams`, or to `BeamSearchParams` for a beam search.  Pure.

Precedence: the request, then the model's generation_config.json, then OpenAI's default.
"""

from collections.abc import Mapping
from typing import Any

from trouper.actors.messages.requests import RequestOptions, client_options
from trouper.config.generation import Marks
from trouper.errors import (
    ContextLengthError,
    TrouperValidationError,
    UnsupportedFeatureError,
    invalid,
    rename_parameter,
)
from trouper.frontends.server.apis.openai.requests import ChatRequest, CompletionRequest
from trouper.frontends.server.generation.adapter import BeamRequest, ParsedRequest
from trouper.frontends.server.generation.request_fields import (
    GUIDED,
    Generating,
    structured_outputs,
)
from trouper.frontends.server.shared.settings import ServerSettings
from trouper.params import (
    GREEDY_BELOW,
    LOWEST_TEMPERATURE,
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
)
from trouper.sampling_fields import BEAM_FOLLOWED, BEAM_REFUSED, BODY_FIELDS, FIELDS

MAX_SEQUENCES = 16_384  # prompts × n of one request
LONGEST = {"stop": 128, "stop_token_ids": 64, "logit_bias": 1024, "bad_words": 128}
MAX_STOP_CHARS = 256
# The default of completions.  A chat continues up to the model's length.
OPENAI_MAX_TOKENS = 16


def completion_params(
    request: CompletionRequest, defaults: Mapping[str, Any], max_model_len: int
) -> SamplingParams:
    """Return the sampling parameters of a completion.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: a field is invalid; the error names it.
    """
    check_common(request)
    if request.logprob_token_ids is not None and request.logprobs is None:
        raise invalid("logprob_token_ids", "needs logprobs")
    given = _given(request)
    max_tokens = request.max_tokens
    if max_tokens == 0 and request.echo:
        # The engine must generate one token.  It is not shown.
        max_tokens = 1
    if request.echo and request.logprobs is not None:
        given["prompt_logprobs"] = request.logprobs
    if request.logprobs is not None and request.logprob_token_ids is None:
        given["logprobs"] = request.logprobs
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens", OPENAI_MAX_TOKENS)
    return _make(request, {**defaults, **given, "max_tokens": max_tokens}, max_model_len)


def chat_params(
    request: ChatRequest, defaults: Mapping[str, Any], max_model_len: int
) -> SamplingParams:
    """Return the sampling parameters of a chat.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: a field is invalid; the error names it.
    """
    check_common(request)
    if request.top_logprobs and not request.logprobs:  # 0 asks for nothing, as in vLLM
        raise invalid("top_logprobs", "needs logprobs")
    if request.logprob_token_ids is not None and not request.logprobs:
        raise invalid("logprob_token_ids", "needs logprobs")
    given = _given(request)
    if request.logprobs and request.logprob_token_ids is None:
        given["logprobs"] = request.top_logprobs or 0
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens")
    return _make(request, {**defaults, **given, "max_tokens": max_tokens}, max_model_len)


def parsed_request(
    request: Generating,
    settings: ServerSettings,
    prompts: list[Any],
    places: list[str],
    params: SamplingParams,
    reasoning: Marks | None = None,
) -> ParsedRequest:
    """Make the part of a `ParsedRequest` that completions and chats have in common.

    They are the options of streams and usage, and the options of the engine.
    """
    options = request.stream_options
    is_forced = settings.force_include_usage
    shows_usage = is_forced or bool(options and options.include_usage)
    return ParsedRequest(
        prompts=prompts,
        places=places,
        params=params,
        options=RequestOptions(
            priority=request.priority or 0,
            session_id=request.session_id,
            reasoning=reasoning,
            **client_options(request),
        ),
        is_stream=bool(request.stream),
        shows_usage=shows_usage and (is_forced or bool(options and options.continuous_usage_stats)),
        ends_with_usage=shows_usage,
        shows_cached=settings.enable_prompt_tokens_details,
        shows_metrics=settings.shows_metrics,
    )


def check_common(request: Generating) -> None:
    """Check the rules that completions and chats share.

    It runs before anything is rendered.  Raises TrouperValidationError, naming the field.
    """
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "needs stream")
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs", "not with stream")
    if request.logprob_token_ids is not None and not request.logprob_token_ids:
        raise invalid("logprob_token_ids", "must not be empty")
    if request.length_penalty not in (None, 1) and not request.use_beam_search:
        raise invalid("length_penalty", "needs use_beam_search", request.length_penalty)
    _check_lengths(request)


def check_sequences(num_prompts: int, n: int) -> None:
    """Check the number of sequences: prompts × n.

    One request could otherwise occupy the whole engine.  Raises TrouperValidationError.
    """
    if num_prompts * n > MAX_SEQUENCES:
        rule = f"at most {MAX_SEQUENCES} completions (prompts × n) in one request"
        raise invalid("n", rule, num_prompts * n)


def check_length(request: Generating, max_tokens: int | None, max_model_len: int) -> None:
    """Raise ContextLengthError if the request asks for more tokens than the context holds.

    The error names the field that the client has used, of the two possible ones.
    """
    if max_tokens is not None and max_tokens > max_model_len:
        name = "max_tokens"
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            name = "max_completion_tokens"
        text = f"{name}: the limit is {max_model_len} tokens (max_model_len)"
        raise ContextLengthError(text, parameter=name, value=max_tokens, limit=max_model_len)


def _check_lengths(request: Generating) -> None:
    for name, limit in LONGEST.items():
        value: list[Any] | dict[Any, Any] | str | None = getattr(request, name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise invalid(name, f"may have {limit} entries", len(value))
    for text in (request.stop,) if isinstance(request.stop, str) else request.stop or ():
        if len(text) > MAX_STOP_CHARS:
            raise invalid("stop", f"a stop string may have {MAX_STOP_CHARS} characters", len(text))


def _given(request: Generating) -> dict[str, Any]:
    given = {name: getattr(request, name) for name in BODY_FIELDS}
    given["extra_args"] = request.vllm_xargs
    given["structured_outputs"] = structured_outputs(request)
    return {name: value for name, value in given.items() if value is not None}


def _make(request: Generating, values: dict[str, Any], max_model_len: int) -> SamplingParams:
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    temperature = values.get("temperature")
    if temperature is not None and GREEDY_BELOW <= temperature < LOWEST_TEMPERATURE:
        # SamplingParams does the same, with a warning.
        values["temperature"] = LOWEST_TEMPERATURE
    try:
        params = SamplingParams(**values, output_kind=kind)
    except TrouperValidationError as error:
        name = error.parameter or ""
        if name.startswith("extra_args"):
            rename_parameter(error, name.replace("extra_args", "vllm_xargs", 1))
        raise
    check_length(request, params.max_tokens, max_model_len)
    return params


# Other fields that have no meaning for a search.
NOT_SEARCHED = ("prompt_embeds", "suffix")
FORMATS = ("response_format", "structured_outputs", *(f"guided_{name}" for name in GUIDED))
FOLLOWED = (*BEAM_FOLLOWED, "length_penalty")
NO_GRAMMAR = "not with use_beam_search: a search chooses among the likeliest tokens, of which a grammar may allow none"


def completion_beams(
    request: CompletionRequest, defaults: Mapping[str, Any], max_model_len: int
) -> BeamRequest:
    """Return the beam search of a completion.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: a field is invalid; the error names it.
    """
    if request.echo and request.logprobs is not None:
        raise invalid("echo", "cannot be combined with logprobs and use_beam_search")
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens", OPENAI_MAX_TOKENS)
    return _beams(request, defaults, max_tokens, max_model_len, request.logprobs)


def chat_beams(
    request: ChatRequest, defaults: Mapping[str, Any], max_model_len: int
) -> BeamRequest:
    """Return the beam search of a chat.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: a field is invalid; the error names it.
    """
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs")
    given = (request.max_completion_tokens, request.max_tokens, defaults.get("max_tokens"))
    max_tokens = next((num for num in given if num is not None), max_model_len)
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _beams(request, defaults, max_tokens, max_model_len, num_logprobs)


def choices_of(beams: BeamRequest) -> SamplingParams:
    """Return sampling parameters with as many choices and tokens as the search yields, for usage and limits."""
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
        raise invalid("stream", "cannot be combined with use_beam_search")
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
    for name in (*BEAM_REFUSED, *NOT_SEARCHED):
        value = getattr(request, name, None)
        neutral = FIELDS[name].neutral if name in FIELDS else ()
        if value not in (None, "", [], {}, *neutral):
            raise invalid(name, "cannot be combined with use_beam_search")
    for name in FORMATS:
        value = getattr(request, name)
        is_text = name == "response_format" and value is not None and value.type == "text"
        if value is not None and not is_text:
            raise UnsupportedFeatureError(f"{name}: {NO_GRAMMAR}", parameter=name)
