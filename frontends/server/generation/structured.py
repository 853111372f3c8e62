"""Convert a request's constraints on the answer to `StructuredOutputsParams`.  Pure.

A client can give them in three ways: OpenAI's `response_format`, vLLM's `structured_outputs`, and vLLM's older `guided_…` fields.
A request may use only one of these.
"""

import json
from collections.abc import Iterable
from typing import Any, cast

import msgspec

from trouper.errors import TrouperValidationError, invalid
from trouper.frontends.server.generation.requests import Generating, ResponseFormat
from trouper.structured_outputs import StructuredOutputsParams

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
