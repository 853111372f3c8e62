"""Declare the bodies of Ollama's API, decide what each of its options means here, and make chats and completions of them.  Pure.

Null means "not given".  `options` is a table of its own, which is checked as the fields of a body are: an option is
honoured, refused by name, or known to change nothing.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import msgspec

from trouper.actors.rendering.media.parts import Base64File
from trouper.errors import invalid
from trouper.frontends.server.apis.openai.requests import CompletionRequest, DerivedChat
from trouper.frontends.server.generation.request_fields import ResponseFormat, closed
from trouper.frontends.server.models.options import seconds_of
from trouper.frontends.server.shared import fields
from trouper.frontends.server.shared.fields import Others, check_others

ONE_MODEL = "nothing is fetched: the server has the models that it was started with"
NO_TEMPLATES = (
    "prompts are made by the model's own chat template; use system, or raw with the whole prompt"
)
NO_SHIFT = "a context is never shifted: an answer that reaches the model's length ends with done_reason length"


class OllamaOptions(msgspec.Struct, kw_only=True):
    """The options that are honoured, with Ollama's names.

    Options about speed or devices are accepted without effect; options that would change the answer are refused by
    name.
    """

    OTHERS: ClassVar[Others] = Others(
        {
            "mirostat": "use temperature with top_p or min_p",
            "typical_p": "use top_p or min_p",
            "tfs_z": "use top_p or min_p",
        },
        {
            **dict.fromkeys(("mirostat_eta", "mirostat_tau"), fields.DOES_NOTHING),
            **dict.fromkeys(
                ("num_thread", "num_gpu", "main_gpu", "num_batch", "use_mmap", "use_mlock", "numa", "low_vram",
                 "f16_kv", "vocab_only", "draft_num_predict"), fields.ONLY_SPEED),
            "num_keep": NO_SHIFT,
            "penalize_newline": "newlines are tokens like others",
        },
    )  # fmt: skip

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    # 0 means no penalty for repetitions.
    repeat_last_n: int | None = None
    # A negative number allows tokens up to the model's length.
    num_predict: int | None = None
    num_ctx: int | None = None


SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "stop", "presence_penalty", "frequency_penalty",
)  # fmt: skip
# What a parameter of a chat or completion is called here.
CLIENT_NAMES = {
    **{name: f"options.{name}" for name in (*SAME_NAME, "seed")},
    "max_tokens": "options.num_predict",
    "max_completion_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "structured_outputs": "format",
    "reasoning_effort": "think",
}


class OllamaRequest(msgspec.Struct, kw_only=True):
    """The fields that all requests for text share.

    A server with one model only checks `keep_alive`, because the model stays loaded.
    """

    OTHERS: ClassVar[Others] = Others(
        {"shift": NO_SHIFT, "_debug_render_only": "use /tokenize with return_token_strs"},
        {},
    )

    model: str | None = None
    options: dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    stream: bool | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None

    @property
    def request_id(self) -> str | None:
        return None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """`POST /api/chat`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    def put_back(self, strings: dict[str, memoryview]) -> None:
        """Replace placeholders of images by their bytes, taken out of `strings`."""
        for message in self.messages or ():
            if "images" in message:
                message["images"] = put_back_images(message["images"], strings)


def put_back_images(images: Any, strings: dict[str, memoryview]) -> Any:
    """Return a list of images with the bytes of the long ones in the place of their placeholders."""
    if not isinstance(images, list):
        return images
    given = cast("list[Any]", images)
    return [strings.pop(each, each) if isinstance(each, str) else each for each in given]


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """`POST /api/generate`.

    With `raw` the prompt is continued as it is; otherwise it is one turn of a chat.
    """

    OTHERS: ClassVar[Others] = Others(
        {
            **OllamaRequest.OTHERS.refused,
            "template": NO_TEMPLATES,
            "context": "send the conversation to /api/chat",
        },
        {},
    )

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    # Files in base64.
    images: list[str] | None = None

    def put_back(self, strings: dict[str, memoryview]) -> None:
        """Replace placeholders of images by their bytes, taken out of `strings`."""
        self.images = put_back_images(self.images, strings)


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """`POST /api/embed`, and `/api/embeddings` with `prompt` in place of `input`."""

    model: str | None = None
    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None


