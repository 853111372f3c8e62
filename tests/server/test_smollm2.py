"""A real small model that was never told of tools: what is forced is made, and valid each time."""

import json
import os

import anyio
import jsonschema_rs
import pytest

from trouper import AsyncLLMEngine, EngineArgs
from trouper.frontends.server.asgi.app import create_app

from .client import Client
from .test_tools import PATH

SMOLLM2 = os.environ.get("TROUPER_SMOLLM2")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not SMOLLM2, reason="TROUPER_SMOLLM2 names no file"),
]
NUM_ASKED = 50
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": -999, "maximum": 999}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip
SCHEMAS = {"get_weather": WEATHER, "add": ADD}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
CITIES = ("Rome", "Oslo", "Lima", "Kyoto", "Accra")


@pytest.fixture(scope="module")
async def engine(anyio_backend):
    options = {"max_model_len": 1024, "max_num_seqs": 16, "num_gpu_blocks_override": 512}
    async with AsyncLLMEngine.from_engine_args(EngineArgs(model=SMOLLM2, **options)) as engine:
        yield engine


async def answers(engine, **fields):
    """Ask so many times at temperature 1, all at once, and return the choices."""
    client, found = Client(create_app(engine)), [None] * NUM_ASKED

    async def ask(seed):
        text = f"What is the weather in {CITIES[seed % len(CITIES)]} this week?"
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "seed": seed, "temperature": 1, "max_completion_tokens": 256}
        (found[seed],) = (await client.post(PATH, {**body, **fields})).json["choices"]

    async with anyio.create_task_group() as askers:
        for seed in range(NUM_ASKED):
            askers.start_soon(ask, seed)
    return found


def is_valid(schema, text):
    return jsonschema_rs.validator_for(schema).is_valid(json.loads(text))


async def test_call_that_is_required_is_valid_each_time(engine):
    found = await answers(engine, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    calls = [choice["message"]["tool_calls"][0]["function"] for choice in found]
    num_valid = sum(is_valid(SCHEMAS[call["name"]], call["arguments"]) for call in calls)
    print(f"required: {num_valid} of {NUM_ASKED} valid, e.g. {calls[0]}")
    assert num_valid == NUM_ASKED


async def test_an_answer_by_schema_is_valid_each_time(engine):
    response_format = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    found = await answers(engine, response_format=response_format)
    num_valid = sum(is_valid(WEATHER, choice["message"]["content"]) for choice in found)
    print(f"schema: {num_valid} of {NUM_ASKED} valid, e.g. {found[0]['message']['content']}")
    assert num_valid == NUM_ASKED
