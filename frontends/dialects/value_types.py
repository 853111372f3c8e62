"""The JSON types that a schema allows for a value, and the conversion of a bare value to JSON.  Pure."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

MAX_DEPTH = 16  # references and unions to follow
MAX_PARSED = 1 << 16  # characters of a value other than a string
Schema = Mapping[str, Any]


class ValueTypes(NamedTuple):
    """The values that a schema allows.

    Attributes:
        names: the allowed JSON types, or None if the schema does not restrict them.
        choices: the listed values, or None if the schema lists none.
    """

    names: frozenset[str] | None = None
    choices: tuple[Any, ...] | None = None

    @property
    def is_text(self) -> bool:
        """Whether a string is allowed: then a bare value is a string, even if it looks like another type."""
        return self.names is not None and "string" in self.names

    @property
    def takes_null(self) -> bool:
        return self.names is not None and "null" in self.names

    def without_text(self) -> "ValueTypes":
        """Return the types of a value that the model has declared not to be a string.

        Some dialects declare for each argument whether it is a string; this has precedence over the schema.
        """
        names = None if self.names is None else self.names - {"string"}
        return ValueTypes(names or None)


TEXT = ValueTypes(frozenset({"string"}))


def property_types(schema: Schema, key: str) -> ValueTypes:
    """Return the types that the schema of an object allows for a property.  References within the schema are followed."""
    return value_types(_member(property_table(schema), key), schema)


def value_types(schema: object, root: Schema) -> ValueTypes:
    """Return the types that a schema allows for a value.  `root` is the schema that references point into."""
    return _types(schema, root, 0)


def property_table(schema: Schema) -> Schema:
    """Return the properties of an object with their schemas, including those from references and `allOf`.

    A schema may spread its properties over several parts, and tools generated from classes usually do.
    """
    found: dict[str, Any] = {}
    for part in _object_parts(schema, schema, 0):
        own = part.get("properties")
        found |= cast("Schema", own) if isinstance(own, Mapping) else {}
    return found


def required_names(schema: Schema) -> frozenset[str]:
    """Return the names of the required properties of an object.

    Includes those from references and `allOf`.  Names that are not strings are converted.
    """
    return frozenset(
        str(name)
        for part in _object_parts(schema, schema, 0)
        for name in _schemas(part, "required")
    )


def as_json(text: str, types: ValueTypes = ValueTypes()) -> str:  # noqa: B008  # it is frozen
    """Convert a bare value to JSON by the types that the tool's schema allows.

    If a string is allowed the value is a string, except for a listed value and null.  A literal of an allowed type is passed
    on unchanged.  Everything else is a string.
    """
    stripped = text.strip()
    literal = _PYTHON_LITERALS.get(stripped, stripped)
    value = _parsed(literal)
    if types.choices is not None:
        chosen = _chosen(text, literal, value, types.choices)
        if chosen is not None:
            return chosen
    if types.is_text:
        is_null = types.takes_null and stripped == "null"
        return stripped if is_null else json.dumps(text, ensure_ascii=False)
    if value is not _NO_JSON and (value.value is None or _is_allowed(value.value, types.names)):
        return value.source
    return json.dumps(text, ensure_ascii=False)


class _Parsed(NamedTuple):
    value: Any
    source: str  # the text, if it is JSON


_NO_JSON = _Parsed(None, "")
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


def _parsed(text: str) -> _Parsed:
    if len(text) > MAX_PARSED:
        return _NO_JSON
    try:
        return _Parsed(json.loads(text, parse_constant=_no_constant), text)
    except (ValueError, RecursionError):
        pass
    if not text.startswith(("{", "[")):
        return _NO_JSON
    # Accepts raw line breaks in strings.
    try:
        value = json.loads(text, parse_constant=_no_constant, strict=False)
    except (ValueError, RecursionError):
        return _NO_JSON
    return _Parsed(value, json.dumps(value))


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not valid JSON")


def _chosen(text: str, literal: str, value: _Parsed, choices: Iterable[Any]) -> str | None:
    """Return the listed value that a text spells, as JSON.  Strings take precedence."""
    for candidate in (text, text.strip()):
        if any(isinstance(choice, str) and choice == candidate for choice in choices):
            return json.dumps(candidate, ensure_ascii=False)
    if value is _NO_JSON:
        return None
    is_listed = any(
        type(choice) is type(value.value) and choice == value.value for choice in choices
    )
    return literal if is_listed else None


def _is_allowed(value: Any, names: frozenset[str] | None) -> bool:
    if names is None:
        return True
    if isinstance(value, float) and value.is_integer() and "integer" in names:
        return True
    name = _name_of(value)
    return name in names or (name == "integer" and "number" in names)


def _name_of(value: Any) -> str:
    return next(name for name, kinds in _PYTHON_TYPES if isinstance(value, kinds))


_PYTHON_TYPES: tuple[tuple[str, Any], ...] = (
    ("boolean", bool), ("integer", int), ("number", float), ("string", str),
    ("array", list), ("object", dict), ("null", object),
)  # fmt: skip
_ALL_VALUES = {"null": (None,), "boolean": (True, False)}
# Keywords that apply to values of one type.  A schema with such a keyword and without `type` means that type.
_IMPLIED = {
    "object": ("properties", "required", "additionalProperties", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
}


def _types(schema: object, root: Schema, depth: int) -> ValueTypes:
    """Return the types that all parts of a schema allow."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ValueTypes()
    given = cast("Schema", schema)
    found = ValueTypes()
    for part in _parts(given, root, depth):
        found = _both(found, part)
    if found.names is None:
        implied = {name for name, words in _IMPLIED.items() if any(word in given for word in words)}
        found = ValueTypes(frozenset(implied) or None, found.choices)
    return found


