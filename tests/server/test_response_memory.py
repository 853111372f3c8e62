"""Memory of `/v1/responses`: follow-ups, reading, deleting, and responses in background."""

from contextlib import asynccontextmanager

import anyio
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from trouper.errors import GenerationError
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.shared.settings import ServerSettings

from .client import Client
from .scripted import ScriptedEngine

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
GREEDY = {"input": "hi", "temperature": 0, "max_output_tokens": 6}
LONG = {"input": "hi", "background": True, "seed": 1, "max_output_tokens": 400}
STORE = {"responses_store_bytes": 2**20}
CALL = '{"name": "f", "arguments": {"a": 1}}'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
KEYS = [[("authorization", f"Bearer {key}")] for key in ("one", "two")]


@pytest.fixture
def served(engine):
    """`async with served() as client`: a server that keeps responses and runs background work."""

    @asynccontextmanager
    async def served(engine=engine, **settings):
        app = create_app(engine, ServerSettings(**{**STORE, **settings}))
        client = Client(app)
        client.service, client.engine = app.service, engine
        async with anyio.create_task_group() as tasks:
            await tasks.start(app.service.background.run_tasks)
            yield client
            tasks.cancel_scope.cancel()
        assert app.service.background.num_running == 0
        assert app.service.gate.admission.num_requests == 0

    return served


@pytest.fixture
def remembering(says):
    return lambda *pieces, **settings: says(*pieces, **{**STORE, **settings})


async def ended(client, name, headers=()):
    """The response, once it runs no more."""
    with anyio.fail_after(30):
        while True:
            response = (await client.get(f"{PATH}/{name}", headers)).json
            if response["status"] not in ("queued", "in_progress"):
                return response
            await anyio.sleep(0.001)


# Input items


async def items(client, name, query="", headers=()):
    answer = await client.get(f"{PATH}/{name}/input_items{query}", headers)
    assert answer.status == 200, answer.body
    return answer.json


async def test_input_items_are_all_that_response_was_made_from(remembering):
    client = remembering("Hello.")
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1", "id": "mine"},
        {"role": "assistant", "content": "so"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "user", "content": "go on"},
    ]
    first = (await client.post(PATH, {"input": given, "instructions": "be brief"})).json
    found = await items(client, first["id"], "?order=asc")
    kinds = ["message", "function_call", "function_call_output", "message", "reasoning", "message"]
    assert [item["type"] for item in found["data"]] == kinds
    assert [item["content"][0] for item in found["data"] if item["type"] == "message"] == [
        {"type": "input_text", "text": "hi"},
        {"type": "output_text", "text": "so", "annotations": []},
        {"type": "input_text", "text": "go on"},
    ]
    assert found["data"][2] == {**given[2], "status": "completed"}
    body = {"input": "more", "previous_response_id": first["id"]}
    second = (await client.post(PATH, body)).json
    whole = (await items(client, second["id"], "?order=asc"))["data"]
    assert [item["type"] for item in whole] == [*kinds, "message", "message"]
    assert whole[6] == first["output"][0]
    assert whole[7]["content"] == [{"type": "input_text", "text": "more"}]
    assert len({item["id"] for item in whole}) == 8
    for item in whole:
        parsed = TypeAdapter(ResponseItem).validate_python(item)
        assert parsed.id == item["id"]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 7, 100])
