"""Decide which URLs of media are read: `data:` URLs, and no others.  Pure.

A server that fetches the URLs of its clients can be made to read the network around it.  Until there is a door for
that, every URL with a scheme is refused with its own code, and nothing is resolved, opened or fetched.
"""

import binascii
import re

from trouper.actors.rendering.media.files import MAX_FILE_BYTES, NAMES, RefusedFileError

# A type, parameters and the mark of base64.  The type is not believed: the file itself shows what it is.
DATA_HEAD = re.compile(rb"data:[^,]{0,256}?;base64,", re.IGNORECASE)
MAX_HEAD = 512
SCHEME = re.compile(rb"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
ADVICE = "send the file itself as a URL such as data:image/png;base64,…"


def read_url(url: str | memoryview) -> bytes:
    """Return the file in a `data:` URL.

    Args:
        url: the text, or its bytes if they were cut out of a request's body.

    Raises:
        RefusedFileError: `media_url_blocked` for any other URL, `invalid_value` for no URL, `invalid_image` for
            wrong base64, `media_too_large` for too long a file.
    """
    head = _head(url)
    if (found := DATA_HEAD.match(head)) is not None:
        return decode_base64(url[found.end() :])
    if head[:5].lower() == b"data:":
        raise RefusedFileError("invalid_image", f"must be base64; {ADVICE}")
    if SCHEME.match(head) is None:
        raise RefusedFileError("invalid_value", f"is not a URL; {ADVICE}")
    rule = "is a URL that this server does not fetch, and no option allows it yet (--allowed-media-domains, --allowed-local-media-path)"
    raise RefusedFileError("media_url_blocked", f"{rule}; {ADVICE}")


def decode_base64(text: str | memoryview) -> bytes:
    """Decode base64 strictly: no blanks, no other characters, right padding.

    Raises:
        RefusedFileError: `invalid_image` or `media_too_large`.
    """
    # The length is checked before the bytes are made.
    if len(text) // 4 * 3 > MAX_FILE_BYTES + 3:
        rule = (
            f"has more than the {MAX_FILE_BYTES} bytes that an image may have; send a smaller one"
        )
        raise RefusedFileError("media_too_large", rule)
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError):
        rule = f"is not base64 (A-Z, a-z, 0-9, + and / with padding, no blanks); send a {NAMES} file as base64"
        raise RefusedFileError("invalid_image", rule) from None


def _head(url: str | memoryview) -> bytes:
    start = url[:MAX_HEAD]
    return start.encode("ascii", "replace") if isinstance(start, str) else bytes(start)
