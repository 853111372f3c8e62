"""The page lists exactly the metrics of the registries; `python -m tests.packaging.test_metrics_page` rewrites the list."""

import re
from pathlib import Path

import anyio

from trouper.actors.observability.metrics import Metrics
from trouper.frontends.server.service.metrics import ServerMetrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
SUFFIX = {"counter": "_total"}
COMMON = ("model_name", "engine")
TABLE = re.compile(r"\| metric \|.*\n(?:\|.*\n)+|^(?:ENGINE|SERVER)\n", re.MULTILINE)


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
    return list(metrics.collect())


def tables():
    return rows(Metrics("a-model", 4096).collect()), rows(anyio.run(server_families))


def test_the_page_lists_every_metric():
    engine, server = TABLE.findall(PAGE.read_text())
    assert (engine, server) == tables(), "python -m tests.packaging.test_metrics_page"


if __name__ == "__main__":
    new = iter(tables())
    PAGE.write_text(TABLE.sub(lambda _: next(new), PAGE.read_text()))
