"""Write the grammar of an answer that must be tool calls, in the syntax that the parser of the dialect reads."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from trouper.errors import invalid
from trouper.frontends.dialects.calls import Schemas
from trouper.frontends.dialects.table import BY_NAME, Dialect, Tags
from trouper.frontends.dialects.value_types import (
    property_table,
    property_types,
    required_names,
    resolved,
    value_types,
)
from trouper.lark import Lark, joined, repeated

# The largest number of calls in one answer: a model that must call does not stop by itself.
MAX_CALLS = 16
# The largest number of items of an array in the dialect's own syntax.
MAX_ITEMS = 256
SIMPLE = frozenset({"integer", "number", "boolean", "null"})
JSONSchema = Mapping[str, Any]


def forced_calls(
    dialect: Dialect, tools: Schemas, *, is_parallel: bool, token_ids: Mapping[str, int]
) -> str:
    """Return the grammar of an answer with one or several calls of these tools.

    Args:
        tools: schemas of their parameters, by name.
        is_parallel: whether several calls may follow each other.
        token_ids: ids of the added tokens, by their text.
    """
    lark = Lark(token_ids)
    opening, rest = _calls(lark, _with_arrays(dialect, token_ids), tools, is_parallel)
    return lark.source(f"{lark.literal(opening)} {rest}".strip())


def strict_calls(
    dialect: Dialect, tools: Schemas, *, is_parallel: bool, token_ids: Mapping[str, int]
) -> str | None:
    """Return the grammar of an arbitrary answer with calls that match the schemas of these tools.

    Returns None if the dialect has no mark that introduces a call.
    """
    if not dialect.marks or dialect.body == "channels":
        return None
    lark = Lark(token_ids)
    opening, rest = _calls(lark, _with_arrays(dialect, token_ids), tools, is_parallel)
    call = lark.rule(f"{lark.text_before(opening)} {rest}")
    tail = lark.rule("/(?s:.*)/")
    return lark.source(f"{call}{'*' if is_parallel else '?'} {tail}")


def _with_arrays(dialect: Dialect, token_ids: Mapping[str, int]) -> Dialect:
    """Use Mistral's older dialect if the vocabulary has no token between name and arguments."""
    is_older = bool(dialect.call_id) and dialect.name_end[0] not in token_ids
    return BY_NAME["granite"].with_mark(dialect.call[0]) if is_older else dialect


def _calls(lark: Lark, dialect: Dialect, tools: Schemas, is_parallel: bool) -> tuple[str, str]:
    """Return the mark that opens the calls, which may be "", and the expression for the text behind it."""
    write = _BODIES[dialect.body]
    call = lark.one_of([write(lark, dialect, name, tools[name]) for name in tools])
    most = MAX_CALLS if is_parallel else 1
    (begin, end), (call_begin, call_end) = dialect.section, dialect.call
    pad = lark.literal(_padding(dialect))
    if begin and call_begin:
        unit = f"{lark.literal(call_begin)} {call} {lark.literal(call_end)}"
        return begin, f"{repeated(unit, unit, most)} {lark.literal(end)}"
    if dialect.body == "channels":
        return "", call
    if dialect.body in ("array", "python"):
        comma = lark.literal(", ")
        return begin, f'"[" {repeated(call, f"{comma} {call}", most)} "]" {lark.literal(end)}'
    if begin:
        return begin, f"{pad} {repeated(call, f'{pad} {call}', most)} {pad} {lark.literal(end)}"
    if dialect.separators or not call_begin:
        return "", repeated(call, f"{lark.literal('; ')} {call}", most)
    unit = f"{pad} {call} {pad} {lark.literal(call_end)}"
    return call_begin, repeated(unit, f"{pad} {lark.literal(call_begin)} {unit}", most)


def _padding(dialect: Dialect) -> str:
    """Return the blanks that templates put around a call."""
    has_name = dialect.tags is not None and bool(dialect.tags.name)
    return "\n" if dialect.body == "object" or has_name else ""


def _object(lark: Lark, dialect: Dialect, name: str, schema: JSONSchema) -> str:
    opening = f'{{"name": "{name}", "{dialect.arguments_key}": '
    return lark.rule(f'{lark.literal(opening)} {_arguments(lark, name, schema)} "}}"')


def _arguments(lark: Lark, name: str, schema: JSONSchema) -> str:
    return lark.json(_checked_schema(schema, name))


def _named(lark: Lark, dialect: Dialect, name: str, schema: JSONSchema) -> str:
    number = ' ":" /[0-9]{1,3}/' if dialect.name_prefix else ""
    opening = lark.literal(dialect.name_prefix + name) + number
    mark = lark.literal(dialect.name_end[0])
    return lark.rule(f"{opening} {mark} {_arguments(lark, name, schema)}")


def _channel(lark: Lark, dialect: Dialect, name: str, schema: JSONSchema) -> str:
    opening = lark.literal(f"<|channel|>commentary to=functions.{name}<|message|>")
    again = lark.literal("<|start|>assistant")  # after reasoning
    return lark.rule(f"({again})? {opening} {_arguments(lark, name, schema)}")