async def test_pages_make_up_the_list(remembering, order, limit):
    client = remembering("Hello.")
    texts = [str(i) for i in range(7)]
    given = [{"role": "user", "content": text} for text in texts]
    for own in given[1::3]:
        own["id"] = f"mine_{own['content']}"
    name = (await client.post(PATH, {"input": given})).json["id"]
    found, after = [], ""
    while True:
        page = await items(client, name, f"?order={order}&limit={limit}{after}")
        assert page["object"] == "list"
        assert 0 < len(page["data"]) <= limit
        assert page["first_id"] == page["data"][0]["id"]
        found += page["data"]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    shown = [item["content"][0]["text"] for item in found]
    assert shown == (texts if order == "asc" else texts[::-1])
    if (order, limit) == ("desc", 100):
        assert (await items(client, name))["data"] == found
    beyond = await items(client, name, f"?order={order}&after={found[-1]['id']}")
    assert (beyond["data"], beyond["last_id"], beyond["has_more"]) == ([], None, False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("limit=", "limit"),
        ("limit=-1", "limit"), ("limit=1" + "0" * 5000, "limit"), ("limit=%D9%A1", "limit"),
        ("order=up", "order"), ("after=msg_x", "after"), ("after=", "after"),
        ("after=msg_NAME_in1", "after"), ("after=rs_NAME_in0", "after"),
    ],
)  # fmt: skip
async def test_a_bad_page_is_refused_by_name(remembering, query, param):
    client = remembering("Hello.")
    name = (await client.post(PATH, {"input": "hi"})).json["id"]
    query = query.replace("NAME", name)
    answer = await client.get(f"{PATH}/{name}/input_items?{query}")
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


async def test_input_items_are_those_of_the_key_alone(remembering):
    client = remembering("Hello.", api_keys=("one", "two"))
    name = (await client.post(PATH, {"input": "hi"}, KEYS[0])).json["id"]
    assert (await items(client, name, "", KEYS[0]))["data"]
    for other, headers in ((name, KEYS[1]), ("resp_x", KEYS[0])):
        answer = await client.get(f"{PATH}/{other}/input_items", headers)
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")


async def test_what_runs_in_background_has_its_input_items(served):
    async with served() as client:
        name = (await client.post(PATH, LONG)).json["id"]
        (item,) = (await items(client, name))["data"]
        assert item["content"] == [{"type": "input_text", "text": "hi"}]
        await client.post(f"{PATH}/{name}/cancel")
        assert (await items(client, name))["data"] == [item]


# Follow-ups


@pytest.mark.parametrize("stream", [False, True])
async def test_follow_up_goes_on_where_response_ended(remembering, stream):
    client = remembering("Hello.")
    await client.post(PATH, {"input": "hi", "instructions": "be brief", "stream": stream})
    (name,) = client._app.service.responses._entries
    reply = (await client.post(PATH, {"input": "more", "previous_response_id": name})).json
    assert (reply["previous_response_id"], reply["store"]) == (name, True)
    prompt, *_ = client.engine.asked[1]
    assert [(m["role"], m["content"]) for m in prompt["messages"]] == [
        ("user", "hi"),
        ("assistant", [{"type": "output_text", "text": "Hello.", "annotations": []}]),
        ("user", "more"),
    ]  # instructions are those of the request alone


async def test_the_result_of_a_call_follows_the_call(remembering):
    client = remembering(CALL)
    first = (await client.post(PATH, {"input": "hi", "tools": [TOOL]})).json
    result = {
        "type": "function_call_output",
        "call_id": first["output"][0]["call_id"],
        "output": "2",
    }
    fields = {"previous_response_id": first["id"], "input": [result]}
    assert (await client.post(PATH, fields)).status == 200
    prompt, *_ = client.engine.asked[1]
    assert [m["role"] for m in prompt["messages"]] == ["user", "assistant", "tool"]


async def test_a_conversation_forks_and_outlives_its_beginning(remembering):
    client = remembering("x")
    first = (await client.post(PATH, {"input": "one"})).json["id"]
    names = [
        (await client.post(PATH, {"input": "two", "previous_response_id": first})).json["id"]
        for _ in range(2)
    ]
    await client.get(f"{PATH}/{first}", method="DELETE")
    for name in names:
        follow_up = {"input": "three", "previous_response_id": name}
        assert (await client.post(PATH, follow_up)).status == 200
    prompt, *_ = client.engine.asked[-1]
    assert len(prompt["messages"]) == 5


