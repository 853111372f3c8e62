"""anthropic: messages, streams, tools, a loop of tools, tokens counted beforehand."""

import sys

from anthropic import Anthropic, beta_tool

HI = [{"role": "user", "content": "Do you like Python?"}]
TOOL = {"name": "vote", "input_schema": {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"], "additionalProperties": False}}  # fmt: skip


@beta_tool
def echo(answer: bool) -> str:
    """Repeat an answer."""
    return str(answer)


def check_tool_runner(client, model):
    """The client runs the tool and sends its result, which with this choice gives another call."""
    choice = {"type": "tool", "name": "echo"}
    runner = client.beta.messages.tool_runner(
        model=model, max_tokens=64, messages=HI, tools=[echo], tool_choice=choice, max_iterations=3
    )
    assert [message.stop_reason for message in runner] == ["tool_use"] * 3


def main(url, pooling_url):
    client = Anthropic(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    message = client.messages.create(model=model, max_tokens=16, messages=HI, system="Be brief.")
    assert message.role == "assistant"
    counted = client.messages.count_tokens(model=model, messages=HI, system="Be brief.")
    usage = message.usage
    cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert counted.input_tokens == usage.input_tokens + cached
    with client.messages.stream(model=model, max_tokens=16, messages=HI) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_text() == text
    choice = {"type": "tool", "name": "vote"}
    called = client.messages.create(
        model=model, max_tokens=64, messages=HI, tools=[TOOL], tool_choice=choice
    )
    (use,) = (block for block in called.content if block.type == "tool_use")
    assert use.input["answer"] in ("yes", "no")
    check_tool_runner(client, model)


if __name__ == "__main__":
    main(*sys.argv[1:])
