"""Prompts out of files, whatever a line holds, and the files of their results."""

import io
import json

import numpy as np
import pyarrow.parquet
import pytest
import typer

from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.cli.batch import prompts, results
from trouper.frontends.cli.batch.prompts import PromptFileOptions, PromptSource, bounded_lines
from trouper.frontends.cli.batch.results import check_output, results_file

COLUMNS = {"line": "int", "text": "text", "embed": "vector", "error": "text"}


@pytest.fixture
def read(tmp_path):
    """(line, text or error) of each prompt of a file with this name and content."""

    def read(name, content, **options):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        given = PromptSource(None, PromptFileOptions(prompt_file=str(path), **options), "TEXT")
        with given:
            num = given.count()
            found = [(prompt.line, prompt.text or f"! {prompt.error}") for prompt in given]
        assert num == len(found)
        return found

    return read


def test_lines_are_prompts(read):
    assert read("a.txt", "\ufeffone\r\n\n  \n two \nlast") == [
        (1, "one"),
        (4, " two "),
        (5, "last"),
    ]
    assert read("noname", "a\x0bb\u2028c\n") == [(1, "a\x0bb\u2028c")]


def test_line_no_text_is_error_in_its_place(read):
    assert read("a.txt", b"one\n\xff\xfe\nthree\n") == [
        (1, "one"), (2, "! not text in UTF-8"), (3, "three"),
    ]  # fmt: skip


JSON_LINES = [
    ('"one"', "one"),
    ('{"prompt": "two", "text": "x"}', "two"),
    ('{"text": "three"}', "three"),
    ('{"input": "four"}', "four"),
    ('{"other": "x"}', "! the object has no field 'prompt'"),
    ('{"prompt": 5}', "! the field 'prompt' is not a string"),
    ("5", "! the line is not a string"),
    ("{", "! not valid JSON"),
    ('"\\ud800"', "! not text in UTF-8"),
    ('""', "! the prompt is empty"),
    ("[" * 10**5, "! not valid JSON"),
    ('"last"', "last"),
]


def test_json_lines_are_prompts(read):
    found = read("a.jsonl", "".join(f"{line}\n" for line, _ in JSON_LINES))
    assert [number for number, _ in found] == list(range(1, len(JSON_LINES) + 1))
    for (_, text), (_, wanted) in zip(found, JSON_LINES, strict=True):
        assert text.startswith(wanted)


def test_a_field_is_named(read):
    lines = '{"body": "one", "text": "x"}\n"two"\n{"text": "x"}\n'
    assert [text for _, text in read("a.ndjson", lines, column="body")] == [
        "one", "! the line is not an object, so it has no field 'body'", "! the object has no field 'body'",
    ]  # fmt: skip


def test_rows_are_prompts(read):
    rows = 'id,text\n1,"one\nand ""more"""\n2,two\n\n3\n4,\n5,"a, b"\n'
    assert read("a.csv", rows) == [
        (2, 'one\nand "more"'), (4, "two"), (6, "! the row has no column 'text'"),
        (7, "! the prompt is empty"), (8, "a, b"),
    ]  # fmt: skip
    assert read("a.csv", "id;a\n1;one, two\n", column="a") == [(2, "one, two")]
    assert read("a.tsv", "id\tprompt\n1\tone\n") == [(2, "one")]
    assert read("a.csv", "anything\none\n") == [(2, "one")]
    assert read("noname", "text\none\n", input_format="csv") == [(2, "one")]


def test_quote_that_is_never_closed_swallows_one_line(read):
    found = read(
        "a.csv", 'text,n\none,1\n"two,2\nthree,3\n"four\nand",4\n"five"x,5\nsix,6\n"seven,7\n'
    )
    assert [(number, text.split(":")[0]) for number, text in found] == [
        (2, "one"), (3, "! not valid CSV"), (4, "three"), (5, "four\nand"), (7, "! not valid CSV"), (8, "six"),
        (9, "! not valid CSV"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        (
            "a.csv",
            "a,b\n1,2\n",
            {},
            "no column prompt or text or input or document; the file has: a, b",
        ),
        ("a.csv", "a,b\n1,2\n", {"column": "c"}, "no column c; the file has: a, b"),
        ("a.csv", '"a\n', {}, "the header is not valid CSV"),
        ("a.csv", "a\n", {}, "no prompt in"),
        ("a.csv", "", {}, "no prompt in"),
        ("a.txt", "\n \n", {}, "no prompt in"),
        ("a.txt", "x", {"column": "a"}, "has no columns"),
        ("a.json", "[]", {}, "cannot read .json files"),
        ("a.parquet", "PAR1", {}, "--input-format"),
    ],
)
def test_file_that_does_not_fit_is_mistake(read, name, content, options, message):
    with pytest.raises(typer.BadParameter) as caught:
        read(name, content, **options)
    assert message in str(caught.value)


def test_options_of_a_file_need_one():
    for option in ({"column": "a"}, {"input_format": "csv"}):
        with pytest.raises(typer.BadParameter, match="needs --prompt-file"):
            PromptSource(["x"], PromptFileOptions(**option), "TEXT")


