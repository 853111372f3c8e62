"""The bounds of structured outputs, and the cost of parsers."""

from pathlib import Path

from trouper.bench.studies.scheduling import structured
from trouper.bench.studies.server import parsers
from trouper.frontends.dialects.table import DIALECTS

ROOT = Path(__file__).parents[2]


def test_bound_of_structured_outputs_missed_is_named():
    kept = {"ratio": 0.96, "new_schema_ms": 9.0, "loop_gap_ms": {"p99": 4.0}}
    assert structured.missed(kept) == []
    assert structured.missed({**kept, "ratio": 0.94}) == ["ratio"]
    assert structured.missed({**kept, "loop_gap_ms": {"p99": 6.0}}) == ["loop_gap_p99_ms"]


def test_parsers_are_timed_by_dialect_and_hostile_text():
    answers = parsers.read_answers(ROOT / "tests/dialects/golden")
    assert {answer.dialect for answer in answers} == {dialect.name for dialect in DIALECTS}
    assert parsers.measure_deltas(answers, repeat=1).keys() == {a.dialect for a in answers}
    rows = parsers.measure_hostile(repeat=1, length=4096)
    assert len(rows) == len(parsers.HOSTILE)
    assert all(row["ms"] >= row["slice_ms"] for row in rows)
