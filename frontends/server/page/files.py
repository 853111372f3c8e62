"""Read the files of the page once, at the first request, and keep them with their compressed forms.

Only the names in `KINDS` are served, so no path of a request reaches the file system.
"""

import gzip
from functools import cache
from hashlib import sha256
from pathlib import Path

import msgspec

STATIC = Path(__file__).parent / "static"
TEXT, SCRIPT = b"text/plain; charset=utf-8", b"text/javascript; charset=utf-8"
KINDS = {
    "index.html": b"text/html; charset=utf-8",
    "page.css": b"text/css; charset=utf-8",
    "mark.svg": b"image/svg+xml",
    **dict.fromkeys(
        (
            "app.js",
            "answers.js",
            "ask.js",
            "engine.js",
            "images.js",
            "numbers.js",
            "play.js",
            "prose.js",
            "store.js",
            "tables.js",
            "vendor/htm-preact.js",
        ),
        SCRIPT,
    ),
    "vendor/LICENSES": TEXT,
    "vendor/table.toml": TEXT,
}


class PageFile(msgspec.Struct, frozen=True):
    """One file, its compressed form, and the tag by which a browser knows its version."""

    content: bytes
    packed: bytes
    kind: bytes
    etag: bytes


def find(name: str) -> PageFile | None:
    """Return a file of the page, or None for an unknown name or a file that the installation lacks."""
    return _read(name) if name in KINDS else None


@cache
def _read(name: str) -> PageFile | None:
    """Read a file of the table.  The cache holds one entry for each name in it."""
    try:
        content = (STATIC / name).read_bytes()
    except OSError:
        return None
    tag = sha256(content).hexdigest()[:20]
    return PageFile(content, gzip.compress(content, 9, mtime=0), KINDS[name], f'"{tag}"'.encode())