async def test_follow_up_says_what_whole_conversation_says(served):
    async with served() as client:
        first = (await client.post(PATH, GREEDY)).json
        follow_up = {**GREEDY, "input": "go on", "previous_response_id": first["id"]}
        found = (await client.post(PATH, follow_up)).json
        items = [
            {"role": "user", "content": "hi"},
            *first["output"],
            {"role": "user", "content": "go on"},
        ]
        wanted = (await client.post(PATH, {**GREEDY, "input": items, "store": False})).json
        assert found["output"][0]["content"] == wanted["output"][0]["content"]
        assert found["usage"]["input_tokens"] == wanted["usage"]["input_tokens"]


@pytest.mark.parametrize("background", [False, True])
async def test_follow_ups_keep_salt_model_and_priority(engine, says, served, background):
    scripted = says("x").engine
    names = ("other", "trouper-demo")
    async with served(scripted, served_model_names=names) as client:
        given = {"model": "trouper-demo", "cache_salt": "pepper", "priority": 7}
        name = (await client.post(PATH, {"input": "a", **given})).json["id"]
        for _ in range(2):  # a follow-up of a follow-up, too
            fields = {"input": "b", "previous_response_id": name, "background": background}
            reply = (await client.post(PATH, fields)).json
            name = reply["id"]
            assert (await ended(client, name))["model"] == "trouper-demo"
        for prompt, _, options in scripted.asked:
            assert (prompt["cache_salt"], options.priority) == ("pepper", 7)
        changed = {"input": "c", "previous_response_id": name, "cache_salt": "salt", "priority": 1}
        await client.post(PATH, changed)
        prompt, _, options = scripted.asked[-1]
        assert (prompt["cache_salt"], options.priority) == ("salt", 1)


async def test_reference_stands_for_item_that_it_names(remembering):
    client = remembering(f"[{CALL}, {CALL}]", api_keys=("one", "two"))
    mine, yours = KEYS
    first = (await client.post(PATH, {"input": "hi", "tools": [TOOL]}, mine)).json
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "2"}
        for item in first["output"]
    ]
    fields = {"input": [{"role": "user", "content": "hi"}, *references, *results]}
    assert (await client.post(PATH, fields, mine)).status == 200
    prompt, *_ = client.engine.asked[-1]
    assert [m["role"] for m in prompt["messages"]] == ["user", "assistant", "tool", "tool"]
    answer = await client.post(PATH, fields, yours)
    assert (answer.status, answer.error["param"]) == (404, "input[1].id")
    for name in ("", "msg_x", f"{references[0]['id']}9", 1):
        answer = await client.post(PATH, {"input": [{"type": "item_reference", "id": name}]}, mine)
        assert answer.status == (400 if name == 1 else 404)
        assert answer.error["param"] == "input[0].id"
    answer = await client.post(PATH, {"input": [references[0], references[0]]}, mine)
    assert (answer.status, answer.error["param"]) == (400, "input[1].id")


async def test_what_is_followed_counts_for_admission(remembering):
    client = remembering("x", max_waiting_tokens=400)
    service = client._app.service
    sizes = []
    enter = service.size
    service.size = lambda context, *more: (
        sizes.append(context.num_body_bytes) or enter(context, *more)
    )
    name = (await client.post(PATH, {"input": "x" * 400})).json["id"]
    await client.post(PATH, {"input": "x", "previous_response_id": name})
    assert sizes[1] > 400


# Reading and deleting


async def test_a_response_is_read_as_it_was_sent(remembering):
    client = remembering("x")
    reply = await client.post(PATH, {"input": "hi"})
    path = f"{PATH}/{reply.json['id']}"
    found = await client.get(path)
    assert (found.status, found.json) == (200, reply.json)
    deleted = await client.get(path, method="DELETE")
    assert deleted.json == {"id": reply.json["id"], "object": "response", "deleted": True}
    answer = await client.get(path)
    assert (answer.status, answer.error["code"]) == (404, "response_not_found")
    assert client._app.service.responses.num_bytes == 0


