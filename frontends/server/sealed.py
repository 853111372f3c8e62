"""Pack a text into one string that clients keep and send back: past reasoning, or the summary of a conversation.  Pure.

The string hides nothing, because the client may read the same text in the answer.  Its prefix distinguishes what this server
has made from what another server has encrypted.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Literal

Kind = Literal["reasoning", "compaction"]
PREFIX = "trouper:{kind}:"


def seal(kind: Kind, text: str) -> str:
    """Return the string that a client keeps for `text`."""
    return PREFIX.format(kind=kind) + urlsafe_b64encode(text.encode(errors="replace")).decode()


def unseal(kind: Kind, content: object) -> str | None:
    """Return the text of a sealed string, or None if this server did not make it."""
    prefix = PREFIX.format(kind=kind)
    if not isinstance(content, str) or not content.startswith(prefix):
        return None
    try:
        return urlsafe_b64decode(content.removeprefix(prefix)).decode()
    except (binascii.Error, ValueError):
        return None
