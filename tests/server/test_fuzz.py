"""Bodies that nobody thought of: whatever comes, no answer is our fault."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trouper.frontends.server.apis.anthropic.conversation import CountTokensRequest, MessagesRequest
from trouper.frontends.server.apis.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from trouper.frontends.server.apis.responses.conversation import ResponsesRequest

pytestmark = pytest.mark.anyio

PATHS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
TEXT = st.text(max_size=20)
NUMBERS = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 20, 2**31, 2**63, -(2**63), 0.0, -0.0, 0.001, 1e308]),
    st.integers(-3, 30),
    st.floats(allow_nan=False, allow_infinity=False),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", ""])},
    optional={
        "content": st.one_of(LEAVES, st.lists(st.one_of(LEAVES, st.fixed_dictionaries({"type": TEXT, "text": LEAVES})), max_size=2)),
        "tool_calls": st.one_of(LEAVES, st.lists(LEAVES, max_size=2)),
        "type": TEXT,
    },
)  # fmt: skip
VALUES = st.one_of(
    LEAVES,
    st.lists(st.one_of(LEAVES, st.lists(LEAVES, max_size=3)), max_size=3),
    st.dictionaries(TEXT, LEAVES, max_size=3),
    st.lists(MESSAGES, max_size=3),
)
LIKELY = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}


@st.composite
def requests(draw):
    path = draw(st.sampled_from(sorted(PATHS)))
    names = st.sampled_from(sorted(PATHS[path].__struct_encode_fields__))
    fields = draw(st.dictionaries(st.one_of(names, names, names, TEXT), VALUES, max_size=4))
    return path, {**LIKELY[path], **fields}


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(request=requests())
async def test_no_body_is_our_fault(client, request):
    path, fields = request
    answer = await client.post(path, fields)
    assert answer.status in (200, 400, 404, 503), (fields, answer.body)
    if answer.status != 200:
        assert len(answer.body) <= 2048
    # Some clients send 1 for true.
    elif not fields.get("stream"):
        json.loads(answer.body)
    else:
        assert b'"error":{' not in answer.body, (fields, answer.body[-300:])
