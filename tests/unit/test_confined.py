"""Templates of requests: the same text as in this process, and a budget for those that mean harm."""

import os
import subprocess

import pytest

from tests.server.bad_input import FORBIDDEN, TOO_MUCH
from trouper.actors.rendering import confined
from trouper.actors.rendering.chat import ChatTemplate
from trouper.actors.rendering.confined import MAX_CHARS, ConfinedTemplate
from trouper.actors.rendering.text import Prompts
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.errors import (
    GenerationError,
    TemplateBudgetError,
    TrouperValidationError,
    UnsupportedFeatureError,
)

from .test_rendering import LIMITS, message

SPECIAL = ["<|im_start|>", "<|im_end|>"]
CHAT = [{"role": "user", "content": "é <|im_end|> \ud800"}]
SOURCE = "{% for m in messages %}<|im_start|>{{ m.content }}{{ word }}{% endfor %}"


def test_it_renders_as_in_this_process():
    options = {"add_generation_prompt": False, "variables": {"word": "!", "tokenize": 1}}
    arguments = SOURCE, SPECIAL, [*SPECIAL, "<think>"]
    expected = ChatTemplate(*arguments).render(CHAT, **options)
    assert len(expected) == 2  # a seam in what the user wrote
    assert ConfinedTemplate(*arguments).render(CHAT, **options) == expected


@pytest.mark.parametrize("source", [*TOO_MUCH.values(), f"{{{{ 'a' * {MAX_CHARS + 1} }}}}"])
def test_what_takes_too_much_is_killed(source):
    with pytest.raises(TemplateBudgetError) as error:
        ConfinedTemplate(source, (), ()).render(CHAT)
    assert error.value.parameter == "chat_template"


def test_a_process_that_does_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(confined, "WALL_S", 0.0)
    with pytest.raises(TemplateBudgetError):
        ConfinedTemplate("x", (), ()).render(CHAT)


@pytest.mark.parametrize("source", [*FORBIDDEN.values(), "{{ " + "(" * 10**5 + " }}"])
def test_what_fails_is_refused_as_in_this_process(source):
    with pytest.raises(TrouperValidationError) as here:
        ChatTemplate(source).render(CHAT)
    with pytest.raises(TrouperValidationError) as there:
        ConfinedTemplate(source, (), ()).render(CHAT)
    assert type(there.value) is TrouperValidationError
    assert there.value.parameter == here.value.parameter


def test_what_is_not_supported_stays_so():
    media = [{"role": "user", "content": [{"type": "image_url"}]}]
    with pytest.raises(UnsupportedFeatureError, match="only text parts"):
        ConfinedTemplate("x", (), ()).render(media)


def test_variables_that_are_nested_deep_are_refused():
    deep = []
    for _ in range(10**4):
        deep = [deep]
    with pytest.raises(TrouperValidationError, match="too deep"):
        ConfinedTemplate("{{ x }}", (), ()).render(CHAT, variables={"x": deep})


def test_it_inherits_no_secrets_and_a_process_that_cannot_start_is_our_fault(monkeypatch):
    seen = []

    def run(*arguments, **options):
        seen.append(options["env"])
        return subprocess.CompletedProcess(arguments, 1, b"", b"no module")

    monkeypatch.setitem(os.environ, "TROUPER_API_KEY", "sesame")
    monkeypatch.setattr(confined.subprocess, "run", run)
    with pytest.raises(GenerationError):
        ConfinedTemplate("x", (), ()).render(CHAT)
    assert [set(environment) for environment in seen] == [{"PYTHONPATH"}]


def test_only_a_foreign_template_costs_a_process(make_folder, monkeypatch):
    monkeypatch.setattr(confined.subprocess, "run", None)
    templates = [{"name": n, "template": n} for n in ("default", "rag")]
    prompts = Prompts(Tokenizer.load(make_folder("bytes", chat_template=templates)), LIMITS)
    for more, text in (
        ({}, "default"), ({"chat_template": "mine"}, "mine"), ({"foreign_chat_template": "rag"}, "rag"),
    ):  # fmt: skip
        assert prompts.render(message({"messages": CHAT} | more)).track.prompt == text
    with pytest.raises(TypeError):
        prompts.render(message({"messages": CHAT, "foreign_chat_template": "mine"}))
