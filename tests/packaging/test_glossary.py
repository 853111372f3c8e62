"""Every noun of our own that a newcomer meets in many files is explained in the glossary.

The words of all identifiers are counted: `RequestTable.open_slot` has four. A word in more than twenty files is either
ordinary (it has its usual meaning in English, Python, machine learning or vLLM), or it is ours and has a row in the
glossary. `ordinary_words.txt` lists the ordinary ones.
"""

import io
import keyword
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("actors", "bench", "frontends", "kernels", "trouper")
ORDINARY = set(Path(__file__).with_name("ordinary_words.txt").read_text().split())
MANY_FILES = 20
MAX_TERMS = 35


def words_of(identifier):
    """Split an identifier at underscores and capitals, into lower-case words."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", identifier)
    return [word for word in spaced.lower().split("_") if len(word) > 2 and word.isalpha()]


def singular(word, known):
    """Return the singular of a plural whose singular is also used, and any other word as it is."""
    endings = (("ies", "y"), ("s", ""), ("es", ""))
    singulars = (word.removesuffix(s) + end for s, end in endings if word.endswith(s))
    return next((one for one in singulars if one in known), word)


def identifiers(path):
    """Collect the names in a module's code, without keywords; strings and comments have none."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return {t.string for t in tokens if t.type == tokenize.NAME} - set(keyword.kwlist)


@pytest.fixture(scope="module")
def common_words():
    """The words that the identifiers of more than twenty modules contain; studies are not in the package."""
    modules = defaultdict(set)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if "studies" not in path.parts:
                for word in {word for name in identifiers(path) for word in words_of(name)}:
                    modules[word].add(path)
    found = defaultdict(set)
    for word, paths in modules.items():
        found[singular(word, modules)] |= paths
    return {word for word, paths in found.items() if len(paths) > MANY_FILES}


@pytest.fixture(scope="module")
def terms():
    page = (ROOT / "docs" / "glossary.md").read_text()
    return re.findall(r"^\| ([a-z ]+) \| ", page, re.MULTILINE)[1:]


def test_identifiers_are_split_into_words():
    assert words_of("RequestTable") == ["request", "table"]
    assert words_of("HTTPServer_x.num_kv_blocks2".replace(".", "_")) == ["http", "server", "num"]
    assert singular("entries", {"entry"}) == "entry"
    assert singular("class", {"cla"}) == "class"


def test_glossary_has_every_common_noun(common_words, terms):
    explained = {word for term in terms for word in term.split()}
    missing = common_words - explained - ORDINARY
    assert missing == set(), (
        "each of these words is now used in more than 20 files. Rename it to a usual word, or explain it in docs/glossary.md; "
        "if it has its usual meaning, add it to tests/packaging/ordinary_words.txt"
    )


def test_no_term_is_also_ordinary(terms):
    assert ORDINARY & set(terms) == set()


def test_glossary_is_short_and_sorted(terms):
    assert len(terms) <= MAX_TERMS
    assert terms == sorted(set(terms))