def _parts(schema: Schema, root: Schema, depth: int) -> Iterable[ValueTypes]:
    kind: Any = schema.get("type")
    if isinstance(kind, str):
        yield ValueTypes(frozenset({kind}), _ALL_VALUES.get(kind))
    elif isinstance(kind, list):
        yield ValueTypes(
            frozenset(filter(lambda each: isinstance(each, str), cast("list[Any]", kind)))
        )
    if "const" in schema:
        yield _listed([schema["const"]])
    if isinstance(listed := schema.get("enum"), list):
        yield _listed(cast("list[Any]", listed))
    if isinstance(reference := schema.get("$ref"), str):
        yield _types(resolved(reference, root), root, depth + 1)
    for part in _schemas(schema, "allOf"):
        yield _types(part, root, depth + 1)
    for word in ("anyOf", "oneOf"):
        if parts := _schemas(schema, word):
            yield _either([_types(part, root, depth + 1) for part in parts])


def _schemas(schema: Schema, word: str) -> list[Any]:
    parts: Any = schema.get(word)
    return cast("list[Any]", parts) if isinstance(parts, list) else []


def _listed(values: list[Any]) -> ValueTypes:
    return ValueTypes(frozenset(map(_name_of, values)), tuple(values))


def _both(one: ValueTypes, other: ValueTypes) -> ValueTypes:
    names = one.names if other.names is None else other.names
    if one.names is not None and other.names is not None:
        names = one.names & other.names
        if "integer" in one.names ^ other.names and "number" in one.names ^ other.names:
            names |= {"integer"}
    return ValueTypes(names, one.choices if other.choices is None else other.choices)


def _either(parts: list[ValueTypes]) -> ValueTypes:
    if any(part.names is None for part in parts):
        return ValueTypes()
    names = frozenset[str]().union(*(part.names or () for part in parts))
    if any(part.choices is None for part in parts):
        return ValueTypes(names)
    return ValueTypes(names, tuple(value for part in parts for value in part.choices or ()))


def resolved(reference: str, root: Schema) -> object:
    """Return the target of a reference into the same schema, or None if it does not exist.

    The path is a JSON pointer with its escapes.  References to other documents are not followed, so nothing is
    fetched.
    """
    if not reference.startswith("#"):
        return None
    found: object = root
    for name in filter(None, reference[1:].split("/")):
        found = _member(found, name.replace("~1", "/").replace("~0", "~"))
    return found


def _object_parts(schema: object, root: Schema, depth: int) -> Iterable[Schema]:
    """Yield the schemas that an object must match, its own last."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return
    given = cast("Schema", schema)
    if isinstance(reference := given.get("$ref"), str):
        yield from _object_parts(resolved(reference, root), root, depth + 1)
    for part in _schemas(given, "allOf"):
        yield from _object_parts(part, root, depth + 1)
    yield given


def _member(value: object, key: str) -> object:
    """Return a member of a JSON object, or None if the value is not an object or has no such member."""
    return cast("Schema", value).get(key) if isinstance(value, Mapping) else None
