"""Write the output file of `run-batch`, so that it survives interruptions and the next run can continue it.

Answers can cost hours of computation, so this module guarantees: each answer is appended to `FILE.part` as soon as it
is complete, so a crash loses only unfinished requests; a saved answer is never removed or overwritten (`FILE.part` is
only appended to, after removing an incomplete last line, and an existing `FILE` is renamed before it is replaced); and a
lock on `FILE.part` excludes a second process. At the end the answers are sorted into the order of the requests.
"""

import os
import stat
import sys
import threading
from array import array
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import count
from typing import BinaryIO

import msgspec

from trouper.errors import TrouperValidationError
from trouper.frontends.cli import output
from trouper.frontends.server.program.batch_records import (
    BatchLine,
    StreamAnswers,
    custom_id_key,
    differs,
)

# Suffix of the output file until it is complete.
PART = ".part"
# Suffix of the file in which answers are sorted.
MERGED = ".part.new"
WAY_OUT = "choose another output file, or use --restart, which keeps this one under another name"


class _SavedStatus(msgspec.Struct):
    status_code: int


class _SavedAnswer(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _SavedStatus | None
    error: msgspec.Raw


decode_saved = msgspec.json.Decoder(_SavedAnswer).decode


class AnswersFile:
    """The answers of one batch in `FILE` (a complete output of an earlier run) and `FILE.part`.

    A position identifies an answer: `2 * offset` in `FILE` or `2 * offset + 1` in `FILE.part`. The answers themselves
    stay on disk; memory holds 8 bytes for each line and about 150 bytes for each answer of an earlier run.
    """

    def __init__(self, path: str, part: BinaryIO, origin: str) -> None:
        self._path = path
        # Open for appending, and locked.
        self._part = part
        self._origin = origin
        self._lock = threading.Lock()
        # Positions of the answers in the order of the requests.
        self._order = array("q")
        self._saved: dict[bytes, int] = {}
        self._is_used: set[bytes] = set()
        self._files: list[BinaryIO | None] = [None, open(path + PART, "rb")]  # noqa: SIM115
        if os.path.exists(path):
            self._files[0] = open(path, "rb")  # noqa: SIM115
        # Size of the part.
        self._end = 0

    def __repr__(self) -> str:
        return f"<AnswersFile {self._path}: {len(self._saved)} saved, {len(self._order)} in order>"

    @property
    def num_saved(self) -> int:
        return len(self._saved)

    @property
    def num_answers(self) -> int:
        """The number of requests with an answer."""
        return len(self._order)

    def read(self) -> None:
        """Index the answers of earlier runs.  Raises TrouperValidationError if a line is not an answer.

        Only positions and digests are kept in memory, so files larger than memory can be continued.
        """
        for which, file in enumerate(self._files):
            if file is not None:
                self._index(which, file)
        self._end = os.path.getsize(self._path + PART)

    def find(self, request: BatchLine) -> int | None:
        """Return the position of the saved answer to a request, or None if there is none.

        Raises:
            TrouperValidationError: the saved answer with this custom_id belongs to another request or model.
        """
        key = custom_id_key(request.custom_id)
        position = self._saved.get(key)
        if position is None:
            return None
        difference = differs(decode_saved(self._line(position)).id, request, self._origin)
        if difference is None:
            self._is_used.add(key)
            return position
        what = {
            "request": "another request with this custom_id",
            "origin": "this request with another model, seed or option",
        }[difference]
        raise self._refused(position, f"answers {what}, {request.custom_id[:60]!r}")

    def check_all_used(self) -> None:
        """Raise TrouperValidationError if a saved answer belongs to no request of the input.

        It protects an output file against a second run with another input: nothing is overwritten.
        """
        for key, position in self._saved.items():
            if key not in self._is_used:
                name = decode_saved(self._line(position)).custom_id or ""
                raise self._refused(position, f"answers {name[:60]!r}, which is not in the input")

    def add(self, line: bytes) -> int:
        """Append an answer to the part and return its position.  Safe to call from several threads.

        The line is flushed at once, so an interruption loses no finished answer.
        """
        with self._lock:
            position = 2 * self._end + 1
            self._part.write(line)
            self._part.flush()
            self._end += len(line)
            return position

    def keep(self, position: int) -> None:
        """Make the answer at `position` the next one in the order of the requests.

        A position is the value that `add` or `find` returned; answers themselves may have been saved in any order.
        """
        self._order.append(position)

    def finish(self) -> None:
        """Sort the answers into the order of the requests and rename the file to its final name.

        An output that already exists is renamed, never deleted.  Raises TrouperValidationError if a saved answer
        belongs to no request.
        """
        self.check_all_used()
        os.fsync(self._part.fileno())
        old, part = self._files
        if old is not None and self._end == 0 and self._is_in_order(0, old):
            # The complete file of an earlier run already has all answers.
            return
        if part is not None and self._is_in_order(1, part):
            newest = self._path + PART
        else:
            newest = self._merge()
        if os.path.exists(self._path):
            kept = set_aside(self._path)
            output.complain(f"the previous output is kept as {kept}")
        os.replace(newest, self._path)

    def close(self) -> None:
        for file in self._files:
            if file is not None:
                file.close()

    def _index(self, which: int, file: BinaryIO) -> None:
        """Index the answers of a file; failed requests are left out, so that they are sent again."""
        offset = 0
        for line in file:
            if not line.endswith(b"\n") and which == 1:
                self._mend(line, offset)
            try:
                saved = decode_saved(line)
            except msgspec.MsgspecError:
                if which == 1 and not line.endswith(b"\n"):
                    # An incomplete last line was removed.
                    return
                raise self._refused(2 * offset + which, "is not an answer of a batch") from None
            status = saved.response.status_code if saved.response is not None else 0
            if saved.custom_id is not None and 200 <= status < 400:
                self._saved[custom_id_key(saved.custom_id)] = 2 * offset + which
            offset += len(line)

    def _mend(self, line: bytes, offset: int) -> None:
        """Terminate the last line of the part, or remove it if it is incomplete."""
        try:
            decode_saved(line)
        except msgspec.MsgspecError:
            os.ftruncate(self._part.fileno(), offset)
        else:
            self._part.write(b"\n")
            self._part.flush()

    def _line(self, position: int) -> bytes:
        file = self._files[position % 2]
        assert file is not None
        file.seek(position // 2)
        line = file.readline()
        return line if line.endswith(b"\n") else line + b"\n"

    def _is_in_order(self, which: int, file: BinaryIO) -> bool:
        """Return whether a file already has exactly the answers of this batch, in order."""
        offset = 0
        file.seek(0)
        positions: Iterator[int] = iter(self._order)
        for line in file:
            if next(positions, None) != 2 * offset + which:
                return False
            offset += len(line)
        return next(positions, None) is None

    def _merge(self) -> str:
        merged = self._path + MERGED
        with open(merged, "wb") as file:
            file.writelines(map(self._line, self._order))
            file.flush()
            os.fsync(file.fileno())
        return merged

    def _refused(self, position: int, why: str) -> TrouperValidationError:
        name = self._path + (PART if position % 2 else "")
        file = self._files[position % 2]
        assert file is not None
        file.seek(0)
        number = 1 + sum(chunk.count(b"\n") for chunk in _chunks(file, position // 2))
        return TrouperValidationError(
            f"line {number} of {name} {why}; {WAY_OUT}", parameter="output_file"
        )


@contextmanager
def answers_file(
    name: str, input_name: str, origin: str, *, restarts: bool
) -> Generator[AnswersFile | StreamAnswers]:
    """Open the output of a batch; stdout, pipes and devices are written directly and cannot be continued.

    Raises:
        TrouperValidationError: the output cannot be written, is the input file, is in use by another process, or has
            lines that are not answers to this batch.
    """
    path = os.path.realpath(name)
    is_plain = name != "-" and (not os.path.exists(path) or stat.S_ISREG(os.stat(path).st_mode))
    if not is_plain:
        if restarts:
            raise TrouperValidationError("needs a file as the output", parameter="restart")
        with _stream(name, path) as sink:
            yield StreamAnswers(sink)
        return
    for each in (path, path + PART):
        if input_name != "-" and os.path.exists(each) and _is_same(each, input_name):
            raise TrouperValidationError("is the input file", parameter="output_file", value=name)
    part = _locked(path + PART, name)
    if restarts:
        part = _begin_anew(path, part, name)
    with part:
        yield from _opened(path, part, name, origin)


def _opened(path: str, part: BinaryIO, name: str, origin: str) -> Generator[AnswersFile]:
    answers = AnswersFile(path, part, origin)
    try:
        answers.read()
        yield answers
        answers.finish()
    except TrouperValidationError:
        # These errors already advise the user.
        raise
    except BaseException:
        if os.path.getsize(path + PART):
            # The part of a symbolic link is in the folder of its target.
            shown = name + PART if os.path.exists(name + PART) else path + PART
            saved = f"the answers so far are in {shown}"
            output.complain(f"{saved}; run the same command again to continue")
        raise
    finally:
        answers.close()
        _tidy(path, part, is_complete=sys.exc_info()[0] is None)


def _tidy(path: str, part: BinaryIO, *, is_complete: bool) -> None:
    """Remove the part if it is empty or all of its answers are in the complete file."""
    name = path + PART
    is_still_ours = os.path.exists(name) and os.path.samestat(
        os.stat(name), os.fstat(part.fileno())
    )
    if is_still_ours and (is_complete or os.path.getsize(name) == 0):
        os.unlink(name)


def _locked(part: str, name: str) -> BinaryIO:
    """Open a part for appending, with a lock that the system releases when the process ends."""
    # Imported here, because Windows lacks it and the other commands must start there.
    import fcntl

    while True:
        try:
            # The caller closes it.
            file = open(part, "ab")  # noqa: SIM115
        except OSError as error:
            raise cannot("be written", error, "output_file", name) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(part), os.fstat(file.fileno())):
                return file
        except BlockingIOError:
            file.close()
            raise TrouperValidationError(
                f"another process is writing {part}", parameter="output_file", value=name
            ) from None
        except FileNotFoundError:
            # The process that held the lock has just renamed the file, so open it again.
            pass
        except OSError as error:
            file.close()
            raise cannot("be locked", error, "output_file", name) from None
        file.close()


def _begin_anew(path: str, part: BinaryIO, name: str) -> BinaryIO:
    """Rename the files of earlier runs, and return a new part."""
    for each in (path, path + PART):
        if os.path.exists(each) and os.path.getsize(each):
            output.complain(f"{each} is kept as {set_aside(each)}")
    if os.path.exists(path + PART):
        return part
    part.close()
    return _locked(path + PART, name)


def set_aside(path: str) -> str:
    """Rename a file to the first unused name of `path.1`, `path.2` …, and return that name.

    No file is overwritten, even if several processes do this at once.
    """
    for number in count(1):
        kept = f"{path}.{number}"
        try:
            # Creating the file first ensures that no file of another process is replaced.
            os.close(os.open(kept, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            continue
        os.replace(path, kept)
        return kept
    raise AssertionError("unreachable")


@contextmanager
def _stream(name: str, path: str) -> Generator[BinaryIO]:
    if name == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        # Closed below; an error of the caller's block must not be caught here.
        file = open(path, "wb")  # noqa: SIM115
    except OSError as error:
        raise cannot("be written", error, "output_file", name) from None
    with file:
        yield file


def _is_same(path: str, other: str) -> bool:
    return os.path.exists(other) and os.path.samefile(path, other)


def _chunks(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    while num_bytes > 0 and (chunk := file.read(min(num_bytes, 2**20))):
        num_bytes -= len(chunk)
        yield chunk


def cannot(verb: str, error: OSError, parameter: str, name: str) -> TrouperValidationError:
    return TrouperValidationError(
        f"cannot {verb}: {error.strerror}", parameter=parameter, value=name
    )
