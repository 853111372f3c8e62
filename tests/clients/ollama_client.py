"""Ollama's own Python client against a server of the demo model and one that embeds: `ollama_client.py URL URL`."""

import sys

import ollama

chat_url, pooling_url = sys.argv[1:]
client = ollama.Client(host=chat_url)
(model,) = client.list().models
assert model.size > 0, model
assert client.ps().models[0].expires_at.year == 9999
shown = client.show(model.model)
assert "completion" in shown.capabilities, shown
assert shown.modelinfo, shown

hello = [{"role": "user", "content": "Hello"}]
options = {"temperature": 0, "num_predict": 8}
whole = client.chat(model.model, hello, options=options, keep_alive="5m")
assert whole.done_reason == "length", whole
assert whole.eval_count == 8, whole
pieces = list(client.chat(model.model, hello, options=options, stream=True))
assert "".join(piece.message.content for piece in pieces) == whole.message.content
assert pieces[-1].total_duration > 0

schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
answer = client.chat(model.model, hello, format=schema, options={"num_predict": 60})
assert '"ok"' in answer.message.content, answer


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


client.chat(model.model, hello, tools=[add], options=options)
assert client.generate(model.model, "Hello", options=options).response
assert client.generate(model.model, "Hello", raw=True, options=options).response
assert client.generate(model.model, keep_alive=0).done
assert client.pull(model.model).status == "success"
refusals = []
try:
    client.chat("other", hello)
except ollama.ResponseError as error:
    refusals.append((error.status_code, "other" in error.error))
assert refusals == [(404, True)], refusals

pooling = ollama.Client(host=pooling_url)
(embedder,) = pooling.list().models
found = pooling.embed(embedder.model, ["one", "two"])
assert len(found.embeddings) == 2, found
assert abs(sum(x * x for x in found.embeddings[0]) - 1) < 1e-3
assert pooling.embeddings(embedder.model, "one").embedding
