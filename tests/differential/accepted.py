"""Differences that are meant, as rows of the table in docs/coming-from-vllm.md."""

import re
from typing import NamedTuple

from .compare import Difference


class Accepted(NamedTuple):
    """One row: the cases and the paths that it covers, as expressions that match a whole name, and the reason."""

    cases: str
    paths: str
    reason: str


ACCEPTED: list[Accepted] = []


def accepted(case: str, difference: Difference) -> Accepted | None:
    """Return the row that covers a difference."""
    for row in ACCEPTED:
        if re.fullmatch(row.cases, case) and re.fullmatch(row.paths, difference.path):
            return row
    return None
