"""Images in requests of every API: how each names them, and what is refused before a model sees them."""

import pytest

from trouper.actors.rendering.media.parts import Base64File
from trouper.frontends.server.apis.anthropic.conversation import MessagesRequest, chat_of
from trouper.frontends.server.apis.responses.conversation import add_items
from trouper.frontends.server.generation.transcript import Transcript

pytestmark = pytest.mark.anyio
B64 = "iVBORw0KGgo="
URL = "data:image/png;base64," + B64
HTTPS = "https://example.org/a.png"
TEXT = {"type": "text", "text": "a"}
ADVICE = "takes no images"


def chat(*parts, role="user"):
    return "/v1/chat/completions", {"messages": [{"role": role, "content": [TEXT, *parts]}]}


def message(*blocks):
    content = [{"role": "user", "content": [TEXT, *blocks]}]
    return "/v1/messages", {"messages": content, "max_tokens": 1}


def response(*parts):
    text = {"type": "input_text", "text": "a"}
    return "/v1/responses", {"input": [{"role": "user", "content": [text, *parts]}]}


def source(**fields):
    return {"type": "image", "source": fields}


def ollama(*images):
    return "/api/chat", {"messages": [{"role": "user", "content": "a", "images": list(images)}]}


PART = "messages[0].content[1]"
REFUSED = {
    "chat": (chat({"type": "image_url", "image_url": {"url": URL}}), 400, PART, ADVICE),
    "a URL to fetch": (chat({"type": "image_url", "image_url": {"url": HTTPS}}), 403, PART + ".image_url", "media-domains"),
    "a file": (chat({"type": "image_url", "image_url": "file:///etc/passwd"}), 403, PART + ".image_url", "media-path"),
    "wrong base64": (chat({"type": "image_url", "image_url": URL + "?"}), 400, PART + ".image_url", "base64"),
    "no URL": (chat({"type": "image_url"}), 400, PART + ".image_url", "URL"),
    "an image of Python": (chat({"type": "image_pil", "image_pil": "x"}), 400, PART + ".image_pil", "image_url"),
    "a part of transformers": (chat({"type": "image", "image": URL}), 400, PART + ".image", "image_url"),
    "an answer's image": (chat({"image_url": URL}, role="assistant"), 400, PART, "user"),
    "audio": (chat({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}), 400, PART, "audio"),
    "video": (chat({"type": "video_url", "video_url": {"url": URL}}), 400, PART, "video"),
    "a PDF": (chat({"type": "file", "file": {"file_data": URL}}), 400, PART, "page"),
    "options of the processor": (
        ("/v1/chat/completions", {**chat()[1], "mm_processor_kwargs": {"size": 10**5}}),
        400, "mm_processor_kwargs", "--trust-request-mm-kwargs",
    ),
    "options of reading": (
        ("/v1/chat/completions", {**chat()[1], "media_io_kwargs": {"image": {}}}),
        400, "media_io_kwargs", "--trust-request-mm-kwargs",
    ),
    "an image beside a prompt": (
        ("/v1/completions", {"prompt": "a", "multi_modal_data": {"image": URL}}), 400, "multi_modal_data", "/v1/chat",
    ),
    "an image as in other servers": (
        ("/completion", {"prompt": "a", "image_data": [{"data": B64}]}), 400, "image_data", "/v1/chat",
    ),
    "a count of tokens": (("/tokenize", chat({"image_url": URL})[1]), 400, PART, ADVICE),
    "options in another API": (
        ("/v1/responses", {**response()[1], "mm_processor_kwargs": {"size": 10**5}}),
        400, "mm_processor_kwargs", "/v1/chat/completions",
    ),
    "a response": (response({"type": "input_image", "image_url": URL}), 400, "input[0].content[1]", ADVICE),
    "a response's URL": (
        response({"type": "input_image", "image_url": HTTPS}), 403, "input[0].content[1].image_url", "media-domains",
    ),
    "a response's file": (response({"type": "input_image", "file_id": "x"}), 400, "input[0].content[1].file_id", "data: URL"),
    "a response's PDF": (response({"type": "input_file", "file_id": "x"}), 400, "input[0].content[1]", "page"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_refusal_names_the_part(client, name):
    (path, body), status, param, word = REFUSED[name]
    answer = await client.post(path, body)
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (status, param), error
    assert word in error["message"]


@pytest.mark.parametrize(
    ("block", "status", "words"),
    [
        (source(type="base64", media_type="image/png", data=B64), 400, f"{PART}: the model"),
        (source(type="base64", data="?"), 400, f"{PART}.source.data: is not valid base64"),
        (source(type="base64", data=5), 400, f"{PART}.source.data: "),
        (source(type="base64", media_type=5, data=B64), 400, f"{PART}.source.media_type: "),
        (source(type="url", url=HTTPS), 403, f"{PART}.source.url: "),
        (source(type="url"), 400, f"{PART}.source.url: must be a URL"),
        (source(type="file", file_id="x"), 400, f"{PART}.source.type"),
        (source(type="x"), 400, f"{PART}.source.type: "),
        ({"type": "image"}, 400, f"{PART}.source.type: "),
        ({"type": "document", "source": {"type": "base64"}}, 400, "each page as an image"),
    ],
)
@pytest.mark.parametrize("route", ["", "/count_tokens"])
async def test_refusal_names_the_block(client, block, status, words, route):
    path, body = message(block)
    answer = await client.post(path + route, body)
    assert (answer.status, answer.json["type"]) == (status, "error")
    assert words in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (ollama(B64), "messages[0].images[0]: the model"),
        (ollama(B64, "?"), "messages[0].images[1]: is not valid base64"),
        (ollama(5), "messages[0].images[0]: must be a file"),
        (("/api/generate", {"prompt": "a", "images": [B64]}), "images[0]: the model"),
        (("/api/generate", {"prompt": "", "system": "b", "images": [B64]}), "images[0]: the model"),
        (("/api/generate", {"prompt": "a", "images": [B64], "raw": True}), "images: are not used"),
    ],
)
async def test_refusal_names_the_image(client, asked, words):
    answer = await client.post(*asked)
    assert answer.status == 400
    assert words in answer.json["error"]


