"""Read prompts from the command line, a file (text, JSON lines or CSV) or a pipe.

A file may be larger than memory, so it is read as needed. An invalid line yields an item with an error instead of ending
the run, because one bad text must not cost the results of 9,999 others.
"""

import codecs
import csv
import io
import json
import os
import re
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TextIO, cast

import typer

from trouper.errors import TrouperValidationError
from trouper.frontends.cli import output

# In characters; no model has such a long context.
MAX_LINE = 32 * 2**20
# The columns to try without --column.
COLUMNS = ("prompt", "text", "input", "document")
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv"}
NOT_LINES = (
    ".json",
    ".parquet",
    ".npy",
    ".npz",
    ".xlsx",
    ".xls",
    ".gz",
    ".zip",
    ".zst",
    ".xz",
    ".bz2",
)
DELIMITERS = ",;\t"
SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass
class PromptFileOptions:
    """Options for a file of prompts.

    Several commands accept the same files, from plain text to tables, and determine the format by the file's name.
    """

    prompt_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="File with one text in each line, row or JSON line; - is stdin."
        ),
    ] = None
    input_format: Annotated[
        Literal["txt", "jsonl", "csv"] | None,
        typer.Option(help="Format of the file; by default that of its name, and txt for stdin."),
    ] = None
    column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Column of a csv file or field of a jsonl file; by default prompt, text, input or document.",
        ),
    ] = None


class Prompt(NamedTuple):
    """One text, or the error of a line without a valid text; `label` is for example `line 3` or `prompt 2`.

    Invalid lines stay in the sequence, so that the results have one record for each line.
    """

    label: str
    line: int | None = None
    text: str | None = None
    error: str | None = None
    # The file of an image; the text is then its path.
    image: Path | None = None

    def place(self) -> dict[str, Any]:
        """Return the number of the line as a field of the record; empty for arguments."""
        return {} if self.line is None else {"line": self.line}


class PromptSource:
    """The prompts of a command: iterate over them once, inside a `with` block that opens and closes the file."""

    def __init__(
        self,
        texts: list[str] | None,
        options: PromptFileOptions,
        what: str,
        images: Sequence[Path] = (),
    ) -> None:
        """Check the arguments; without arguments and file, read all of stdin as one prompt.

        Args:
            texts: prompts given as arguments.
            what: name of the argument, for errors.
            images: image files to embed after the texts.

        Raises:
            typer.BadParameter: there is no prompt, or an option does not apply to the file.
            TrouperValidationError: an argument is empty.
        """
        self._stack = ExitStack()
        self._options = options
        self._texts, self.images = list(texts or ()), tuple(images)
        if options.prompt_file is None:
            self._refuse_file_options()
            if not self._texts and not images:
                self._texts = [_whole_stdin(what)]
        else:
            # Raises an error for unsuitable options.
            input_format(options)
        if not all(self._texts):
            raise TrouperValidationError("the prompt is empty", parameter="prompt")
        self._items: Iterator[Prompt] = iter(())
        self._first: list[Prompt] = []

    def __enter__(self) -> Self:
        """Open the file and read the first prompts, so that a wrong file is reported before a model is loaded.

        Raises:
            typer.BadParameter: the file has no prompt, or lacks the column.
            TrouperValidationError: the file cannot be read.
        """
        try:
            self._items = self._read(self._open())
            self._first = list(islice(self._items, 2))
            if not self._first:
                message = f"no prompt in {self._options.prompt_file}"
                raise typer.BadParameter(message, param_hint="--prompt-file")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[Prompt]:
        first, self._first = self._first, []
        return chain(first, self._items)

    @property
    def is_single(self) -> bool:
        """Whether there is only one prompt; valid before the iteration."""
        return len(self._first) == 1

    @property
    def is_from_file(self) -> bool:
        return self._options.prompt_file is not None

    @property
    def is_pipe(self) -> bool:
        """Whether the prompts come from a pipe, which can be read only once and may be slow.

        Its prompts are not counted in advance, and the progress bar has no total.
        """
        name = self._options.prompt_file
        return name is not None and (name == "-" or not stat.S_ISREG(os.stat(name).st_mode))

    def count(self) -> int | None:
        """Return the number of prompts for a progress bar, or None for a pipe.

        This reads the whole file once more, which is cheap relative to the computation.
        """
        name = self._options.prompt_file
        if self.is_pipe:
            return None
        if name is None:
            return len(self._texts) + len(self.images)
        with ExitStack() as stack:
            file = stack.enter_context(_opened(name))
            return sum(1 for _ in self._read(file))

    def _refuse_file_options(self) -> None:
        for option in ("input_format", "column"):
            if getattr(self._options, option) is not None:
                name = f"--{option.replace('_', '-')}"
                raise typer.BadParameter("needs --prompt-file", param_hint=name)

    def _open(self) -> TextIO | None:
        name = self._options.prompt_file
        if name is None:
            return None
        return text_stdin() if name == "-" else self._stack.enter_context(_opened(name))

    def _read(self, file: TextIO | None) -> Iterator[Prompt]:
        for number, text in enumerate(self._texts, 1):
            yield Prompt(f"prompt {number}", None, text)
        if file is not None:
            format, column = input_format(self._options), self._options.column
            for number, text, error in READERS[format](bounded_lines(file), column):
                yield _checked(Prompt(f"line {number}", number, text, error))
        for path in self.images:
            yield Prompt(f"image {path}", None, str(path), image=path)


