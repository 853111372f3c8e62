"""Source files that a kernel is made of: the module that writes it, and whatever that imports, in turn.

Law: every file of trouper is named whose change could change the kernel.  An import counts wherever it stands,
also within a function.
"""

import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2]  # the folder `trouper`
IMPORTS = re.compile(
    r"^[ \t]*(?:from[ ]+(trouper[\w.]*)[ ]+import[ ]+(\([^)]*\)|[^\n]*)|import[ ]+(trouper[^\n]*))",
    re.M,
)
COMMENT = re.compile("#[^\n]*")


def digest_of(*files: Path) -> str:
    """Return a hash of these files and of every file of trouper that they import, in turn."""
    contents = sorted((file.name, _read(file)[0]) for file in files_of(*files))
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def files_of(*files: Path) -> set[Path]:
    """Return these files and every file of trouper that they import, in turn."""
    found: set[Path] = set()
    waiting = list(files)
    while waiting:
        if (file := waiting.pop()) not in found:
            found.add(file)
            waiting += _read(file)[1]
    return found


@functools.cache  # a start compiles some twenty kernels from the same files
def _read(file: Path) -> tuple[str, tuple[Path, ...]]:
    """Return the hash of a file, and the files of trouper that it imports."""
    content = file.read_bytes()
    modules = imported_modules(content.decode())
    files = dict.fromkeys(found for name in modules if (found := _file_of(name)))
    return hashlib.sha256(content).hexdigest(), tuple(files)


def imported_modules(source: str) -> Iterator[str]:
    """Yield the dotted names in the imports of this source that may be modules of trouper."""
    for package, names, modules in IMPORTS.findall(source):
        if package:
            yield package
        for name in COMMENT.sub("", names or modules).strip("() \n").split(","):
            if name := name.strip().partition(" ")[0]:  # without `as …`
                yield f"{package}.{name}" if package else name


def _file_of(module: str) -> Path | None:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)
