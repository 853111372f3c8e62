"""Read messages from a terminal or a pipe, and print answers to it.

A model's text may contain control characters, which could change the terminal; stdin may be an open pipe without data,
on which the command would wait without a word; and a read of stdin cannot be cancelled. These cases are handled here.
"""

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

# All control characters except tab and newline.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
STDIN = "-"
# Explain the wait for stdin after this many seconds.
SLOW_S = 2.0
# In characters; no model has such a long context.
MAX_STDIN = 64 * 2**20


def show(text: str) -> None:
    """Print a part of an answer immediately, without control characters if stdout is a terminal.

    A model's text could otherwise move the cursor or change the colours.  Pipes get the text unchanged.
    """
    if output.is_terminal(sys.stdout):
        text = CONTROLS.sub("", text)
    print(text, end="", flush=True)


def is_interactive() -> bool:
    return output.is_terminal(sys.stdin) and output.is_terminal(sys.stdout)


def backend(quick: str | None) -> str:
    """Return the event loop for a session: asyncio if it uses the line editor, which needs it, else trio.

    The line editor is built on asyncio.  Without it there is no reason to prefer asyncio, and trio's cancellation is
    stricter.
    """
    return "asyncio" if quick is None and is_interactive() else "trio"


def quick_message(quick: str | None) -> str | None:
    """Return the message of `--quick`, followed by the text on stdin if that is a file or a pipe.

    With `-` the message is only the text on stdin. Returns None without `--quick`.

    Raises:
        typer.BadParameter: the message is empty.
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
    """Explain the wait if stdin is a pipe without data, in which some programs start their commands."""
    try:
        is_ready = bool(select.select([sys.stdin.fileno()], [], [], SLOW_S)[0])
    except (OSError, ValueError):
        # Stdin has no descriptor, or one that `select` does not support.
        return
    if not is_ready:
        output.note(
            "waiting for the end of stdin, which is added to the message; add < /dev/null to avoid this"
        )


class PipeReader:
    """Reads messages from a pipe or a file; with `joins_lines`, quotes and backslashes continue a message.

    Without `joins_lines`, each line is one message.
    """

    def __init__(self, *, joins_lines: bool) -> None:
        self._joins_lines = joins_lines
        self._stdin = text_stdin()
        self._limiter = anyio.CapacityLimiter(1)

    async def read(self) -> str | None:
        """Return the next message, or None at the end.

        Raises:
            TrouperValidationError: the message is not text in UTF-8; reading can continue with the next one.
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
        # A read cannot be cancelled, so its thread is abandoned when the command ends.
        return await anyio.to_thread.run_sync(
            self._stdin.readline, abandon_on_cancel=True, limiter=self._limiter
        )


@contextmanager
def terminal_kept() -> Generator[None]:
    """Restore the terminal's mode after the block, because the line editor changes it and may not get to restore it."""
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