# The number of a line, and its text or its error.
Found = tuple[int, str | None, str | None]


def input_format(options: PromptFileOptions) -> str:
    """Return the format of a file, from the option or its name.

    Raises typer.BadParameter if the file has no lines, or --column does not apply.
    """
    suffix = Path(options.prompt_file or "").suffix.lower()
    if options.input_format is None and suffix in NOT_LINES:
        known = "use a text file, .jsonl or .csv, or set the format with --input-format"
        message = f"cannot read {suffix} files: {known}"
        raise typer.BadParameter(message, param_hint="--prompt-file")
    found = options.input_format or FORMATS.get(suffix, "txt")
    if found == "txt" and options.column is not None:
        raise typer.BadParameter("a text file has no columns", param_hint="--column")
    return found


def bounded_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file with their line ends; overlong lines are cut to `MAX_LINE` characters.

    A file without line ends would otherwise be read into memory as a whole.  A byte order mark is removed.
    """
    is_first = True
    while line := file.readline(MAX_LINE):
        rest = line
        while len(rest) == MAX_LINE and not rest.endswith("\n"):
            rest = file.readline(MAX_LINE)
        yield line.removeprefix("\ufeff") if is_first else line
        is_first = False


def txt_prompts(lines: Iterable[str], column: str | None) -> Iterator[Found]:
    """Yield a prompt for each nonempty line."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield (number, *_whole(line, line.rstrip("\r\n")))


def jsonl_prompts(lines: Iterable[str], column: str | None) -> Iterator[Found]:
    """Yield a prompt for each line of JSON: a string, or an object with a field for the text.

    Blank lines are skipped.  A line that is not valid yields its error instead of a text, and reading continues.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text, error = _whole(line, line)
        if text is not None:
            text, error = _json_text(text, column)
        yield number, text, error


def csv_prompts(lines: Iterable[str], column: str | None) -> Iterator[Found]:
    """Yield a prompt for each row after the header; quoted fields may have several lines.

    Raises:
        typer.BadParameter: the header is not CSV or lacks the column.
    """
    feed = _RecordLines(lines)
    header_line = next(feed, "")
    if not header_line.strip():
        return
    # In many countries spreadsheets separate columns by semicolons.
    delimiter = max(DELIMITERS, key=header_line.count)
    csv.field_size_limit(MAX_LINE - 1)
    feed.give_back(0)
    rows = csv.reader(feed, delimiter=delimiter, strict=True)
    try:
        header = next(rows)
    except csv.Error as error:
        message = f"the header is not valid CSV: {error}"
        raise typer.BadParameter(message, param_hint="--prompt-file") from None
    index = _column_index(header, column)
    while True:
        number = feed.begin()
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            # An unclosed quote would make the rest of the file one field, so continue at the next line.
            feed.give_back(1)
            yield number, None, f"not valid CSV: {error}"
            continue
        if len(row) > index:
            yield number, row[index], None
        elif row:
            yield number, None, f"the row has no column {header[index]!r}"


class _RecordLines:
    """The lines of a CSV file for `csv.reader`; those of the current record can be read again.

    Memory holds one record: at most `MAX_LINE` characters, the limit of a field, and one more line.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        self._again: deque[str] = deque()
        self._record: list[str] = []
        self._number = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._lines)
        self._number += 1
        self._record.append(line)
        return line

    def begin(self) -> int:
        """Begin a record and return the number of its first line."""
        self._record.clear()
        return self._number + 1

    def give_back(self, num_kept: int) -> None:
        """Return the lines of the current record, except the first `num_kept`, to the input."""
        lines = self._record[num_kept:]
        self._again.extendleft(reversed(lines))
        self._number -= len(lines)
        self._record.clear()


