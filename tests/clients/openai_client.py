"""openai: sync and async, streams, `parse`, responses, durable responses, tools, embeddings."""

import asyncio
import json
import sys
from typing import Literal

from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

HI = [{"role": "user", "content": "Do you like Python?"}]


class Reply(BaseModel):
    answer: Literal["yes", "no"]


TOOL = {
    "type": "function",
    "function": {
        "name": "vote",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"enum": ["yes", "no"]}},
            "required": ["answer"],
            "additionalProperties": False,
        },
    },
}


def check_sync(client, model):
    chat = client.chat.completions.create(model=model, messages=HI, max_tokens=8)
    assert chat.usage.completion_tokens <= 8
    chunks = list(
        client.chat.completions.create(
            model=model, messages=HI, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )  # fmt: skip
    assert chunks[-1].usage.prompt_tokens == chat.usage.prompt_tokens
    text = client.completions.create(model=model, prompt="def f(", max_tokens=8, logprobs=1)
    assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens


def check_structured(client, model):
    parsed = client.chat.completions.parse(
        model=model, messages=HI, response_format=Reply, max_tokens=64
    )
    assert parsed.choices[0].message.parsed.answer in ("yes", "no")
    choice = {"type": "function", "function": {"name": "vote"}}
    called = client.chat.completions.create(
        model=model, messages=HI, tools=[TOOL], tool_choice=choice, max_tokens=64
    )
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "vote"
    assert json.loads(call.function.arguments)["answer"] in ("yes", "no")


def check_responses(client, model):
    response = client.responses.create(
        model=model, input="Hello", max_output_tokens=16, store=False
    )
    assert response.output_text == "".join(
        part.text for item in response.output for part in item.content
    )
    with client.responses.stream(
        model=model, input="Hello", max_output_tokens=16, store=False
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def check_durable(client, model):
    """Leave a background response in the middle of its stream, and read the rest by its id."""
    body = {"model": model, "input": "Hello", "max_output_tokens": 40, "temperature": 1}
    events = []
    with client.responses.create(**body, background=True, stream=True) as stream:
        for event in stream:
            events.append(event)
            if len(events) == 6:
                break
    name, last = events[0].response.id, events[-1].sequence_number
    with client.responses.retrieve(name, stream=True, starting_after=last) as stream:
        events += stream
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers)), numbers
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == client.responses.retrieve(name).output_text
    with client.responses.retrieve(name, stream=True) as stream:
        assert [event.to_dict() for event in stream] == [event.to_dict() for event in events]


async def check_async(url, model):
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        requests = [
            client.chat.completions.create(model=model, messages=HI, max_tokens=8, seed=i)
            for i in range(8)
        ]
        assert len(await asyncio.gather(*requests)) == 8


def check_embeddings(url):
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        data = client.embeddings.create(model=model, input=["one", "two"]).data  # as base64
        assert len(data[0].embedding) == len(data[1].embedding) > 0


def main(url, pooling_url):
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        check_sync(client, model)
        check_structured(client, model)
        check_responses(client, model)
        check_durable(client, model)
    asyncio.run(check_async(url, model))
    check_embeddings(pooling_url)


if __name__ == "__main__":
    main(*sys.argv[1:])
