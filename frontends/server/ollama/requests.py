"""The bodies of Ollama's API, and what each of its options means here.

Null means "not given".  `options` is a table of its own, which is checked as the fields of a body are: an option is
honoured, refused by name, or known to change nothing.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import msgspec

from trouper.errors import invalid
from trouper.frontends.server.shared import fields
from trouper.frontends.server.shared.durations import seconds_of
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

    prompt: str = ""
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