class OllamaNamed(msgspec.Struct, kw_only=True):
    """`POST /api/show` and the routes that change models: older clients name the model `name`."""

    OTHERS: ClassVar[Others] = Others(
        {},
        {"verbose": "an answer has all that is known", "stream": ONE_MODEL, "insecure": ONE_MODEL},
    )

    model: str | None = None
    name: str | None = None


def read_options(given: Mapping[str, Any] | None) -> tuple[OllamaOptions, tuple[str, ...]]:
    """Return the options, and the names of those that are in no table.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: naming the option.
    """
    known = OllamaOptions.__struct_encode_fields__
    options = {name: value for name, value in (given or {}).items() if value is not None}
    others = {f"{name}": value for name, value in options.items() if name not in known}
    unknown = check_others(others, OllamaOptions.OTHERS)
    try:
        return msgspec.convert(options, OllamaOptions, strict=False), unknown
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        raise invalid(f"options{place.rstrip('`')}", reason) from None


def sampling_fields(options: OllamaOptions) -> dict[str, Any]:
    """Return the options as fields of a chat or completion.

    -1 means "any" for a seed, and "no limit" for the number of tokens.
    """
    found = {name: getattr(options, name) for name in SAME_NAME}
    if options.seed is not None and options.seed >= 0:  # -1 asks for any
        found["seed"] = options.seed
    if options.repeat_last_n != 0:
        found["repetition_penalty"] = options.repeat_penalty
    if options.num_predict is not None and options.num_predict >= 0:
        found["max_tokens"] = options.num_predict
    return {name: value for name, value in found.items() if value is not None}


def read_keep_alive(value: str | float | None) -> float | None:
    """Return the seconds for which a model stays loaded, or None without a wish.  Raises TrouperValidationError."""
    return None if value is None or value == "" else seconds_of(value, "keep_alive")


JSONObject = dict[str, Any]
EFFORTS = ("low", "medium", "high", "max")


def chat_of(request: OllamaChatRequest, options: OllamaOptions) -> DerivedChat:
    """Convert a conversation to a chat.

    Calls of earlier turns are converted, and results of tools get the names of their calls.

    Raises:

        TrouperValidationError, UnsupportedFeatureError: naming the field.
    """
    messages = [_message(i, each) for i, each in enumerate(request.messages or ())]
    _name_results(messages)
    return DerivedChat(messages=messages, tools=request.tools or None, **_shared(request, options))


def chat_of_prompt(request: OllamaGenerateRequest, options: OllamaOptions) -> DerivedChat:
    """Convert a prompt, and the system's if there is one, to a chat of one turn.

    `/api/generate` uses the chat template unless the request is raw, as Ollama does.
    """
    system = [{"role": "system", "content": request.system}] if request.system else []
    content = _with_images("images", request.images, request.prompt or "")
    messages = [*system, {"role": "user", "content": content}]
    return DerivedChat(messages=messages, **_shared(request, options))


def completion_of(
    request: OllamaGenerateRequest, options: OllamaOptions, max_tokens: int
) -> CompletionRequest:
    """Convert a prompt that no template changes.

    Args:
        max_tokens: the limit of a request that gives none: completions of OpenAI's API would stop at 16.
    """
    if request.system:
        rule = "is not used with raw or suffix; put it into the prompt"
        raise invalid("system", rule)
    if request.images:
        raise invalid("images", "are not used with raw or suffix; use /api/chat")
    if request.think:
        raise invalid("think", "is not used with raw or suffix, whose answers are not parsed")
    shared = _shared(request, options)
    for name in ("reasoning_effort", "include_reasoning", "template_defaults", "top_logprobs"):
        shared.pop(name, None)
    if shared.pop("logprobs", None):
        shared["logprobs"] = request.top_logprobs or 0
    shared.setdefault("max_tokens", max_tokens)
    return CompletionRequest(prompt=request.prompt or "", suffix=request.suffix, **shared)


