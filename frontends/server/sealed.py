"""Texts that a client keeps for this server and sends back unread: past reasoning, and what a compaction leaves.  Pure.

The form hides nothing, since the client has been sent the same text or could ask for it; it only is one string, as the API
has it, by which texts of this server can be told from those that another server has encrypted.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Literal

Kind = Literal["reasoning", "compaction"]
PREFIX = "trouper:{kind}:"


def seal(kind: Kind, text: str) -> str:
    return PREFIX.format(kind=kind) + urlsafe_b64encode(text.encode(errors="replace")).decode()


def unseal(kind: Kind, content: object) -> str | None:
    """Return the text again; None: this server has not made it."""
    prefix = PREFIX.format(kind=kind)
    if not isinstance(content, str) or not content.startswith(prefix):
        return None
    try:
        return urlsafe_b64decode(content.removeprefix(prefix)).decode()
    except (binascii.Error, ValueError):
        return None
