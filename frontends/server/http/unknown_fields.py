"""Report the fields and tools that a request is answered without, to its client and in the log."""

from collections.abc import Sequence
from typing import NamedTuple

from trouper.frontends.server.errors import Headers, clean, logger

MAX_NAME = 64  # characters of a name that clients and the log are shown
MAX_NAMES = 16  # of one request that the header names: with commas 1 KiB
MAX_LOGGED = 256  # names that are remembered, 16 KiB; the log is not a place that clients fill


class Ignored(NamedTuple):
    """Describe a kind of thing that is ignored: the header that names it, and the line for the log."""

    header: bytes
    text: str


FIELDS = Ignored(b"x-trouper-ignored-fields", "the field %r is not known, and is ignored")
TOOLS = Ignored(b"x-trouper-ignored-tools", "the tool %r cannot run here, and is left out")


class UnknownFields:
    """Count the fields of requests that are ignored, and warn of each name once."""

    def __init__(self) -> None:
        self.num = 0
        self._logged: set[str] = set()

    def note(self, path: str, names: Sequence[str], kind: Ignored = FIELDS) -> Headers:
        """Count what one request is answered without, log what is new, and return a header that names it."""
        self.num += len(names)
        shown = sorted(clean(name, MAX_NAME).encode("ascii", "replace").decode() for name in names)
        for name in shown:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                logger.warning(f"%s: {kind.text}", path, name)
        more = ("…",) if len(shown) > MAX_NAMES else ()
        return ((kind.header, ", ".join((*shown[:MAX_NAMES], *more)).encode("ascii", "replace")),)
