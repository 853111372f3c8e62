"""A model that sees, over HTTP: every API sends the same image, and hostile files end nothing but their request."""

import base64
import json
import random
import re
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import anthropic
import openai
import pytest

from tests.support.image_payloads import HOSTILE, saved
from tests.support.vision import VisionModel, picture
from trouper import AsyncLLMEngine, EngineArgs

from .conftest import SMALL
from .image_attack import attack_all
from .lives import lives_on
from .process import started
from .test_durable_streams import begin, rest
from .test_journal import SimulatedDisk


def url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


FILE = saved(picture(1))
B64 = base64.b64encode(FILE).decode()
TEXT = {"type": "text", "text": "hi"}
PART = {"type": "image_url", "image_url": {"url": url(FILE)}}
CHAT = [{"role": "user", "content": [TEXT, PART]}]
GREEDY = {"temperature": 0, "max_tokens": 6}
# 16 rows and the text around them, one token for each byte.
NUM_TOKENS = len("user: hi\nassistant: ") + 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return VisionModel("llava", tmp_path_factory.mktemp("llava")).folder


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """The address of a web server with one image."""
    files = tmp_path_factory.mktemp("host")
    (files / "a.png").write_bytes(FILE)
    serve = partial(QuietFiles, directory=str(files))
    with ThreadingHTTPServer(("localhost", 0), serve) as server:
        Thread(target=server.serve_forever).start()
        yield f"localhost:{server.server_port}"
        server.shutdown()


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
async def engine(anyio_backend, folder, host, tmp_path_factory):
    local = tmp_path_factory.mktemp("local")
    (local / "a.png").write_bytes(FILE)
    args = EngineArgs(
        model=str(folder), served_model_name="sees", block_size=16, allowed_media_domains=[host],
        allow_http_media=True, allow_private_media_hosts=True, allowed_local_media_path=str(local),
        **SMALL,
    )  # fmt: skip
    async with AsyncLLMEngine.from_engine_args(args) as engine:
        yield engine


@pytest.fixture(scope="module")
def seen(folder):
    """The answer to CHAT."""
    from trouper import LLM, SamplingParams

    with LLM(model=str(folder), **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=6)
        (output,) = llm.chat(CHAT, params, use_tqdm=False)
        return output.outputs[0].text


