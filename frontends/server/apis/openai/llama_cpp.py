"""llama.cpp's own routes: `POST /completion` and, for its editor plug-ins, `POST /infill`.

Both are completions under llama.cpp's names, and answer in its form.
"""

from collections.abc import Awaitable
from typing import Any, ClassVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from trouper.errors import UnsupportedFeatureError, invalid
from trouper.frontends.server.apis.openai.requests import CompletionRequest
from trouper.frontends.server.apis.openai.sampling import completion_params, parsed_request
from trouper.frontends.server.generation.adapter import (
    ChoiceUpdate,
    ParsedRequest,
    ReplyHead,
    ServedModel,
    StreamEvent,
)
from trouper.frontends.server.generation.driver import drive
from trouper.frontends.server.generation.logprobs import chat_logprobs
from trouper.frontends.server.generation.request_fields import Int64, ResponseFormat, closed
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared import fields
from trouper.frontends.server.shared.usage import Usage
from trouper.outputs import CompletionOutput, FinishReason, RequestOutput, RequestStateStats

MAX_PROMPTS = 1024
# The bias of a token that `false` forbids.
FORBIDDEN = -100.0
# The prompt may use at least a quarter of the model's length, and leaves a quarter if the output has no limit.
PART = 4
SAME_NAME = (
    "model", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop",
    "ignore_eos", "stream", "priority", "cache_salt", "request_id",
)  # fmt: skip
CLIENT_NAMES = {
    "suffix": "input_suffix", "middle": "prompt", "files": "input_extra", "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
}  # fmt: skip
STOP_TYPES: dict[str, str] = {"length": "limit", "abort": "none", "repetition": "none"}


class InfillFile(msgspec.Struct, kw_only=True):
    """Hold another file of the client's project, which gives the model context for the gap.

    The name is only shown to the model; the server opens no such file.
    """

    text: str
    filename: str = "tmp"


class LlamaFields(msgspec.Struct, kw_only=True):
    """The fields that both routes share, under llama.cpp's names.

    Fields of llama.cpp without an entry here are in the table of refused and harmless fields.
    """

    model: str | None = None
    # -1 allows tokens up to the model's length.  With 0 the prompt is only computed and cached.
    n_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    cache_salt: str | None = None


class InfillRequest(LlamaFields, kw_only=True):
    """`POST /infill`: the gap between two texts."""

    OTHERS: ClassVar[fields.Others] = fields.INFILL

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[InfillFile] | None = None
    prompt: str | None = None  # what the filling begins with


class LlamaCompletionRequest(LlamaFields, kw_only=True):
    """`POST /completion`: one prompt or several, as text or token ids."""

    OTHERS: ClassVar[fields.Others] = fields.LLAMA_COMPLETION

    prompt: str | list[Any] = ""
    n_probs: int | None = None
    logit_bias: list[list[Any]] | dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None


class InfillTimings(msgspec.Struct, kw_only=True):
    """Report the times of a request under llama.cpp's names.

    Times are in milliseconds and rates in tokens per second, measured in the engine without the time on the network.
    """

    prompt_n: int
    prompt_ms: float | None = None
    predicted_n: int
    predicted_ms: float | None = None
    predicted_per_second: float | None = None


class InfillReply(msgspec.Struct, kw_only=True):
    """Text that fills the gap, or in a stream the next piece of it."""

    index: int = 0
    content: str
    tokens: list[int]
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    # Only the last part has this field and the following ones.
    tokens_cached: int | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    timings: InfillTimings | UnsetType = UNSET


class LlamaCompletionReply(InfillReply, kw_only=True):
    """The answer to a prompt, or in a stream the next part of it."""

    completion_probabilities: list[dict[str, Any]] | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET


def create_infill(
    service: Service, context: RequestContext, request: InfillRequest
) -> Awaitable[None]:
    """Fill a gap between two texts, whole or as a stream.

    The model must have tokens for filling gaps; others are refused with an explanation.
    """
    return drive(service, context, request, InfillAdapter)


def create_llama_completion(
    service: Service, context: RequestContext, request: LlamaCompletionRequest
) -> Awaitable[None]:
    """Continue prompts in llama.cpp's form, whole or as a stream.

    Editors and benchmarks written for llama.cpp can use this server without changes.
    """
    return drive(service, context, request, LlamaCompletionAdapter)


