"""Numbers and booleans that clients write as texts are read as pydantic reads them for vLLM."""

from typing import Any

import pydantic
import pytest

from trouper.frontends.server.apis.openai.requests import ChatRequest
from trouper.frontends.server.http.decoding import decode_now, relax
from trouper.frontends.server.shared.errors import HTTPError

KINDS = (
    int, float, bool, str, int | None, float | None, bool | None, str | list[str] | None, list[int] | None,
    dict[str, float] | None,
)  # fmt: skip
VALUES = (
    "5", " 5 ", "5.0", "5.", "5.00", " 5.0 ", ".0", "+5", "-5", "-0", "05", "1_000", "1__0", "0_1.5", "1e3", "5e-1", "5.5", "0x5",
    "", "- 5", "5 . 0", "٣", "½", "true", "TRUE", " true", "yes", "on", "t", "2", "1.0", "0.0", "null", "False", "off", 0, 1, 2,
    0.0, 1.0, 5.0, 5.5, 1e30, True, False, None, [], {}, ["5", True], ["5", "x"], {"a": "1"}, {"a": None},
)  # fmt: skip


def fits(value, kind):
    try:
        return pydantic.TypeAdapter(kind).validate_python(value, strict=True) == value
    except pydantic.ValidationError:
        return False


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_value_is_read_as_pydantic_reads_it(kind):
    lax: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(kind)
    for value in VALUES:
        found = relax(value, kind)
        try:
            wanted = lax.validate_python(value)
        except pydantic.ValidationError:
            assert not fits(found, kind), (value, found)
        else:
            assert (found, isinstance(found, bool)) == (wanted, isinstance(wanted, bool)), value


@pytest.mark.parametrize("text", ["inf", "-Infinity", "nan", "1e400", "9" * 70])
def test_text_is_no_number_that_json_does_not_have(text):
    assert relax(text, float | None) == text


def test_only_fields_that_are_wrong_change():
    body = b"""{"messages": [{"role": "user", "content": "5", "n": "1"}], "logprobs": "true", "top_logprobs": "2", "max_tokens": 5.0,
        "stop": "7", "seed": "12", "logit_bias": {"5": "1"}, "stream_options": {"include_usage": 1}, "temperature": "0.5"}"""
    request = decode_now(body, ChatRequest).request
    assert request.messages == [{"role": "user", "content": "5", "n": "1"}]
    assert (request.logprobs, request.top_logprobs, request.max_tokens) == (True, 2, 5)
    assert (request.stop, request.seed, request.temperature) == ("7", 12, 0.5)
    assert (request.logit_bias, request.stream_options.include_usage) == ({"5": 1.0}, True)


@pytest.mark.parametrize("rest", [b'"stop": "\\ud800"', b'"seed": 1, "seed": 2', b'"seed": nan'])
def test_a_relaxed_body_obeys_the_rules_of_json(rest):
    with pytest.raises(HTTPError) as caught:
        decode_now(b'{"messages": [], "n": "1", ' + rest + b"}", ChatRequest)
    assert caught.value.code == "invalid_json"
