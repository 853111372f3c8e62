"""Check the words of docstrings, comments, help texts and pages: `python scripts/words.py [PATH … | --count | --markers PATH …]`.

A docstring begins with a verb or with a noun that has its head in the sentence, so it can be understood without the
code below it. Parts of the program are tasks, threads, clients or senders, never persons. Nothing refers
to a document that readers do not have.

*Markers* are turns of phrase at which a native reader stumbles, such as "the text that is there".  Each has good uses, so they
are counted and not forbidden: a folder may have as many per 1,000 words as its budget says, and budgets only fall.
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
MARKERS = re.compile(
    r"\b(?:"
    r"(?:that|which) (?:is|are|has|have|was|were)|of which|whose|(?:says?|said|saying|tells?|told|telling)"
    r"|stretch(?:es)?|pieces?|beside|in turn|in force|lies?|lying|lay|stands?|standing|stood"
    r"|alone|by (?:itself|themselves)|so (?:many|much|long|few)"
    r"|where (?:an?|the|there|it|none?|they|one|this|that|all|not)"
    r"|(?:has|have|had|is|are) (?:left|gone|come)|as (?:\S+ ){1,3}(?:has|have|had) (?:it|them)"
    r")\b|\bNone: ",
    re.IGNORECASE,
)
BUDGETS = {  # of markers per 1,000 words; lower them when the count falls
    "actors": 23.5, "bench": 24.5, "frontends": 22.5, "kernels": 18.0, "scripts": 22.5, "trouper": 27.0, "docs": 13.0,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Check the words of docstrings, comments, help texts and pages."
    )
    parser.add_argument(
        "--count", action="store_true", help="print only how many of each kind there are"
    )
    parser.add_argument(
        "--markers",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="print the markers in these files or folders",
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH", help="check only these files or folders"
    )
    args = parser.parse_args()
    if args.markers:
        sys.stdout.writelines(f"{line}\n" for path in args.markers for line in show_markers(path))
        return
    if args.paths:
        found = [line for path in args.paths for file in files(path) for line in check_file(file)]
        sys.stdout.writelines(f"{line}\n" for line in found)
        sys.exit(bool(found))
    found = [line for path in sources() for line in check(path)]
    found += [line for path in pages() for line in check_page(path)]
    rates = {folder: marker_rate(folder) for folder in BUDGETS}
    found += [
        f"{folder}: markers: {rate:.1f} per 1,000 words, and the budget is {BUDGETS[folder]}: see --markers {folder}"
        for folder, rate in rates.items()
        if rate > BUDGETS[folder]
    ]
    if args.count:
        num_words = sum(len(text.split()) for path in sources() for _, text in texts(path))
        for kind in ("fragment", "person", "absent", "help"):
            num = sum(f" {kind}: " in line for line in found)
            print(f"{kind}: {num}, {1000 * num / num_words:.2f} per 1,000 of {num_words} words")
        for folder, rate in rates.items():
            print(f"markers in {folder}: {rate:.1f} per 1,000 words, budget {BUDGETS[folder]}")
    else:
        sys.stdout.writelines(f"{line}\n" for line in found)
    sys.exit(bool(found))


def sources() -> list[Path]:
    """Every module but this one, also in a copy that is no git checkout."""
    folders = ("actors", "bench", "frontends", "kernels", "scripts", "trouper")
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in paths if path != Path(__file__).resolve()]


def check_file(path: Path) -> Iterator[str]:
    """Yield the findings in one module or page."""
    return check_page(path.resolve()) if path.suffix == ".md" else check(path.resolve())


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


def marker_rate(folder: str) -> float:
    """Count the markers per 1,000 words of a folder: its docstrings and comments, or the text of its pages."""
    found = [text for path in files(ROOT / folder) for _, text in prose(path)]
    return 1000 * sum(len(MARKERS.findall(t)) for t in found) / sum(len(t.split()) for t in found)


def show_markers(path: Path) -> Iterator[str]:
    for file in files(path):
        for first, text in prose(file):
            for number, line in enumerate(text.splitlines(), first):
                if markers := MARKERS.findall(line):
                    yield f"{file}:{number}: {', '.join(map(repr, markers))} in {line.strip()[:100]!r}"


def files(path: Path) -> list[Path]:
    """The modules or pages of a folder, or the one file; README belongs to docs, dated logs to nothing."""
    if path.is_file():
        return [path]
    if path.resolve() == ROOT / "docs":
        return pages()
    return [file for file in sources() if file.is_relative_to(path.resolve())]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    if path.suffix == ".md":
        yield 1, FENCED.sub(lambda block: "\n" * block[0].count("\n"), path.read_text())
    else:
        yield from texts(path)


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
