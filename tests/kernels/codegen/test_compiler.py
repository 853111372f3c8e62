"""Which files the machine code of a kernel depends on.

Kernels on the disk: what is found there is used only if it is what was written.
"""

import ast
import ctypes
import re
import sys
import threading
import types

import pytest

from trouper.kernels.codegen import compiler, launch

KERNELS = compiler.PACKAGE / "kernels"
FILES = sorted(KERNELS.rglob("*.py"))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package in place of trouper: a kernel, a helper, the language of kernels, and another kernel."""
    texts = {
        "__init__": "",
        "kernels/__init__": "",
        "kernels/language": "import re\n",
        "kernels/helper": "from trouper.kernels.language import (\n    a,  # b, c\n    d,\n)\n",
        "kernels/mine": "def write():\n    from trouper.kernels import helper as other, missing\n",
        "kernels/other": "import trouper.kernels.language\n",
    }
    for name, text in texts.items():
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(compiler, "PACKAGE", tmp_path)
    compiler._hash_and_imports.cache_clear()
    yield tmp_path / "kernels"
    compiler._hash_and_imports.cache_clear()


def changed_by(file, *kernels):
    """Return which of the kernels have another digest when this file is another."""
    before = [compiler.digest_of(kernel) for kernel in kernels]
    file.write_text(file.read_text() + "\n# another\n")
    compiler._hash_and_imports.cache_clear()
    after = [compiler.digest_of(kernel) for kernel in kernels]
    return [
        kernel.stem for kernel, old, new in zip(kernels, before, after, strict=True) if old != new
    ]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("mine", ["mine"]),
        ("other", ["other"]),
        ("helper", ["mine"]),
        ("language", ["mine", "other"]),
        ("__init__", ["mine"]),  # the package that `helper` is imported from
    ],
)
def test_a_kernel_depends_on_indirect_imports(package, name, changed):
    kernels = package / "mine.py", package / "other.py"
    assert changed_by(package / f"{name}.py", *kernels) == changed


def test_a_digest_does_not_depend_on_the_location(package, tmp_path, monkeypatch):
    before = compiler.digest_of(package / "mine.py")
    moved = package.rename(tmp_path / "elsewhere")
    (tmp_path / "new").mkdir()
    moved = moved.rename(tmp_path / "new" / "kernels")
    monkeypatch.setattr(compiler, "PACKAGE", tmp_path / "new")
    assert compiler.digest_of(moved / "mine.py") == before


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(KERNELS)))
def test_every_import_of_a_kernel_is_found(file):
    source = file.read_text()
    expected = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            expected |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            expected |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    ours = {name for name in expected if name.split(".")[0] == "trouper"}
    assert ours <= set(compiler.imported_modules(source))


def test_no_kernel_depends_on_another_ones_module():
    attention, products = KERNELS / "cpu/attention/prefill.py", KERNELS / "cpu/linear/dense.py"
    for kernel, other in ((attention, products), (products, attention)):
        files = compiler.files_of(kernel)
        assert {kernel, KERNELS / "codegen" / "core.py"} <= files
        assert other not in files


machine_code = pytest.importorskip("trouper.kernels.codegen.compiler")


def write_answer(code):
    (target,) = code.arguments(1)
    for item in code.work_items():
        code.pointer(target, "i64")[item] = item * item + 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_code, "cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def compilations(monkeypatch):
    names = []
    compile_ = machine_code._compile
    monkeypatch.setattr(
        machine_code, "_compile", lambda name, *rest: (names.append(name), compile_(name, *rest))[1]
    )
    return names


def answers():
    """Return the result of a newly linked kernel."""
    kernel = launch.Kernel("answer", *machine_code.address_of("answer", write_answer))
    target = (ctypes.c_int64 * 4)()
    kernel(4, ctypes.addressof(target))
    return list(target)


def test_the_second_start_compiles_nothing(folder, compilations):
    assert answers() == answers() == [1, 2, 5, 10]
    assert compilations == ["answer"]
    (file,) = folder.iterdir()
    assert re.fullmatch(r"answer-[0-9a-f]{16}\.o", file.name)


def test_an_edit_recompiles_only_its_kernel(folder, compilations, tmp_path_factory, monkeypatch):
    sources_folder = tmp_path_factory.mktemp("sources")
    text = "def write(code):\n    (at,) = code.arguments(1)\n    code.pointer(at, 'i64')[0] = {}\n"

    def run_all(**values):
        """Return the results of kernels with these values in their sources, from a new process."""
        found = []
        for name, value in values.items():
            file = sources_folder / f"{name}.py"
            file.write_text(text.format(value))
            module = types.ModuleType(name)
            module.__file__ = str(file)
            exec(file.read_text(), vars(module))
            monkeypatch.setitem(sys.modules, name, module)
            machine_code._hash_and_imports.cache_clear()
            target = ctypes.c_int64()
            kernel = launch.Kernel(name, *machine_code.address_of(name, module.write))
            kernel(1, ctypes.addressof(target))
            found.append(target.value)
        return found

    assert run_all(kernel_one=1, kernel_two=2) == [1, 2]
    assert run_all(kernel_one=3, kernel_two=2) == [3, 2]
    assert compilations == ["kernel_one", "kernel_two", "kernel_one"]
    assert run_all(kernel_one=1, kernel_two=2) == [1, 2]  # both are still there
    assert len(compilations) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:],
        lambda content: b"",
        lambda content: b"\x7fELF foreign",
    ],
    ids=["cut off", "one bit", "empty", "foreign"],
)
def test_a_damaged_file_is_compiled_anew_and_replaced(folder, compilations, damage):
    answers()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert answers() == [1, 2, 5, 10]
    assert compilations == ["answer"] * 2
    assert file.read_bytes() == whole


def test_a_read_only_folder_only_costs_time(folder, compilations, monkeypatch):
    monkeypatch.setattr(machine_code, "cache_folder", lambda: folder / "missing")
    assert answers() == [1, 2, 5, 10]
    monkeypatch.setattr(machine_code, "cache_folder", lambda: None)
    assert answers() == [1, 2, 5, 10]
    assert compilations == ["answer"] * 2


def test_the_folder_belongs_to_user_and_compiler(tmp_path, monkeypatch):
    find = machine_code.cache_folder.__wrapped__
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = find()
    assert folder == find()
    assert folder.parent == tmp_path / "trouper"
    monkeypatch.setattr(machine_code, "llvmlite_version", "another")
    assert find() != folder
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder.chmod(0o777)
    assert find() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert find() is None


def test_scratch_is_aligned_and_private_to_a_thread():
    small = launch.scratch(10)
    assert small % 64 == 0
    assert launch.scratch(5) == small
    assert launch.scratch(100_000) % 64 == 0
    own, others = launch.scratch(64), []
    thread = threading.Thread(target=lambda: others.append(launch.scratch(64)))
    thread.start()
    thread.join()
    assert others[0] != own
