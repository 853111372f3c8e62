"""Print results on stdout, and everything else on stderr, with an error in one line.

Commands are used in pipes, so stdout must contain only results, also when a progress bar or a warning appears.  A
failed write to stdout is an error.  Lines that stderr cannot take (closed, full or without a reader) are dropped and
counted, because an hour-long run must neither stop nor block if its messages are not read.
"""

import difflib
import io
import os
import re
import select
import sys
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast, runtime_checkable

from trouper.config.generation import describe_sampling
from trouper.errors import (
    RemoteError,
    TrouperClientError,
    TrouperValidationError,
    UnsupportedFeatureError,
)

if TYPE_CHECKING:
    from tqdm import tqdm

    from trouper.config.model import ModelConfig


# An error shows at most this many characters of an invalid value.
MAX_VALUE = 200
EXIT_CRASH = 1
EXIT_USAGE = 2
# Shells add the number of the signal to this.
EXIT_SIGNALLED = 128
EXIT_CTRL_C = 130
EXIT_BROKEN_PIPE = 141
HINT = " (--debug shows where)"


class Interrupted(Exception):
    """A signal ended the command, and everything it had open was closed in order.

    The exit code is 128 plus the signal's number, as shells expect.
    """

    def __init__(self, number: int) -> None:
        super().__init__("interrupted" if number == EXIT_CTRL_C - EXIT_SIGNALLED else "terminated")
        self.exit_code = EXIT_SIGNALLED + number


@runtime_checkable
class _UsageError(Protocol):
    """The interface of typer's errors for an invalid command line."""

    exit_code: int

    def format_message(self) -> str: ...


def explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the message for an error.

    A user's mistake has code 2 and a message without the type of the exception; other errors have code 1.
    """
    error = _first(error)
    if isinstance(error, _UsageError):
        return error.exit_code, _usage(error)
    match error:
        case Interrupted():
            return error.exit_code, str(error)
        case KeyboardInterrupt():
            return EXIT_CTRL_C, "interrupted"
        case TrouperValidationError():
            return EXIT_USAGE, _sentence(error)
        case TrouperClientError() | UnsupportedFeatureError():
            return EXIT_USAGE, str(error)
        case RemoteError():
            return EXIT_CRASH, str(error)
        case _:
            return EXIT_CRASH, f"{type(error).__name__}: {error}{_cause(error)}{HINT}"


def _sentence(error: TrouperValidationError) -> str:
    """Return the message of an error, with its parameter and value added unless the message names them."""
    text = error.message
    if error.parameter is not None and not _names(text, error.parameter):
        text = f"{error.parameter}: {text}"
    if error.value is None or _names(text, str(error.value)):
        return text
    value = repr(error.value)
    return f"{text} (given: {value if len(value) <= MAX_VALUE else value[:MAX_VALUE] + '…'})"


def _names(text: str, name: str) -> bool:
    return bool(name) and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def _first(error: BaseException) -> BaseException:
    """Return the most important error of an exception group: a Ctrl-C if there is one, else the first error."""
    while isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        error = (group.subgroup(KeyboardInterrupt) or group).exceptions[0]
    return error


def complain(message: str) -> None:
    """Print an error or a warning as one line on stderr, even if its text contains line breaks.

    Programs that read stderr can treat each line as one message, and its prefix names the program.
    """
    print(f"trouper: {' '.join(message.split())}", file=sys.stderr)


def note(text: str) -> None:
    """Print information on stderr unchanged, to keep it apart from the results on stdout."""
    print(text, file=sys.stderr, flush=True)


def tell_sampling(model: "ModelConfig", params: Mapping[str, Any]) -> None:
    """Print the sampling parameters of the command and the source of the model's defaults, on stderr.

    Answers depend on these values, and users otherwise do not learn what a model's own file has set.
    """
    line = f"sampling: {describe_sampling(params)} (defaults: {model.sampling_source})"
    print(" ".join(line.split()), file=sys.stderr)


def prepare_streams() -> None:
    """Make printing safe: replace characters without an encoding, never block on stderr, print warnings as one line."""
    open_standard_files()
    drop_what_stderr_does_not_take()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    warnings.showwarning = _show_warning


def silence_stdout() -> None:
    """Discard all further output, after the reader of stdout has closed its end.

    `trouper generate … | head` then ends without a traceback, like other programs in a pipe.
    """
    # Stays open until the process ends.
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def is_terminal(stream: Any) -> bool:
    return bool(stream is not None and stream.isatty())


@contextmanager
def status(text: str) -> Generator[None]:
    """Show `text` on stderr during the block, if it is a terminal.

    Loading takes seconds, and a terminal without any output looks like a hung program.  The text is erased
    afterwards.
    """
    if not is_terminal(sys.stderr):
        yield
        return
    print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"\r{' ' * len(text)}\r", end="", file=sys.stderr, flush=True)


@contextmanager
def progress(
    total: int | None, what: str, *, is_wanted: bool = True
) -> Generator["tqdm[NoReturn]"]:
    """Show a progress bar during the block, if stderr is a terminal and there is more than one item.

    Args:
        total: number of items, or None if it is unknown.
        what: what the items are, for example `prompts`.
    """
    from tqdm import tqdm

    is_hidden = not is_wanted or total == 1 or not is_terminal(sys.stderr)
    with tqdm(total=total, desc=what, disable=is_hidden, leave=False) as bar:
        yield bar


@contextmanager
def printing_beside(bar: "tqdm[NoReturn]") -> Generator[None]:
    """Hide the bar while the block prints whole lines on stdout, so that they do not mix.

    Both may be the same terminal, in which a bar is redrawn in place.
    """
    if bar.disable:
        yield
        return
    with bar.external_write_mode(sys.stdout):
        yield
        sys.stdout.flush()


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    complain(f"warning: {message}")


def _cause(error: BaseException) -> str:
    cause = error.__cause__
    text = f"{type(cause).__name__}: {cause}" if cause is not None else ""
    return f" (caused by {text})" if text and text not in str(error) else ""


def _usage(error: _UsageError) -> str:
    option: str | None = getattr(error, "option_name", None)
    if option is None or not hasattr(error, "possibilities"):
        return error.format_message().removesuffix(".")
    # A weaker similarity would suggest unrelated options.
    names = cast("list[str] | None", getattr(error, "possibilities", None))
    near = difflib.get_close_matches(option, names or [], cutoff=0.8)
    return f"no such option: {option}" + (f"; did you mean {' or '.join(near)}?" if near else "")


# A pipe that is ready accepts this many bytes at once, so a write of this size never blocks.
PIECE_BYTES = 4096
# Wait this long for a slow reader, but not at all after it has been too slow once.
PATIENCE_MS = 1000


class DroppingStream(io.RawIOBase):
    """A stream over a file descriptor on which writing neither fails nor blocks for long.

    Args:
        file: the descriptor; closing the stream does not close it.
    """

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._poll = select.poll()
        self._poll.register(file, select.POLLOUT)
        # Lines dropped since the last successful write.
        self._num_dropped = 0

    def __repr__(self) -> str:
        return f"<DroppingStream {self._file}: {self._num_dropped} lines dropped>"

    def fileno(self) -> int:
        return self._file

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        given = text = bytes(data)
        if self._num_dropped:
            notice = b"trouper: %d lines could not be written here\n" % self._num_dropped
            text = notice + given if self._is_ready() else given
        for start in range(0, len(text), PIECE_BYTES):
            if not self._write(text[start : start + PIECE_BYTES]):
                self._num_dropped += max(1, min(text.count(b"\n", start), given.count(b"\n")))
                break
        return len(given)

    def _write(self, piece: bytes) -> bool:
        try:
            while piece and self._is_ready():
                piece = piece[os.write(self._file, piece) :]
                self._num_dropped = 0
        except OSError:
            # The disk is full, or the reader or the descriptor is closed.
            return False
        return not piece

    def _is_ready(self) -> bool:
        found = self._poll.poll(0 if self._num_dropped else PATIENCE_MS)
        return bool(found) and not found[0][1] & (select.POLLERR | select.POLLNVAL)


def open_standard_files() -> None:
    """Open /dev/null for each closed standard descriptor, so that a later socket cannot get its number.

    Messages would otherwise be written into that socket.
    """
    for file, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(file)
        except OSError:
            # The system assigns the lowest free descriptor, which is this one, since lower ones are open.
            opened = os.open(os.devnull, flags)
            assert opened == file
    # Python sets it to None if the descriptor was closed at start.
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        # Opened for reading above, so that writing results raises an error instead of losing them.
        sys.stdout = os.fdopen(1, "w", closefd=False)


def drop_what_stderr_does_not_take() -> None:
    """Replace the process's stderr by a `DroppingStream`; a stderr that a test has replaced stays."""
    if sys.stderr is None or sys.stderr is sys.__stderr__:  # pyright: ignore[reportUnnecessaryComparison]  # it was closed
        encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding  # pyright: ignore[reportUnnecessaryComparison]
        stream: Any = DroppingStream(2)
        sys.stderr = sys.__stderr__ = io.TextIOWrapper(  # pyright: ignore[reportConstantRedefinition]
            stream, encoding, "replace", write_through=True
        )
