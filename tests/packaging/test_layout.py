"""The source folders at the root are exactly the sub-packages of trouper."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import hypothesis
from setuptools import find_namespace_packages

ROOT = Path(__file__).parents[2]
FOLDERS = ("actors", "bench", "frontends", "kernels")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FIND = PYPROJECT["tool"]["setuptools"]["packages"]["find"]
# A move of modules leaves folders in older checkouts that contain nothing but `__pycache__`.
PACKAGES = [
    name
    for name in find_namespace_packages(str(ROOT), **FIND)
    if any(path.is_file() for path in (ROOT / name.replace(".", "/")).iterdir())
]
SOURCES = [
    path
    for folder in (*FOLDERS, "docs", "scripts", "tests", "trouper")
    for path in (ROOT / folder).rglob("*.py")  # does not follow the links in trouper/
]
IMPORT = re.compile(r"^ *(?:import|from) +(\w[^#\n]*)", re.MULTILINE)
CHECKOUT_ONLY = ("trouper.bench.studies", "trouper.bench.h200")
UNSHIPPED = ("bench/studies", "scripts", "tests")
BARE_IMPORT = re.compile(rf"^\s*(?:from|import)\s+(?:{'|'.join(FOLDERS)})\b", re.MULTILINE)


def test_every_package_of_the_tree_is_found():
    found = {"trouper.demo"}  # no code
    for folder in (*FOLDERS, "trouper"):
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            found.add(".".join(parts if folder == "trouper" else ("trouper", *parts)))
    found = {name for name in found if not name.startswith(CHECKOUT_ONLY)}
    assert sorted(PACKAGES) == sorted(found)


def test_every_folder_with_sources_is_a_package():
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), f"{path.parent} has no __init__.py"


def test_folders_are_linked():
    for folder in FOLDERS:
        link = ROOT / "trouper" / folder
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{folder}"


def test_packages_but_the_root_are_docstrings():
    for name in PACKAGES:
        if name not in ("trouper", "trouper.demo"):
            init = ROOT.joinpath(*name.split("."), "__init__.py")
            text = init.read_text().strip()
            assert re.fullmatch(r'"""[^"]+"""', text), f"{init} is more than a docstring"


def test_nothing_imports_a_folder_by_its_bare_name():
    """`python -m pytest` puts the root on sys.path, so a bare import would work there and fail elsewhere."""
    assert len(SOURCES) > 20
    for path in SOURCES:
        found = BARE_IMPORT.search(path.read_text())
        assert found is None, f"{path}: write trouper.… in {found.group().strip()!r}"


def test_no_example_has_a_deadline():
    """The profile of the tests has no deadline, because a busy machine misses any wall-clock limit."""
    assert hypothesis.settings().deadline is None
    for path in (ROOT / "tests").rglob("*.py"):
        found = re.search(r"\bdeadline=(?!None\b)[\dt]", path.read_text())
        assert found is None, f"{path}: an example with a deadline"


def test_no_module_has_two_names():
    for folder in FOLDERS:
        if folder == "kernels" and "transformers" in sys.modules:
            continue  # it asks for a package of that name, and in a checkout finds ours
        module = sys.modules.get(folder)
        assert module is None or not str(module.__file__).startswith(str(ROOT))


def test_every_import_is_a_declared_dependency():
    extras = PYPROJECT["project"]["optional-dependencies"]
    shipped = list(PYPROJECT["project"]["dependencies"])
    known = (
        "audio",
        "bench",
        "cuda",
        "gguf",
        "grammar",
        "parquet",
        "ray",
        "server",
        "tracing",
        "transformers",
        "vision",
    )
    for name in known:
        shipped += extras[name]
    for path in SOURCES:
        is_test = any(path.is_relative_to(ROOT / name) for name in UNSHIPPED)
        lines = shipped + extras["test"] + extras["clients"] + extras["dev"] if is_test else shipped
        names = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}
        names |= {"PIL"} if "pillow" in names else set()
        names |= {name.split("_")[0] for name in names}  # opentelemetry-sdk brings opentelemetry
        names |= {"trouper", "conftest", "tests"} if is_test else {"trouper"}
        names |= sys.stdlib_module_names
        text = path.read_text()
        # Most files are known after a search. Only a line of a text can look like an import without being one.
        if not seeming_imports(text) <= names:
            unknown = imported_names(text) - names
            assert not unknown, f"{path}: {unknown}"


def seeming_imports(text):
    """Find the packages of all lines that look like imports: `import a.b, c` has `a` and `c`."""
    modules = (part.split(" import ")[0] for part in IMPORT.findall(text))
    return {re.split(r"\W", name.strip())[0] for part in modules for name in part.split(",")}


def test_import_in_text_seems_to_be_one():
    text = "import a.b, c as d\ndef f():\n    from e.f import g, h\n    from .i import j\n"
    assert seeming_imports(text) == imported_names(text) == {"a", "c", "e"}
    assert seeming_imports('"""\nfrom x import y\n"""') == {"x"}
    assert imported_names('"""\nfrom x import y\n"""') == set()


def imported_names(text):
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


def test_files_of_the_page_are_package_data():
    data = PYPROJECT["tool"]["setuptools"]["package-data"]["trouper.frontends.server.page"]
    folder = ROOT / "frontends" / "server" / "page"
    found = {path for pattern in data for path in folder.glob(pattern) if path.is_file()}
    assert found == {path for path in (folder / "static").rglob("*") if path.is_file()}
