"""What coding agents send, as `tests/clients/agents` keeps it, and prompts of their size; the agents themselves run in `tests/clients`."""

import json
from pathlib import Path

import pytest

from tests.clients.agent_model import make_model
from tests.clients.agent_session import CASES, LAST, find_tool, forced, has_result
from trouper import AsyncLLMEngine, EngineArgs

pytestmark = pytest.mark.anyio

FIXTURES = Path(__file__).parents[1] / "clients" / "agents"
TURNS = [
    (agent, turn["path"], turn["body"])
    for agent in CASES
    for turn in json.loads((FIXTURES / f"{agent}.json").read_text())["turns"]
]
LENGTH = 131_072


@pytest.fixture(scope="module")
async def engine(anyio_backend, tmp_path_factory):
    """An engine of noise, with the length that agents need and a chat template that has a place for tools."""
    arguments = EngineArgs(
        model=str(make_model(tmp_path_factory.mktemp("noise"))), load_format="dummy", dtype="float32",
        max_num_seqs=4, max_model_len=LENGTH, num_gpu_blocks_override=1024,
    )  # fmt: skip
    async with AsyncLLMEngine.from_engine_args(arguments) as engine:
        yield engine


@pytest.fixture
def client(make_client):
    return make_client(served_model_names=("noise",))


def outcome(path, body):
    """The text of a stream, and the arguments of its call."""
    events = [
        json.loads(line.removeprefix("data: "))
        for line in body.decode().splitlines()
        if line.startswith("data: {")
    ]
    if path == "/v1/responses":
        assert events[-1]["type"] == "response.completed"
        items = events[-1]["response"]["output"]
        texts = [part["text"] for item in items for part in item.get("content", ())]
        return "".join(texts), "".join(item.get("arguments", "") for item in items)
    if path == "/v1/messages":
        assert events[-1]["type"] == "message_stop"
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return tuple("".join(d.get(n, "") for d in deltas) for n in ("text", "partial_json"))
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return text, "".join(call["arguments"] for call in calls)


@pytest.mark.parametrize(("agent", "path", "body"), TURNS, ids=[f"{a}{p}" for a, p, _ in TURNS])
async def test_a_turn_of_an_agent_is_answered(client, agent, path, body):
    case = CASES[agent]
    is_call = not has_result(body) and find_tool(body.get("tools") or (), case.tool)
    answer = await client.post(path, forced(path, body, case))
    assert answer.status == 200, answer.body
    assert answer.headers.get("x-trouper-ignored-fields") is None
    text, arguments = outcome(path, answer.body)
    if is_call:
        assert json.loads(arguments) == case.arguments
    else:
        assert (text, arguments) == (LAST, "")


LEAF = {"type": "string", "description": "what it is and how it must be written " * 3}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        **{f"p{i}": {**LEAF, "enum": [f"v{j}" for j in range(8)]} for i in range(6)},
        "many": {"type": "array", "items": {"type": "object", "properties": {f"q{i}": LEAF for i in range(6)}}},
        "either": {"anyOf": [LEAF, {"type": "integer", "minimum": 0}, {"type": "null"}]},
    },
    "required": ["p0", "many"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTIONS = [{"name": f"tool_{i}", "description": "does it " * 60} for i in range(40)]
SYSTEM = "You are an agent that works on the code of a project. " * 1600
MESSAGES = [{"role": "user", "content": "hi"}]
FULL_SIZE = {
    "/v1/messages/count_tokens": {
        "system": SYSTEM, "messages": MESSAGES,
        "tools": [{**each, "input_schema": SCHEMA} for each in FUNCTIONS],
    },
    "/v1/responses/input_tokens": {
        "instructions": SYSTEM, "input": "hi",
        "tools": [{**each, "type": "function", "parameters": SCHEMA} for each in FUNCTIONS],
    },
    "/tokenize": {
        "messages": [{"role": "system", "content": SYSTEM}, *MESSAGES],
        "tools": [{"type": "function", "function": {**e, "parameters": SCHEMA}} for e in FUNCTIONS],
    },
}  # fmt: skip


async def test_first_turn_of_full_size_is_within_all_limits(client):
    lengths = []
    for path, body in FULL_SIZE.items():
        answer = await client.post(path, body)
        assert answer.status == 200, answer.body[:300]
        lengths.append(answer.json.get("input_tokens") or answer.json.get("count"))
    assert min(lengths) == max(lengths) > 30_000
