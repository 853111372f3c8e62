"""Structural tags -> a grammar in Lark: text in which marks begin parts that must have a form.  Pure.

There are two forms: `{"structures": …, "triggers": …}`, and `{"format": …}`, a tree of formats.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from trouper.lark import Lark

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
