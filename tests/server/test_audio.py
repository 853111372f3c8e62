"""A model that hears, over HTTP: recordings in chats, and transcriptions."""

import base64
import json

import numpy as np
import openai
import pytest

from tests.support.audio import MARKS, HearingModel, saved, tone
from trouper import AsyncLLMEngine, EngineArgs

from .conftest import SMALL
from .process import started

SOUND = tone(1)
FILE = saved(SOUND)
TEXT = {"type": "text", "text": "hi"}
GREEDY = {"temperature": 0, "max_tokens": 6}
BOUNDARY = "xxBOUNDARYxx"
ROUTE = "/v1/audio/transcriptions"


def wav(data=FILE):
    return {"data": base64.b64encode(data).decode(), "format": "wav"}


def chat(*parts):
    return {"messages": [{"role": "user", "content": [TEXT, *parts]}], **GREEDY}


def form(fields, file=FILE):
    """Return the body of a form, in which a field may have several values."""
    parts = []
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value]
        parts += [f'form-data; name="{name}"\r\n\r\n{each}'.encode() for each in values]
    if file is not None:
        head = b'form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
        parts.append(head + file)
    mark = f"--{BOUNDARY}".encode()
    pieces = [mark + b"\r\nContent-Disposition: " + part + b"\r\n" for part in parts]
    return b"".join(pieces) + mark + b"--\r\n"


async def send(client, body, kind=f"multipart/form-data; boundary={BOUNDARY}", route=ROUTE):
    headers = [("content-type", kind)]
    return await client.request("POST", route, body, headers=headers)


async def ask(client, file=FILE, **fields):
    return await send(client, form({"model": "hears", **fields}, file))


