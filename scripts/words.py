"""Check the words of docstrings, comments, help texts and pages: `python scripts/words.py [--count]`.

A docstring begins with a verb or with a noun that has its head in the sentence, so it can be understood without the
code below it. Parts of the program are tasks, threads, clients or senders, never persons. Nothing refers
to a document that readers do not have.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FRAGMENT = re.compile(
    r"(Of|What|Who|Whose|It|Its|They|None|As|So|Until|And|But|Or|The same|Where|That|Also|Not|Nothing|Something|Same)\b"
)
PERSON = re.compile(
    r"\b(who|whoever|whom|nobody|somebody|everybody|anybody|someone|anyone|everyone|he|she|him|his|her)\b",
    re.IGNORECASE,
)
# A page may speak of its readers, who are persons.
PERSON_IN_PAGES = re.compile(
    r"\b(whoever|whom|nobody|somebody|everybody|anybody|someone)\b", re.IGNORECASE
)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
ABSENT = re.compile(r"\bspec(ification)? (section )?\d|\bsemantics \d|§ ?\d", re.IGNORECASE)
MIN_HELP_WORDS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Check the words of docstrings, comments, help texts and pages."
    )
    parser.add_argument(
        "--count", action="store_true", help="print only how many of each kind there are"
    )
    args = parser.parse_args()
    found = [line for path in sources() for line in check(path)]
    found += [line for path in pages() for line in check_page(path)]
    if args.count:
        num_words = sum(len(text.split()) for path in sources() for _, text in texts(path))
        for kind in ("fragment", "person", "absent", "help"):
            num = sum(f" {kind}: " in line for line in found)
            print(f"{kind}: {num}, {1000 * num / num_words:.2f} per 1,000 of {num_words} words")
    else:
        sys.stdout.writelines(f"{line}\n" for line in found)
    sys.exit(bool(found))


def sources() -> list[Path]:
    """Every module but this one, also in a copy that is no git checkout."""
    folders = ("actors", "bench", "frontends", "kernels", "scripts", "trouper")
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in paths if path != Path(__file__).resolve()]


def check(path: Path) -> Iterator[str]:
    name = path.relative_to(ROOT)
    for line, docstring in docstrings(path):
        if FRAGMENT.match(docstring.lstrip()):
            yield f"{name}:{line}: fragment: {docstring.strip().splitlines()[0][:80]}"
    for line, text in texts(path):
        for match in PERSON.finditer(text):
            yield f"{name}:{line}: person: {match[0]!r} in {text.strip()[:80]!r}"
        if match := ABSENT.search(text):
            yield f"{name}:{line}: absent: {match[0]!r}"
    for line, text in help_texts(path):
        if len(text.split()) < MIN_HELP_WORDS:
            yield f"{name}:{line}: help: {text!r} does not stand alone"


def pages() -> list[Path]:
    """The pages of the documentation; dated logs keep the words of their day."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def check_page(path: Path) -> Iterator[str]:
    text = FENCED.sub(lambda block: "\n" * block[0].count("\n"), path.read_text())
    for number, line in enumerate(text.splitlines(), 1):
        for match in PERSON_IN_PAGES.finditer(line):
            yield f"{path.relative_to(ROOT)}:{number}: person: {match[0]!r} in {line.strip()[:80]!r}"


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, docstring


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Every comment and docstring."""
    yield from docstrings(path)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#")


def help_texts(path: Path) -> Iterator[tuple[int, str]]:
    """The `help` of options and arguments of the command line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "help" and isinstance(keyword.value, ast.Constant):
                    yield node.lineno, str(keyword.value.value)


if __name__ == "__main__":
    main()