class InfillAdapter:
    """One choice; a stream ends with the event that says why it has.

    That event contains the counts and times.
    """

    STREAM_END: ClassVar[bytes] = b""

    @staticmethod
    def parse(request: InfillRequest, model: ServedModel) -> ParsedRequest:
        if not (request.input_prefix or request.input_suffix):
            raise invalid("input_prefix", "give input_prefix, input_suffix or both")
        num = -1 if request.n_predict is None else request.n_predict
        if num < -1:
            raise invalid("n_predict", "must be -1 or more", num)
        limit = model.max_model_len
        most = limit if num == -1 else max(1, num)
        reserved = limit // PART if num == -1 else most
        completion = _completion(request, most)
        params = completion_params(completion, model.default_sampling, limit)
        extra = request.input_extra or ()
        prompt: dict[str, Any] = {
            "prompt": request.input_prefix,
            "suffix": request.input_suffix,
            "middle": request.prompt or "",
            "files": [{"filename": each.filename, "text": each.text} for each in extra],
            "max_prompt_tokens": max(1, limit // PART, limit - reserved),
        }
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        parsed = parsed_request(completion, model.settings, [prompt], ["input_prefix"], params)
        parsed.is_prompt_only = num == 0
        return parsed

    @staticmethod
    def client_name(request: InfillRequest, parameter: str) -> str:
        if parameter.startswith("files["):
            return f"input_extra{parameter.removeprefix('files')}"
        return CLIENT_NAMES.get(parameter, parameter)

    def __init__(
        self, request: InfillRequest, parsed: ParsedRequest, model: ServedModel, head: ReplyHead
    ) -> None:
        self._model = model.name
        self._num_predicted = 0
        self._last: InfillReply | None = None

    def begin(self, output: RequestOutput, usage: Usage | None) -> list[StreamEvent]:
        return []

    def render(self, update: ChoiceUpdate, usage: Usage | None) -> list[StreamEvent]:
        piece = self._piece(update)
        return [StreamEvent(piece)] if piece.content or piece.tokens or piece.stop else []

    def end(self, usage: Usage) -> list[StreamEvent]:
        return []

    def add(self, update: ChoiceUpdate) -> None:
        self._last = self._piece(update)

    def reply(self, usage: Usage) -> InfillReply:
        assert self._last is not None
        return self._last

    def _piece(self, update: ChoiceUpdate) -> InfillReply:
        completion, output = update.completion, update.output
        self._num_predicted += len(completion.token_ids)
        piece = InfillReply(
            content=update.text,
            tokens=completion.token_ids,
            stop=completion.finish_reason is not None,
            model=self._model,
            tokens_predicted=self._num_predicted,
            tokens_evaluated=len(output.prompt_token_ids),
        )
        if completion.finish_reason is not None:
            _finish(piece, completion, output)
        return piece


class LlamaCompletionAdapter:
    """Render one choice for each prompt.

    The answer to a list of prompts is a list. The last part of a choice repeats the prompt and the settings with
    which it was generated.
    """

    STREAM_END: ClassVar[bytes] = b""

    @staticmethod
    def parse(request: LlamaCompletionRequest, model: ServedModel) -> ParsedRequest:
        num = -1 if request.n_predict is None else request.n_predict
        # -2 fills the context, which is never shifted here.
        if num < -2:
            raise invalid("n_predict", "must be -1 or more", num)
        prompts, places = _prompts(request.prompt)
        completion = _completion(request, model.max_model_len if num < 0 else max(1, num))
        completion.logprobs = request.n_probs or None
        completion.logit_bias = _logit_bias(request.logit_bias)
        if request.json_schema:
            schema = {"schema": closed(request.json_schema)}
            completion.response_format = ResponseFormat(type="json_schema", json_schema=schema)
        params = completion_params(completion, model.default_sampling, model.max_model_len)
        if request.cache_salt is not None:
            prompts = [{**prompt, "cache_salt": request.cache_salt} for prompt in prompts]
        parsed = parsed_request(completion, model.settings, prompts, places, params)
        parsed.is_prompt_only = num == 0
        return parsed

    @staticmethod
    def client_name(request: LlamaCompletionRequest, parameter: str) -> str:
        names = {"logprobs": "n_probs", "structured_outputs": "json_schema", **CLIENT_NAMES}
        return names.get(parameter, parameter)

    def __init__(
        self,
        request: LlamaCompletionRequest,
        parsed: ParsedRequest,
        model: ServedModel,
        head: ReplyHead,
    ) -> None:
        self._request, self._model = request, model
        self._params = parsed.params
        self._nums = [0] * len(parsed.prompts)  # tokens so far
        self._replies: dict[int, LlamaCompletionReply] = {}

    def begin(self, output: RequestOutput, usage: Usage | None) -> list[StreamEvent]:
        return []

    def render(self, update: ChoiceUpdate, usage: Usage | None) -> list[StreamEvent]:
        part = self._part(update)
        return [StreamEvent(part)] if part.content or part.tokens or part.stop else []

    def end(self, usage: Usage) -> list[StreamEvent]:
        return []

    def add(self, update: ChoiceUpdate) -> None:
        self._replies[update.index] = self._part(update)

    def reply(self, usage: Usage) -> Any:
        found = [self._shown(self._replies[i]) for i in sorted(self._replies)]
        return found if _has_several(self._request.prompt) else found[0]

    def _shown(self, reply: LlamaCompletionReply) -> Any:
        """Return only the fields that the client asks for, if it names some: `a/b` is field b of a."""
        wanted = self._request.response_fields
        if not wanted:
            return reply
        whole = msgspec.to_builtins(reply)
        found: dict[str, Any] = {}
        for path in wanted:
            value: Any = whole
            for name in path.split("/"):
                value = cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
            if value is not None:
                found[path.rpartition("/")[2]] = value
        return found

    def _part(self, update: ChoiceUpdate) -> LlamaCompletionReply:
        completion, output, index = update.completion, update.output, update.index
        self._nums[index] += len(completion.token_ids)
        part = LlamaCompletionReply(
            index=index,
            content=update.text,
            tokens=completion.token_ids if self._request.return_tokens else [],
            stop=completion.finish_reason is not None,
            model=self._model.name,
            tokens_predicted=self._nums[index],
            tokens_evaluated=len(output.prompt_token_ids),
        )
        if self._request.n_probs and completion.logprobs:
            part.completion_probabilities = self._probabilities(completion)
        if completion.finish_reason is not None:
            _finish(part, completion, output)
            part.prompt = output.prompt or ""
            part.generation_settings = self._settings()
        return part

    def _probabilities(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        shown = chat_logprobs(
            completion.token_ids,
            completion.logprobs or (),
            self._request.n_probs or 0,
            bytes_of=self._model.token_bytes,
        )
        entries = msgspec.to_builtins(shown.content)
        return [
            {"id": id, **entry} for id, entry in zip(completion.token_ids, entries, strict=True)
        ]

    def _settings(self) -> dict[str, Any]:
        params = self._params
        return {
            "n_predict": params.max_tokens,
            "seed": params.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop": list(params.stop_strings),
            "n_probs": self._request.n_probs or 0,
            "ignore_eos": params.ignore_eos,
            "stream": bool(self._request.stream),
        }


def _prompts(given: str | list[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the prompts in the engine's form, and the client's name for each."""
    several = given if isinstance(given, list) and _has_several(given) else [given]
    places = [f"prompt[{i}]" for i in range(len(several))] if _has_several(given) else ["prompt"]
    prompts: list[dict[str, Any]] = []
    for prompt, place in zip(several, places, strict=True):
        if isinstance(prompt, str) and prompt:
            prompts.append({"prompt": prompt})
        elif isinstance(prompt, list) and prompt:
            ids = prompt
            if not all(type(id) is int for id in ids):
                rule = "texts and token ids in one prompt are not supported; send either"
                raise UnsupportedFeatureError(f"{place}: {rule}", parameter=place)
            prompts.append({"prompt_token_ids": ids})
        else:
            raise invalid(place, "must be a text or a list of token ids that is not empty")
    if len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"at most {MAX_PROMPTS} prompts", len(prompts))
    return prompts, places


def _has_several(given: str | list[Any]) -> bool:
    """Tell a list of prompts from one prompt of token ids, among which llama.cpp also takes texts."""
    return isinstance(given, list) and bool(given) and all(type(each) is not int for each in given)


def _logit_bias(given: list[list[Any]] | dict[str, Any] | None) -> dict[str, float] | None:
    """Convert pairs or an object; false forbids a token."""
    pairs: list[Any] = list(given.items()) if isinstance(given, dict) else list(given or ())
    found: dict[str, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(cast("list[Any]", pair)) != 2:
            raise invalid("logit_bias", "must be an object, or pairs of a token id and a bias")
        token, bias = cast("list[Any]", pair)
        if isinstance(token, str) and not token.isdigit():
            rule = "texts are not supported, only token ids"
            raise UnsupportedFeatureError(f"logit_bias: {rule}", parameter="logit_bias")
        if bias is False:
            bias = FORBIDDEN
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise invalid("logit_bias", "a bias must be a number or false", bias)
        found[str(token)] = float(bias)
    return found or None


def _finish(reply: InfillReply, completion: CompletionOutput, output: RequestOutput) -> None:
    """Fill the fields that come with the last part of an answer."""
    assert completion.finish_reason is not None
    reply.tokens_cached = output.num_cached_tokens or 0
    reply.truncated = False
    reply.stop_type, reply.stopping_word = _stop(completion.finish_reason, completion.stop_reason)
    reply.timings = _timings(output.metrics, reply)


def _completion(request: LlamaFields, max_tokens: int) -> CompletionRequest:
    """Return the completion that is sampled alike."""
    fields = {name: getattr(request, name) for name in SAME_NAME}
    fields["repetition_penalty"] = request.repeat_penalty
    return CompletionRequest(max_tokens=max_tokens, **fields)


def _stop(reason: FinishReason, stop_reason: int | str | None) -> tuple[str, str]:
    """Return why it has ended, in llama.cpp's word, and the stop string that was met."""
    if reason == "stop":
        return ("word", stop_reason) if isinstance(stop_reason, str) else ("eos", "")
    return STOP_TYPES.get(reason, "none"), ""


def _timings(stats: RequestStateStats | None, piece: InfillReply) -> InfillTimings:
    num = piece.tokens_predicted
    timings = InfillTimings(prompt_n=piece.tokens_evaluated, predicted_n=num)
    if stats is not None and stats.prefill_s is not None:
        timings.prompt_ms = 1000 * stats.prefill_s
    if stats is not None and stats.decode_s is not None:
        timings.predicted_ms = 1000 * stats.decode_s
        timings.predicted_per_second = num / stats.decode_s if stats.decode_s else None
    return timings
