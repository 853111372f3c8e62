"""Output of commands: results on stdout, everything else on stderr, an error in one line."""

import difflib
import os
import re
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
from trouper.frontends.cli.stderr import drop_what_stderr_does_not_take, open_standard_files

if TYPE_CHECKING:
    from tqdm import tqdm

    from trouper.config.model import ModelConfig

MAX_VALUE = 200  # characters of a wrong value that an error shows
EXIT_CRASH = 1
EXIT_USAGE = 2
EXIT_SIGNALLED = 128  # plus the number of the signal, as in a shell
EXIT_CTRL_C = 130
EXIT_BROKEN_PIPE = 141
HINT = " (--debug shows where)"


class Interrupted(Exception):
    """Raised when a signal has ended the command, and all it had open has been closed in order."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted" if number == EXIT_CTRL_C - EXIT_SIGNALLED else "terminated")
        self.exit_code = EXIT_SIGNALLED + number


@runtime_checkable
class _UsageError(Protocol):
    """The errors of typer for a command line that it cannot parse."""

    exit_code: int

    def format_message(self) -> str: ...


def explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the line for an error."""
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
    """Return the message, with the parameter and the value that it does not name itself."""
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
    """Return the error that a group of them is explained by: a Ctrl-C, or else the first."""
    while isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        error = (group.subgroup(KeyboardInterrupt) or group).exceptions[0]
    return error


def complain(message: str) -> None:
    """Print a message as one line on stderr, whatever it holds."""
    print(f"trouper: {' '.join(message.split())}", file=sys.stderr)


def note(text: str) -> None:
    """Print information on stderr as it is, apart from the results on stdout."""
    print(text, file=sys.stderr, flush=True)


def tell_sampling(model: "ModelConfig", params: Mapping[str, Any]) -> None:
    """Print how texts are sampled, and where the defaults come from; a line that is no complaint."""
    line = f"sampling: {describe_sampling(params)} (defaults: {model.sampling_source})"
    print(" ".join(line.split()), file=sys.stderr)


def prepare_streams() -> None:
    """Let streams replace characters that they cannot encode, stderr drop what it cannot take, and print warnings as one line."""
    open_standard_files()
    drop_what_stderr_does_not_take()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    warnings.showwarning = _show_warning


def silence_stdout() -> None:
    """Discard all further output: the reader of stdout has ended."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # lives as long as the process


def is_terminal(stream: Any) -> bool:
    return bool(stream is not None and stream.isatty())


@contextmanager
def status(text: str) -> Generator[None]:
    """Show `text` on a terminal's stderr for the length of the block."""
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
    """Show a progress bar on a terminal's stderr for the length of the block; nothing elsewhere, and none of one thing.

    Args:
        total: None where the number is not known before the end.
    """
    from tqdm import tqdm

    is_hidden = not is_wanted or total == 1 or not is_terminal(sys.stderr)
    with tqdm(total=total, desc=what, disable=is_hidden, leave=False) as bar:
        yield bar


@contextmanager
def printing_beside(bar: "tqdm[NoReturn]") -> Generator[None]:
    """Lift the bar off the terminal while the block prints whole lines on stdout."""
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
    # Names that only have a few letters in common would lead astray.
    names = cast("list[str] | None", getattr(error, "possibilities", None))
    near = difflib.get_close_matches(option, names or [], cutoff=0.8)
    return f"no such option: {option}" + (f"; did you mean {' or '.join(near)}?" if near else "")
