"""`/v1/messages` in memory, and a real server driven by Anthropic's own clients, the plain one and the async one."""

import json
import re

import anthropic
import pytest
from anthropic._models import construct_type
from anthropic.types import Message, RawMessageStreamEvent

from trouper.frontends.server.asgi.app import create_app

from .client import Client
from .process import started, stop
from .scripted import ScriptedEngine, completion, output

BILLING = "x-anthropic-billing-header:"
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
GREEDY = {"messages": HI, "max_tokens": 6, "temperature": 0}
HELLO = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
TOOL = {
    "name": "f", "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}  # fmt: skip
BAD_TOOL = {
    **TOOL,
    "input_schema": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
}
WITH_TOOL = {"messages": HI, "max_tokens": 6, "tools": [TOOL]}
CALL = '{"name": "f", "arguments": {"a": 1}}'
USE = {"type": "tool_use", "id": "u", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "u", "content": "2"}
REASONING = {"reasoning_parser": "deepseek_r1"}
CALLED = {"role": "assistant", "content": [USE]}


def text(content):
    return {"type": "text", "text": content}


# Blocks other than `text` that hold text, and what the model reads.
TEXTS = [
    ({"type": "document", "title": "T", "context": "c", "citations": {"enabled": False},
      "source": {"type": "text", "media_type": "text/plain", "data": "d"}}, "T\nc\nd"),
    ({"type": "document", "source": {"type": "content", "content": "d"}}, "d"),
    ({"type": "document", "source": {"type": "content", "content": [text("d"), text("e")]}}, "d\ne"),
    ({"type": "search_result", "title": "T", "source": "https://a", "content": [text("d")]}, "T\nhttps://a\nd"),
    ({"type": "tool_reference", "tool_name": "f"}, "The tool f is available."),
]  # fmt: skip


def input_of(usage):
    """All tokens of the prompt, which the API counts in three parts."""
    cached = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    return usage["input_tokens"] + cached


def named_events(body):
    """The events of a stream, each of which the client's types hold."""
    frames = body.decode().split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            typed = construct_type(type_=RawMessageStreamEvent, value=event)
            type(typed).model_validate(event, strict=True)
        found.append(event)
    return found


@pytest.fixture
def asked(engine):
    """`await asked(fields)` is the answer and what the engine was asked for."""

    async def asked(fields, stop_reason=None):
        def script(number, params):
            yield output(
                completion("x", 1, finish_reason="stop", stop_reason=stop_reason), is_last=True
            )

        scripted = ScriptedEngine(engine, script)
        answer = await Client(create_app(scripted)).post(PATH, fields)
        return answer.json, scripted.asked[0]

    return asked


@pytest.mark.anyio
class TestInMemory:
    async def test_a_reply_says_what_a_chat_says(self, client):
        reply = (await client.post(PATH, {**GREEDY, "system": "be brief"})).json
        chat = {**GREEDY, "messages": [{"role": "system", "content": "be brief"}, *HI]}
        wanted = (await client.post("/v1/chat/completions", chat)).json
        assert reply["content"] == [text(wanted["choices"][0]["message"]["content"])]
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("max_tokens", None)
        usage = reply["usage"]
        num_input = input_of(usage)
        assert num_input == wanted["usage"]["prompt_tokens"]
        assert usage["output_tokens"] == 6

    async def test_a_stream_has_the_events_of_one_block(self, client):
        whole = (await client.post(PATH, GREEDY)).json
        events = named_events((await client.post(PATH, {**GREEDY, "stream": True})).body)
        kinds = [event["type"] for event in events]
        assert kinds[:3] == ["message_start", "ping", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        deltas = events[3:-3]
        assert {event["type"] for event in deltas} == {"content_block_delta"}
        assert [text("".join(event["delta"]["text"] for event in deltas))] == whole["content"]
        assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
        assert events[-2]["usage"]["output_tokens"] == 6

    async def test_what_prompt_adds_to_cache_is_told(self, make_client):
        client = make_client()
        long = [{"role": "user", "content": "a long prompt of its own " * 40}]
        asked = {**GREEDY, "messages": long, "stream": True}

        async def usages():
            events = named_events((await client.post(PATH, asked)).body)
            return events[0]["message"]["usage"], events[-2]["usage"]

        (begun, cold), (_, warm) = await usages(), await usages()
        assert begun["input_tokens"] == input_of(cold) == input_of(warm)
        assert cold["cache_read_input_tokens"] == warm["cache_creation_input_tokens"] == 0
        assert cold["cache_creation_input_tokens"] >= warm["cache_read_input_tokens"] > 0

    async def test_counted_tokens_are_those_of_the_prompt(self, client):
        counted = (await client.post(COUNT, {"messages": HI, "system": [text("be brief")]})).json
        usage = (await client.post(PATH, {**GREEDY, "system": "be brief"})).json["usage"]
        num_input = input_of(usage)
        assert counted == {"input_tokens": num_input}

    async def test_neighbours_of_one_role_are_one_message(self, asked):
        _, (prompt, *_) = await asked({**GREEDY, "messages": [*HI, HELLO]})
        assert prompt["messages"] == [
            {"role": "user", "content": [text(t) for t in ("hi", "a", "b")]}
        ]

    async def test_a_last_message_of_the_assistant_is_continued(self, asked):
        begun = {"role": "assistant", "content": [text("Sure:")]}
        _, (prompt, *_) = await asked({**GREEDY, "messages": [*HI, begun]})
        assert prompt["messages"][-1] == {"role": "assistant", "content": "Sure:"}
        assert prompt["continue_final_message"] is True
        assert prompt["add_generation_prompt"] is False

    @pytest.mark.parametrize(
        ("stop_reason", "wanted"),
        [(None, ("end_turn", None)), (7, ("end_turn", None)), ("é", ("stop_sequence", "é"))],
    )
    async def test_a_stop_sequence_is_named(self, asked, stop_reason, wanted):
        reply, _ = await asked({**GREEDY, "stop_sequences": ["é"]}, stop_reason)
        assert (reply["stop_reason"], reply["stop_sequence"]) == wanted

    async def test_a_call_is_a_block(self, says):
        reply = (await says(CALL).post(PATH, WITH_TOOL)).json
        Message.model_validate(reply, strict=True)
        (block,) = reply["content"]
        assert block.pop("id").startswith("toolu_")
        assert block == {"type": "tool_use", "name": "f", "input": {"a": 1}}
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("tool_use", None)

    @pytest.mark.parametrize("pieces", [[CALL], list(CALL)])
    async def test_a_streamed_call_has_pieces_of_its_input(self, says, pieces):
        answer = await says(*pieces).post(PATH, {**WITH_TOOL, "stream": True})
        _, _, start, *deltas, stop_, delta, _ = named_events(answer.body)
        assert start["content_block"].pop("id").startswith("toolu_")
        assert start["content_block"] == {"type": "tool_use", "name": "f", "input": {}}
        assert {event["delta"]["type"] for event in deltas} == {"input_json_delta"}
        assert json.loads("".join(e["delta"]["partial_json"] for e in deltas)) == {"a": 1}
        assert (stop_["type"], stop_["index"]) == ("content_block_stop", 0)
        assert delta["delta"]["stop_reason"] == "tool_use"

    async def test_blocks_are_numbered_in_order(self, says):
        said = "Let me see.\n<tool_call>\n" + CALL + "\n</tool_call>"
        reply = (await says(said).post(PATH, WITH_TOOL)).json
        events = named_events((await says(*said).post(PATH, {**WITH_TOOL, "stream": True})).body)
        kinds = [block["type"] for block in reply["content"]]
        starts = [event for event in events if event["type"] == "content_block_start"]
        assert [event["content_block"]["type"] for event in starts] == kinds
        assert [event["index"] for event in starts] == list(range(len(kinds)))

    async def test_call_that_is_cut_is_there_as_text(self, says):
        reply = (await says(CALL[:-4], finish_reason="length").post(PATH, WITH_TOOL)).json
        assert reply["stop_reason"] == "max_tokens"
        assert reply["content"][0]["input"] == {"INVALID_JSON": '{"a":'}

    @pytest.mark.parametrize(
        "end",
        ["", [], [text("")], [{"type": "redacted_thinking", "data": "x"}]],
        ids=["text", "list", "block", "redacted"],
    )
    async def test_empty_end_of_assistant_is_dropped(self, asked, end):
        messages = [*HI, {"role": "assistant", "content": end}]
        _, (prompt, *_) = await asked({**GREEDY, "messages": messages})
        assert prompt["messages"] == HI
        assert not prompt.get("continue_final_message")

    async def test_empty_turn_of_the_assistant_is_skipped(self, asked):
        messages = [*HI, {"role": "assistant", "content": []}, *HI]
        _, (prompt, *_) = await asked({**GREEDY, "messages": messages})
        assert {message["role"] for message in prompt["messages"]} == {"user"}

    @pytest.mark.parametrize(("block", "wanted"), TEXTS, ids=[each["type"] for each, _ in TEXTS])
    async def test_block_of_text_in_another_form_is_read(self, asked, block, wanted):
        content = [block, text("so?")]
        _, (prompt, *_) = await asked(
            {**GREEDY, "messages": [{"role": "user", "content": content}]}
        )
        assert prompt["messages"][0]["content"][0] == text(wanted)
        results = {"role": "user", "content": [{**RESULT, "content": [block]}]}
        _, (prompt, *_) = await asked({**WITH_TOOL, "messages": [*HI, CALLED, results]})
        assert prompt["messages"][-1]["content"] == wanted

    async def test_new_thread_is_a_whole_conversation(self, client):
        wanted = (await client.post(PATH, GREEDY)).json
        reply = (await client.post(PATH, {**GREEDY, "thread": {"type": "create"}})).json
        assert reply["content"] == wanted["content"]
        thread = {"type": "continue", "previous_message_id": reply["id"]}
        answer = await client.post(PATH, {**GREEDY, "thread": thread})
        assert answer.status == 404
        assert answer.error["details"] == {"error_code": "thread_not_found"}

    async def test_calls_and_their_results_go_back_into_conversation(self, says):
        client = says("two")
        thought = {"type": "thinking", "thinking": "hm", "signature": ""}
        again = {**USE, "id": "v", "input": {}}
        messages = [
            *HI,
            {"role": "assistant", "content": [thought, text("Let me see."), USE, again]},
            {"role": "user", "content": [
                RESULT, {**RESULT, "tool_use_id": "v", "content": [text("3")], "is_error": True}, text("so?"),
            ]},
        ]  # fmt: skip
        answer = await client.post(PATH, {**WITH_TOOL, "messages": messages})
        assert answer.status == 200
        prompt, *_ = client.engine.asked[0]
        calls = [
            {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}
            for id, arguments in (("u", '{"a": 1}'), ("v", "{}"))
        ]
        assert prompt["messages"] == [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant", "reasoning_content": "hm", "content": "Let me see.",
                "tool_calls": calls,
            },
            {"role": "tool", "tool_call_id": "u", "content": "2"},
            {"role": "tool", "tool_call_id": "v", "content": "Error: 3"},
            {"role": "user", "content": "so?"},
        ]  # fmt: skip
        function = {
            "name": "f",
            "description": "adds",
            "parameters": TOOL["input_schema"],
        }
        assert prompt["tools"] == [{"type": "function", "function": function}]

    async def test_thinking_is_a_block_before_the_text(self, says):
        pieces = ("<think>", "hm, ", "so</th", "ink>", "yes")
        reply = (await says(*pieces, **REASONING).post(PATH, GREEDY)).json
        Message.model_validate(reply, strict=True)
        thought = {"type": "thinking", "thinking": "hm, so", "signature": ""}
        assert reply["content"] == [thought, text("yes")]
        answer = await says(*pieces, **REASONING).post(PATH, {**GREEDY, "stream": True})
        events = named_events(answer.body)
        starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        assert starts == [{**thought, "thinking": ""}, text("")]
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        assert "".join(each.get("thinking", "") for each in deltas) == "hm, so"
        assert "".join(each.get("text", "") for each in deltas) == "yes"

    async def test_thinking_omitted_comes_back_in_its_signature(self, says):
        client = says("<think>", "hm, ", "so</th", "ink>", "yes", **REASONING)
        fields = {**GREEDY, "thinking": {"type": "adaptive", "display": "omitted"}}
        reply = (await client.post(PATH, fields)).json
        Message.model_validate(reply, strict=True)
        thought, said = reply["content"]
        assert (thought["thinking"], said) == ("", text("yes"))
        answer = await client.post(PATH, {**fields, "stream": True})
        events = named_events(answer.body)
        starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
        signed, _ = (e["delta"] for e in events if e["type"] == "content_block_delta")
        assert signed == {"type": "signature_delta", "signature": thought["signature"]}
        messages = [*HI, {"role": "assistant", "content": [thought, said]}, *HI]
        await client.post(PATH, {**fields, "messages": messages})
        prompt, *_ = client.engine.asked[-1]
        assert prompt["messages"][1]["reasoning_content"] == "hm, so"

    @pytest.mark.parametrize("stream", [False, True])
    async def test_thinking_that_is_cut_is_the_only_block(self, says, stream):
        client = says("<think>hm", "\n", finish_reason="length", **REASONING)
        answer = await client.post(PATH, {**GREEDY, "stream": stream})
        kinds = re.findall(rb'"type":"(thinking|text)"', answer.body)
        assert kinds == [b"thinking"]  # Anthropic's clients cannot send an empty text back
        assert b"max_tokens" in answer.body

    async def test_thinking_that_is_disabled_is_not_shown(self, says):
        client = says("<think>hm</think>yes", **REASONING)
        reply = (await client.post(PATH, {**GREEDY, "thinking": {"type": "disabled"}})).json
        assert reply["content"] == [text("yes")]
        prompt, *_ = client.engine.asked[0]
        assert prompt["template_defaults"] == {"enable_thinking": False}

    async def test_the_budget_of_thinking_is_the_engines(self, says):
        client = says("<think>hm</think>yes", **REASONING)
        thinking = {"type": "enabled", "budget_tokens": 5}
        await client.post(PATH, {**GREEDY, "thinking": thinking})
        prompt, params, _ = client.engine.asked[0]
        assert params.thinking_token_budget == 5
        assert prompt["template_defaults"] == {"enable_thinking": True}

    async def test_system_messages_keep_their_places(self, asked):
        later = {
            "role": "system",
            "content": [{**text("b"), "cache_control": {"type": "ephemeral"}}],
        }
        fields = {"system": "a", "messages": [*HI, later, {"role": "system", "content": "c"}, *HI]}
        _, (prompt, *_) = await asked({**GREEDY, **fields})
        assert [(each["role"], each["content"]) for each in prompt["messages"]] == [
            ("system", "a"), ("user", "hi"), ("system", "b"), ("system", "c"), ("user", "hi"),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("system", "wanted"),
        [
            ([text(f"{BILLING} cc_version=1.2;"), text("be brief")], ["be brief"]),
            (f"{BILLING} cc_version=1.2;\nbe brief", ["be brief"]),
            (f"{BILLING} cc_version=1.2;", []),
            ([text("be brief"), text(f"what is {BILLING}?")], [[text("be brief"), text(f"what is {BILLING}?")]]),
        ],
    )  # fmt: skip
    async def test_billers_line_is_no_part_of_prompt(self, asked, system, wanted):
        _, (prompt, *_) = await asked({**GREEDY, "system": system})
        assert [each["content"] for each in prompt["messages"][:-1]] == wanted

    async def test_effort_goes_to_the_template(self, asked):
        _, (prompt, *_) = await asked({**GREEDY, "output_config": {"effort": "high"}})
        assert prompt["template_defaults"] == {"reasoning_effort": "high"}

    @pytest.mark.parametrize("edits", [[], [{"type": "clear_thinking_20251015", "keep": "all"}]])
    async def test_the_answer_says_that_no_edit_was_applied(self, client, edits):
        fields = {**GREEDY, "context_management": {"edits": edits}}
        wanted = {"applied_edits": []}
        assert (await client.post(PATH, fields)).json["context_management"] == wanted
        answer = await client.post(PATH, {**fields, "stream": True})
        assert named_events(answer.body)[-2]["context_management"] == wanted
        counted = (await client.post(COUNT, {"messages": HI, **fields})).json
        assert counted["context_management"]["original_input_tokens"] == counted["input_tokens"]
        assert "context_management" not in (await client.post(PATH, GREEDY)).json

    async def test_thinking_that_another_server_has_encrypted_is_left_out(self, asked):
        said = [{"type": "redacted_thinking", "data": "x"}, text("yes")]
        messages = [*HI, {"role": "assistant", "content": said}, *HI]
        _, (prompt, *_) = await asked({**GREEDY, "messages": messages})
        assert prompt["messages"][1] == {"role": "assistant", "content": "yes"}

    async def test_more_tokens_than_models_length_are_no_limit(self, asked):
        _, (_, params, _) = await asked({**GREEDY, "max_tokens": 32_000})
        assert params.max_tokens == 512

    async def test_tools_count(self, client):
        fields = {"messages": HI, "tools": [TOOL]}
        counted = (await client.post(COUNT, fields)).json["input_tokens"]
        usage = (await client.post(PATH, {**GREEDY, **fields})).json["usage"]
        assert counted == input_of(usage)

    async def test_answer_has_format_that_is_asked_for(self, client):
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        given = {
            "format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
        }
        fields = {**GREEDY, "max_tokens": 40, "output_config": given}
        reply = (await client.post(PATH, fields)).json
        assert list(json.loads(reply["content"][0]["text"])) == ["a"]

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("fields", "name"),
        [
            ({"messages": []}, "messages"),
            ({"messages": None}, "messages"),
            ({"messages": [{"content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "system", "content": [{"type": "image"}]}, *HI]}, "messages[0].content[0].type"),
            ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "messages"),
            ({"output_config": {"effort": 3}}, "output_config.effort"),
            ({"messages": [*HI, {"role": "user"}]}, "messages[1].content"),
            ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
            ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
            *(
                ({"messages": [{"role": "user", "content": [{"type": kind}]}]}, "messages[0].content[0].type")
                for kind in ("tool_use", "thinking", "server_tool_use", "what", None, {})
            ),
            ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "x"}}]}]}, "messages[0].content[0].source.type"),
            ({"messages": [{"role": "user", "content": [{**TEXTS[0][0], "citations": {"enabled": True}}]}]}, "messages[0].content[0].citations"),
            ({"messages": [{"role": "user", "content": [{**TEXTS[0][0], "title": 3}]}]}, "messages[0].content[0].title"),
            ({"messages": [{"role": "user", "content": [{**TEXTS[3][0], "title": None}]}]}, "messages[0].content[0].title"),
            ({"messages": [{"role": "user", "content": [{**TEXTS[1][0], "source": {"type": "content", "content": [{"type": "image"}]}}]}]}, "source.content[0].type"),
            ({"messages": [*HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[1].content: "),
            ({"thread": {"type": "fork"}}, "thread.type: "),
            ({"system": [{"type": "image"}]}, "system[0].type"),
            ({"system": 3}, "system"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": None}, "max_tokens"),
            ({"temperature": 3}, "temperature"),
            ({"top_p": 2}, "top_p"),
            ({"top_k": -7}, "top_k"),
            ({"stop_sequences": [""]}, "stop_sequences"),
            ({"stop_sequences": ["x"] * 129}, "stop_sequences"),
            ({"tools": [{"name": "f"}]}, "tools[0].input_schema: "),
            ({"tools": [TOOL, {**TOOL, "name": "a b"}]}, "tools[1].name: "),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
            ({"tool_choice": {"type": "any"}}, "tool_choice: "),
            ({"tools": [BAD_TOOL], "tool_choice": {"type": "any"}}, "tools"),
            ({"tools": [TOOL], "tool_choice": {"type": "what"}}, "tool_choice.type: "),
            ({"tools": [TOOL], "tool_choice": {"type": ["auto"]}}, "tool_choice.type: "),
            ({"tools": [TOOL], "tool_choice": {"type": {}}}, "tool_choice.type: "),
            ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: "),
            ({"messages": [*HI, CALLED]}, "messages[1].content: "),
            # Anthropic wants each result in the next turn
            ({"messages": [*HI, CALLED, *HI]}, "messages[1].content: every tool_use needs a tool_result after it; 'u' has none"),
            ({"messages": [*HI, {"role": "assistant", "content": [USE, {**USE, "id": "v"}]}, {"role": "user", "content": [RESULT]}]}, "'v' has none"),
            ({"messages": [*HI, CALLED, {"role": "user", "content": [{**RESULT, "tool_use_id": "x"}]}]}, "messages[2].content[0].tool_use_id: "),
            ({"messages": [*HI, CALLED, {"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}]}, "messages[2].content[0].content[0].source.type"),
            ({"messages": [{"role": "assistant", "content": [{**USE, "input": "x"}]}]}, "messages[0].content[0].input: "),
            ({"messages": [{"role": "assistant", "content": [{**USE, "id": 1}]}]}, "messages[0].content[0].id: "),
            ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages[0].content[0].thinking: "),
            ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: "),
            ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: "),
            ({"thinking": {"type": "enabled", "budget_tokens": 6}}, "thinking.budget_tokens: "),
            ({"thinking": {"type": "often"}}, "thinking.type: "),
            ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display: "),
            ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format: "),
            ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "objec"}}}}, "output_config.format"),
            ({"output_format": {"type": "json_schema"}}, "output_format"),
            ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "prompt is too long"),
            ({"messages": [{"role": "user", "content": "x y " * 400}]}, " tokens > 512 maximum"),
        ],
    )  # fmt: skip
    async def test_a_refusal_names_the_field(self, client, fields, name, stream):
        answer = await client.post(PATH, {**GREEDY, **fields, "stream": stream})
        assert answer.status == 400
        assert answer.json["type"] == "error"
        assert answer.error["type"] == "invalid_request_error"
        assert name in answer.error["message"]

    @pytest.mark.parametrize(
        "fields",
        [{"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}}, {"tool_choice": {"type": "none"}}, {"tools": []},
         {"tool_choice": {"type": "auto"}},
         {"service_tier": "auto"}, {"metadata": {"user_id": "u"}}, {"system": ""},
         {"context_management": {}}, {"context_management": 3}, {"max_tokens": 32_000},
         {"thinking": {"type": "enabled", "budget_tokens": 5}},  # of a model that does not reason
         {"output_config": {"effort": "max"}}, {"cache_control": {"type": "ephemeral"}}],
    )  # fmt: skip
    async def test_a_field_that_asks_for_nothing_is_allowed(self, client, fields):
        assert (await client.post(PATH, {**GREEDY, **fields})).status == 200

    async def test_other_errors_have_their_types(self, make_client):
        client = make_client(api_keys=("sesame",))
        key = ("x-api-key", "sesame")
        found = [
            await client.post(PATH, GREEDY),
            await client.post(PATH, {**GREEDY, "model": "x"}, [key]),
            await client.get(PATH, [key]),
            await client.request("POST", PATH, b"{", [key, ("content-type", "application/json")]),
        ]
        assert [(answer.status, answer.error["type"]) for answer in found] == [
            (401, "authentication_error"), (404, "not_found_error"),
            (405, "invalid_request_error"), (400, "invalid_request_error"),
        ]  # fmt: skip
        assert found[1].json["request_id"] == found[1].headers["x-request-id"]

    async def test_a_model_is_described_by_its_name(self, make_client):
        client = make_client(served_model_names=("org/one", "two"))
        cards = (await client.get("/v1/models")).json["data"]
        for card in cards:
            found = (await client.get(f"/v1/models/{card['id']}")).json
            assert {**found, "created": 0} == {**card, "created": 0}
        for name in ("three", "org"):
            answer = await client.get(f"/v1/models/{name}")
            assert (answer.status, answer.error["code"]) == (404, "model_not_found")


@pytest.fixture(scope="module")
def server():
    with started("--api-key", "sesame") as server:
        yield server
        assert stop(server) == 0


@pytest.fixture
def options(server):
    url = f"http://127.0.0.1:{server.port}"
    return {"base_url": url, "api_key": "sesame", "max_retries": 0, "timeout": 30}


FIELDS = {
    "model": "trouper-demo", "messages": HI, "max_tokens": 6, "system": [text("be brief")],
    "extra_body": {"temperature": 0},  # the client's later versions have no such argument
}  # fmt: skip


def test_the_plain_client(options):
    with anthropic.Anthropic(**options) as client:
        reply = client.messages.create(**FIELDS)
        assert (reply.role, reply.stop_reason) == ("assistant", "max_tokens")
        with client.messages.stream(**FIELDS) as stream:
            pieces = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert pieces == reply.content[0].text == final.content[0].text
        assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 6)
        counted = client.messages.count_tokens(
            model="trouper-demo", messages=HI, system="be brief"
        ).input_tokens
        assert counted == input_of(reply.usage.model_dump())
        kinds = [event.type for event in client.messages.create(**FIELDS, stream=True)]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


