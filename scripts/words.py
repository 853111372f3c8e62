"""Check the words of docstrings, comments, help texts and pages: `python scripts/words.py [PATH … | --count | --markers PATH … | --glosses PATH …]`.

A docstring begins with a verb or with a noun that has its head in the sentence, so it can be understood without the
code below it. Parts of the program are tasks, threads, clients or senders, never persons. Nothing refers
to a document that readers do not have.

Three measures have a budget for each folder, because no single occurrence is wrong.  Budgets only improve.

*Markers* are phrases at which a native reader stumbles, such as "the text that is there", per 1,000 words.
*Glosses* are comments at the end of a line, as a share of all comments.  Units, shapes and examples are useful there; a
reason belongs into a sentence above the line.
*Docstring words* are the median length of the docstrings of public functions and classes: a short one names its
subject, and a longer one also explains it.
"""

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
DIRECTIVE = re.compile(r"#\s*(noqa|pyright|type:|fmt:|ruff|!)")
MAX_UNIT_WORDS = 3
KINDS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Budget(NamedTuple):
    """The limits of a folder: the first two are maxima, the last is a minimum."""

    markers: float  # per 1,000 words
    glosses: float = 100.0  # percent
    docstring_words: float = 0.0


# Improve a budget when its measure improves.
BUDGETS = {
    "actors": Budget(3.5, 26, 24),
    "bench": Budget(3.5, 15, 24),
    "frontends": Budget(3.3, 20, 25),
    "kernels": Budget(2.5, 19, 24),
    "scripts": Budget(0.5, 10, 25),
    "trouper": Budget(2.0, 22, 26),
    "docs": Budget(2.3),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Check the words of docstrings, comments, help texts and pages."
    )
    parser.add_argument(
        "--count", action="store_true", help="print only how many of each kind there are"
    )
    for name in ("markers", "glosses"):
        help_ = f"print the {name} in these files or folders"
        parser.add_argument(f"--{name}", nargs="+", type=Path, metavar="PATH", help=help_)
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH", help="check only these files or folders"
    )
    args = parser.parse_args()
    for paths, show in ((args.markers, show_markers), (args.glosses, show_glosses)):
        if paths:
            sys.stdout.writelines(f"{line}\n" for path in paths for line in show(path))
            return
    if args.paths:
        found = [line for path in args.paths for file in files(path) for line in check_file(file)]
        sys.stdout.writelines(f"{line}\n" for line in found)
        sys.exit(bool(found))
    found = [line for path in sources() for line in check(path)]
    found += [line for path in pages() for line in check_page(path)]
    measures = {folder: measure(folder) for folder in BUDGETS}
    found += [line for folder, found in measures.items() for line in over_budget(folder, found)]
    if args.count:
        num_words = sum(len(text.split()) for path in sources() for _, text in texts(path))
        for kind in ("fragment", "person", "absent", "help"):
            num = sum(f" {kind}: " in line for line in found)
            print(f"{kind}: {num}, {1000 * num / num_words:.2f} per 1,000 of {num_words} words")
        for folder, has in measures.items():
            budget = BUDGETS[folder]
            print(
                f"{folder}: {has.markers:.1f} markers per 1,000 words (budget {budget.markers}), {has.glosses:.0f} % "
                f"glosses ({budget.glosses:.0f}), docstrings of {has.docstring_words:.0f} words ({budget.docstring_words:.0f})"
            )
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


def measure(folder: str) -> Budget:
    """Measure the prose of a folder: its docstrings and comments, or the text of its pages."""
    paths = files(ROOT / folder)
    found = [text for path in paths for _, text in prose(path)]
    num_words = sum(len(text.split()) for text in found)
    markers = 1000 * sum(len(MARKERS.findall(text)) for text in found) / num_words
    if folder == "docs":
        return Budget(markers, 0.0)
    comments = [is_gloss for path in paths for _, is_gloss, _ in comments_of(path)]
    lengths = [len(text.split()) for path in paths for text in public_docstrings(path)]
    return Budget(markers, 100 * sum(comments) / len(comments), statistics.median(lengths))


def over_budget(folder: str, has: Budget) -> Iterator[str]:
    """Yield a line for each measure of a folder that exceeds its budget."""
    budget = BUDGETS[folder]
    if has.markers > budget.markers:
        yield f"{folder}: {has.markers:.1f} markers per 1,000 words, budget {budget.markers}: see --markers {folder}"
    if has.glosses > budget.glosses:
        yield f"{folder}: {has.glosses:.1f} % glosses, budget {budget.glosses}: see --glosses {folder}"
    if has.docstring_words < budget.docstring_words:
        yield f"{folder}: docstrings of {has.docstring_words} words, budget {budget.docstring_words}: explain more"


def public_docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of public functions and classes, methods included."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_public = isinstance(node, KINDS) and not node.name.startswith("_")
        if is_public and (docstring := ast.get_docstring(node)):
            yield docstring


def comments_of(path: Path) -> Iterator[tuple[int, bool, str]]:
    """Yield (line, whether it is a gloss, text) of each comment; the lines of a block are one comment."""
    source = path.read_text()
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string):
            continue
        text, (line, _) = token.string.lstrip("# "), token.start
        if token.line[: token.start[1]].strip():
            is_unit = text.startswith(("[", "e.g.")) or len(text.split()) <= MAX_UNIT_WORDS
            yield line, not is_unit, text
        else:
            if line != last + 1:
                yield line, False, text
            last = line


def show_glosses(path: Path) -> Iterator[str]:
    for file in files(path):
        yield from (
            f"{file}:{line}: {text}" for line, is_gloss, text in comments_of(file) if is_gloss
        )


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
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, *KINDS)) and (
            docstring := ast.get_docstring(node, clean=False)
        ):
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
