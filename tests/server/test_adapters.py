"""Adapters over HTTP: models of their own names, loaded and unloaded while the server runs."""

import json
import random
import shutil

import anyio
import pytest

from tests.support.adapters import random_tensors, write_adapter
from trouper import AsyncLLMEngine, EngineArgs, LoRARequest, SamplingParams
from trouper.actors.messages.requests import RequestOptions
from trouper.errors import LoRAAdapterNotFoundError, TrouperValidationError
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.program.server import load_adapters
from trouper.frontends.server.shared.settings import ServerSettings

from .client import Client
from .conftest import SMALL
from .lives import lives_on, until
from .test_journal import SimulatedDisk

pytestmark = pytest.mark.anyio
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PATH = "/v1/completions"
KEYED = [("content-type", "application/json"), ("idempotency-key", "one")]
FIELDS = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with the adapters `one`, `two` and `three`."""
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("one", "two", "three"), 1):
        write_adapter(folder / name, random_tensors(seed=number))
    return folder


@pytest.fixture(scope="module")
async def engine(anyio_backend):
    args = EngineArgs(**SMALL, enable_lora=True, max_loras=2, max_cpu_loras=2)
    async with AsyncLLMEngine.from_engine_args(args) as engine:
        yield engine


@pytest.fixture
async def client(engine, root):
    yield Client(create_app(engine, ServerSettings(lora_root=str(root), is_dev_mode=True)))
    for number in await engine.list_loras():
        await engine.remove_lora(number)


async def text(client, model=None):
    answer = await client.post(PATH, {**FIELDS, **({"model": model} if model else {})})
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["text"], answer.json["model"]


async def test_loaded_adapter_is_model_and_another_one_than_its_base(client):
    (base,) = [card["id"] for card in (await client.get("/v1/models")).json["data"]]
    for name in ("one", "two"):
        answer = await client.post(LOAD, {"lora_name": name, "lora_path": name})
        assert (answer.status, answer.json["id"]) == (200, name)
    cards = {card["id"]: card for card in (await client.get("/v1/models")).json["data"]}
    assert cards.keys() == {base, "one", "two"}
    assert (cards["one"]["parent"], cards[base]["parent"]) == (base, None)
    assert (cards["one"]["root"], cards[base]["root"]) == ("one", base)
    assert (await client.get("/v1/models/two")).json["parent"] == base
    texts = {name: await text(client, name) for name in cards}
    assert [shown for _, shown in texts.values()] == list(texts)
    assert len({found for found, _ in texts.values()}) == 3
    assert await text(client) == texts[base]


async def test_an_unloaded_adapter_is_unknown(client):
    assert (await client.post(LOAD, {"lora_name": "one", "lora_path": "one"})).status == 200
    assert (await client.post(UNLOAD, {"lora_name": "one"})).status == 200
    for path, fields, name in (
        (PATH, {**FIELDS, "model": "one"}, None),  # as OpenAI says it
        (UNLOAD, {"lora_name": "one"}, "lora_name"),
    ):
        answer = await client.post(path, fields)
        assert (answer.status, answer.error["type"]) == (404, "NotFoundError")
        assert (answer.error["code"], answer.error["param"]) == ("model_not_found", name)
    for fields in ({}, {"lora_name": ""}):
        answer = await client.post(UNLOAD, fields)
        assert (answer.status, answer.error["param"]) == (400, "lora_name")


async def test_stream_survives_unloading_its_adapter(client, engine, wait_until):
    """Its slot is not loaded anew before it ends, and its tokens are those of an undisturbed one."""
    await client.post(LOAD, {"lora_name": "one", "lora_path": "one"})
    fields = {**FIELDS, "max_tokens": 40, "model": "one", "ignore_eos": True}
    whole = (await client.post(PATH, fields)).json["choices"][0]["text"]
    found = []

    async def ask():
        found.append((await client.post(PATH, fields)).json["choices"][0]["text"])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await wait_until(lambda: len(engine.engine.requests) == 1)
        assert (await client.post(UNLOAD, {"lora_name": "one"})).status == 200
        answer = await client.post(LOAD, {"lora_name": "two", "lora_path": "two"})
        assert answer.status == 200
    assert found == [whole]
    assert engine.engine.adapters.num_free_slots == 1


@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({"lora_name": "a/b", "lora_path": "one"}, 400, "lora_name"),
        ({"lora_name": "", "lora_path": "one"}, 400, "lora_name"),
        ({"lora_name": "x" * 129, "lora_path": "one"}, 400, "lora_name"),
        ({"lora_name": "a", "lora_path": ""}, 400, "lora_path"),
        ({"lora_name": "a", "lora_path": "../one"}, 400, "lora_path"),
        ({"lora_name": "a", "lora_path": "/etc"}, 400, "lora_path"),
        ({"lora_name": "a", "lora_path": "nowhere"}, 404, "lora_path"),
        ({"lora_name": "a", "lora_path": "one\0"}, 400, "lora_path"),
        ({"lora_name": 7, "lora_path": "one"}, 400, "lora_name"),
        ({}, 400, "lora_name"),
    ],
)
async def test_a_bad_order_is_refused_by_name(client, fields, status, named):
    answer = await client.post(LOAD, fields)
    assert (answer.status, answer.error["param"]) == (status, named)
    assert len((await client.get("/v1/models")).json["data"]) == 1


async def test_link_that_leads_out_of_root_is_not_followed(client, root, tmp_path):
    elsewhere = write_adapter(tmp_path / "elsewhere")
    (root / "link").symlink_to(elsewhere)
    (root / "file").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "file" / name).symlink_to(f"{elsewhere}/{name}")
    for path in ("link", "file"):
        answer = await client.post(LOAD, {"lora_name": "a", "lora_path": path})
        assert (answer.status, answer.error["param"]) == (400, "lora_path")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_dora": True}, "does not yet support DoRA"),
        ({"modules_to_save": ["embed_tokens"]}, "Unsupported modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"r": 0}, "adapter_config.json"),
        (None, "adapter_config.json cannot be read"),
    ],
)
async def test_broken_files_are_error_of_server_in_words_of_vllm(client, root, change, sentence):
    shutil.copytree(root / "one", root / "broken", dirs_exist_ok=True)
    config = root / "broken" / "adapter_config.json"
    config.write_text(
        "no json" if change is None else json.dumps({**json.loads(config.read_text()), **change})
    )
    answer = await client.post(LOAD, {"lora_name": "broken", "lora_path": "broken"})
    assert (answer.status, answer.error["param"]) == (500, "lora_path")
    assert answer.error["code"] == "broken_adapter"
    assert answer.headers["x-should-retry"] == "false"
    assert sentence in answer.error["message"]
    assert (await client.post(LOAD, {"lora_name": "one", "lora_path": "one"})).status == 200


async def test_success_is_told_in_the_words_of_vllm(client):
    answer = await client.post(LOAD, {"lora_name": "one", "lora_path": "one"})
    assert answer.json["message"] == "Success: LoRA adapter 'one' added successfully."
    card = (await client.get("/v1/models")).json["data"][-1]
    assert (card["id"], card["root"]) == ("one", "one")
    answer = await client.post(UNLOAD, {"lora_name": "one"})
    assert answer.json["message"] == "Success: LoRA adapter 'one' removed successfully."


async def test_a_name_that_is_taken_is_refused(client):
    fields = {"lora_name": "one", "lora_path": "one"}
    assert (await client.post(LOAD, fields)).status == 200
    answer = await client.post(LOAD, fields)
    assert (answer.status, answer.error["param"]) == (400, "lora_name")
    assert "has already been loaded" in answer.error["message"]
    answer = await client.post(LOAD, {**fields, "load_inplace": True})
    assert answer.status == 200
    base = (await client.get("/v1/models")).json["data"][0]["id"]
    answer = await client.post(LOAD, {"lora_name": base, "lora_path": "one"})
    assert (answer.status, answer.error["param"]) == (400, "lora_name")


async def test_without_a_root_nothing_is_loaded_by_http(engine):
    client = Client(create_app(engine, ServerSettings(is_dev_mode=True)))
    answer = await client.post(LOAD, {"lora_name": "one", "lora_path": "one"})
    assert answer.status == 403


async def test_user_loads_adapters_only_where_that_is_allowed(engine, root):
    fields = {"lora_name": "one", "lora_path": "one"}
    for allows, status in ((False, 404), (True, 200)):
        settings = ServerSettings(lora_root=str(root), allows_lora_updates=allows)
        client = Client(create_app(engine, settings))
        assert (await client.post(LOAD, fields)).status == status
    assert (await client.post(UNLOAD, {"lora_name": "one"})).status == 200


async def test_adapters_of_command_line_are_there_from_start(client, engine, root):
    await load_adapters(engine, [LoRARequest("mine", 1, str(root / "one"))])
    assert (await text(client, "mine"))[1] == "mine"
    name = engine.model_config.name
    with pytest.raises(TrouperValidationError, match="name of the model"):
        await load_adapters(engine, [LoRARequest(name, 2, str(root / "two"))])


async def test_request_does_not_bring_back_what_was_unloaded_meanwhile(client, engine, root):
    """Its file would be another one: a path that came by HTTP is below the root."""
    adapter = LoRARequest("one", 1, str(root / "one"))
    options = RequestOptions(lora_request=adapter, loads_adapter=False)
    generation = engine.engine.generate("x", SamplingParams(max_tokens=1), "a", options)
    with pytest.raises(LoRAAdapterNotFoundError):
        await generation.submit()
    assert await engine.list_loras() == set()


async def load(client, *names):
    for name in names:
        answer = await client.post(LOAD, {"lora_name": name, "lora_path": name})
        assert answer.status == 200, answer.body


async def names(client):
    return [card["id"] for card in (await client.get("/v1/models")).json["data"]][1:]


async def test_more_adapters_than_may_be_loaded_are_all_models(client, engine):
    """Two of them are loaded at a time, and each has its own text whenever it is named."""
    await load(client, "one", "two")
    before = [await text(client, name) for name in ("one", "two")]
    await load(client, "three")
    assert await names(client) == ["one", "two", "three"]
    for _ in range(2):
        assert [await text(client, name) for name in ("one", "two")] == before
        assert (await text(client, "three"))[0] not in [found for found, _ in before]


async def test_command_line_adapters_may_exceed_slots(client, engine, root):
    given = [
        LoRARequest(name, number, str(root / name))
        for number, name in enumerate(("one", "two", "three"), 1)
    ]
    await load_adapters(engine, given)
    for name in ("one", "two", "three"):
        await text(client, name)


async def test_one_that_has_given_way_is_unloaded_like_any_other(client):
    await load(client, "one", "two", "three")
    assert (await client.post(UNLOAD, {"lora_name": "one"})).status == 200
    assert await names(client) == ["two", "three"]
    assert (await client.post(PATH, {**FIELDS, "model": "one"})).status == 404
    await load(client, "one")


async def test_evicted_adapter_without_folder_is_not_found(client, root):
    write_adapter(root / "passing", random_tensors(seed=4))
    await load(client, "passing", "two", "three")
    (root / "passing" / "adapter_config.json").unlink()
    answer = await client.post(PATH, {**FIELDS, "model": "passing"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert "adapter_config.json" in answer.error["message"]
    await text(client, "two")


async def test_busy_adapters_queue_requests_but_refuse_loads(client, engine, wait_until):
    await load(client, "one", "two", "three")
    expected = await text(client, "three")
    fields = {**FIELDS, "max_tokens": 200, "ignore_eos": True}
    found = []

    async def ask(name):
        answer = await client.post(PATH, {**fields, "model": name})
        assert answer.status == 200

    async def ask_late():
        found.append(await text(client, "three"))

    async with anyio.create_task_group() as tasks:
        for name in ("one", "two"):
            tasks.start_soon(ask, name)
        await wait_until(lambda: len(engine.engine.requests) == 2)
        tasks.start_soon(ask_late)
        answer = await client.post(LOAD, {"lora_name": "four", "lora_path": "one"})
        assert (answer.status, answer.error["code"]) == (503, "adapters_in_use")
        assert "all 2 adapter slots" in answer.error["message"]
        assert "max_cpu_loras" in answer.error["message"]
        for path, status in (("/etc", 400), ("nowhere", 404)):
            # What is wrong with an order itself is said first.
            answer = await client.post(LOAD, {"lora_name": "four", "lora_path": path})
            assert (answer.status, answer.error["param"]) == (status, "lora_path")
    assert found == [expected]


@pytest.mark.parametrize("fields", [{"background": True, "stream": False}, {"stream": False}])
async def test_changed_adapter_loses_a_durable_answer(engine, root, fields):
    disk, path = SimulatedDisk(random.Random(0), full_rate=0, error_rate=0), "/v1/responses"
    body = {"model": "four", "input": "hi", "max_output_tokens": 400, "ignore_eos": True, **fields}
    life = lives_on(engine, disk, lora_root=str(root), is_dev_mode=True)

    async def load(client, seed):
        write_adapter(root / "four", random_tensors(seed=seed))
        answer = await client.post(LOAD, {"lora_name": "four", "lora_path": "four"})
        assert answer.status == 200

    async def outcome(client):
        if not fields.get("background"):
            answer = await client.post(path, body, KEYED)
            return answer.status, str(answer.json)
        with anyio.fail_after(30):
            while True:
                (stream,) = (await client.get("/v1/streams")).json["data"]
                found = (await client.get(f"{path}/{stream['id']}")).json
                if found["status"] not in ("queued", "in_progress"):
                    return 410 if found["status"] == "failed" else 200, str(found["error"])

    async with life() as client:
        await load(client, 4)
        async with client.stream("POST", path, json.dumps(body).encode(), KEYED):
            streams = client.service.journal._segments.streams
            await until(lambda: [s for s in streams.values() if s.num_tokens > 2])
    for seed, reason in ((None, "not loaded"), (5, "adapter has changed"), (4, None)):
        for number in await engine.list_loras():
            await engine.remove_lora(number)
        if seed is not None:
            write_adapter(root / "four", random_tensors(seed=seed))
            await engine.add_lora(LoRARequest("four", 4, str(root / "four")))
        async with life() as client:
            status, text = await outcome(client)
            assert status == (200 if reason is None else 410), text
            assert reason is None or ("stream_lost" in text and reason in text)
    for number in await engine.list_loras():
        await engine.remove_lora(number)