SWITCH = {
    "name": "switch", "description": "turns the light on or off",
    "input_schema": {
        "type": "object", "properties": {"is_on": {"type": "boolean"}}, "required": ["is_on"],
        "additionalProperties": False,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "choice",
    [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "switch"}],
)
def test_the_plain_client_calls_and_brings_the_result(options, choice):
    fields = {**FIELDS, "tools": [SWITCH], "max_tokens": 60}
    with anthropic.Anthropic(**options) as client:
        reply = client.messages.create(**fields, tool_choice=choice)
        use = reply.content[-1]
        assert (reply.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "switch")
        assert isinstance(use.input["is_on"], bool)
        with client.messages.stream(**fields, tool_choice=choice) as stream:
            final = stream.get_final_message()
        assert final.content[-1].input == use.input
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "done"}
        messages = [
            *HI, {"role": "assistant", "content": reply.content},
            {"role": "user", "content": [result]},
        ]  # fmt: skip
        after = client.messages.create(**{**fields, "messages": messages, "max_tokens": 6})
        assert after.usage.input_tokens > 0


def test_the_plain_client_raises_typed_errors(options):
    with anthropic.Anthropic(**options) as client:
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            client.messages.create(**{**FIELDS, "extra_body": {"temperature": 3}})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**FIELDS, "model": "nope"})
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].source"):
            client.messages.create(
                **{**FIELDS, "messages": [{"role": "user", "content": [{"type": "image"}]}]}
            )
    wrong = {**options, "api_key": "wrong"}
    with anthropic.Anthropic(**wrong) as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(**FIELDS)


@pytest.mark.anyio
async def test_the_async_client(options):
    async with anthropic.AsyncAnthropic(**options) as client:
        reply = await client.messages.create(**FIELDS)
        async with client.messages.stream(**FIELDS) as stream:
            pieces = "".join([piece async for piece in stream.text_stream])
        assert pieces == reply.content[0].text
        counted = await client.messages.count_tokens(model="trouper-demo", messages=HI)
        assert counted.input_tokens > 0
        with pytest.raises(anthropic.BadRequestError, match="tools"):
            await client.messages.create(**FIELDS, tools=[{"name": "a b", "input_schema": {}}])