READERS: dict[str, Callable[[Iterable[str], str | None], Iterator[Found]]] = {
    "txt": txt_prompts,
    "jsonl": jsonl_prompts,
    "csv": csv_prompts,
}


def _whole(line: str, text: str) -> tuple[str | None, str | None]:
    if len(line) < MAX_LINE:
        return text, None
    return None, f"the line has {MAX_LINE} characters or more"


def _json_text(line: str, column: str | None) -> tuple[str | None, str | None]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, f"not valid JSON: {error}"
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        names = COLUMNS if column is None else (column,)
        name = next((name for name in names if name in fields), None)
        if name is None:
            hint = "; choose another with --column" if column is None else ""
            return None, f"the object has no field {' or '.join(map(repr, names))}{hint}"
        value, where = fields[name], f"the field {name!r}"
    elif column is not None:
        return None, f"the line is not an object, so it has no field {column!r}"
    else:
        where = "the line"
    return (value, None) if isinstance(value, str) else (None, f"{where} is not a string")


def _column_index(header: list[str], column: str | None) -> int:
    names = [name.strip() for name in header]
    usual = tuple(names) if len(names) == 1 else COLUMNS
    wanted = usual if column is None else (column,)
    for name in wanted:
        if name in names:
            return names.index(name)
    message = f"no column {' or '.join(wanted)}; the file has: {', '.join(names)}"
    raise typer.BadParameter(message, param_hint="--column")


def _checked(prompt: Prompt) -> Prompt:
    """Return the prompt, or an error in its place if its text is empty or not UTF-8."""
    if prompt.text is None:
        return prompt
    if not prompt.text.strip():
        return prompt._replace(text=None, error="the prompt is empty")
    if SURROGATES.search(prompt.text):
        return prompt._replace(text=None, error="not text in UTF-8")
    return prompt


def _opened(name: str) -> TextIO:
    try:
        # Invalid UTF-8 becomes surrogates, which `_checked` reports for their own line only.
        return open(name, encoding="utf-8", errors="surrogateescape", newline="")
    except OSError as error:
        raise TrouperValidationError(
            f"cannot be read: {error.strerror}", parameter="prompt_file", value=name
        ) from None


def text_stdin() -> TextIO:
    """Return stdin as a text stream in which invalid UTF-8 becomes surrogates.

    Line ends are not translated, and each invalid byte is found later, with the number of its line.
    """
    stdin: Any = sys.stdin
    if isinstance(stdin, io.TextIOWrapper):
        stdin.reconfigure(encoding="utf-8", errors="surrogateescape", newline="")
    return cast("TextIO", sys.stdin)


def _whole_stdin(what: str) -> str:
    if output.is_terminal(sys.stdin):
        raise typer.BadParameter(
            "missing: give one, or use --prompt-file or a pipe", param_hint=what
        )
    try:
        return sys.stdin.read().removeprefix(codecs.BOM_UTF8.decode()).removesuffix("\n")
    except UnicodeDecodeError:
        raise TrouperValidationError("not text in UTF-8", parameter="prompt", value="-") from None
