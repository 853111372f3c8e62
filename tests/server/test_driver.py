"""The streaming driver between the engine and the adapters: its parser chain."""

import msgspec
import pytest

from trouper.frontends.server.apis.openai.chat import ChatAdapter
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.generation.parsers import Content, ParserChain

from .client import Client
from .scripted import ScriptedEngine, completion, output

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class HoldsBack:
    """Gives everything at the end."""

    def __init__(self):
        self._held = []

    def feed(self, parts, end=None):
        self._held += parts
        return [Content("".join(part.text for part in self._held))] if end else []


class Shouts:
    def feed(self, parts, end=None):
        return [Content(part.text.upper()) for part in parts]


def in_pieces(number, params):
    yield output(completion("a", 1), completion("x", 2, index=1))
    yield output(completion("b", 1, finish_reason="stop"))
    yield output(completion("y", 2, index=1, finish_reason="stop"), is_last=True)


@pytest.fixture
def chained(engine, monkeypatch):
    """A client of a server whose chats go through these parsers."""

    def chained(*kinds, script=in_pieces):
        parse = ChatAdapter.parse

        def with_parsers(request, model):
            chain = lambda: ParserChain(kind() for kind in kinds)  # noqa: E731
            return msgspec.structs.replace(parse(request, model), make_parsers=lambda _: chain())

        monkeypatch.setattr(ChatAdapter, "parse", staticmethod(with_parsers))
        return Client(create_app(ScriptedEngine(engine, script)))

    return chained


def said(answer):
    """The texts of each choice, chunk by chunk."""
    found = {}
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            text = choice["delta"].get("content")
            found.setdefault(choice["index"], []).extend([text] if text else [])
    return found


async def test_without_parsers_text_passes_as_it_comes(chained):
    answer = await chained().post("/v1/chat/completions", {**CHAT, "n": 2, "stream": True})
    assert said(answer) == {0: ["a", "b"], 1: ["x", "y"]}


async def test_each_choice_has_a_chain_of_its_own(chained):
    client = chained(HoldsBack, Shouts)
    answer = await client.post("/v1/chat/completions", {**CHAT, "n": 2, "stream": True})
    assert said(answer) == {0: ["AB"], 1: ["XY"]}


async def test_a_whole_reply_goes_through_the_chain_too(chained):
    def whole(number, params):
        yield output(completion("ab", 1, 2, finish_reason="stop"), is_last=True)

    client = chained(Shouts, script=whole)
    reply = (await client.post("/v1/chat/completions", CHAT)).json
    assert reply["choices"][0]["message"]["content"] == "AB"