async def test_another_key_finds_nothing(remembering):
    client = remembering("x", api_keys=("one", "two"))
    mine, yours = KEYS
    name = (await client.post(PATH, {"input": "hi"}, mine)).json["id"]
    follow_up = {"input": "hi", "previous_response_id": name}
    absent = await client.get(f"{PATH}/resp_none", yours)
    found = [
        await client.get(f"{PATH}/{name}", yours),
        await client.get(f"{PATH}/{name}", yours, method="DELETE"),
        await client.request("POST", f"{PATH}/{name}/cancel", headers=yours),
    ]
    same = absent.body.replace(b"resp_none", name.encode())
    assert {(answer.status, answer.body) for answer in found} == {(404, same)}
    assert absent.error["message"].startswith("Response with id 'resp_none' not found.")
    answer = await client.post(PATH, follow_up, yours)
    assert (answer.status, answer.error["param"]) == (404, "previous_response_id")
    assert (await client.get(f"{PATH}/{name}", mine)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_to_be_stored_is_not(remembering, stream):
    client = remembering("x")
    await client.post(PATH, {"input": "hi", "store": False, "stream": stream})
    assert len(client._app.service.responses) == 0


async def test_the_store_holds_what_was_used_last(remembering):
    client = remembering("x", responses_store_bytes=8000)
    names = []
    for _ in range(20):
        names.append((await client.post(PATH, {"input": "hi"})).json["id"])
        assert (await client.get(f"{PATH}/{names[0]}")).status == 200
    found = [(await client.get(f"{PATH}/{name}")).status for name in names]
    assert found[1] == 404
    assert found[-1] == 200
    assert client._app.service.responses.num_bytes <= 8000


async def test_request_id_of_client_names_no_response(remembering):
    client = remembering("x")
    header = [("x-request-id", "same")]
    names = {(await client.post(PATH, {"input": "hi"}, header)).json["id"] for _ in range(3)}
    assert len(names) == 3
    assert (await client.get(f"{PATH}/resp_same")).status == 404


@pytest.mark.parametrize("error", [GenerationError("x")])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_leaves_nothing(engine, error, stream):
    scripted = ScriptedEngine(engine, lambda number, params: [error])
    app = create_app(scripted, ServerSettings(**STORE))
    await Client(app).post(PATH, {"input": "hi", "stream": stream})
    assert len(app.service.responses) == 0


async def test_responses_are_kept_where_no_option_says_otherwise(client):
    first = (await client.post(PATH, GREEDY)).json
    assert first["store"] is True
    follow_up = await client.post(PATH, {**GREEDY, "previous_response_id": first["id"]})
    assert follow_up.json["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert (await client.get(f"{PATH}/{first['id']}")).json == first
    assert client._app.service.responses.max_bytes == 64 * 2**20


async def test_without_a_store_what_needs_one_is_refused(make_client):
    client = make_client(responses_store_bytes=0)
    assert (await client.post(PATH, GREEDY)).json["store"] is False
    for fields in ({"store": True}, {"background": True}, {"previous_response_id": "resp_x"}):
        answer = await client.post(PATH, {**GREEDY, **fields})
        assert (answer.status, answer.error["param"]) == (400, next(iter(fields)))
        assert "--responses-store-bytes" in answer.error["message"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        answer = await client.request(method, f"{PATH}/resp_x{path}")
        assert (answer.status, answer.error["code"]) == (400, "not_supported")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"background": True, "temperature": 3}, "temperature"),
        ({"background": True, "input": [{"type": "x"}]}, "input[0].type"),
    ],
)
async def test_what_is_refused_at_once(served, fields, param):
    async with served() as client:
        answer = await client.post(PATH, {**GREEDY, **fields})
        assert (answer.status, answer.error["param"]) == (400, param)
        assert len(client.service.responses) == 0


async def test_application_without_its_lifespan_runs_no_background_work(remembering):
    answer = await remembering("x").post(PATH, {"input": "hi", "background": True})
    assert (answer.status, answer.error["param"]) == (400, "background")


@pytest.mark.parametrize("path", ["x", "x/y", "x/cancel/z", ""])
async def test_other_paths_are_not_found(remembering, path):
    answer = await remembering("x").get(f"{PATH}/{path}")
    assert answer.status == 404


# In background


