"""A browser, and pages in it that must leave its console empty."""

import os
import shutil
from pathlib import Path

import pytest

from tests.server.process import started

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Installed by `npm install --prefix FOLDER axe-core`.
AXE = Path(os.environ.get("AGENTS", "agents")) / "node_modules" / "axe-core" / "axe.min.js"


# Not of the session: playwright's loop must have ended before tests of other modules run theirs.
@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        options = {"executable_path": CHROMIUM, "args": ["--no-sandbox", "--disable-gpu"]}
        browser = playwright.chromium.launch(**options)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server():
    # A model of its own name, which must stay text too.
    name = '<img src=x onerror="document.title=1">'
    arguments = ("--dev-mode", "--max-model-len", "2048", "--served-model-name", name)
    with started(*arguments) as server:
        yield server


@pytest.fixture
def open_page(browser):
    """Open pages.  At the end none may have written to its console or asked another server."""
    log, contexts, asked = [], [], []

    def open_page(server, path="/", *, may_fail=False, **options):
        base = f"http://127.0.0.1:{server.port}"
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(45_000)
        if not may_fail:
            page.on("console", lambda message: log.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: log.append(f"error: {error}"))
        page.on("dialog", lambda dialog: log.append(f"dialog: {dialog.message}"))

        def note(request):
            asked.append((request.method, request.url.removeprefix(base).partition("?")[0]))
            if not request.url.startswith((base, "data:")):
                log.append(f"foreign request: {request.url}")

        page.on("request", note)
        page.goto(base + path)
        return page

    open_page.asked = asked
    yield open_page
    for context in contexts:
        context.close()
    assert log == []