def test_a_pipe_is_read_as_it_comes(monkeypatch):
    lines = iter(["one\n", "two\n", "three\n"])

    class Pipe(io.StringIO):
        num_read = 0

        def readline(self, limit=-1):
            Pipe.num_read += 1
            return next(lines, "")

    monkeypatch.setattr("sys.stdin", Pipe())
    with PromptSource(None, PromptFileOptions(prompt_file="-"), "TEXT") as given:
        assert (given.count(), given.is_single, Pipe.num_read) == (None, False, 2)
        assert [prompt.label for prompt in given] == ["line 1", "line 2", "line 3"]


def test_a_line_that_never_ends_is_cut(monkeypatch, read):
    monkeypatch.setattr(prompts, "MAX_LINE", 8)
    assert list(bounded_lines(io.StringIO("a" * 30 + "\nb\n"))) == ["a" * 8, "b\n"]
    assert read("a.txt", "a" * 30 + "\nb\n") == [
        (1, "! the line has 8 characters or more"),
        (2, "b"),
    ]


def write(path, *records, columns=COLUMNS):
    check_output(str(path), columns)
    with results_file(str(path), columns) as file:
        for record in records:
            file.write(record)


ROW = np.arange(3, dtype=np.float32)
RECORDS = [
    {"line": 1, "text": "a", "error": "too long"},
    {"line": 2, "text": "b", "embed": ROW},
    {"line": 3, "text": None, "error": "empty"},
    {"line": 4, "text": "d", "embed": 2 * ROW},
]


def test_results_are_array_with_row_for_each_prompt(tmp_path):
    write(tmp_path / "a.npy", *RECORDS)
    found = np.load(tmp_path / "a.npy")
    assert found.dtype == np.float32
    assert np.isnan(found).all(axis=1).tolist() == [True, False, True, False]
    assert (found[[1, 3]] == [ROW, 2 * ROW]).all()
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]


@pytest.mark.parametrize(("num", "shape"), [(0, (0, 0)), (2, (2, 0))])
def test_an_array_without_results_is_empty(tmp_path, num, shape):
    write(tmp_path / "a.npy", *[{"error": "x"}] * num)
    assert np.load(tmp_path / "a.npy").shape == shape


def test_scores_are_an_array_of_one_dimension(tmp_path):
    columns = {"score": "score", "error": "text"}
    write(tmp_path / "a.npy", {"score": 0.5}, {"error": "x"}, columns=columns)
    found = np.load(tmp_path / "a.npy")
    assert found[0] == 0.5
    assert np.isnan(found[1])


def test_results_are_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROWS_PER_GROUP", 3)
    write(tmp_path / "a.parquet", *RECORDS)
    rows = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["line"] for row in rows] == [1, 2, 3, 4]
    assert [row["error"] for row in rows] == ["too long", None, "empty", None]
    assert [row["embed"] for row in rows] == [None, [0, 1, 2], None, [0, 2, 4]]


def test_results_are_lines(tmp_path):
    write(tmp_path / "a.jsonl", *RECORDS)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {"line": 2, "text": "b", "embed": [0, 1, 2]}
    assert len(lines) == 4


@pytest.mark.parametrize("name", ["a.jsonl", "a.npy", "a.parquet"])
def test_interrupted_run_leaves_file_that_can_be_read(tmp_path, capsys, name):
    (tmp_path / name).write_text("old")
    with pytest.raises(KeyboardInterrupt), results_file(str(tmp_path / name), COLUMNS) as file:
        file.write(RECORDS[1])
        raise KeyboardInterrupt
    assert (tmp_path / name).read_text() == "old"
    (part,) = tmp_path.glob("*.part")
    assert f"the results so far are in {part}" in capsys.readouterr().err
    if name == "a.npy":
        assert (np.load(part) == [ROW]).all()
    elif name == "a.parquet":
        assert pyarrow.parquet.read_table(part).num_rows == 1


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        ("a.txt", COLUMNS, "must end in .jsonl, .npy, .parquet"),
        ("a", COLUMNS, "must end in"),
        ("a.npy", {"embed": "matrix"}, "not an array of numbers"),
    ],
)
def test_output_that_does_not_fit_is_mistake(tmp_path, name, columns, message):
    with pytest.raises(TrouperValidationError, match=message):
        check_output(str(tmp_path / name), columns)


def test_the_input_is_no_output(tmp_path):
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    with pytest.raises(TrouperValidationError, match="is the input file"):
        check_output(str(tmp_path / "b.jsonl"), COLUMNS, str(tmp_path / "a.jsonl"))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedFeatureError, match=r"needs pyarrow: .*install"):
        check_output(str(tmp_path / "a.parquet"), COLUMNS)


def test_output_that_cannot_be_written_is_mistake(tmp_path):
    with pytest.raises(TrouperValidationError, match="cannot be written: No such"):
        write(tmp_path / "nowhere" / "a.npy")
