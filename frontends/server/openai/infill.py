"""`POST /infill`: llama.cpp's route for filling in the middle, as its editor plug-ins ask for it."""

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from trouper.errors import invalid
from trouper.frontends.server.generation.adapter import (
    ChoiceUpdate,
    ParsedRequest,
    ReplyHead,
    ServedModel,
    StreamEvent,
)
from trouper.frontends.server.generation.driver import drive
from trouper.frontends.server.generation.requests import Int64
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.openai.requests import CompletionRequest
from trouper.frontends.server.openai.sampling import completion_params, parsed_request
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared import fields
from trouper.frontends.server.shared.usage import Usage
from trouper.outputs import FinishReason, RequestOutput, RequestStateStats

PART = 4  # of the model's length the prompt has a quarter at least, and leaves one where the output has no limit
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
    """A file beside the gap."""

    text: str
    filename: str = "tmp"


class InfillRequest(msgspec.Struct, kw_only=True):
    """`POST /infill`: the gap, and llama.cpp's names for how it is filled."""

    OTHERS: ClassVar[fields.Others] = fields.INFILL

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[InfillFile] | None = None
    prompt: str | None = None  # what the filling begins with
    model: str | None = None
    n_predict: int | None = None  # -1: to the model's length; 0: the prompt is computed and kept
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


class InfillTimings(msgspec.Struct, kw_only=True):
    """Times of a request, under llama.cpp's names."""

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
    tokens_cached: int | UnsetType = UNSET  # this and the rest with the last piece
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    timings: InfillTimings | UnsetType = UNSET


async def create_infill(service: Service, context: RequestContext, request: InfillRequest) -> None:
    """Fill a gap between two texts, whole or as a stream."""
    await drive(service, context, request, InfillAdapter)


class InfillAdapter:
    """One choice; a stream ends with the event that says why it has."""

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
            piece.tokens_cached = output.num_cached_tokens or 0
            piece.truncated = False
            piece.stop_type, piece.stopping_word = _stop(
                completion.finish_reason, completion.stop_reason
            )
            piece.timings = _timings(output.metrics, piece)
        return piece


def _completion(request: InfillRequest, max_tokens: int) -> CompletionRequest:
    """Return the completion that is sampled alike."""
    fields = {name: getattr(request, name) for name in SAME_NAME}
    return CompletionRequest(
        max_tokens=max_tokens, repetition_penalty=request.repeat_penalty, **fields
    )


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
