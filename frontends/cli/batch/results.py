"""Write the results of many prompts as lines of JSON, a NumPy array or a Parquet file.

Results are written as they arrive, so they need not fit in memory, and a file gets its final name only when it is
complete. Each prompt has one record, in order; the record of a failed prompt has its error, its row of an array is NaN.
"""

import contextlib
import json
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Protocol, cast

import typer

from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.extras import install_hint
from trouper.frontends.cli import output

SUFFIXES = (".jsonl", ".npy", ".parquet")
# Size of the header in bytes; the shape is written into it at the end.
NPY_HEADER = 128
# Parquet rows are kept in memory until a group of this size is written.
ROWS_PER_GROUP = 1024
# Values of a record by name; arrays are NumPy's.
Record = dict[str, Any]
# Kinds of a record's values by name: int, text, float, score, vector, matrix or outputs.
Columns = dict[str, str]

OutputFileOption = Annotated[
    str | None,
    typer.Option(
        "--output-file",
        "-o",
        metavar="FILE",
        help="File for the results: .jsonl, .npy or .parquet; stdout by default.",
    ),
]


class ResultWriter(Protocol):
    """Writes the records of all prompts, in order, in some format.

    Records arrive one by one, so a writer needs memory for only a few of them.
    """

    num_records: int

    def write(self, record: Record) -> None: ...

    def finish(self) -> None:
        """Complete the file, so that programs can read it."""
        ...


def check_output(name: str | None, columns: Columns, input_name: str | None = None) -> None:
    """Check the name of the output file, before a model is loaded.

    Raises:
        TrouperValidationError: the format is unknown or unsuitable for these results, or the file is the input.
        UnsupportedFeatureError: the package for the format is not installed.
    """
    if name is None or name == "-" or not _is_plain(name):
        return
    is_there = input_name is not None and os.path.exists(name) and os.path.exists(input_name)
    if is_there and os.path.samefile(name, input_name or ""):
        raise TrouperValidationError("is the input file", parameter="output_file", value=name)
    suffix = Path(name).suffix.lower()
    if suffix not in SUFFIXES:
        rule = f"must end in {', '.join(SUFFIXES)}"
        raise TrouperValidationError(rule, parameter="output_file", value=name)
    if suffix == ".npy" and _array_column(columns) is None:
        rule = (
            "cannot hold these results, which are not an array of numbers; use .jsonl or .parquet"
        )
        raise TrouperValidationError(rule, parameter="output_file", value=name)
    if suffix == ".parquet" and find_spec("pyarrow") is None:
        hint = install_hint("parquet")
        raise UnsupportedFeatureError(f".parquet needs pyarrow: {hint}", parameter="output_file")


@contextmanager
def results_file(name: str | None, columns: Columns) -> Generator[ResultWriter]:
    """Open the output file, or stdout without a name, for the duration of a block.

    If the block raises an error, the results so far are kept in a file with another name.

    Raises:
        TrouperValidationError: the file cannot be written.
    """
    if name is None or name == "-":
        yield JsonLines(None)
        return
    path = os.path.realpath(name)
    is_plain = _is_plain(name)
    # With the process id, so that another process or a later run never writes the same file.
    part = f"{path}.{os.getpid()}.part" if is_plain else path
    try:
        # Closed below; an error of the caller's block must not be caught here.
        file = open(part, "wb")  # noqa: SIM115
    except OSError as error:
        raise TrouperValidationError(
            f"cannot be written: {error.strerror}", parameter="output_file", value=name
        ) from None
    with file:
        writer = _writer(Path(name).suffix.lower() if is_plain else ".jsonl", file, columns)
        try:
            yield writer
            writer.finish()
        except BaseException:
            if is_plain:
                _keep_part(writer, file, part)
            raise
    if is_plain:
        os.replace(part, path)


def _keep_part(writer: ResultWriter, file: BinaryIO, part: str) -> None:
    """Complete the file with the results so far, or remove it if there are none."""
    with contextlib.suppress(Exception):
        writer.finish()
    with contextlib.suppress(OSError):
        file.flush()
    if writer.num_records and os.path.getsize(part):
        output.complain(f"the results so far are in {part}")
    else:
        os.unlink(part)


def _is_plain(name: str) -> bool:
    return not os.path.exists(name) or stat.S_ISREG(os.stat(name).st_mode)


def _array_column(columns: Columns) -> str | None:
    """Return the column that can be one array, with a number or a vector for each prompt; None without one."""
    return next((name for name, kind in columns.items() if kind in ("vector", "score")), None)


