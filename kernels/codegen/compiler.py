"""Compile a kernel to machine code, and keep it on disk, so that the second start loads what the first one compiled.

Laws:
  * A file's key covers everything that its content depends on: the sources of the kernel, the name and features of the
    processor, the version of LLVM.  A file with a given key never changes, and an edit of one kernel recompiles only
    that kernel.
  * The sources of a kernel are the module that writes it and all modules of trouper that it imports, directly or
    indirectly, at the top or inside a function.
  * A file begins with the hash of its content and is renamed into place.  A file that does not match its hash (truncated,
    foreign) is compiled again.  Nothing is unpickled.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# llvmlite has no types.
import contextlib
import functools
import hashlib
import logging
import os
import re
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llvmlite import __version__ as llvmlite_version
from llvmlite import binding

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.features import target

PACKAGE = Path(__file__).parents[2]  # the folder `trouper`
IMPORTS = re.compile(
    r"^[ \t]*(?:from[ ]+(trouper[\w.]*)[ ]+import[ ]+(\([^)]*\)|[^\n]*)|import[ ]+(trouper[^\n]*))",
    re.M,
)
COMMENT = re.compile("#[^\n]*")


def digest_of(*files: Path) -> str:
    """Return a hash of these files and of every file of trouper that they import.

    A kernel's machine code is stored under this hash, so a change of any of them compiles it again.
    """
    contents = sorted((file.name, _hash_and_imports(file)[0]) for file in files_of(*files))
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def files_of(*files: Path) -> set[Path]:
    """Return these files and every file of trouper that they import, directly or indirectly.

    Imports are found in the text, so nothing is executed. The hash of a kernel covers them.
    """
    found: set[Path] = set()
    waiting = list(files)
    while waiting:
        if (file := waiting.pop()) not in found:
            found.add(file)
            waiting += _hash_and_imports(file)[1]
    return found


@functools.cache
def _hash_and_imports(file: Path) -> tuple[str, tuple[Path, ...]]:
    """Return the hash of a file, and the files of trouper that it imports.

    Results are cached, because a start compiles about twenty kernels from the same files.
    """
    content = file.read_bytes()
    modules = imported_modules(content.decode())
    files = dict.fromkeys(found for name in modules if (found := _file_of(name)))
    return hashlib.sha256(content).hexdigest(), tuple(files)


def imported_modules(source: str) -> Iterator[str]:
    """Yield the dotted names in this source's imports that may be modules of trouper.

    A name imported from a package may be a module or an object, so both possibilities are yielded.
    """
    for package, names, modules in IMPORTS.findall(source):
        if package:
            yield package
        for name in COMMENT.sub("", names or modules).strip("() \n").split(","):
            if name := name.strip().partition(" ")[0]:
                yield f"{package}.{name}" if package else name


def _file_of(module: str) -> Path | None:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


DIGEST_BYTES = hashlib.sha256().digest_size

logger = logging.getLogger(__name__)
_compiling = threading.Lock()


def address_of(name: str, write: Callable[..., None], *options: object) -> tuple[int, object]:
    """Return the address of the compiled function, and the library that must outlive its calls.

    Loads the machine code from disk, or else compiles it and writes it there.

    Args:
        name: the function's name, unique for `write` and its options.
        write: the Python function that writes the kernel.
    """
    with _compiling:
        file = _file_for(name, write)
        image = None if file is None else _read(file)
        if image is None:
            image = _compile(name, write, *options)
            if file is not None:
                _write(file, image)
        jit = binding.create_lljit_compiler(_target_machine(), use_jit_link=False)
        builder: Any = binding.JITLibraryBuilder()
        library = builder.add_object_img(image).export_symbol(name).link(jit, name)
        return library[name], library


@functools.cache
def cache_folder() -> Path | None:
    """Return the user's private folder for machine code.

    Returns None if no such folder can be created; then every start compiles. Each processor and version of llvmlite
    has its own.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256()
    for part in (*target(), llvmlite_version):
        digest.update(f"{part}\n".encode())
    folder = home / "trouper" / f"kernels-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError:
        return None
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & stat.S_IWOTH):
        logger.warning(
            "%s belongs to another user or is world-writable: compiling the kernels at each start",
            folder,
        )
        return None
    return folder


def _file_for(name: str, write: Callable[..., None]) -> Path | None:
    """Return the path of a kernel's machine code, or None if it cannot be kept."""
    folder, writer = cache_folder(), getattr(sys.modules[write.__module__], "__file__", None)
    if folder is None or writer is None:
        return None
    try:
        digest = digest_of(Path(writer), Path(__file__))
    # Without the sources, as in a distribution of bytecode, there is no key.
    except OSError:
        return None
    return folder / f"{name}-{digest[:16]}.o"


def _read(file: Path) -> bytes | None:
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, image = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return image if hashlib.sha256(image).digest() == digest else None


def _write(file: Path, image: bytes) -> None:
    # If the disk is full or read-only, the next start compiles again.
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as made:
            made.write(hashlib.sha256(image).digest() + image)
        os.replace(made.name, file)


def _compile(name: str, write: Callable[..., None], *options: object) -> bytes:
    code = KernelBuilder(name)
    write(code, *options)
    machine = _target_machine()
    module = binding.parse_assembly(code.finish())
    module.verify()
    # Kernels use explicit vectors and unroll loops themselves, so these passes would only slow compilation down.
    tuning = binding.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = False
    passes: Any = binding.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    return machine.emit_object(module)


@functools.cache
def _target_machine() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    name, features = target()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=name,
        features=features,
        opt=2,
        reloc="pic",
    )
