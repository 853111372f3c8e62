"""Bodies with long strings are read as the strict parser reads them, only faster."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.frontends.server.apis.anthropic.conversation import CountTokensRequest, MessagesRequest
from trouper.frontends.server.apis.ollama.requests import OllamaChatRequest, OllamaGenerateRequest
from trouper.frontends.server.apis.openai.requests import (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)
from trouper.frontends.server.http import body as module
from trouper.frontends.server.http.body import LONG, excerpt
from trouper.frontends.server.http.decoding import THREAD_FROM, decode_now
from trouper.frontends.server.shared.errors import HTTPError

TEXT = "QUJD" * (LONG // 4 + 1)


def read(body):
    return decode_now(
        body if isinstance(body, bytes) else json.dumps(body).encode(), CompletionRequest
    )


def test_long_text_of_field_becomes_view_of_body():
    body = json.dumps({"model": "x", "prompt_embeds": TEXT, "n": 3}).encode()
    request = decode_now(memoryview(body), CompletionRequest).request
    assert (request.model, request.n) == ("x", 3)
    assert request.prompt_embeds.tobytes() == TEXT.encode()
    assert request.prompt_embeds.obj is body


def test_long_and_short_texts_of_list_keep_their_order():
    texts = [TEXT, "short", TEXT + "A", ""]
    found = read({"prompt_embeds": texts}).request.prompt_embeds
    assert [text if isinstance(text, str) else bytes(text).decode() for text in found] == texts


def test_only_long_payloads_become_views():
    def parts(*given):
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": list(given)}]
        body = json.dumps({"messages": messages}).encode()
        return decode_now(body, ChatRequest).request.messages[1]["content"]

    embeds = {"type": "prompt_embeds", "data": TEXT}
    first, second = parts(embeds, {"type": "text", "text": "short"})
    assert (bytes(first["data"]).decode(), second["text"]) == (TEXT, "short")
    for text in ({"type": "text", "text": TEXT}, {"type": "image", "data": TEXT}, TEXT):
        assert parts(embeds, text) == [embeds, text]


IMAGE = {"type": "base64", "data": TEXT}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ChatRequest, {"content": [{"type": "image_url", "image_url": {"url": TEXT}}]}),
        (ChatRequest, {"content": [{"image_url": TEXT}]}),
        (TokenizeRequest, {"content": [{"image_url": TEXT}]}),
        (MessagesRequest, {"content": [{"type": "image", "source": IMAGE}]}),
        (CountTokensRequest, {"content": [{"type": "image", "source": IMAGE}]}),
        (
            MessagesRequest,
            {"content": [{"type": "tool_result", "content": [{"type": "image", "source": IMAGE}]}]},
        ),
        (OllamaChatRequest, {"content": "a", "images": ["short", TEXT]}),
    ],
)
def test_long_images_become_views(kind, message):
    body = json.dumps({"messages": [message], "max_tokens": 1}).encode()
    decoded = decode_now(body, kind)
    assert decoded.holds_body
    assert shown(decoded.request.messages) == [message]


def test_long_image_of_a_prompt_becomes_view():
    body = json.dumps({"prompt": "a", "images": [TEXT]}).encode()
    decoded = decode_now(body, OllamaGenerateRequest)
    assert decoded.holds_body
    assert shown(decoded.request.images) == [TEXT]


def shown(value):
    """A value with texts in the place of views."""
    if isinstance(value, memoryview):
        return bytes(value).decode()
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    return [shown(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": TEXT},
        {"prompt": TEXT, "prompt_embeds": "short"},
        {"prompt": [TEXT], "prompt_embeds": [TEXT]},
        {"prompt": 'a "quoted" \\ text' * LONG},
        {"prompt_embeds": TEXT.replace("J", "/")},
        json.dumps({"prompt_embeds": "a/b" * LONG}).replace("/", "\\/").encode(),
    ],
)
def test_long_text_elsewhere_or_with_escapes_is_parsed_as_ever(body):
    found = read(body).request
    want = msgspec.json.decode(body) if isinstance(body, bytes) else body
    for name, value in want.items():
        given = getattr(found, name)
        assert (bytes(given).decode() if isinstance(given, memoryview) else given) == value


BAD = {
    "a key twice": b'{"prompt_embeds": "%b", "prompt_embeds": "%b"}' % (TEXT.encode(), TEXT.encode()),
    "a string cut off": b'{"prompt_embeds": "%b' % TEXT.encode(),
    "more after the end": b'{"prompt_embeds": "%b"} x' % TEXT.encode(),
    "no comma": b'{"prompt_embeds": "%b" "n": 1}' % TEXT.encode(),
    "a backslash outside": b'{\\"prompt_embeds": "%b"}' % TEXT.encode(),
    "quotes out of step": b'{"n": 1, "a": \\"%b", "prompt_embeds": "%b"}' % (TEXT.encode(), TEXT.encode()),
    "a long key": b'{"%b": 1, "n": x}' % TEXT.encode(),
    "nothing but quotes": b'"' * (2 * LONG),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_what_the_parser_refuses_is_refused(kind):
    with pytest.raises(HTTPError) as caught:
        read(BAD[kind])
    assert caught.value.status == 400


def test_too_many_marks_are_left_to_the_parser(monkeypatch):
    monkeypatch.setattr(module, "MAX_MARKS", 10)
    body = json.dumps({"stop": ["x"] * 10, "prompt_embeds": TEXT}).encode()
    assert excerpt(body) is None
    assert read(body).request.prompt_embeds == TEXT


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12) | st.text('A"\\/é', max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\', max_size=3), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@given(JSON, st.booleans(), st.sampled_from([7, 2**20]))
def test_removing_long_strings_is_reversible(value, is_ascii, step):
    """Every string of more than three bytes counts as long; references are looked up on the way out."""
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LONG", 3)
        patch.setattr(module, "STEP", step)
        short = excerpt(body)
    if short is None:
        return

    def restored(part):
        if isinstance(part, str) and part in short.strings:
            return bytes(short.strings[part]).decode()
        if isinstance(part, list):
            return [restored(item) for item in part]
        if isinstance(part, dict):
            return {restored(key): restored(item) for key, item in part.items()}
        return part

    assert restored(json.loads(short.rest)) == value


def test_short_bodies_are_not_searched():
    assert len(TEXT) > THREAD_FROM
    assert read({"prompt_embeds": "A" * 100}).request.prompt_embeds == "A" * 100
