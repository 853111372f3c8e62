"""Beam search over HTTP: its answers, its place among other requests, and what it refuses."""

import pytest

from trouper.frontends.server.admission.gate import AdmissionTicket

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SEARCH = {"prompt": "def f(", "use_beam_search": True, "max_tokens": 6}
ASK = {"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True, "max_tokens": 6}


async def choices(client, path=COMPLETIONS, **fields):
    answer = await client.post(path, {**(SEARCH if path == COMPLETIONS else ASK), **fields})
    assert answer.status == 200, answer.body
    return answer.json["choices"]


def scores(found):
    """The cumulative logprob of each choice."""
    return [sum(choice["logprobs"]["token_logprobs"]) for choice in found]


async def test_one_beam_is_the_greedy_completion(client):
    (beam,) = await choices(client, return_token_ids=True)
    (greedy,) = await choices(client, return_token_ids=True, use_beam_search=False, temperature=0)
    assert beam == greedy


async def test_the_choices_are_beams_the_most_probable_first(client):
    found = await choices(client, n=4, logprobs=1)
    assert [choice["index"] for choice in found] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in found}) == 4
    assert scores(found) == sorted(scores(found), reverse=True)
    (greedy,) = await choices(client, use_beam_search=False, temperature=0, logprobs=1)
    assert scores(found)[0] >= scores([greedy])[0] - 1e-4
    assert {choice["finish_reason"] for choice in found} == {"length"}


async def test_the_temperature_changes_nothing(client):
    assert await choices(client, n=3, temperature=1.5) == await choices(client, n=3, temperature=0)


async def test_each_prompt_has_beams_of_its_own(client):
    both = await choices(client, prompt=["def f(", "import"], n=2)
    alone = [*await choices(client, n=2), *await choices(client, prompt="import", n=2)]
    assert [choice["text"] for choice in both] == [choice["text"] for choice in alone]
    assert [choice["index"] for choice in both] == [0, 1, 2, 3]


async def test_chat_is_searched_as_prompt_that_it_renders_to(client):
    found = await choices(client, CHAT, n=2, logprobs=True, top_logprobs=3, return_token_ids=True)
    shown = [[len(token["top_logprobs"]) for token in c["logprobs"]["content"]] for c in found]
    assert shown == [[3] * 6] * 2
    chat = {"messages": ASK["messages"]}
    prompt = (await client.post("/tokenize", chat)).json["tokens"]
    same = await choices(client, prompt=prompt, n=2, return_token_ids=True)
    assert [choice["token_ids"] for choice in found] == [choice["token_ids"] for choice in same]


async def test_the_prompt_may_be_shown(client):
    found = await choices(client, n=2, echo=True)
    plain = await choices(client, n=2)
    assert [choice["text"] for choice in found] == ["def f(" + choice["text"] for choice in plain]


async def test_long_prompt_is_cut_once_and_no_beam_of_it(client):
    fields = {"prompt": "def f(x): return x", "truncate_prompt_tokens": 3, "n": 2}
    found = await choices(client, **fields, return_token_ids=True)
    ids = found[0]["prompt_token_ids"]
    assert len(ids) == 3
    alone = await choices(client, prompt=ids, n=2, return_token_ids=True)
    assert [choice["token_ids"] for choice in found] == [choice["token_ids"] for choice in alone]


async def test_it_ends_at_the_models_length(client):
    prompt = [40] * 509
    (beam,) = await choices(client, prompt=prompt, max_tokens=100, return_token_ids=True)
    assert len(beam["token_ids"]) == 3


async def test_usage_counts_each_prompt_once_and_all_choices(client):
    answer = await client.post(COMPLETIONS, {**SEARCH, "n": 3, "return_token_ids": True})
    (first, *_) = answer.json["choices"]
    num_prompt = len(first["prompt_token_ids"])
    assert answer.json["usage"]["prompt_tokens"] == num_prompt
    assert answer.json["usage"]["completion_tokens"] == 18


async def test_a_search_holds_its_place_until_it_ends(client, app, monkeypatch, wait_idle):
    held = []
    num_rounds = 0
    wait_turn = AdmissionTicket.wait_turn

    async def noted(ticket):
        nonlocal num_rounds
        num_rounds += 1
        held.append((app.service.gate.admission.num_sequences, ticket.is_over))
        await wait_turn(ticket)

    monkeypatch.setattr(AdmissionTicket, "wait_turn", noted)
    await choices(client, n=2)
    assert num_rounds == 6
    assert held == [(2, False)] * 6
    assert app.service.gate.admission.num_sequences == 0
    await wait_idle()


async def test_a_client_that_leaves_ends_the_search(client, app, engine, wait_idle, wait_until):
    body = b'{"prompt": "def f(", "use_beam_search": true, "n": 4, "max_tokens": 400}'
    headers = [("content-type", "application/json")]
    async with client.stream("POST", COMPLETIONS, body, headers):
        await wait_until(lambda: engine.statistics().scheduler.num_running)
    await wait_idle()
    assert app.service.gate.admission.num_sequences == 0


async def test_what_admin_aborts_ends_with_beams_so_far(client, app, wait_until):
    body = b'{"prompt": "def f(", "use_beam_search": true, "n": 2, "max_tokens": 400, "request_id": "mine"}'
    headers = [("content-type", "application/json")]
    async with client.stream("POST", COMPLETIONS, body, headers) as call:
        await wait_until(lambda: app.service._open)
        app.service.abort(["mine"])
        await call.wait_complete()
    if call.answer.status == 200:
        reasons = {choice["finish_reason"] for choice in call.answer.json["choices"]}
        assert reasons == {"abort"}
    else:
        assert call.answer.error["code"] == "aborted"
