"""Declare the request fields that several APIs share.  A null means that the field is not given.

The table in `fields.py` decides about all other fields.

The engine checks ranges, so they are not checked here a second time: one validator gives one answer.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from trouper.actors.messages.requests import ClientOptions
from trouper.frontends.server.shared import fields
from trouper.params import RepetitionDetectionParams
from trouper.sampling_fields import FIELDS

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Timestamp = Annotated[int, Meta(ge=0)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's `response_format`.  `structured.py` checks which members belong to which type.

    Unknown members are refused, because a misspelled constraint would otherwise silently be no constraint.
    """

    type: str
    json_schema: dict[str, Any] | None = None  # name, schema, strict
    schema: dict[str, Any] | None = None  # of type json_object, like llama.cpp
    structures: list[dict[str, Any]] | None = None  # of a structural tag, with the triggers
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


JSON_TYPES = {"integer": int, "number": float, "flag": bool, "token ids": list[int]}
# The sampling fields of all APIs that are a number, a flag or a list of ids, from their declarations.  They are read by name only.
if TYPE_CHECKING:
    DeclaredFields = ClientOptions
else:
    DeclaredFields = msgspec.defstruct(
        "DeclaredFields",
        [
            (name, JSON_TYPES[field.kind] | None, None)
            for name, field in FIELDS.items()
            if field.bodies == "all" and field.kind in JSON_TYPES
        ],
        bases=(ClientOptions,),
        frozen=False,
        kw_only=True,
    )


class SamplingFields(DeclaredFields, frozen=False, kw_only=True):  # pyright: ignore[reportGeneralTypeIssues]  # msgspec allows it
    """Fields of all generating APIs.  They have the same meaning in each and reach the engine unchanged.

    Each is None if the client has not set it; then the model's default applies.
    """

    OTHERS: ClassVar[fields.Others] = fields.NONE

    model: str | None = None
    # Some adapters read or set these three, so they are declared for the type checker, too.
    temperature: float | None = None
    seed: int | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    stream: bool | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    structured_outputs: dict[str, Any] | None = None
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None

    def shared(self) -> dict[str, Any]:
        """Return these fields by name, to construct a request of another API.

        An adapter uses it to build the chat that it serves on behalf of another API.
        """
        return {name: getattr(self, name) for name in SamplingFields.__struct_fields__}


class Generating(SamplingFields, kw_only=True):
    """The fields that completions and chats share.

    They include OpenAI's own fields and vLLM's extensions, under the names of both.
    """

    n: int | None = None
    use_beam_search: bool | None = None  # n is the width
    length_penalty: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
