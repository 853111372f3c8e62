"""Links on the pages have existing targets, and the page of commands agrees with the commands."""

import re
import runpy
from importlib import import_module
from pathlib import Path

import pytest

yaml = import_module("yaml")  # which huggingface_hub brings
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def prose(page):
    """Return a page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text()))


def anchors(page):
    """Return the anchors of a page's headings in the format of the site and of code hosts; a repeated anchor gets a number."""
    found = {}
    for heading in re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        found[slug] = found.get(slug, 0) + 1
    return found.keys() | {f"{slug}_{i}" for slug, n in found.items() for i in range(1, n)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_existing_anchors(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_page_has_marks_of_another_markup(page):
    # `::` of reStructuredText; the reference of Python is directives of the site's generator.
    text = re.sub(r"^::: [\w.]+$", "", prose(page), flags=re.MULTILINE)
    assert not re.search(r"::(\s|$)", text, re.MULTILINE)
    assert "URL-OF" not in text


def test_every_page_is_in_the_navigation():
    class Loader(yaml.SafeLoader):
        """Load YAML and skip Python tags."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    found = set()

    def walk(entry):
        match entry:
            case dict():
                for below in entry.values():
                    walk(below)
            case list():
                for below in entry:
                    walk(below)
            case str():
                found.add(entry)

    walk(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    assert found == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_page_of_commands_is_what_commands_say():
    script = runpy.run_path(str(ROOT / "scripts" / "cli_page.py"))
    assert script["PAGE"].read_text() == script["page"](), "run python scripts/cli_page.py"
