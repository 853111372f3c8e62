"""Lines from a terminal or a pipe, and text for it."""

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager

import anyio
import anyio.to_thread

from trouper.frontends.cli import output

PROMPT = "> "
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def show(text: str) -> None:
    """Print a piece of an answer at once; a terminal gets no control characters from it."""
    if output.is_terminal(sys.stdout):
        text = CONTROLS.sub("", text)
    print(text, end="", flush=True)


async def read_line() -> str | None:
    """Return the next line, or None at the end.  Abandoned when the command ends: a read cannot be cancelled."""
    return await anyio.to_thread.run_sync(
        _input, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
    )


def _input() -> str | None:
    if output.is_terminal(sys.stdin) and output.is_terminal(sys.stdout):
        try:
            return input(PROMPT)
        except EOFError:
            print()
            return None
    return sys.stdin.readline() or None


@contextmanager
def terminal_kept() -> Generator[None]:
    """Restore the terminal's mode after the block, for line editing changes it and a read may be abandoned."""
    if not output.is_terminal(sys.stdin):
        yield
        return
    import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]  # gives input() history and arrow keys
    import termios

    fd = sys.stdin.fileno()
    mode = termios.tcgetattr(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, mode)
