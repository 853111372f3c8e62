"""The page lists exactly the metrics of the registries; `python -m tests.packaging.test_metrics_page` rewrites the list."""

import random
import re
from pathlib import Path

import anyio

from tests.server.test_journal import SimulatedDisk
from trouper.actors.observability.metrics import Metrics
from trouper.frontends.server.durable.journal import Journal
from trouper.frontends.server.durable.segments import Segments
from trouper.frontends.server.models.metrics import ResidencyMetrics
from trouper.frontends.server.models.policy import ResidencyLimits
from trouper.frontends.server.models.residency import Residency
from trouper.frontends.server.models.table import ModelTable
from trouper.frontends.server.service.metrics import ServerMetrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
SUFFIX = {"counter": "_total"}
COMMON = ("model_name", "engine")
TABLE = re.compile(r"\| metric \|.*\n(?:\|.*\n)+|^(?:ENGINE|SERVER|MODELS)\n", re.MULTILINE)


def rows(families):
    """Return the table of metric families, sorted by name."""
    lines = ["| metric | type | labels | is |", "|---|---|---|---|"]
    for family in sorted(families, key=lambda family: family.name):
        labels = [f"`{name}`" for name in family._labelnames if name not in COMMON]
        name = family.name + SUFFIX.get(family.type, "")
        lines.append(f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |")
    return "\n".join(lines) + "\n"


async def server_families():
    metrics = ServerMetrics()
    metrics.prefix = "trouper"
    segments = Segments(
        SimulatedDisk(random.Random(0), full_rate=0, error_rate=0), b"", bytes, max_bytes=0
    )
    metrics.journal = Journal(segments, "off", 0)
    return list(metrics.collect())


def model_families():
    table = ModelTable([], "none", 0)
    residency = Residency(table, ResidencyLimits(0), print)
    return ResidencyMetrics(residency, "trouper").collect()


def tables():
    engine = rows(Metrics("a-model", 4096).collect())
    return engine, rows(anyio.run(server_families)), rows(model_families())


def test_the_page_lists_every_metric():
    assert tuple(TABLE.findall(PAGE.read_text())) == tables(), (
        "python -m tests.packaging.test_metrics_page"
    )


if __name__ == "__main__":
    new = iter(tables())
    PAGE.write_text(TABLE.sub(lambda _: next(new), PAGE.read_text()))
