"""Alternatives that are parts of characters have their bytes, and none is lost."""

import pytest

from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.model import DEMO_MODEL
from trouper.frontends.server.generation.logprobs import chat_logprobs, completion_logprobs
from trouper.outputs import Logprob

POSITION = {5: Logprob(-0.1, 1, "a"), 6: Logprob(-1.0, 2, ""), 7: Logprob(-2.0, 3, ""), 8: Logprob(-3.0, 4, "b")}  # fmt: skip
BYTES = {6: b"\xc3", 7: b"\xf0\x9f"}


def test_alternatives_of_chats_have_their_bytes():
    (found,) = chat_logprobs([5], [POSITION], 4, bytes_of=BYTES.get).content
    assert [(each.token, each.bytes) for each in found.top_logprobs] == [
        ("a", [97]), ("\\xc3", [0xC3]), ("\\xf0\\x9f", [0xF0, 0x9F]), ("b", [98]),
    ]  # fmt: skip


def test_alternatives_of_completions_are_all_there():
    made = completion_logprobs([5], [POSITION], 4, text_of=str, bytes_of=BYTES.get)
    assert list(made.top_logprobs[0]) == ["a", "bytes:\\xc3", "bytes:\\xf0\\x9f", "b"]


def test_the_token_that_was_drawn_keeps_its_text():
    position = {6: POSITION[6], 7: POSITION[7]}
    (found,) = chat_logprobs([6], [position], 2, bytes_of=BYTES.get).content
    assert [each.token for each in found.top_logprobs] == ["", "\\xf0\\x9f"]
    made = completion_logprobs([6], [position], 2, text_of=str, bytes_of=BYTES.get)
    assert list(made.top_logprobs[0]) == ["", "bytes:\\xf0\\x9f"]


@pytest.mark.parametrize("text", ["é", "😀", "a b", "中\n"])
def test_bytes_of_tokens_are_those_of_text(text):
    tokenizer = Tokenizer.load(DEMO_MODEL)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
