"""A pause of the garbage collector while modules are imported: they are kept, so scans of them find nothing.

Importing torch makes half a million objects, and collections on the way take a sixth of its time; the first one after it
takes 0.1 s.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collections_paused(*, is_frozen: bool = False) -> Generator[None]:
    """Let no collection run in this block, unless something in it asks for one.

    `is_frozen` exempts what is there at its end from later collections: for processes of this program alone, since what
    is garbage by then is kept, too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_frozen:
            gc.freeze()
        if was_enabled:
            gc.enable()
