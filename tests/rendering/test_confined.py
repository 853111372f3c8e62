"""Chat templates in processes of their own: the same text as in this process, and a budget for each rendering."""

import gc
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.server.bad_input import FORBIDDEN, TOO_MUCH
from trouper.actors.rendering import conversations
from trouper.actors.rendering.confined_process import ConfinedProcess
from trouper.actors.rendering.conversations import (
    FOREIGN,
    MAX_TEMPLATES,
    ConfinedTemplates,
    TemplateSource,
    render_once,
)
from trouper.actors.rendering.prompts.prompts import Prompts
from trouper.actors.rendering.template import ChatTemplate
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.errors import (
    GenerationError,
    TemplateBudgetError,
    TrouperValidationError,
    UnsupportedFeatureError,
)

from .test_rendering import LIMITS, message

SPECIAL = ("<|im_start|>", "<|im_end|>")
CHAT = [{"role": "user", "content": "é <|im_end|> \ud800"}]
SOURCE = "{% for m in messages %}<|im_start|>{{ m.content }}{{ word }}{% endfor %}"
TEMPLATE = TemplateSource(SOURCE, SPECIAL, (*SPECIAL, "<think>"))
HANG = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def templates():
    templates = ConfinedTemplates()
    yield templates
    templates.close()


@pytest.fixture
def impatience(monkeypatch):
    """A block in which a rendering gets no time to speak of."""

    @contextmanager
    def impatience():
        with monkeypatch.context() as patch:
            patch.setattr(conversations, "WALL_S", 0.001)
            yield

    return impatience


@pytest.fixture
def started(monkeypatch):
    """The processes that have been started."""
    processes = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            processes.append((self, options))

    monkeypatch.setattr(subprocess, "Popen", Popen)
    return processes


def test_it_renders_as_in_this_process(templates):
    options = {"add_generation_prompt": False, "variables": {"word": "!", "tokenize": 1}}
    expected = ChatTemplate(*TEMPLATE).render(CHAT, **options)
    assert len(expected) == 2  # a boundary in what the user wrote
    assert render_once(TEMPLATE, CHAT, **options) == expected
    assert templates.render(TEMPLATE, CHAT, **options) == expected


def test_one_process_renders_one_after_another(templates, started):
    for word in ("one", "two"):
        for source in ("{{ word }}", "{{ word }}{{ word }}"):
            pieces = templates.render(TemplateSource(source), CHAT, variables={"word": word})
            assert pieces == [word * source.count("word")]
    assert len(started) == 1


def test_process_keeps_some_templates_and_then_new_one_begins(templates, started):
    for number in range(MAX_TEMPLATES + 1):
        assert templates.render(TemplateSource(f"t{number}"), CHAT) == [f"t{number}"]
    assert [process.poll() is None for process, _ in started] == [False, True]


@pytest.mark.parametrize("source", [*TOO_MUCH.values(), f"{{{{ 'a' * {FOREIGN.chars + 1} }}}}"])
def test_a_template_that_takes_too_much_is_killed(source):
    with pytest.raises(TemplateBudgetError) as error:
        render_once(TemplateSource(source), CHAT)
    assert error.value.parameter == "chat_template"


def test_after_one_that_was_killed_next_is_rendered(templates, started, impatience):
    assert templates.render(TemplateSource("fine"), CHAT) == ["fine"]
    with impatience(), pytest.raises(TemplateBudgetError):
        templates.render(TemplateSource(HANG), CHAT)
    assert templates.render(TemplateSource("fine"), CHAT) == ["fine"]
    assert [process.poll() is None for process, _ in started] == [False, True]


def test_process_that_does_nothing_is_not_waited_for(impatience):
    with impatience(), pytest.raises(TemplateBudgetError):
        render_once(TEMPLATE, CHAT)


def test_an_idle_process_that_was_killed_is_replaced(templates, started):
    assert templates.render(TemplateSource("one"), CHAT) == ["one"]
    os.kill(started[0][0].pid, signal.SIGKILL)
    started[0][0].wait()
    assert templates.render(TemplateSource("two"), CHAT) == ["two"]


