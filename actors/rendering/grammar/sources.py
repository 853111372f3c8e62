"""Convert the constraints that a request sets on its output to a grammar in the form that `llguidance` reads.  Pure.

The constraints are schemas, regular expressions, choices, grammars and structural tags.  Structural tags are text in which marks
begin parts that must have a form.  They have two notations, `{"structures": …, "triggers": …}` and `{"format": …}`, a tree of
formats, and become a grammar in Lark.

Sizes and depths are checked before anything walks them; what the grammar means is checked when it is compiled.  The conversion runs
where grammars are tried, since the time of the converter of EBNF grows with the square of the number of rules.
"""

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import msgspec

from trouper.actors.rendering.grammar.matchers import NotAGrammarError
from trouper.actors.rendering.grammar.schemas import (
    DATA,
    MAX_WORK,
    NAMED,
    IsEmpty,
    flattened,
    rewritten,
    work_of,
)
from trouper.errors import GrammarError
from trouper.lark import WHITESPACE, Lark
from trouper.structured_outputs import MAX_SOURCE, StructuredOutputsParams

Fields = Mapping[str, Any]


class StructuralTagError(ValueError):
    """The description has not the form of its type."""


def structural_tag_lark(tag: Fields, read_grammar: Callable[[str], str]) -> str:
    """Return the grammar of a structural tag.

    Args:
        tag: its depth is bounded.
        read_grammar: turns a grammar inside it into Lark.

    Raises:
        StructuralTagError: it has not the form of its type.
    """
    writer = _Writer(read_grammar)
    if tag.get("format") is not None:
        return writer.lark.source(writer.write(_fields(tag, "format")))
    structures = [
        {"begin": each.get("begin"), "end": each.get("end"), "content": {"type": "json_schema", "json_schema": each.get("schema")}}
        for each in _list_of_fields(tag, "structures")
    ]  # fmt: skip
    given = {"triggers": tag.get("triggers"), "tags": structures}
    return writer.lark.source(writer.triggered_tags(given))


class _Writer:
    """Writes the rules of one tag."""

    def __init__(self, read_grammar: Callable[[str], str]) -> None:
        self.lark = Lark({})
        self._read_grammar = read_grammar

    def write(self, given: Fields) -> str:
        """Write a format and return the expression that matches it."""
        lark = self.lark
        writers: Mapping[str, Callable[[], str]] = {
            "const_string": lambda: lark.literal(_text(given, "value")),
            "json_schema": lambda: lark.json(_fields(given, "json_schema")),
            "regex": lambda: lark.regex(_text(given, "pattern")),
            "grammar": lambda: lark.grammar(self._read_grammar(_text(given, "grammar"))),
            "any_text": lark.text,
            "sequence": lambda: lark.rule(" ".join(self._elements(given))),
            "or": lambda: lark.one_of(self._elements(given)),
            "tag": lambda: self._tag(given),
            "triggered_tags": lambda: self.triggered_tags(given),
            "tags_with_separator": lambda: self._tags_with_separator(given),
        }
        kind = given.get("type")
        if not isinstance(kind, str) or kind not in writers:
            raise StructuralTagError(f"there is no format of the type {str(kind)[:64]!r}")
        return writers[kind]()

    def _elements(self, given: Fields) -> list[str]:
        return [self.write(element) for element in _list_of_fields(given, "elements")]

    def _tag(self, tag: Fields, trigger: str = "") -> str:
        """Write a tag behind the trigger that begins it."""
        content, end = _fields(tag, "content"), _text(tag, "end")
        begin = self.lark.literal(_text(tag, "begin")[len(trigger) :])
        if content.get("type") == "any_text" and end:
            return self.lark.rule(f"{begin} {self.lark.text_before(end)}")
        return self.lark.rule(f"{begin} {self.write(content)} {self.lark.literal(end)}")

    def triggered_tags(self, given: Fields) -> str:
        """Write any text in which each trigger begins one of its tags."""
        triggers, tags = _texts(given, "triggers"), _list_of_fields(given, "tags")
        found: dict[str, list[str]] = {}
        for tag in tags:
            begin = _text(tag, "begin")
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise StructuralTagError(f"no trigger begins {begin[:64]!r}")
            found.setdefault(trigger, []).append(self._tag(tag, trigger))
        lark = self.lark
        calls = [
            lark.rule(f"{lark.text_before(trigger)} {lark.one_of(tags)}")
            for trigger, tags in found.items()
        ]
        call, text = lark.one_of(calls), lark.text()
        if given.get("stop_after_first"):
            return call if given.get("at_least_one") else lark.rule(f"{call} | {text}")
        return f"{call}{'+' if given.get('at_least_one') else '*'} {text}"

    def _tags_with_separator(self, given: Fields) -> str:
        lark = self.lark
        tag = lark.one_of([*map(self._tag, _list_of_fields(given, "tags"))])
        separator = lark.literal(_text(given, "separator"))
        many = tag if given.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return many if given.get("at_least_one") else f"({many})?"


