"""Names of tests are short enough to read in a list: three to eight words of behaviour."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
# Searched instead of parsed, because parsing all tests would take two seconds.
DEFINITION = re.compile(r"^ *(?:async )?def test_(\w+)", re.MULTILINE)
MAX_WORDS = 8
# The share of longer names. Lower it when it falls; never raise it.
MAX_LONG_SHARE = 0.18
# No name is longer than this.
MAX_WORDS_OF_ANY = 10


def names():
    """Yield the place and the name of each test, without its prefix."""
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        for found in DEFINITION.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{path.relative_to(TESTS)}:{line}", found.group(1)


def test_names_are_short():
    lengths = {f"{place} {name}": len(name.split("_")) for place, name in names()}
    assert len(lengths) > 1000
    assert {name for name, words in lengths.items() if words > MAX_WORDS_OF_ANY} == set()
    long = [name for name, words in lengths.items() if words > MAX_WORDS]
    assert len(long) <= MAX_LONG_SHARE * len(lengths), f"{len(long)} of {len(lengths)}: {long[:50]}"
