"""Read files of `file:` URLs beneath the one folder that the operator allows.

The path is walked folder by folder from an open descriptor, and links are never followed.  So no name and no change of
the folder at the same time leads out of it.
"""

import errno
import os
import stat
from urllib.parse import unquote, urlsplit

from trouper.actors.rendering.media.files import RefusedFileError, check_bytes
from trouper.actors.rendering.media.urls import ADVICE, BLOCKED, MAX_URL

UNAVAILABLE = "media_unavailable"
# Errors of a walk that meets a link, or a file in the place of a folder.
NOT_BENEATH = (errno.ELOOP, errno.ENOTDIR)


def is_local(url: object) -> bool:
    """Return whether it is a `file:` URL."""
    return isinstance(url, str) and url[:5].lower() == "file:"


def read_local(url: str, folder: str) -> bytes:
    """Return the bytes of a file beneath `folder`.

    Raises:
        RefusedFileError: `media_url_blocked` for a file elsewhere, `media_unavailable` for one that cannot be read,
            `media_too_large` for one that is too long.
    """
    names = _names_below(url, folder)
    try:
        return _read_beneath(folder, names)
    except OSError as error:
        if error.errno in NOT_BENEATH:
            raise _elsewhere() from None
        rule = "names a file that does not exist or cannot be read"
        raise RefusedFileError(UNAVAILABLE, rule) from None


def _names_below(url: str, folder: str) -> list[str]:
    """Return the path of the URL as names of folders and of a file, relative to `folder`."""
    if len(url) > MAX_URL:
        raise RefusedFileError("invalid_value", f"has more than {MAX_URL} characters")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise RefusedFileError("invalid_value", "is not a URL") from None
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise RefusedFileError("invalid_value", "must be a URL such as file:///folder/image.png")
    path = unquote(parts.path)
    base = folder.rstrip("/") + "/"
    if "\0" in path or not path.startswith(base):
        raise _elsewhere()
    names = path[len(base) :].split("/")
    if any(name in ("", ".", "..") for name in names):
        raise _elsewhere()
    return names


def _read_beneath(folder: str, names: list[str]) -> bytes:
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(name, flags, dir_fd=at)
            os.close(at)
            at = inner
        # Without O_NONBLOCK, opening a named pipe would wait for its writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(names[-1], flags, dir_fd=at), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise RefusedFileError(UNAVAILABLE, "names something that is not a file")
            check_bytes(found.st_size)
            data = file.read(found.st_size + 1)
            check_bytes(len(data))
            return data
    finally:
        os.close(at)


def _elsewhere() -> RefusedFileError:
    rule = "names a file that is not below the folder of --allowed-local-media-path"
    return RefusedFileError(BLOCKED, f"{rule}; {ADVICE}")