def _tagged(lark: Lark, dialect: Dialect, name: str, schema: JSONSchema) -> str:
    tags = cast("Tags", dialect.tags)
    newline = "" if tags.name_end[0] == "\n" else "\n"
    parts = [lark.literal(tags.name + name + tags.name_end[0] + newline)]
    properties, required = _properties(_checked_schema(schema, name))
    for key in properties:
        member = _tagged_member(lark, tags, schema, key)
        parts.append(member if key in required else f"({member})?")
    if tags.end:
        parts.append(lark.literal(tags.end))
    return lark.rule(" ".join(parts))


def _tagged_member(lark: Lark, tags: Tags, schema: JSONSchema, key: str) -> str:
    types = property_types(schema, key)
    is_text = types.is_text
    closing = ""
    if tags.key.endswith('"'):  # an attribute
        closing = f'" string="{str(is_text).lower()}"' if tags.has_kind else '"'
    end, pad = tags.value_end[-1], "\n" if tags.value_end[0].startswith("\n") else ""
    opening = lark.literal(tags.key + key + closing + tags.key_end + tags.value + pad)
    behind = lark.literal(pad + end + "\n")
    choices = [text for text in types.choices or () if isinstance(text, str)]
    if not is_text:
        value = f"{lark.json(_property(schema, key))} {behind}"
    elif choices:
        value = f"{lark.one_of([lark.literal(text) for text in choices])} {behind}"
    else:
        value = f"{lark.text_before(pad + end)} {lark.literal(chr(10))}"
    return lark.rule(f"{opening} {value}")


def _python(lark: Lark, dialect: Dialect, name: str, schema: JSONSchema) -> str:
    """Write a call in Python syntax.  The parser also accepts JSON in place of Python's literals."""
    keywords = _members(schema, name, lambda key: f"{lark.literal(key + '=')} {_value(lark, schema, key)}")  # fmt: skip
    return lark.rule(f'{lark.literal(name + "(")} {joined(*keywords, lark.literal(", "))} ")"')


def _value(lark: Lark, schema: JSONSchema, key: str) -> str:
    return lark.json(_property(schema, key))


def _literals(lark: Lark, dialect: Dialect, name: str, schema: JSONSchema) -> str:
    quote = dialect.literal_quote

    def member(key: str) -> str:
        return f"{lark.literal(key + ':')} {_literal(lark, quote, _property(schema, key))}"

    members = joined(*_members(schema, name, member), lark.literal(","))
    return lark.rule(f'{lark.literal("call:" + name + "{")} {members} "}}"')


def _literal(lark: Lark, quote: str, schema: JSONSchema) -> str:
    """Match a value with the dialect's quotes around strings.  Arrays contain values of one kind."""
    if isinstance(reference := schema.get("$ref"), str):
        schema = {**_mapping(resolved(reference, schema)), **_definitions(schema)}
    types, mark, kind = value_types(schema, schema), lark.literal(quote), schema.get("type")
    choices = [text for text in types.choices or () if isinstance(text, str)]
    if choices:
        texts = [lark.literal(text) for text in choices]
        return f"{mark} {lark.one_of(texts)} {mark}"
    if kind == "array":
        item = _literal(lark, quote, {**_mapping(schema.get("items")), **_definitions(schema)})
        items = repeated(item, f"{lark.literal(',')} {item}", MAX_ITEMS)
        return lark.rule(f'"[" ({items})? "]"')
    if kind == "object":
        required, optional = _members(
            schema, "", lambda key: f"{lark.literal(key + ':')} {_literal(lark, quote, _property(schema, key))}"
        )  # fmt: skip
        return lark.rule(f'"{{" {joined(required, optional, lark.literal(","))} "}}"')
    if types.names is not None and types.names <= SIMPLE:
        return lark.json(schema)
    return f"{mark} {lark.text_before(quote)}"


def _checked_schema(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of a tool's parameters.

    Raises:
        TrouperValidationError: the schema is not that of an object.
    """
    kind = schema.get("type", "object")
    if kind != "object":
        raise invalid("tools", f"the parameters of {name} must be an object", kind)
    return {**schema, "type": "object"}


def _members(
    schema: JSONSchema, name: str, write: Callable[[str], str]
) -> tuple[list[str], list[str]]:
    """Write the properties of an object: the required ones, then the others."""
    properties, required = _properties(_checked_schema(schema, name))
    return (
        [write(key) for key in properties if key in required],
        [write(key) for key in properties if key not in required],
    )


def _properties(schema: JSONSchema) -> tuple[list[str], frozenset[str]]:
    return list(property_table(schema)), required_names(schema)


def _property(schema: JSONSchema, key: str) -> JSONSchema:
    """Return the schema of one property, with the definitions that it may refer to."""
    return {**_mapping(property_table(schema).get(key)), **_definitions(schema)}


def _definitions(schema: JSONSchema) -> JSONSchema:
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _mapping(value: object) -> JSONSchema:
    return cast("JSONSchema", value) if isinstance(value, Mapping) else {}


_BODIES: Mapping[str, Callable[[Lark, Dialect, str, JSONSchema], str]] = {
    "object": _object,
    "array": _object,
    "named": _named,
    "tagged": _tagged,
    "python": _python,
    "literals": _literals,
    "channels": _channel,
}
