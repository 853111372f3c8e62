"""Text from a terminal or a pipe, and text for it."""

import re
import select
import sys
from collections.abc import Generator
from contextlib import contextmanager

import anyio
import anyio.to_thread
import typer

from trouper.errors import TrouperValidationError
from trouper.frontends.cli import output
from trouper.frontends.cli.batch.prompts import SURROGATES, text_stdin
from trouper.frontends.cli.chat.input import continued

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline
STDIN = "-"
SLOW_S = 2.0  # after which a wait for stdin is explained
MAX_STDIN = 64 * 2**20  # characters; no model reads as much


def show(text: str) -> None:
    """Print a piece of an answer at once; a terminal gets no control characters from it."""
    if output.is_terminal(sys.stdout):
        text = CONTROLS.sub("", text)
    print(text, end="", flush=True)


def is_interactive() -> bool:
    return output.is_terminal(sys.stdin) and output.is_terminal(sys.stdout)


def backend(quick: str | None) -> str:
    """Return the event loop of a session; the line editor runs on asyncio only."""
    return "asyncio" if quick is None and is_interactive() else "trio"


def quick_message(quick: str | None) -> str | None:
    """Return the message of `--quick`, with the text of a file or pipe on stdin after it; `-` is stdin only.

    Raises:
        typer.BadParameter: there is no text.
    """
    if quick is None:
        return None
    parts = [] if quick == STDIN else [quick]
    if sys.stdin is not None and (quick == STDIN or not output.is_terminal(sys.stdin)):
        parts.append(_read_stdin())
    message = "\n\n".join(part for part in parts if part.strip())
    if not message:
        raise typer.BadParameter("the message is empty", param_hint="--quick")
    return message


def _read_stdin() -> str:
    _note_wait()
    try:
        text = sys.stdin.read(MAX_STDIN + 1)
    except UnicodeDecodeError:
        raise TrouperValidationError("stdin is not text in UTF-8", parameter="quick") from None
    if len(text) > MAX_STDIN:
        raise TrouperValidationError(
            f"stdin has more than {MAX_STDIN} characters", parameter="quick"
        )
    return text.removesuffix("\n")


def _note_wait() -> None:
    """Say what the command waits for, if stdin is a pipe to which nothing is written, as some programs leave it."""
    try:
        is_ready = bool(select.select([sys.stdin.fileno()], [], [], SLOW_S)[0])
    except (OSError, ValueError):  # no descriptor, or none that can be waited for
        return
    if not is_ready:
        output.note(
            "waiting for the end of stdin, which belongs to the message; if not, give < /dev/null"
        )


class PipeReader:
    """Reads messages without a line editor, as a filter does."""

    def __init__(self, *, joins_lines: bool) -> None:
        self._joins_lines = joins_lines  # whether `\"\"\"` and a backslash continue a message
        self._stdin = text_stdin()
        self._limiter = anyio.CapacityLimiter(1)

    async def read(self) -> str | None:
        """Return the next message, or None at the end.

        Raises:
            TrouperValidationError: it is no text; the next may be.
        """
        text = ""
        while line := await self._line():
            text += line.rstrip("\r\n")
            more = continued(text) if self._joins_lines else None
            if more is None:
                break
            text = more
        else:
            if not text:
                return None
        if SURROGATES.search(text):
            raise TrouperValidationError("a line of stdin is not text in UTF-8", parameter="prompt")
        return text

    async def _line(self) -> str:
        # Abandoned when the command ends: a read cannot be cancelled.
        return await anyio.to_thread.run_sync(
            self._stdin.readline, abandon_on_cancel=True, limiter=self._limiter
        )


@contextmanager
def terminal_kept() -> Generator[None]:
    """Restore the terminal's mode after the block, for line editing changes it and a read may be abandoned."""
    if not output.is_terminal(sys.stdin):
        yield
        return
    import termios

    fd = sys.stdin.fileno()
    mode = termios.tcgetattr(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, mode)