@pytest.fixture(scope="module", params=["qwen3_asr"])
def model(request, tmp_path_factory):
    return HearingModel(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
async def engine(anyio_backend, model):
    args = EngineArgs(
        model=str(model.folder), served_model_name="hears", block_size=16,
        media_processor="process" if anyio_backend == "asyncio" else "thread", **SMALL,
    )  # fmt: skip
    async with AsyncLLMEngine.from_engine_args(args) as engine:
        yield engine


@pytest.mark.anyio
class TestInMemory:
    async def test_each_part_is_the_same_recording(self, client, make_client):
        client = make_client(enable_prompt_tokens_details=True)
        url = f"data:audio/wav;base64,{wav()['data']}"
        parts = [
            {"type": "input_audio", "input_audio": wav()},
            {"input_audio": wav(saved(SOUND, "FLAC"))},
            {"type": "audio_url", "audio_url": {"url": url}},
            {"type": "audio_url", "audio_url": url},
        ]
        answers = [await client.post("/v1/chat/completions", chat(part)) for part in parts]
        assert {answer.status for answer in answers} == {200}
        assert len({answer.json["choices"][0]["message"]["content"] for answer in answers}) == 1
        details = answers[0].json["usage"]["prompt_tokens_details"]
        assert details["audio_tokens"] == 9

    async def test_long_recording_is_heard_like_a_short_one(self, client):
        noise = np.random.default_rng(0).standard_normal(3 * 16_000) * 0.1
        part = {"type": "input_audio", "input_audio": wav(saved(noise))}
        answer = await client.post("/v1/chat/completions", chat(part))
        assert answer.status == 200, answer.body

    async def test_model_lists_what_it_takes(self, client):
        (card,) = (await client.get("/v1/models")).json["data"]
        assert card["modalities"] == ["text", "audio"]
        assert (await client.get("/props")).json["modalities"] == {"vision": False, "audio": True}

    @pytest.mark.parametrize(
        ("part", "place", "code"),
        [
            ({"input_audio": wav(b"%PDF-1.7")}, ".input_audio.data", "invalid_audio"),
            ({"input_audio": wav(b"")}, ".input_audio.data", "invalid_audio"),
            ({"input_audio": wav(saved(SOUND, "AIFF"))}, ".input_audio.data", "invalid_audio"),
            (
                {"input_audio": wav(saved(SOUND, "FLAC")[:9000])},
                ".input_audio.data",
                "invalid_audio",
            ),
            ({"input_audio": {"data": "?"}}, ".input_audio.data", "invalid_audio"),
            (
                {"input_audio": wav(saved(np.zeros(601_000), rate=1000))},
                ".input_audio.data",
                "media_too_large",
            ),
            ({"audio_url": "https://example.org/a.wav"}, ".audio_url", "media_url_blocked"),
            ({"image_url": "data:;base64,QUJD"}, "", "invalid_value"),
            ({"video_url": "data:;base64,QUJD"}, "", None),
        ],
    )
    async def test_bad_recording_is_named(self, client, part, place, code):
        answer = await client.post("/v1/chat/completions", chat(part))
        error = answer.json["error"]
        assert answer.status in (400, 403), answer.body
        assert code is None or error["code"] == code
        assert error["param"] == f"messages[0].content[1]{place}"

    async def test_transcription_is_the_answer_of_the_model(self, client):
        answer = await ask(client, language="en", max_completion_tokens="6")
        assert answer.status == 200, answer.body
        assert answer.json["usage"] == {"seconds": 1, "type": "duration"}
        messages = [
            {"role": "user", "content": [{"type": "input_audio", "input_audio": wav()}]},
            {"role": "assistant", "content": "language English<asr_text>"},
        ]
        body = {
            "messages": messages, **GREEDY, "continue_final_message": True, "add_generation_prompt": False,
        }  # fmt: skip
        said = (await client.post("/v1/chat/completions", body)).json["choices"][0]["message"]
        assert answer.json["text"] == said["content"].lstrip()

    async def test_text_format_is_plain_text(self, client):
        answer = await ask(client, response_format="text", max_completion_tokens=4)
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/plain")

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"language": "xx"}, "language"),
            ({"response_format": "srt"}, "response_format"),
            ({"response_format": "x"}, "response_format"),
            ({"temperature": "warm"}, "temperature"),
            ({"temperature": "-1"}, "temperature"),
            ({"stream": "true", "response_format": "verbose_json"}, "stream"),
            ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
            ({"include[]": "logprobs"}, "include"),
            ({"chunking_strategy": "server_vad"}, "chunking_strategy"),
            ({"max_completion_tokens": "99999"}, "max_completion_tokens"),
        ],
    )
    async def test_wrong_field_is_named(self, client, fields, param):
        answer = await ask(client, **fields)
        assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.body

    async def test_unknown_field_is_named_in_a_header(self, client):
        answer = await ask(client, max_completion_tokens=2, chunking_strategy="auto", colour="red")
        assert answer.status == 200
        assert "colour" in str(answer.headers)

    @pytest.mark.parametrize(
        ("body", "code"),
        [
            (form({}, None), "invalid_schema"),
            (form({"model": ["a", "b"]}), "invalid_form"),
            (form({"prompt": "x" * 70_000}), "invalid_form"),
            (form({f"f{i}": "x" for i in range(70)}), "invalid_form"),
            (form({})[:-20], "invalid_form"),
            (b"", "invalid_form"),
            (b"--other\r\n", "invalid_form"),
            (form({}, b"no audio"), "invalid_audio"),
            (form({}, saved(SOUND[:1])[:30]), "invalid_audio"),
        ],
    )
    async def test_broken_form_is_refused(self, client, body, code):
        answer = await send(client, body)
        assert (answer.status, answer.json["error"]["code"]) == (400, code)
        if code in ("invalid_audio", "invalid_schema"):
            assert answer.json["error"]["param"] == "file"

    async def test_form_needs_its_content_type(self, client):
        for kind in ("application/json", "multipart/form-data", "text/plain"):
            answer = await send(client, form({}), kind)
            assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_content_type")

    async def test_translations_are_refused_by_name(self, client):
        answer = await send(client, form({}), route="/v1/audio/translations")
        assert answer.status == 400
        assert "translations are not supported" in answer.json["error"]["message"]

    async def test_language_is_taken_off_the_text(self, says):
        head = "language German<asr_text>Guten Tag."
        answer = await ask(says(head), response_format="verbose_json")
        assert answer.json["text"] == "Guten Tag."
        assert (answer.json["language"], answer.json["task"]) == ("de", "transcribe")

    @pytest.mark.parametrize(
        ("pieces", "deltas"),
        [
            (("lang", "uage German<asr", "_text> Guten", " Tag."), ["Guten", " Tag."]),
            (("language None<asr_text>", "x"), ["x"]),
            (("Lang", "uage"), ["Lang", "uage"]),
            (("langu",), ["langu"]),
        ],
    )
    async def test_stream_has_the_events_of_openai(self, says, pieces, deltas):
        answer = await ask(says(*pieces), stream="true")
        lines = [
            line[6:] for line in answer.body.decode().splitlines() if line.startswith("data: ")
        ]
        assert lines[-1] == "[DONE]"
        *events, done = map(json.loads, lines[:-1])
        assert [event["delta"] for event in events] == deltas
        assert {event["type"] for event in events} == {"transcript.text.delta"}
        assert (done["type"], done["text"]) == ("transcript.text.done", "".join(deltas))
        assert done["usage"]["type"] == "tokens"


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MARKS))
def test_openais_client_transcribes(tmp_path, kind):
    folder = HearingModel(kind, tmp_path / kind).folder
    with started("--model", str(folder), "--served-model-name", "hears") as server:
        options = {
            "base_url": f"http://127.0.0.1:{server.port}/v1",
            "api_key": "x",
            "max_retries": 0,
        }
        with openai.OpenAI(**options) as client:
            asked = {
                "file": ("a.flac", saved(SOUND, "FLAC")), "model": "hears", "language": "en",
                "extra_body": {"max_completion_tokens": 5},
            }  # fmt: skip
            whole = client.audio.transcriptions.create(**asked)
            assert whole.usage.seconds == 1
            events = list(client.audio.transcriptions.create(**asked, stream=True))
            assert events[-1].text == whole.text
            shown = client.audio.transcriptions.create(**asked, response_format="verbose_json")
            assert (shown.language, shown.duration) == ("en", 0.7)
            with pytest.raises(openai.BadRequestError, match="cannot be read as audio"):
                client.audio.transcriptions.create(**{**asked, "file": ("a.mp3", b"no audio")})