@pytest.mark.anyio
class TestInMemory:
    async def test_chat_sees_the_image(self, client, seen):
        answer = await client.post("/v1/chat/completions", {"messages": CHAT, **GREEDY})
        assert answer.status == 200, answer.body
        assert answer.json["choices"][0]["message"]["content"] == seen
        assert answer.json["usage"]["prompt_tokens"] == NUM_TOKENS

    async def test_images_of_urls_are_seen(self, client, engine, host, seen):
        local = engine.config.media.sources.folder
        for place in (f"http://{host}/a.png", f"file://{local}/a.png"):
            part = {"type": "image_url", "image_url": {"url": place, "detail": "low"}}
            messages = [{"role": "user", "content": [TEXT, part]}]
            answer = await client.post("/v1/chat/completions", {"messages": messages, **GREEDY})
            assert answer.status == 200, answer.body
            assert answer.json["choices"][0]["message"]["content"] == seen
            answer = await client.post("/tokenize", {"messages": messages})
            assert answer.json["count"] == NUM_TOKENS

    async def test_message_sees_the_image_of_a_url(self, client, host, seen):
        source = {"type": "url", "url": f"http://{host}/a.png"}
        messages = [{"role": "user", "content": [TEXT, {"type": "image", "source": source}]}]
        answer = await client.post("/v1/messages", {"messages": messages, **GREEDY})
        assert answer.json["content"][0]["text"] == seen

    @pytest.mark.parametrize(
        ("place", "status", "code"),
        [
            ("http://{}/b.png", 422, "media_unavailable"),
            ("http://{}.evil.org/a.png", 400, "invalid_value"),
            ("http://127.0.0.1/a.png", 403, "media_url_blocked"),
            ("https://{}/a.png", 422, "media_unavailable"),
            ("https://example.org/a.png", 403, "media_url_blocked"),
            ("file:///etc/passwd", 403, "media_url_blocked"),
            ("ftp://{}/a.png", 403, "media_url_blocked"),
            ("a.png", 400, "invalid_value"),
        ],
    )
    async def test_url_is_refused_with_its_code(self, client, host, place, status, code):
        part = {"type": "image_url", "image_url": {"url": place.format(host)}}
        messages = [{"role": "user", "content": [TEXT, part]}]
        answer = await client.post("/v1/chat/completions", {"messages": messages, **GREEDY})
        error = answer.json["error"]
        assert (answer.status, error["code"]) == (status, code), error
        assert error["param"] == "messages[0].content[1].image_url"

    async def test_metrics_count_images_found(self, client):
        async def counts():
            text = (await client.get("/metrics")).body.decode()
            names = ("mm_cache_queries_total", "mm_cache_hits_total")
            return [float(re.search(rf"{name}\{{.*?\}} (\S+)", text)[1]) for name in names]

        body = {"messages": CHAT, **GREEDY}
        await client.post("/v1/chat/completions", body)
        queries, hits = await counts()
        await client.post("/v1/chat/completions", body)
        assert await counts() == [queries + 1, hits + 1]

    async def test_other_image_has_other_logprobs(self, client):
        found = []
        for seed in (1, 2, 1):
            part = {"image_url": url(saved(picture(seed)))}
            body = {"messages": [{"role": "user", "content": [TEXT, part]}], "logprobs": True}
            answer = await client.post("/v1/chat/completions", {**body, **GREEDY})
            found.append([t["logprob"] for t in answer.json["choices"][0]["logprobs"]["content"]])
        assert found[0] == pytest.approx(found[2], abs=1e-5)
        assert found[0] != pytest.approx(found[1], abs=1e-2)

    async def test_response_sees_the_image(self, client, seen):
        part = {"type": "input_image", "image_url": url(FILE), "detail": "auto"}
        content = [{"type": "input_text", "text": TEXT["text"]}, part]
        body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 6}
        answer = await client.post("/v1/responses", {**body, "temperature": 0})
        assert answer.json["output"][0]["content"][0]["text"] == seen
        after = {"input": "Why?", "previous_response_id": answer.json["id"]}
        answer = await client.post("/v1/responses", {**after, "max_output_tokens": 1})
        assert answer.json["usage"]["input_tokens"] > NUM_TOKENS

    @pytest.mark.parametrize("route", ["", "/count_tokens"])
    async def test_message_sees_the_image(self, client, seen, route):
        source = {"type": "base64", "media_type": "image/jpeg", "data": B64}
        messages = [{"role": "user", "content": [TEXT, {"type": "image", "source": source}]}]
        answer = await client.post("/v1/messages" + route, {"messages": messages, **GREEDY})
        if route:
            assert answer.json == {"input_tokens": NUM_TOKENS}
        else:
            assert answer.json["content"][0]["text"] == seen

    async def test_result_of_a_tool_shows_an_image(self, client):
        use = {"type": "tool_use", "id": "u", "name": "look", "input": {}}
        source = {"type": "base64", "media_type": "image/png", "data": B64}
        result = {"tool_use_id": "u", "content": [{"type": "image", "source": source}]}
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", **result}]},
        ]
        answer = await client.post("/v1/messages", {"messages": messages, **GREEDY})
        assert answer.status == 200, answer.body
        usage = answer.json["usage"]
        parts = "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"
        assert sum(usage[name] for name in parts) > 100

    @pytest.mark.parametrize("route", ["/api/chat", "/api/generate"])
    async def test_ollama_sees_the_image(self, client, route):
        asked = {"messages": [{"role": "user", "content": TEXT["text"], "images": [B64]}]}
        if route == "/api/generate":
            asked = {"prompt": TEXT["text"], "images": [B64]}
        options = {"temperature": 0, "num_predict": 6}
        answer = await client.post(route, {**asked, "options": options, "stream": False})
        assert (answer.status, answer.json["prompt_eval_count"]) == (200, NUM_TOKENS)

    async def test_model_says_that_it_sees(self, client):
        (card,) = (await client.get("/v1/models")).json["data"]
        assert card["modalities"] == ["text", "image"]
        shown = await client.post("/api/show", {"model": "sees"})
        assert "vision" in shown.json["capabilities"]

    async def test_tokenize_expands_the_image(self, client):
        answer = await client.post("/tokenize", {"messages": CHAT})
        assert answer.json["count"] == NUM_TOKENS

    async def test_system_message_may_have_an_image(self, client):
        messages = [{"role": "system", "content": [PART]}, {"role": "user", "content": "a"}]
        answer = await client.post("/v1/chat/completions", {"messages": messages, **GREEDY})
        assert answer.status == 200, answer.body

    async def test_text_that_spells_the_placeholder_is_text(self, client):
        messages = [{"role": "user", "content": "<image>"}]
        answer = await client.post("/v1/chat/completions", {"messages": messages, **GREEDY})
        assert answer.json["usage"]["prompt_tokens"] == len("user: <image>assistant: ")

    async def test_large_body_is_read_without_a_copy(self, client, seen):
        noise = saved(picture(3, 400, 300))
        assert len(noise) > 2**18
        body = {"messages": [{"role": "user", "content": [TEXT, {"image_url": url(noise)}]}]}
        answer = await client.post("/v1/chat/completions", {**body, **GREEDY})
        assert answer.json["usage"]["prompt_tokens"] == NUM_TOKENS

    @pytest.mark.parametrize(
        ("data", "code"),
        [
            (b"%PDF-1.7", "invalid_image"),
            (FILE[: len(FILE) // 2], "invalid_image"),
            (saved(picture(1, 201, 1)), "media_too_large"),
        ],
    )
    async def test_bad_file_is_named(self, client, data, code):
        part = {"image_url": url(data)}
        messages = [{"role": "user", "content": [PART, TEXT, part]}]
        answer = await client.post("/v1/chat/completions", {"messages": messages, **GREEDY})
        error = answer.json["error"]
        assert (answer.status, error["code"]) == (400, code)
        assert error["param"] == "messages[0].content[2].image_url"
        assert error["message"].startswith(error["param"])

    @pytest.mark.parametrize("data", ["?", base64.b64encode(b"%PDF-1.7").decode()])
    async def test_error_of_each_api_names_the_field(self, client, data):
        """Of a file that is not base64, and of one that is no image."""
        source = {"type": "base64", "media_type": "image/png", "data": data}
        image = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
        turn = {"role": "user", "content": "a", "images": [data]}
        for path, body, place in (
            ("/v1/messages", {"messages": [{"role": "user", "content": [TEXT, {"type": "image", "source": source}]}]},
             "messages[0].content[1].source.data"),
            ("/v1/responses", {"input": [{"role": "user", "content": [image]}]}, "input[0].content[0].image_url"),
            ("/api/chat", {"messages": [turn]}, "messages[0].images[0]"),
            ("/api/generate", {"prompt": "a", "images": [data]}, "images[0]"),
        ):  # fmt: skip
            limit = {} if path == "/v1/responses" else {"max_tokens": 1}
            answer = await client.post(path, {**limit, **body})
            error = answer.json["error"]
            text = error if isinstance(error, str) else error["message"]
            assert answer.status == 400
            assert f"{place}: " in text, text

    async def test_too_many_images_are_refused(self, client):
        messages = [{"role": "user", "content": [PART] * 33}]
        answer = await client.post("/v1/chat/completions", {"messages": messages, **GREEDY})
        assert (answer.status, answer.json["error"]["code"]) == (400, "too_many_media")

    async def test_trusted_request_chooses_processor_options(self, make_client):
        client = make_client(trust_request_mm_kwargs=True)
        body = {"messages": CHAT, **GREEDY, "mm_processor_kwargs": {"do_rescale": False}}
        assert (await client.post("/v1/chat/completions", body)).status == 200
        body["mm_processor_kwargs"] = {"sise": 1}
        answer = await client.post("/v1/chat/completions", body)
        assert (answer.status, answer.json["error"]["param"]) == (400, "mm_processor_kwargs")


@pytest.mark.anyio
async def test_usage_counts_the_tokens_of_images(make_client):
    client = make_client(enable_prompt_tokens_details=True)
    for content, wanted in ((CHAT[0]["content"], 16), ([TEXT, PART, PART], 32), ([TEXT], None)):
        body = {"messages": [{"role": "user", "content": content}], **GREEDY}
        usage = (await client.post("/v1/chat/completions", body)).json["usage"]
        assert usage["prompt_tokens_details"].get("image_tokens") == wanted


@pytest.mark.anyio
async def test_later_server_sees_the_image_again(engine, client):
    """The journal contains the image, so an answer goes on after the death of its server."""
    life = lives_on(engine, SimulatedDisk(random.Random(0), full_rate=0, error_rate=0))
    sampled = {"temperature": 0.9, "seed": 3, "ignore_eos": True, "max_tokens": 40}
    path, body = "/v1/chat/completions", {"messages": CHAT, "stream": True, **sampled}
    async with life() as first:
        had = await begin(first, path, body, 4)
    async with life() as second:
        whole = await rest(second, path, body, b"")
        assert had + await rest(second, path, body, had) == whole
    frames = [line.removeprefix(b"data: ") for line in whole.split(b"\n")]
    chunks = [json.loads(frame) for frame in frames if frame.startswith(b"{")]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    plain = await client.post(path, {**body, "stream": False})
    assert text == plain.json["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_hostile_images_change_no_other_answer():
    assert attack_all(HOSTILE, show=lambda line: None) == 0


@pytest.mark.slow
def test_real_clients_send_images(folder, seen):
    with started("--model", str(folder), "--served-model-name", "sees") as server:
        address, more = f"http://127.0.0.1:{server.port}", {"api_key": "x", "max_retries": 0}
        with openai.OpenAI(base_url=f"{address}/v1", **more) as client:
            chat = client.chat.completions.create(model="sees", messages=CHAT, **GREEDY)
            assert chat.choices[0].message.content == seen
            part = {"type": "input_image", "image_url": url(FILE), "detail": "auto"}
            content = [{"type": "input_text", "text": TEXT["text"]}, part]
            response = client.responses.create(
                model="sees",
                input=[{"role": "user", "content": content}],
                max_output_tokens=6,
                temperature=0,
            )
            assert response.output_text == seen
            with pytest.raises(openai.PermissionDeniedError, match="data:image/png"):
                bad = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
                messages = [{"role": "user", "content": [bad]}]
                client.chat.completions.create(model="sees", messages=messages, **GREEDY)
        with anthropic.Anthropic(base_url=address, **more) as client:
            source = {"type": "base64", "media_type": "image/png", "data": B64}
            messages = [{"role": "user", "content": [TEXT, {"type": "image", "source": source}]}]
            message = client.messages.create(
                model="sees", max_tokens=6, messages=messages, extra_body={"temperature": 0}
            )
            assert message.content[0].text == seen
