"""Answers in each dialect give the events of the golden files, however they are cut into pieces."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.frontends.dialects import calls
from trouper.frontends.dialects.core import AnswerParser
from trouper.frontends.dialects.table import BY_NAME, DIALECTS, detect
from trouper.frontends.dialects.value_types import ValueTypes, as_json

TOOLS = {
    "f": {
        "properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array"}}
    },
    "g": {},
}
PAGE = Path(__file__).parents[2] / "docs" / "tools.md"
GOLDEN = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "golden").glob("*.json"))
}
CASES = [
    pytest.param(name, row["answer"], row["events"], row.get("is_cut", False), id=f"{name}-{i}")
    for name, rows in GOLDEN.items()
    for i, row in enumerate(rows)
]


def plain(event):
    return [type(event).__name__, *(getattr(event, name) for name in event.__struct_fields__)]


def parse(name, pieces, *, is_cut=False, **options):
    dialect, merged = BY_NAME[name], calls.EventList()
    parser = AnswerParser(dialect, TOOLS, reasoning=dialect.reasoning, **options)
    for piece in pieces:
        for event in parser.feed(piece):
            merged.add(event)
    for event in parser.end(is_cut=is_cut):
        merged.add(event)
    return [plain(event) for event in merged.take()]


def test_every_dialect_has_a_golden_file():
    assert set(GOLDEN) == {dialect.name for dialect in DIALECTS}


@pytest.mark.parametrize(("name", "answer", "expected", "is_cut"), CASES)
def test_answer_gives_its_events_whole_and_in_every_split(name, answer, expected, is_cut):
    assert parse(name, [answer], is_cut=is_cut) == expected
    assert parse(name, list(answer), is_cut=is_cut) == expected
    for i in range(len(answer)):
        assert parse(name, [answer[:i], answer[i:]], is_cut=is_cut) == expected


@given(st.data())
def test_answer_in_drawn_pieces_gives_same_events(data):
    name, answer, expected, is_cut = data.draw(st.sampled_from([case.values for case in CASES]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)))))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert parse(name, pieces, is_cut=is_cut) == expected


@given(
    st.sampled_from(sorted(GOLDEN)),
    st.lists(
        st.sampled_from(
            [
                *{mark for dialect in DIALECTS for mark in (*dialect.section, *dialect.call)},
                *"{}[]()\",=:\\\n '",
                "<",
                "name",
                "arguments",
                '"f"',
                "f",
                "\\ud800",
                "<function=",
                "<parameter=",
                "</think>",
                "<think>",
                "<|message|>",
                "```json",
                "call:",
                "1",
            ]
        )
    ),
)
def test_hostile_answers_raise_nothing_and_do_not_depend_on_cuts(name, pieces):
    whole = parse(name, ["".join(pieces)])
    assert parse(name, pieces) == whole
    json.dumps(whole, ensure_ascii=False).encode()


@given(st.sampled_from(sorted(set(GOLDEN) - {"openai"})), st.text(st.sampled_from("ab {[<`.\n")))
def test_answer_without_marks_is_content_and_nothing_is_lost(name, text):
    found = parse(name, [f"x{text}"])
    assert found == [["Content", f"x{text}"]]


def test_without_tools_marks_are_text():
    parser = AnswerParser(BY_NAME["hermes"])
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert [*parser.feed(text), *parser.end()] == [calls.Content(text)]


def test_an_answer_may_begin_inside_the_reasoning():
    found = parse("hermes", ["hm</think>", "\n\nyes"], begins_in_reasoning=True)
    assert found == [["Reasoning", "hm"], ["Content", "yes"]]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_template_with_marks_is_of_dialect(dialect):
    if dialect.marks:
        template = "".join(dialect.marks) + (dialect.tags.key if dialect.tags else "")
        assert detect(template) is dialect
    else:
        assert detect("{{ messages }}").name == "json"


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("1", "integer", "1"), ("1", "string", '"1"'), ("x", "integer", '"x"'), ("True", None, "true"),
        ("true", "integer", '"true"'), ("None", "string", '"None"'), ("NaN", "number", '"NaN"'),
        ("[1]", "array", "[1]"), ("{", "object", '"{"'), ("null", "object", "null"), ("1.5", "number", "1.5"),
    ],
)  # fmt: skip
def test_a_bare_value_becomes_json_of_its_type(text, kind, expected):
    types = ValueTypes() if kind is None else ValueTypes(frozenset({kind}))
    assert as_json(text, types) == expected


def test_page_names_every_dialect_as_option_takes_it():
    (listed,) = re.findall(r"parser names as aliases: ([^.]*)\. To add a dialect", PAGE.read_text())
    names = re.sub(r"\([^)]*\)", "", listed).replace("\n", " ").split(",")
    assert sorted(name.strip() for name in names) == sorted(d.name for d in DIALECTS)