async def test_server_may_trust_processor_options(make_client):
    client = make_client(trust_request_mm_kwargs=True)
    path, body = chat()
    answer = await client.post(path, {**body, "max_tokens": 1, "mm_processor_kwargs": {"a": 1}})
    assert answer.status == 200


def test_images_of_results_follow_all_results():
    calls = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in "uv"]
    image = source(type="base64", media_type="image/png", data=B64)
    results = [
        {"type": "tool_result", "tool_use_id": "u", "content": [image, TEXT]},
        {"type": "tool_result", "tool_use_id": "v", "content": [image], "is_error": True},
        {"type": "text", "text": "b"},
    ]
    body = MessagesRequest(
        max_tokens=1,
        messages=[{"role": "assistant", "content": calls}, {"role": "user", "content": results}],
    )
    transcript = Transcript()
    messages = chat_of(body, transcript).messages
    part = {"type": "image", "image": Base64File(B64, ".source.data")}
    assert [m["role"] for m in messages] == ["assistant", "tool", "tool", "user"]
    assert [m["content"] for m in messages[1:]] == [
        "a",
        "Error: no details",
        [part, part, {"type": "text", "text": "b"}],
    ]
    names = [transcript.client_name(f"messages[3].content[{i}]") for i in range(3)]
    assert names == [
        "messages[1].content[0].content[0]",
        "messages[1].content[1].content[0]",
        "messages[1].content[2]",
    ]


def test_images_of_outputs_follow_the_outputs():
    transcript = Transcript()
    image = {"type": "input_image", "image_url": URL}
    items = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [image]},
    ]
    add_items(transcript, items, "input")
    _, result, user = transcript.messages
    assert (result["role"], result["content"]) == ("tool", "")
    assert (user["role"], user["content"]) == ("user", [image])
    assert (
        transcript.client_name("messages[2].content[0].image_url") == "input[1].output[0].image_url"
    )


async def test_long_image_is_refused_like_a_short_one(client):
    path, body = chat({"image_url": URL + "A" * 2**18})
    answer = await client.post(path, body)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_image")


async def test_bad_image_of_an_old_turn_is_not_dropped(client):
    turns = [
        {"role": "user", "content": "a", "images": [B64]},
        {"role": "assistant", "content": "b"},
    ]
    answer = await client.post(
        "/api/chat", {"messages": [*turns, {"role": "user", "content": "c"}], "stream": False}
    )
    assert (answer.status, ADVICE in answer.json["error"]) == (400, True)


@pytest.mark.anyio
async def test_model_of_texts_transcribes_nothing(client):
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nA\r\n--x--\r\n'
    headers = [("content-type", "multipart/form-data; boundary=x")]
    answer = await client.request("POST", "/v1/audio/transcriptions", body, headers=headers)
    assert (answer.status, answer.json["error"]["param"]) == (400, "model")
    assert "takes no audio" in answer.json["error"]["message"]