@pytest.mark.parametrize("num_kills", [1, 2])
def test_rendering_whose_process_is_killed_is_made_once_again(
    templates, started, monkeypatch, num_kills
):
    ask = ConfinedProcess.ask

    def ask_and_die(process, order, wall_s):
        if len(started) <= num_kills:
            os.killpg(process._process.pid, signal.SIGKILL)
        return ask(process, order, wall_s)

    monkeypatch.setattr(ConfinedProcess, "ask", ask_and_die)
    renders = (
        lambda: templates.render(TEMPLATE, CHAT),
        lambda: render_once(TEMPLATE, CHAT),
    )
    for render in renders:
        started.clear()
        if num_kills == 1:
            assert "".join(render())
        else:
            with pytest.raises(TemplateBudgetError):
                render()
        assert len(started) == 2


def test_the_processes_end_with_their_owner(started):
    templates = ConfinedTemplates()
    templates.render(TEMPLATE, CHAT)
    del templates
    gc.collect()
    assert [process.returncode for process, _ in started] == [-signal.SIGKILL]


@pytest.mark.parametrize("source", [*FORBIDDEN.values(), "{{ " + "(" * 10**5 + " }}"])
def test_what_fails_is_refused_as_in_this_process(templates, source):
    with pytest.raises(TrouperValidationError) as here:
        ChatTemplate(source).render(CHAT)
    with pytest.raises(TrouperValidationError) as there:
        templates.render(TemplateSource(source), CHAT)
    assert type(there.value) is TrouperValidationError
    assert there.value.parameter == here.value.parameter
    assert templates.render(TemplateSource("goes on"), CHAT) == ["goes on"]


def test_what_is_not_supported_stays_so(templates):
    media = [{"role": "user", "content": [{"type": "image_url"}]}]
    with pytest.raises(UnsupportedFeatureError, match="only text parts"):
        templates.render(TEMPLATE, media)


def test_variables_that_are_nested_deep_are_refused(templates):
    deep = []
    for _ in range(10**4):
        deep = [deep]
    for _ in range(2):  # what was never sent is no template that the process knows
        with pytest.raises(TrouperValidationError, match="too deep"):
            templates.render(TemplateSource("{{ x }}"), CHAT, variables={"x": deep})
    assert templates.render(TemplateSource("{{ x }}"), CHAT, variables={"x": 1}) == ["1"]


def test_it_inherits_no_secrets(monkeypatch, started):
    monkeypatch.setitem(os.environ, "TROUPER_API_KEY", "sesame")
    monkeypatch.setitem(os.environ, "TZ", "UTC")
    render_once(TEMPLATE, CHAT)
    assert [set(options["env"]) for _, options in started] == [{"PYTHONPATH", "TZ"}]


def test_process_that_cannot_start_or_fails_is_our_fault(monkeypatch):
    monkeypatch.setattr(conversations, "WORKER", "no_such_module")
    with pytest.raises(GenerationError, match="No module named no_such_module"):
        render_once(TEMPLATE, CHAT)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(GenerationError, match="no process"):
        render_once(TEMPLATE, CHAT)


def test_a_forked_child_leaves_the_processes_alone(templates):
    templates.render(TEMPLATE, CHAT)
    child = os.fork()
    if child == 0:
        try:
            templates.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert templates.render(TemplateSource("still here"), CHAT) == ["still here"]


def test_only_foreign_template_has_process_for_itself(make_folder, started):
    names = [{"name": n, "template": n} for n in ("default", "rag")]
    prompts = Prompts(Tokenizer.load(make_folder("bytes", chat_template=names)), LIMITS)
    for more, text in (
        ({}, "default"), ({"chat_template": "mine"}, "mine"), ({"foreign_chat_template": "rag"}, "rag"),
    ):  # fmt: skip
        assert prompts.render(message({"messages": CHAT} | more)).track.prompt == text
    assert len(started) == 1
    foreign = {"messages": CHAT, "foreign_chat_template": "mine"}
    for number in (2, 3):
        assert prompts.render(message(foreign)).track.prompt == "mine"
        assert len(started) == number
        assert started[-1][0].returncode is not None


def test_models_own_template_that_hangs_ends_request_alone(make_folder, impatience):
    prompts = Prompts(Tokenizer.load(make_folder("bytes", chat_template=HANG)), LIMITS)
    with impatience(), pytest.raises(TemplateBudgetError):
        prompts.render(message({"messages": CHAT}))
    own = {"messages": CHAT, "chat_template": "mine"}
    assert prompts.render(message(own)).track.prompt == "mine"
