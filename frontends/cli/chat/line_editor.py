"""The line editor of interactive sessions, based on prompt_toolkit, and its history file.

Importing prompt_toolkit takes 0.1 s, so only this module imports it, and only sessions at a terminal import this
module.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from prompt_toolkit import PromptSession
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.utils import is_dumb_terminal

from trouper.frontends.cli.chat.terminal import continued

PROMPT, CONTINUATION = "> ", "... "
MAX_ENTRIES = 1000
# Longer messages, in characters, are not saved.
MAX_ENTRY = 64 * 2**10
# At most this many bytes are read, from the end of the file.
MAX_FILE = 8 * 2**20
LEAVE = "to leave the session, press Ctrl-D or type /bye"


class _Cleared(NamedTuple):
    """The result of a prompt after Ctrl-C; `had_text` is False if the line was already empty."""

    had_text: bool


class LineEditor:
    """Reads messages at a terminal.  Pasted text is one message, even with several lines.

    It has history, search and editing of several lines.  Ctrl-C clears the line, and Ctrl-D at an empty one ends the
    session.
    """

    def __init__(self, history: "MessageHistory", note: Callable[[str], None]) -> None:
        """Create an editor that shows hints to the user by calling `note`."""
        self._note = note
        self.history = history
        # Without an output prompt_toolkit uses no escape sequences.
        output = None if is_dumb_terminal() else create_output(sys.stdout)
        if isinstance(output, Vt100_Output):
            # The cursor's position matters only for menus, and not every terminal reports it.
            output.enable_cpr = False
        self._session: PromptSession[Any] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=_continuation,
            history=history,
            key_bindings=_bindings(),
            output=output,
            reserve_space_for_menu=0,
            enable_suspend=True,
        )

    async def read(self) -> str | None:
        """Return the next message, or None at the end (Ctrl-D).

        Ctrl-C at an empty line prints how to leave, instead of ending the session by accident.
        """
        while True:
            try:
                found = await self._session.prompt_async(
                    handle_sigint=False, set_exception_handler=False
                )
            except EOFError:
                return None
            # A dumb terminal has no key bindings, so Ctrl-C arrives as a signal.
            except KeyboardInterrupt:
                self._note(LEAVE)
                continue
            if not isinstance(found, _Cleared):
                return str(found)
            if not found.had_text:
                self._note(LEAVE)


def _continuation(width: int, line_number: int, wrap_count: int) -> str:
    """Return the mark of a further line of a message; wrapped parts of a long line have none."""
    return "" if wrap_count else CONTINUATION


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        text = continued(buffer.text)
        if text is None:
            buffer.validate_and_handle()
        else:
            buffer.text = text
            buffer.cursor_position = len(text)

    @bindings.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def _(event: Any) -> None:
        # A second Ctrl-C finds an empty line, and shows how to leave.
        event.app.exit(result=_Cleared(bool(event.current_buffer.text)))

    return bindings


class MessageHistory(History):
    """Messages of earlier sessions, one JSON string for each line, in a file that only its owner can read.

    The newest `MAX_ENTRIES` are kept. If the file cannot be written, entries last until the session ends.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path or Path(os.devnull)
        self.is_kept = path is not None

    def load_history_strings(self) -> Iterable[str]:
        """Return the entries of the file, newest first."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - MAX_FILE))
                entries = entries_of(file.read(MAX_FILE))
        except OSError:
            return []
        if len(entries) > MAX_ENTRIES or size > MAX_FILE:
            entries = entries[-MAX_ENTRIES:]
            with contextlib.suppress(OSError):
                self._replace(entries)
        return reversed(entries)

    def store_string(self, string: str) -> None:
        if self.is_kept and len(string) <= MAX_ENTRY:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write(self._path, os.O_APPEND, [string])

    def _replace(self, entries: list[str]) -> None:
        newest = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        _write(newest, os.O_TRUNC, entries)
        newest.replace(self._path)


def _write(path: Path, flag: int, entries: list[str]) -> None:
    """Write all entries with one system call, so that entries of two sessions do not mix."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)
    try:
        os.fchmod(file, 0o600)
        os.write(file, "".join(f"{json.dumps(entry)}\n" for entry in entries).encode())
    finally:
        os.close(file)


def entries_of(data: bytes) -> list[str]:
    """Parse the entries of a history file; skip invalid lines, such as half of an entry at the start.

    Each line is a JSON string, so that a message of several lines is one entry.
    """
    entries: list[str] = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, str):
                entries.append(entry)
    return entries


def history_path(name: str) -> Path | None:
    """Return the history file of a command in the XDG state directory; None for a user without a home."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        try:
            state = Path.home() / ".local" / "state"
        except RuntimeError:
            return None
    return state / "trouper" / f"{name}_history"
