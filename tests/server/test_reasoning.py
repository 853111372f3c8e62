"""Reasoning of chats: the span that a model writes before its answer, in fields of its own."""

import pytest

from trouper.errors import TrouperValidationError
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.shared.settings import ServerSettings

from .client import Client
from .scripted import ScriptedEngine, completion, output
from .test_tools import ANSWER, CHAT, PATH

pytestmark = pytest.mark.anyio

ASK = {"messages": [{"role": "user", "content": "hi"}]}
PIECES = ("<thi", "nk>hm", ", so", "</thi", "nk>\n\nyes")


@pytest.fixture
def says(engine):
    """A client of a server whose model says these pieces behind this prompt."""

    def says(*pieces, prompt="hi", **settings):
        def script(number, params):
            if params.output_kind.name == "FINAL_ONLY":
                ids = engine.tokenizer.encode("".join(pieces), add_special_tokens=False)
                whole = completion("".join(pieces), *ids, finish_reason="stop")
                yield output(whole, is_last=True, prompt=prompt)
                return
            for i, piece in enumerate(pieces):
                is_last = i == len(pieces) - 1
                reason = "stop" if is_last else None
                ids = engine.tokenizer.encode(piece, add_special_tokens=False)
                piece = completion(piece, *ids, finish_reason=reason)
                yield output(piece, is_last=is_last, prompt=prompt)

        settings = {"reasoning_parser": "deepseek_r1", **settings}
        return Client(create_app(ScriptedEngine(engine, script), ServerSettings(**settings)))

    return says


async def message(client, **fields):
    reply = (await client.post(PATH, {**ASK, **fields})).json
    return reply["choices"][0]["message"]


async def deltas(client, **fields):
    answer = await client.post(PATH, {**ASK, "stream": True, **fields})
    choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
    return [choice["delta"] for choice in choices]


async def test_reasoning_has_a_field_of_its_own(says):
    found = await message(says(*PIECES))
    assert (found["reasoning"], found["content"]) == ("hm, so", "yes")
    assert "reasoning_content" not in found


async def test_streamed_reasoning_comes_in_deltas_before_the_content(says):
    found = await deltas(says(*PIECES))
    assert "".join(each.get("reasoning", "") for each in found) == "hm, so"
    assert "".join(each.get("content") or "" for each in found) == "yes"
    assert all(not (each.get("reasoning") and each.get("content")) for each in found)


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("reasoning_content", {"reasoning_content"}),
        ("both", {"reasoning", "reasoning_content"}),
    ],
)
async def test_field_has_name_that_server_was_told(says, field, names):
    found = await message(says(*PIECES, reasoning_field=field))
    assert {name for name in found if name.startswith("reasoning") and found[name]} == names
    found = await deltas(says(*PIECES, reasoning_field=field))
    assert {name for each in found for name in each if name.startswith("reasoning")} == names


async def test_reasoning_that_client_does_not_want_is_dropped(says):
    assert (await message(says(*PIECES), include_reasoning=False))["reasoning"] is None
    found = await deltas(says(*PIECES), include_reasoning=False)
    assert "".join(each.get("content") or "" for each in found) == "yes"
    assert all("reasoning" not in each for each in found)


async def test_stream_has_ids_of_marks_too(says, engine):
    answer = await says(*PIECES).post(PATH, {**ASK, "stream": True, "return_token_ids": True})
    choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
    found = [id for choice in choices for id in choice.get("token_ids") or ()]
    encode = engine.tokenizer.encode
    assert found == [id for piece in PIECES for id in encode(piece, add_special_tokens=False)]


async def test_answer_begins_inside_where_prompt_has_opened_reasoning(says):
    found = await message(says("hm</think>yes", prompt="user: hi\nassistant: <think>\n"))
    assert (found["reasoning"], found["content"]) == ("hm", "yes")
    found = await message(says("hm</think>yes", prompt="user: <think>\nassistant: "))
    assert found["content"] == "hm</think>yes"


@pytest.mark.parametrize("thought", ["hm", [{"type": "text", "text": "hm"}]])
async def test_thinking_parts_are_reasoning_of_their_turn(make_client, thought):
    async def prompt_of(message):
        messages = [*ASK["messages"], message, *ASK["messages"]]
        body = {"messages": messages, "return_prompt_text": True, "max_tokens": 1}
        body |= {
            "chat_template": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
        }
        client = make_client(trust_request_chat_template=True)
        return (await client.post("/v1/chat/completions", body)).json["prompt_text"]

    parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "yes"}]
    found = await prompt_of({"role": "assistant", "content": parts})
    assert found == await prompt_of({"role": "assistant", "reasoning": "hm", "content": "yes"})
    assert "hm|yes" in found


async def test_a_call_may_follow_the_reasoning(says):
    client = says("<think>hm</think>\n", ANSWER)
    found = await message(client, tools=CHAT["tools"])
    assert found["reasoning"] == "hm"
    assert found["tool_calls"][0]["function"]["name"] == "f"


async def test_without_a_parser_reasoning_stays_in_the_text(says):
    client = says(*PIECES, reasoning_parser="none")
    assert (await message(client))["content"] == "".join(PIECES)


async def test_the_usage_counts_the_tokens_of_the_reasoning(says, engine):
    expected = len(engine.tokenizer.encode("so it is", add_special_tokens=False))
    client = says("so it is", "</think>", "yes", prompt="<think>")
    end = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = await client.post(PATH, {**ASK, **end})
    usage = streamed.events[-2]["usage"]
    found = usage["completion_tokens_details"]["reasoning_tokens"]
    assert expected <= found < usage["completion_tokens"]
    plain = await says("yes").post(PATH, ASK)
    assert plain.json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parser_is_refused_with_names_near(option):
    with pytest.raises(TrouperValidationError, match="deepseek") as caught:
        ServerSettings(**{option: "deepsek"})
    assert caught.value.parameter == option
