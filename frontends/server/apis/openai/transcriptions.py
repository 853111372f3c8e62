"""Serve `POST /v1/audio/transcriptions`: a recording to its text, by a model that hears.

The route asks the model as its makers do: Qwen3-ASR and Voxtral have a mode for transcriptions, and Qwen2-Audio gets an
instruction.  The recording is a part of a prompt like that of a chat, so every rule of recordings holds here, too.
"""

import math
from collections.abc import Awaitable
from typing import Any, ClassVar, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from trouper.actors.rendering.media.parts import FetchedFile
from trouper.config.media import AUDIO, modality_of, no_media
from trouper.errors import UnsupportedFeatureError, invalid
from trouper.frontends.server.generation.adapter import (
    ChoiceUpdate,
    ParsedRequest,
    ReplyHead,
    ServedModel,
    StreamEvent,
)
from trouper.frontends.server.generation.driver import drive
from trouper.frontends.server.http.context import DONE, RequestContext
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared import fields
from trouper.frontends.server.shared.usage import Usage
from trouper.outputs import RequestOutput
from trouper.params import RequestOutputKind, SamplingParams

# What Qwen3-ASR calls the languages that it was trained on, by their codes.
LANGUAGES = {
    "ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English", "es": "Spanish",
    "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fr": "French", "hi": "Hindi", "hu": "Hungarian", "id": "Indonesian",
    "it": "Italian", "ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay", "nl": "Dutch", "pl": "Polish",
    "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "vi": "Vietnamese",
    "yue": "Cantonese", "zh": "Chinese",
}  # fmt: skip
CODES = {name: code for code, name in LANGUAGES.items()}
# Qwen3-ASR writes `language English<asr_text>` in front of the text.
HEAD, HEAD_END, NO_LANGUAGE = "language ", "<asr_text>", "None"
MAX_HEAD = 64
FORMATS = ("json", "text", "verbose_json")
NO_TIMES = "the models that hear give no times of words; use json, text or verbose_json"
# Where the recording is in the engine's terms.
PLACES = ("messages", "multi_modal_data", "recordings", "file.")


class TranscriptionRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/audio/transcriptions`, a form: OpenAI's fields, and vLLM's of sampling."""

    OTHERS: ClassVar[fields.Others] = fields.TRANSCRIPTION

    file: bytes
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: str = "json"
    temperature: float = 0.0
    stream: bool = False
    timestamp_granularities: list[str] = []
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_completion_tokens: int | None = None
    request_id: str | None = None


class DurationUsage(msgspec.Struct):
    """Count the begun seconds of a recording, as OpenAI's transcriptions of Whisper do."""

    seconds: int
    type: str = "duration"


class Transcription(msgspec.Struct):
    """The reply; the fields of `verbose_json` are unset for `json`.

    The language is null if neither the client nor the model has named it.
    """

    text: str
    task: str | UnsetType = UNSET
    language: str | UnsetType | None = UNSET
    duration: float | UnsetType = UNSET
    usage: DurationUsage | UnsetType = UNSET


class TokenDetails(msgspec.Struct):
    text_tokens: int
    audio_tokens: int


class TokenUsage(msgspec.Struct):
    """The tokens of a stream's last event."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: TokenDetails
    type: str = "tokens"


class TranscriptDelta(msgspec.Struct):
    delta: str
    type: str = "transcript.text.delta"


class TextDone(msgspec.Struct):
    text: str
    usage: TokenUsage
    type: str = "transcript.text.done"


class TranscriptionJob(NamedTuple):
    """A request to the model of one family."""

    fields: TranscriptionRequest
    family: str

    @property
    def model(self) -> str | None:
        return self.fields.model

    @property
    def request_id(self) -> str | None:
        return self.fields.request_id


def create_transcription(
    service: Service, context: RequestContext, request: TranscriptionRequest
) -> Awaitable[None]:
    """Transcribe a recording, as one reply or as a stream.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: the model does not hear.
    """
    config = service.config
    media = config.media
    if media is None or media.modality != AUDIO:
        name, own = service.check_model(request.model), modality_of(config.model.source_config)
        raise no_media(AUDIO, config.no_media, name, "model", own)
    return drive(
        service, context, TranscriptionJob(request, media.model_type), TranscriptionAdapter
    )


async def refuse_translation(service: Service, context: RequestContext, request: Any) -> None:  # noqa: ASYNC124  # a handler is async
    """Refuse a translation of speech: no model here has a mode for it."""
    rule = "translations are not supported; use /v1/chat/completions with a part input_audio, and ask for the language"
    raise UnsupportedFeatureError(f"file: {rule}", parameter="file")


class TranscriptionAdapter:
    """Render the text of one recording."""

    STREAM_END: ClassVar[bytes] = DONE

    @staticmethod
    def parse(request: TranscriptionJob, model: ServedModel) -> ParsedRequest:
        form = request.fields
        _check(form)
        given: dict[str, Any] = {
            name: value
            for name in (
                "top_p",
                "top_k",
                "min_p",
                "seed",
                "frequency_penalty",
                "presence_penalty",
                "repetition_penalty",
            )
            if (value := getattr(form, name)) is not None
        }
        if form.max_completion_tokens is not None:
            given["max_tokens"] = form.max_completion_tokens
            if form.max_completion_tokens > model.max_model_len:
                rule = f"the limit is {model.max_model_len} tokens (max_model_len)"
                raise invalid("max_completion_tokens", rule, form.max_completion_tokens)
        kind = RequestOutputKind.DELTA if form.stream else RequestOutputKind.FINAL_ONLY
        # The defaults of generation_config.json are made for chats.
        params = SamplingParams(temperature=form.temperature, output_kind=kind, **given)
        prompt = PROMPTS[request.family](form)
        parsed = ParsedRequest(
            prompts=[prompt], places=["file"], params=params, is_stream=form.stream
        )
        if "prompt" in prompt:
            parsed.set_options(add_special_tokens=False)
        return parsed

    @staticmethod
    def client_name(request: TranscriptionJob, parameter: str) -> str:
        if parameter == "max_tokens":
            return "max_completion_tokens"
        return "file" if parameter.startswith(PLACES) else parameter

    def __init__(
        self, request: TranscriptionJob, parsed: ParsedRequest, model: ServedModel, head: ReplyHead
    ) -> None:
        self._form = request.fields
        may_have_head = request.family == "qwen3_asr" and request.fields.language is None
        self._reader = _HeadReader() if may_have_head else None
        self._text = ""
        self._output: RequestOutput | None = None

    def begin(self, output: RequestOutput, usage: Usage | None) -> list[StreamEvent]:
        return []

    def render(self, update: ChoiceUpdate, usage: Usage | None) -> list[StreamEvent]:
        delta = self._add(update)
        return [StreamEvent(TranscriptDelta(delta))] if delta else []

    def end(self, usage: Usage) -> list[StreamEvent]:
        assert self._output is not None
        places = (self._output.multi_modal_placeholders or {}).get(AUDIO, ())
        num_audio = sum(length for _, length in places)
        details = TokenDetails(usage.prompt_tokens - num_audio, num_audio)
        counts = usage.prompt_tokens, usage.completion_tokens, usage.total_tokens
        return [StreamEvent(TextDone(self._text, TokenUsage(*counts, details)))]

    def add(self, update: ChoiceUpdate) -> None:
        self._add(update)

    def reply(self, usage: Usage) -> object:
        form = self._form
        if form.response_format == "text":
            return f"{self._text}\n"
        assert self._output is not None
        seconds = self._output.audio_seconds or 0.0
        found = Transcription(self._text, usage=DurationUsage(math.ceil(seconds)))
        if form.response_format == "verbose_json":
            found.task, found.duration = "transcribe", round(seconds, 3)
            found.language = form.language
            if self._reader is not None:
                found.language = self._reader.language
        return found

    def _add(self, update: ChoiceUpdate) -> str:
        """Return what an update adds to the text."""
        self._output = update.output
        delta = update.text
        if self._reader is not None:
            delta = self._reader.read(delta, is_end=update.completion.finish_reason is not None)
        if not self._text:
            delta = delta.lstrip()
        self._text += delta
        return delta


class _HeadReader:
    """Takes the language, which Qwen3-ASR writes first, off the text."""

    def __init__(self) -> None:
        self.language: str | None = None
        # What may still be the head, or None behind it.
        self._held: str | None = ""

    def read(self, text: str, *, is_end: bool) -> str:
        """Return the part of the text that belongs to the transcript."""
        if self._held is None:
            return text
        self._held += text
        head, is_complete, rest = self._held.partition(HEAD_END)
        if is_complete:
            name = head.removeprefix(HEAD).strip()
            self.language = None if name == NO_LANGUAGE else CODES.get(name, name)
            self._held = None
            return rest
        is_head = self._held.startswith(HEAD[: len(self._held)]) and len(self._held) <= MAX_HEAD
        if is_head and not is_end:
            return ""
        found, self._held = self._held, None
        return found


def _check(form: TranscriptionRequest) -> None:
    if form.response_format in ("srt", "vtt", "diarized_json"):
        text = f"response_format: {form.response_format} is not supported: {NO_TIMES}"
        raise UnsupportedFeatureError(text, parameter="response_format")
    if form.response_format not in FORMATS:
        raise invalid(
            "response_format", f"must be one of {', '.join(FORMATS)}", form.response_format
        )
    if form.stream and form.response_format == "verbose_json":
        raise invalid("stream", "not with response_format verbose_json; use json or text")
    if form.timestamp_granularities:
        text = f"timestamp_granularities: not supported: {NO_TIMES}"
        raise UnsupportedFeatureError(text, parameter="timestamp_granularities")
    if form.language is not None and form.language not in LANGUAGES:
        known = ", ".join(LANGUAGES)
        raise invalid("language", f"must be a code among {known}, or left out", form.language)


def _of_qwen3_asr(form: TranscriptionRequest) -> dict[str, Any]:
    """Return a conversation; the answer begins with the language, if it is known."""
    messages: list[dict[str, Any]] = [_message(_recording(form))]
    if form.prompt:
        messages.insert(0, {"role": "system", "content": [_text(form.prompt)]})
    if form.language is None:
        return {"messages": messages}
    head = f"{HEAD}{LANGUAGES[form.language]}{HEAD_END}"
    messages.append({"role": "assistant", "content": head})
    return {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}


def _of_voxtral(form: TranscriptionRequest) -> dict[str, Any]:
    """Return a prompt of the mode for transcriptions, which is no chat and reads no context."""
    _refuse_prompt(form)
    language = "" if form.language is None else f"lang:{form.language}"
    text = f"<s>[INST][BEGIN_AUDIO][AUDIO][/INST]{language}[TRANSCRIBE]"
    return {"prompt": text, "multi_modal_data": {AUDIO: form.file}}


def _of_qwen2_audio(form: TranscriptionRequest) -> dict[str, Any]:
    _refuse_prompt(form)
    language = "" if form.language is None else f" in {LANGUAGES[form.language]}"
    instruction = f"Transcribe the speech{language}. Answer with the transcript only."
    return {"messages": [_message(_recording(form), _text(instruction))]}


PROMPTS = {"qwen3_asr": _of_qwen3_asr, "voxtral": _of_voxtral, "qwen2_audio": _of_qwen2_audio}


def _refuse_prompt(form: TranscriptionRequest) -> None:
    if form.prompt:
        rule = "this model reads no context for transcriptions; use /v1/chat/completions with a part input_audio"
        raise UnsupportedFeatureError(f"prompt: {rule}", parameter="prompt")


def _message(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def _recording(form: TranscriptionRequest) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": FetchedFile(form.file)}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
