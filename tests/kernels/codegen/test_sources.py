"""Which files the machine code of a kernel depends on."""

import ast

import pytest

from trouper.kernels.codegen import sources

KERNELS = sources.PACKAGE / "kernels"
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
    monkeypatch.setattr(sources, "PACKAGE", tmp_path)
    sources._read.cache_clear()
    yield tmp_path / "kernels"
    sources._read.cache_clear()


def changed_by(file, *kernels):
    """Return which of the kernels have another digest when this file is another."""
    before = [sources.digest_of(kernel) for kernel in kernels]
    file.write_text(file.read_text() + "\n# another\n")
    sources._read.cache_clear()
    after = [sources.digest_of(kernel) for kernel in kernels]
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
def test_a_kernel_depends_on_what_its_module_imports_in_turn(package, name, changed):
    kernels = package / "mine.py", package / "other.py"
    assert changed_by(package / f"{name}.py", *kernels) == changed


def test_a_digest_does_not_depend_on_where_the_package_lies(package, tmp_path, monkeypatch):
    before = sources.digest_of(package / "mine.py")
    moved = package.rename(tmp_path / "elsewhere")
    (tmp_path / "new").mkdir()
    moved = moved.rename(tmp_path / "new" / "kernels")
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "new")
    assert sources.digest_of(moved / "mine.py") == before


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
    assert ours <= set(sources.imported_modules(source))


def test_no_kernel_depends_on_another_ones_module():
    attention, products = KERNELS / "cpu/attention/prefill.py", KERNELS / "cpu/linear/dense.py"
    for kernel, other in ((attention, products), (products, attention)):
        files = sources.files_of(kernel)
        assert {kernel, KERNELS / "codegen" / "core.py"} <= files
        assert other not in files
