"""Fields that are in no table: the request is answered without them, and neither side is left in the dark."""

from collections.abc import Sequence

from trouper.frontends.server.errors import Headers, clean, logger

HEADER = b"x-trouper-ignored-fields"
MAX_NAME = 64  # characters of a name that clients and the log are shown
MAX_NAMES = 16  # of one request that the header names: with commas 1 KiB
MAX_LOGGED = 256  # names that are remembered, 16 KiB; the log is not a place that clients fill


class UnknownFields:
    """Count the fields of requests that are ignored, and warn of each name once."""

    def __init__(self) -> None:
        self.num = 0
        self._logged: set[str] = set()

    def note(self, path: str, names: Sequence[str]) -> Headers:
        """Count the unknown fields of one request, log those that are new, and return a header that names them."""
        self.num += len(names)
        shown = sorted(clean(name, MAX_NAME).encode("ascii", "replace").decode() for name in names)
        for name in shown:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                logger.warning("%s: the field %r is not known, and is ignored", path, name)
        more = ("…",) if len(shown) > MAX_NAMES else ()
        return ((HEADER, ", ".join((*shown[:MAX_NAMES], *more)).encode("ascii", "replace")),)
