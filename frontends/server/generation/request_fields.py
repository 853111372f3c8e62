"""Declare the request fields that several APIs share, and convert those that constrain the answer.  Pure.

A null means that a field is not given.  The table in `fields.py` decides about all other fields.  The engine checks ranges, so they
are not checked here a second time: one validator gives one answer.

A client can constrain the answer in three ways: by OpenAI's `response_format`, vLLM's `structured_outputs`, and vLLM's older
`guided_…` fields.  A request may use only one of them; `structured_outputs` converts it to `StructuredOutputsParams`.
"""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import msgspec
from msgspec import Meta

from trouper.actors.messages.requests import ClientOptions
from trouper.errors import TrouperValidationError, invalid
from trouper.frontends.server.shared import fields
from trouper.params import RepetitionDetectionParams
from trouper.sampling_fields import FIELDS
from trouper.structured_outputs import StructuredOutputsParams

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Timestamp = Annotated[int, Meta(ge=0)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Declare OpenAI's `response_format`.  `structured_outputs` checks which members belong to which type.

    Unknown members are refused, because a misspelled constraint would otherwise be ignored silently.
    """

    type: str
    json_schema: dict[str, Any] | None = None  # name, schema, strict
    schema: dict[str, Any] | None = None  # of type json_object, like llama.cpp
    structures: list[dict[str, Any]] | None = None  # of a structural tag, with the triggers
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


JSON_TYPES = {"integer": int, "number": float, "flag": bool, "token ids": list[int]}
# The numbers, flags and lists of ids among the sampling fields of all APIs, from their declarations.  They are read by name only.
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


# The members of each type of `response_format`, and those of a described schema.
MEMBERS = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema",),
    "structural_tag": ("structures", "triggers", "format"),
}
DESCRIBING = {"name", "description", "schema", "strict"}
GUIDED = ("json", "regex", "choice", "grammar")
# Objects below these keywords hold for one value together, so closing each would leave no value that fits.
JOINED = ("allOf", "$ref", "if", "then", "else", "not")


def structured_outputs(request: Generating) -> StructuredOutputsParams | None:
    """Return the constraint on the answer.  Returns None if the answer may be any text.

    Raises:
        TrouperValidationError: two fields constrain the answer, or one of them is malformed.
    """
    guided = {
        name: value for name in GUIDED if (value := getattr(request, f"guided_{name}")) is not None
    }
    ways: dict[str, dict[str, Any] | None] = {
        "response_format": _of_format(request.response_format),
        "structured_outputs": request.structured_outputs,
        **{f"guided_{name}": {name: value} for name, value in guided.items()},
    }
    given = {name: kinds for name, kinds in ways.items() if kinds}
    if not given:
        return None
    if len(given) > 1:
        raise invalid(list(given)[-1], f"cannot be combined with {next(iter(given))}")
    ((name, kinds),) = given.items()
    if request.guided_whitespace_pattern is not None:
        kinds = {**kinds, "whitespace_pattern": request.guided_whitespace_pattern}
    unknown = kinds.keys() - set(StructuredOutputsParams.__struct_fields__)
    if unknown:
        raise invalid(name, f"unknown fields: {', '.join(sorted(unknown))[:128]}")
    try:
        return StructuredOutputsParams(**cast("Any", kinds))
    except TrouperValidationError as error:
        raise TrouperValidationError(error.message, parameter=name) from None


def way_of(request: Generating) -> str:
    """Return the name of the field that constrains the answer, for errors.

    A client may have used any of several fields, and an error about the grammar should name that one.
    """
    if request.structured_outputs:
        return "structured_outputs"
    guided = [f"guided_{name}" for name in GUIDED]
    return next((name for name in guided if getattr(request, name) is not None), "response_format")


def _of_format(given: ResponseFormat | None) -> dict[str, Any]:
    if given is None:
        return {}
    _check_members(given)
    match given.type:
        case "text":
            return {}
        case "json_object":
            return {"json_object": True} if given.schema is None else {"json": given.schema}
        case "json_schema":
            described = given.json_schema or {}
            if unknown := described.keys() - DESCRIBING:
                raise invalid(
                    "response_format", f"json_schema: unknown members: {_listed(unknown)}"
                )
            schema = described.get("schema")
            if not isinstance(schema, dict):
                raise invalid("response_format", "json_schema must have a schema, an object")
            return {"json": schema}
        case _:  # structural_tag
            tag = {
                name: value
                for name in ("structures", "triggers", "format")
                if (value := getattr(given, name)) is not None
            }
            return {"structural_tag": json.dumps(tag)}


def _check_members(given: ResponseFormat) -> None:
    """Refuse members of other types, which would be ignored silently."""
    own = MEMBERS.get(given.type)
    if own is None:
        raise invalid("response_format", f"type must be {', '.join(MEMBERS)}", given.type)
    fields = msgspec.structs.asdict(given)
    others = {name for name, value in fields.items() if value is not None} - {"type", *own}
    if others:
        raise invalid("response_format", f"type {given.type} has no {_listed(others)}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))[:128]


def closed(schema: Any) -> Any:
    """Copy a JSON schema whose objects have no other properties than those described, unless it says so itself.

    llama.cpp's grammars, and so Ollama's, allow no others; small models that may invent properties go on inventing them.
    """
    if isinstance(schema, list):
        return [closed(each) for each in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    given = cast("dict[str, Any]", schema)
    if any(name in given for name in JOINED):
        return given
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in ("properties", "$defs", "definitions") and isinstance(value, dict):
            found[name] = {k: closed(v) for k, v in cast("dict[str, Any]", value).items()}
        elif name in ("items", "prefixItems", "anyOf", "oneOf"):
            found[name] = closed(value)
        else:
            found[name] = value
    is_open = not {"additionalProperties", "unevaluatedProperties", "patternProperties"} & set(
        given
    )
    if "properties" in given and is_open:
        found["additionalProperties"] = False
    return found