def _text(given: Fields, name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise StructuralTagError(f"{name} must be text")
    return value


def _fields(given: Fields, name: str) -> Fields:
    value = given.get(name)
    if not isinstance(value, dict):
        raise StructuralTagError(f"{name} must be an object")
    return cast("Fields", value)


def _list_of_fields(given: Fields, name: str) -> Sequence[Fields]:
    value = given.get(name)
    each = cast("list[Any]", value) if isinstance(value, list) else []
    if not each or not all(isinstance(item, dict) for item in each):
        raise StructuralTagError(f"{name} must be a list of objects")
    return each


def _texts(given: Fields, name: str) -> Sequence[str]:
    value = given.get(name)
    each = cast("list[Any]", value) if isinstance(value, list) else []
    if not each or not all(isinstance(item, str) and item for item in each):
        raise StructuralTagError(f"{name} must be a list of texts")
    return each


MAX_DEPTH = 64  # of a schema
MAX_TAG_DEPTH = 80  # of a structural tag, which holds schemas
INVALID_SCHEMA, INVALID_GRAMMAR, TOO_COMPLEX = (
    "invalid_schema",
    "invalid_grammar",
    "schema_too_complex",
)
SCHEMA_KINDS = frozenset({"json", "json_object"})
_EBNF = re.compile(
    r"^[^\S\n]*[\w-]+\s*::=", re.MULTILINE
)  # a rule; in Lark it may stand in a schema's texts
_JSON_RULE = re.compile(r"%json\s*(?={)")  # in Lark, with a schema behind it
_CODE_POINT = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)")
_decoder = json.JSONDecoder()


def grammar_source(params: StructuredOutputsParams, is_empty: IsEmpty | None = None) -> str:
    """Return the grammar as text.

    Args:
        is_empty: returns whether a pattern matches nothing except some names.

    Raises:
        GrammarError: it is too large or too deep, or has not the form of its kind.
    """
    match params.kind:
        case "json":
            return _json_source(_schema(params.json, params, is_empty), params)
        case "json_object":
            return _json_source({"type": "object"}, params)
        case "regex":
            return _tagged("regex", flattened(_checked_size(params.regex or "", "regex")))
        case "choice":
            return _choice_source(params.choice or [])
        case "grammar":
            return _tagged("lark", _lark(_checked_size(params.grammar or "", "grammar"), is_empty))
        case _:
            return _structural_tag_source(params, is_empty)


def failure(message: str, kind: str) -> GrammarError:
    """Make the error of a grammar that the compiler has refused.

    The code follows from the compiler's message: too complex, or invalid as a schema or grammar.
    """
    lines = message.strip() or "it cannot be compiled"
    if any(
        word in lines.lower()
        for word in ("too big", "too large", "too many", "too complex", "limit")
    ):
        return refused(kind, f"too complex: {lines}", TOO_COMPLEX)
    return refused(kind, lines, INVALID_SCHEMA if kind in SCHEMA_KINDS else INVALID_GRAMMAR)


@contextmanager
def typed_failures(kind: str) -> Generator[None]:
    """Convert the compiler's exceptions in a `with` block to the error of the request.

    `kind` is the field that contained the grammar, and is named in the error.
    """
    try:
        yield
    except UnicodeError:
        raise failure("not valid Unicode (a lone surrogate)", kind) from None
    except NotAGrammarError as error:
        raise failure(str(error), kind) from None
    except RecursionError:
        raise refused(kind, "nested too deep", TOO_COMPLEX) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the library: no Exception
            raise
        raise failure("the compiler failed", kind) from error  # noqa: ASYNC104  # a panic


def refused(kind: str, reason: str, code: str) -> GrammarError:
    """Make the error of a grammar of this kind.

    Its parameter is `structured_outputs`, and the message names the member, for example `structured_outputs.json`.
    `code` distinguishes invalid grammars from too complex ones.
    """
    text = f"structured_outputs.{kind}: {reason}"
    return GrammarError(text, parameter="structured_outputs", code=code)


def check_work(schema: Any, kind: str) -> None:
    """Refuse schemas that the compiler would work at for seconds: it counts its steps, but not these."""
    work = work_of(schema)
    if work > MAX_WORK:
        reason = f"too complex: properties and multipleOf cost {work:.1e} steps; at most {MAX_WORK:.1e} may be"
        raise refused(kind, reason, TOO_COMPLEX)


def _json_source(schema: dict[str, Any], params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    try:
        return LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides=cast("Any", options)
        )
    except ValueError as error:
        raise failure(str(error), "json") from None


def _schema(
    given: Any, params: StructuredOutputsParams, is_empty: IsEmpty | None
) -> dict[str, Any]:
    """Read a schema within the limits of length and depth."""
    schema = _object(given, "json", INVALID_SCHEMA, MAX_DEPTH)
    check_work(schema, "json")
    # What the compiler is told in a schema would lift the bounds on whitespace.
    schema = {name: value for name, value in schema.items() if name != "x-guidance"}
    if params.disable_additional_properties:
        schema = _closed(schema)
    return rewritten(schema, is_empty)


