"""Embeddings through `/v1/completions`: base64 in, tokens out, and each defect named."""

import base64
import io

import pytest
import torch
from safetensors.torch import load_file, save

from trouper import AsyncLLMEngine, EngineArgs
from trouper.config.model import DEMO_MODEL
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.http.body import LONG

from .client import Client
from .conftest import SMALL

pytestmark = pytest.mark.anyio
WIDTH = 256


@pytest.fixture(scope="module")
async def engine(anyio_backend):
    args = EngineArgs(**SMALL, enable_prompt_embeds=True)
    async with AsyncLLMEngine.from_engine_args(args) as engine:
        yield engine


@pytest.fixture
def client(engine):
    return Client(create_app(engine))


def as_text(tensor, write=torch.save):
    file = io.BytesIO()
    write(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def embeddings_of(token_ids):
    weights = load_file(DEMO_MODEL / "model.safetensors")
    return weights["model.embed_tokens.weight"][token_ids]


async def test_the_embeddings_of_tokens_stand_for_the_tokens(client):
    ids = [[40, 50, 60, 70, 80], [90, 100]]
    body = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    want = await client.post("/v1/completions", {**body, "prompt": ids})
    rows = [embeddings_of(part) for part in ids]
    texts = [as_text(rows[0]), base64.b64encode(save({"x": rows[1]})).decode()]
    got = await client.post("/v1/completions", {**body, "prompt_embeds": texts})
    assert got.status == want.status == 200, got.json
    answers = [[c["token_ids"] for c in reply.json["choices"]] for reply in (got, want)]
    assert answers[0] == answers[1]
    assert got.json["usage"] == want.json["usage"]


async def test_part_of_chat_stands_for_its_tokens(client):
    ids = [40, 50, 60] * 40
    content = [
        {"type": "text", "text": "one"},
        {"type": "prompt_embeds", "data": as_text(embeddings_of(ids))},
    ]
    body = {"max_tokens": 8, "temperature": 0, "return_token_ids": True, "repetition_penalty": 1}
    assert len(content[1]["data"]) > LONG  # so it is cut out of the body
    chat = {**body, "messages": [{"role": "user", "content": content}]}
    got = await client.post("/v1/chat/completions", chat)
    assert got.status == 200, got.json
    holes = iter(ids)
    whole = [id or next(holes) for id in got.json["prompt_token_ids"]]
    want = (await client.post("/v1/completions", {**body, "prompt": whole})).json["choices"][0]
    assert got.json["choices"][0]["token_ids"] == want["token_ids"]
    content[1]["data"] = "AAAA"
    refused = await client.post("/v1/chat/completions", chat)
    assert (refused.status, refused.json["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt_embeds": "not base64!"}, "prompt_embeds"),
        ({"prompt_embeds": ["AAAA"]}, "prompt_embeds[0]"),
        ({"prompt_embeds": []}, "prompt_embeds"),
        ({"prompt_embeds": as_text(torch.zeros(3, WIDTH + 1))}, "prompt_embeds"),
        ({"prompt_embeds": as_text([torch.zeros(3, WIDTH)])}, "prompt_embeds"),
        ({"prompt_embeds": as_text(torch.zeros(3, WIDTH)), "prompt": [""]}, "prompt[0]"),
        ({"prompt_embeds": as_text(torch.zeros(3, WIDTH)), "echo": True}, "echo"),
        ({"prompt_embeds": as_text(torch.zeros(3, WIDTH)), "prompt_logprobs": 1},
         "prompt_logprobs"),
        ({"prompt_embeds": 5}, "prompt_embeds"),
    ],
)  # fmt: skip
async def test_bad_payload_is_400_that_names_it(client, body, param):
    reply = await client.post("/v1/completions", {"max_tokens": 1, **body})
    assert reply.status == 400, reply.json
    assert reply.json["error"]["param"] == param
    assert len(reply.body) < 1000