async def test_response_in_background_is_there_when_it_is_done(served):
    async with served() as client:
        queued = (await client.post(PATH, {**GREEDY, "background": True})).json
        Response.model_validate(queued, strict=True)
        assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
        done = await ended(client, queued["id"])
        Response.model_validate(done, strict=True)
        wanted = (await client.post(PATH, GREEDY)).json
        assert done["status"] == "incomplete"
        assert done["output"][0]["content"] == wanted["output"][0]["content"]
        assert done["usage"]["output_tokens"] == 6


@pytest.mark.parametrize("action", ["cancel", "delete"])
async def test_one_that_is_given_up_ends_in_engine(served, action, wait_idle, wait_until):
    async with served() as client:
        name = (await client.post(PATH, {**LONG})).json["id"]
        await wait_until(lambda: client.engine.statistics().scheduler.num_running)
        if action == "cancel":
            reply = (await client.request("POST", f"{PATH}/{name}/cancel")).json
            assert (reply["id"], reply["status"]) == (name, "cancelled")
            again = (await client.request("POST", f"{PATH}/{name}/cancel")).json
            assert again == reply == (await client.get(f"{PATH}/{name}")).json
        else:
            assert (await client.get(f"{PATH}/{name}", method="DELETE")).status == 200
            assert len(client.service.responses) == 0
        await wait_idle()
        await wait_until(lambda: not client.service.background.num_running)
        assert client.service.gate.admission.num_requests == 0


async def test_what_was_not_in_background_cannot_be_cancelled(remembering):
    client = remembering("x")
    name = (await client.post(PATH, {"input": "hi"})).json["id"]
    answer = await client.request("POST", f"{PATH}/{name}/cancel")
    assert answer.status == 400


async def test_one_that_runs_cannot_be_followed(served, wait_until):
    async with served() as client:
        name = (await client.post(PATH, LONG)).json["id"]
        answer = await client.post(PATH, {**GREEDY, "previous_response_id": name})
        assert (answer.status, answer.error["param"]) == (400, "previous_response_id")


async def test_shutting_down_ends_what_runs(served, wait_idle):
    async with served() as client:
        name = (await client.post(PATH, LONG)).json["id"]
    await wait_idle()
    assert (await client.get(f"{PATH}/{name}")).json["status"] == "cancelled"


async def test_failure_is_told_when_response_is_read(engine, served):
    scripted = ScriptedEngine(engine, lambda number, params: [GenerationError("internals")])
    async with served(scripted) as client:
        name = (await client.post(PATH, {"input": "hi", "background": True})).json["id"]
        failed = await ended(client, name)
        Response.model_validate(failed, strict=True)
        assert failed["status"] == "failed"
        assert failed["error"] == {
            "code": "server_error", "message": "the request failed inside the engine",
        }  # fmt: skip


async def test_prompt_too_long_is_reported_when_response_is_read(served):
    async with served() as client:
        fields = {"input": "x" * 100_000, "background": True}
        failed = await ended(client, (await client.post(PATH, fields)).json["id"])
        assert (failed["status"], failed["error"]["code"]) == ("failed", "invalid_prompt")
        assert "input" in failed["error"]["message"]


async def test_the_deadline_counts_in_background(served):
    async with served() as client:
        header = [("x-request-timeout-ms", "1")]
        fields = {**LONG, "max_output_tokens": 500}
        failed = await ended(client, (await client.post(PATH, fields, header)).json["id"])
        assert failed["status"] == "failed"
        assert "deadline" in failed["error"]["message"]


async def test_background_requests_are_admitted_as_others(served):
    async with served(max_requests=1) as client:
        name = (await client.post(PATH, LONG)).json["id"]
        answer = await client.post(PATH, GREEDY)
        assert answer.status in (429, 503)
        await client.request("POST", f"{PATH}/{name}/cancel")
        await ended(client, name)


async def test_where_all_kept_runs_no_more_is_taken(served):
    async with served(responses_store_bytes=3000) as client:
        found = [await client.post(PATH, LONG) for _ in range(4)]
        statuses = [answer.status for answer in found]
        assert statuses[0] == 200
        assert statuses[-1] == 503
        assert "retry-after" in found[-1].headers