def _writer(suffix: str, file: BinaryIO, columns: Columns) -> ResultWriter:
    if suffix == ".npy":
        return NpyFile(file, _array_column(columns) or "")
    return ParquetFile(file, columns) if suffix == ".parquet" else JsonLines(file)


class JsonLines:
    """Writes a line of JSON for each record, to a file or (None) to stdout.

    A record contains the number of its line in the input, and either its result or its error.
    """

    def __init__(self, file: BinaryIO | None) -> None:
        self._file = file
        self.num_records = 0

    def write(self, record: Record) -> None:
        self.num_records += 1
        line = json.dumps(record, ensure_ascii=False, default=_as_list)
        if self._file is None:
            print(line, flush=True)
            return
        self._file.write(line.encode("utf-8", "replace") + b"\n")
        self._file.flush()

    def finish(self) -> None:
        pass


def _as_list(value: Any) -> Any:
    """Convert an array to lists, for JSON."""
    return value.tolist()


class NpyFile:
    """Writes a float32 array with one row for each prompt (NaN if it failed), or one number for a score.

    The number of rows is known only at the end, so the header is written once more by `finish`.
    """

    def __init__(self, file: BinaryIO, column: str) -> None:
        self._file = file
        self._column = column
        self.num_records = 0
        # Shape of a row, known after the first successful prompt.
        self._shape: tuple[int, ...] | None = None

    def write(self, record: Record) -> None:
        import numpy as np

        value = record.get(self._column)
        if value is not None:
            row = np.asarray(value, dtype="<f4")
            if self._shape is None:
                self._begin(row.shape)
            self._file.write(row.tobytes())
        elif self._shape is not None:
            self._write_nan(1)
        self.num_records += 1

    def finish(self) -> None:
        if self._shape is None:
            self._begin((0,))
        shape = (self.num_records, *(self._shape or ()))
        fields = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape!r}, }}"
        text = fields.ljust(NPY_HEADER - 11) + "\n"
        header = b"\x93NUMPY\x01\x00" + (NPY_HEADER - 10).to_bytes(2, "little") + text.encode()
        self._file.seek(0)
        self._file.write(header)
        self._file.seek(0, os.SEEK_END)

    def _begin(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._file.write(bytes(NPY_HEADER))
        self._write_nan(self.num_records)

    def _write_nan(self, num_rows: int) -> None:
        import numpy as np

        row = np.full(self._shape or (), np.nan, "<f4").tobytes()
        for _ in range(num_rows):
            self._file.write(row)


class ParquetFile:
    """Writes a row for each record with pyarrow.

    Rows are collected and written in groups, because small groups make a large file.  Needs the extra `parquet`.
    """

    def __init__(self, file: BinaryIO, columns: Columns) -> None:
        pa, pq = import_module("pyarrow"), import_module("pyarrow.parquet")
        self._schema: Any = pa.schema(
            [(name, _parquet_type(kind)) for name, kind in columns.items()]
        )
        self._writer: Any = pq.ParquetWriter(file, self._schema)
        self._rows: list[Record] = []
        self.num_records = 0

    def write(self, record: Record) -> None:
        self.num_records += 1
        self._rows.append({name: _parquet_value(record.get(name)) for name in self._schema.names})
        if len(self._rows) == ROWS_PER_GROUP:
            self._flush()

    def finish(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            batch: Any = import_module("pyarrow").RecordBatch
            self._writer.write_batch(batch.from_pylist(self._rows, self._schema))
            self._rows = []


def _parquet_type(kind: str) -> Any:
    pa: Any = import_module("pyarrow")
    completion = {
        "text": pa.string(), "token_ids": pa.list_(pa.int64()),
        "finish_reason": pa.string(), "stop_reason": pa.string(),
    }  # fmt: skip
    return {
        "int": pa.int64(),
        "text": pa.string(),
        "float": pa.float64(),
        "score": pa.float64(),
        "vector": pa.list_(pa.float32()),
        "matrix": pa.list_(pa.list_(pa.float32())),
        "outputs": pa.list_(pa.struct(list(completion.items()))),
    }[kind]


def _parquet_value(value: Any) -> Any:
    """Convert a value for its column; stop reasons become text, because some are token ids."""
    if isinstance(value, list):
        completions = cast("list[Record]", value)
        return [{**each, "stop_reason": _text(each.get("stop_reason"))} for each in completions]
    return value.tolist() if getattr(value, "ndim", 1) > 1 else value


def _text(value: object) -> str | None:
    return None if value is None else str(value)