def _object(given: Any, kind: str, code: str, max_depth: int) -> dict[str, Any]:
    if isinstance(given, str):
        text = _checked_size(given, kind)
        if _text_depth(text) > max_depth:
            raise refused(kind, f"nested deeper than {max_depth}", TOO_COMPLEX)
        try:
            given = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise refused(kind, f"not valid JSON: {error}", code) from None
    elif _depth(given, max_depth) > max_depth:
        raise refused(kind, f"nested deeper than {max_depth}", TOO_COMPLEX)
    if not isinstance(given, dict):
        raise refused(kind, "must be a JSON object", code)
    try:
        text = json.dumps(given)
    except (TypeError, ValueError) as error:
        raise refused(kind, f"not valid JSON: {error}", code) from None
    _checked_size(text, kind)
    return cast("dict[str, Any]", given)


def _checked_size(text: str, kind: str) -> str:
    if len(text) > MAX_SOURCE:
        raise refused(kind, f"{len(text)} characters; at most {MAX_SOURCE} may be", TOO_COMPLEX)
    return text


def _text_depth(text: str) -> int:
    """Return the nesting of a JSON text; brackets inside strings count too, but for those of one."""
    depth = deepest = 0
    in_string = is_escaped = False
    for character in text:
        if in_string:
            in_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            in_string = True
        elif character in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "}]":
            depth -= 1
    return deepest


def _depth(value: Any, limit: int) -> int:
    """Return the nesting of a value, or more than `limit` as soon as it is deeper."""
    level, depth = [value], 0
    while level and depth <= limit:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += cast("dict[Any, Any]", item).values()
            elif isinstance(item, list | tuple):
                inner += cast("list[Any]", item)
        if inner or any(isinstance(item, dict | list | tuple) for item in level):
            depth += 1
        level = inner
        if len(level) > MAX_SOURCE:
            return limit + 1
    return depth


def _closed(schema: Any, *, is_schema: bool = True) -> Any:
    """Forbid unnamed properties in each object of a schema that names some."""
    if isinstance(schema, list):
        return [_closed(item) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    given = cast("dict[str, Any]", schema)
    found = {
        name: value
        if is_schema and name in DATA
        else _closed(value, is_schema=not (is_schema and name in NAMED))
        for name, value in given.items()
    }
    if is_schema and "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


def _tagged(name: str, source: str) -> str:
    from llguidance import LLMatcher

    if name == "regex":
        return LLMatcher.grammar_from_regex(source)
    return LLMatcher.grammar_from_lark(source)


def _choice_source(choice: list[str]) -> str:
    """Return a grammar of one terminal: as rules, more than 2,000 texts would be too many for a row of the parser."""
    texts = [json.dumps(text, ensure_ascii=False) for text in choice]
    lark = "start: CHOICE\nCHOICE: " + " | ".join(texts)
    return _tagged("lark", _checked_size(lark, "choice"))


def _structural_tag_source(params: StructuredOutputsParams, is_empty: IsEmpty | None) -> str:
    kind, code = "structural_tag", INVALID_GRAMMAR
    tag = _object(params.structural_tag, kind, code, MAX_TAG_DEPTH)
    check_work(tag, kind)
    try:
        return _tagged(
            "lark", _checked_size(_lark(structural_tag_lark(tag, _lark), is_empty), kind)
        )
    except StructuralTagError as error:
        raise refused(kind, str(error), code) from None


def _lark(text: str, is_empty: IsEmpty | None = None) -> str:
    """Return a grammar in Lark, which may be given as EBNF; schemas in it are rewritten."""
    text = _with_schemas(text, is_empty)
    if not _EBNF.search(text):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_CODE_POINT.sub(_character, text))
    except Exception as error:  # the converter raises nearly anything for what it cannot read
        raise refused("grammar", f"no EBNF: {error}", INVALID_GRAMMAR) from None


def _character(found: re.Match[str]) -> str:
    r"""Return the character of an escape such as `\u00e9`, which the converter reads wrongly."""
    digits = found[1] or found[2]
    if digits is None:  # another escape, such as that of a backslash
        return found[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise refused("grammar", f"{found[0]} is no character", INVALID_GRAMMAR)
    return chr(code) if code > 0x7F else f"\\x{code:02x}"


def _with_schemas(text: str, is_empty: IsEmpty | None) -> str:
    """Rewrite the schemas in a grammar."""
    pieces: list[str] = []
    start = 0
    for found in _JSON_RULE.finditer(text):
        if found.end() < start:  # in the texts of a schema
            continue
        try:
            schema, end = _decoder.raw_decode(text, found.end())
        except json.JSONDecodeError:
            continue  # the compiler says what is wrong with it
        check_work(schema, "grammar")
        pieces += [text[start : found.end()], json.dumps(rewritten(schema, is_empty))]
        start = end
    return "".join([*pieces, text[start:]])