def _shared(request: OllamaRequest, options: OllamaOptions) -> JSONObject:
    return {
        **sampling_fields(options),
        **_thinking(request.think),
        "model": request.model,
        # Ollama streams by default.
        "stream": request.stream is not False,
        "response_format": _response_format(request.format),
        "logprobs": request.logprobs or None,
        "top_logprobs": request.top_logprobs or None,
    }


def _thinking(think: bool | str | None) -> JSONObject:
    if think is None or think == "":
        return {}
    if isinstance(think, bool):
        fields: JSONObject = {"template_defaults": {"enable_thinking": think}}
        return fields if think else {**fields, "include_reasoning": False}
    if think not in EFFORTS:
        raise invalid("think", f"must be true, false or one of {', '.join(EFFORTS)}", think)
    return {"reasoning_effort": think, "template_defaults": {"enable_thinking": True}}


def _response_format(given: str | JSONObject | None) -> ResponseFormat | None:
    if given is None or given == "":
        return None
    if given == "json":
        return ResponseFormat(type="json_object")
    if isinstance(given, str):
        raise invalid("format", 'must be "json" or a JSON schema, which is an object', given)
    return ResponseFormat(type="json_schema", json_schema={"schema": closed(given)})


def _message(i: int, given: JSONObject) -> JSONObject:
    """Convert one message; fields that are not named here go to the template as they are."""
    place = f"messages[{i}]"
    message = {name: value for name, value in given.items() if value is not None}
    role, content = message.get("role"), message.setdefault("content", "")
    if not isinstance(role, str):
        raise invalid(f"{place}.role", "must be a string")
    if not isinstance(content, str):
        raise invalid(f"{place}.content", "must be a string")
    message["content"] = _with_images(f"{place}.images", message.pop("images", None), content)
    message["role"] = role.lower()
    thinking = message.pop("thinking", "")
    if not isinstance(thinking, str):
        raise invalid(f"{place}.thinking", "must be a string")
    if thinking:
        message["reasoning_content"] = thinking
    if calls := message.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise invalid(f"{place}.tool_calls", "must be a list")
        message["tool_calls"] = [
            _call(f"{place}.tool_calls[{j}]", f"call_{i}_{j}", each)
            for j, each in enumerate(cast("list[Any]", calls))
        ]
    return message


def _with_images(place: str, images: Any, text: str) -> Any:
    """Return the content of a message: Ollama puts images in front of the text."""
    if not images:
        return text
    if not isinstance(images, list):
        raise invalid(place, "must be a list of files in base64")
    parts: list[JSONObject] = []
    for i, file in enumerate(cast("list[Any]", images)):
        if not isinstance(file, str | memoryview):
            raise invalid(f"{place}[{i}]", "must be a file in base64")
        text_of_file = cast("str | memoryview", file)
        parts.append({"type": "image", "image": Base64File(text_of_file)})
    return [*parts, {"type": "text", "text": text}] if text else parts


def _call(place: str, call_id: str, given: Any) -> JSONObject:
    function: Any = cast("JSONObject", given).get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        raise invalid(f"{place}.function", "must be an object")
    fields = cast("JSONObject", function)
    name: Any = fields.get("name")
    arguments: Any = fields.get("arguments") or {}
    if not isinstance(name, str):
        raise invalid(f"{place}.function.name", "must be a string")
    if not isinstance(arguments, dict):
        raise invalid(f"{place}.function.arguments", "must be an object")
    text = json.dumps(arguments, ensure_ascii=False)
    id = cast("JSONObject", given).get("id")
    return {
        "id": id if isinstance(id, str) and id else call_id,
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


def _name_results(messages: list[JSONObject]) -> None:
    """Give each result the id of its call: the last of that name, or without a name the next that has no result."""
    open_calls: list[JSONObject] = []
    for message in messages:
        if message["role"] == "assistant":
            open_calls += message.get("tool_calls", ())
        if message["role"] != "tool":
            continue
        name, call_id = message.pop("tool_name", None), message.get("tool_call_id")
        by_id = [each for each in open_calls if each["id"] == call_id]
        by_name = [each for each in open_calls if each["function"]["name"] == name]
        found = by_id or (by_name if name else open_calls)
        if found:
            message["tool_call_id"] = found[0]["id"]
            open_calls.remove(found[0])
