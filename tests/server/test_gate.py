"""Waiting at the gate: turns, shares, overload, and what is told to those who cannot come in."""

import json
import math

import anyio
import pytest

from tests.support.engines import simulated_engine
from trouper.actors.engine.engine import Engine
from trouper.frontends.cli.server_options import settings_from
from trouper.frontends.server.admission.gate import BYTES_PER_TOKEN, LOOK_S, AdmissionGate
from trouper.frontends.server.admission.overload import (
    LAG_S,
    NUM_CALM,
    Ladder,
    Level,
    QueueDelay,
    Throughput,
    memory_used,
)
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import HTTPError, describe
from trouper.frontends.server.shared.settings import ServerSettings

from .client import JSON, Client

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
LONG = {"prompt": "def f(", "max_tokens": 500, "ignore_eos": True}


def bearer(key):
    return ("authorization", f"Bearer {key}")


def body(**fields):
    return json.dumps({**LONG, **fields}).encode()


@pytest.fixture
def gate():
    rejections = []
    gate = AdmissionGate(rejections.append)
    gate.admission.max_sequences, gate.admission.max_started = 2, 1
    gate.min_waiting_tokens = 10_000
    gate.rejections = rejections
    return gate


async def test_admission_reads_no_statistics(autojump_clock, monkeypatch):
    async with simulated_engine() as engine:
        service = Service(ServerSettings())
        service.open(engine)
        service.gate.max_prefill_tokens = 10
        monkeypatch.setattr(Engine, "statistics", None)
        scope = {"path": PATH, "method": "POST", "headers": []}
        with service.enter(RequestContext(scope, None, None)):
            assert service.gate.admission.num_sequences == 1


async def test_time_to_come_back_is_work_over_pace(gate):
    def told():
        with pytest.raises(HTTPError) as raised:
            gate.enter("", 0)
        headers = dict(describe(raised.value).headers)
        return int(headers[b"retry-after"]), int(headers[b"retry-after-ms"])

    with gate.enter("", 0) as first, gate.enter("", 0):
        first.size(80_000, 1, 1, 100, 0)  # 20 000 tokens and 100
        assert told() == (1, 1000)  # nothing is known of the pace
        gate.throughput.note(0, 10.0, is_busy=True)
        gate.throughput.note(5000, 11.0, is_busy=True)
        times = [told()[1] for _ in range(20)]
        assert 4020 <= min(times) < max(times) <= 4020 * 1.25
        assert len(set(times)) == 20  # not all at once
        gate.throughput.note(5000, 1000.0, is_busy=True)
        assert told() == (60, 60_000)
    assert gate.rejections == ["overloaded"] * 22
    assert gate.admission.num_tokens == gate.admission.num_requests == 0


async def test_more_may_wait_where_more_is_done(gate):
    gate.min_waiting_tokens = 100
    with gate.enter("", 200) as first:
        first.size(200, 1, 1, 10, 0)
        with pytest.raises(HTTPError):
            gate.enter("", 400)
        gate.throughput.note(0, 0.0, is_busy=True)
        gate.throughput.note(100, 1.0, is_busy=True)
        with gate.enter("", 400):
            pass


class Opened:
    is_over, num_tokens = False, (0, 0)


async def test_prompts_not_rendered_yet_count_as_queued(gate):
    gate.admission.max_sequences = 100
    gate.max_prefill_tokens = 100
    with gate.enter("", 200), gate.enter("", 220) as second:
        with pytest.raises(HTTPError) as raised:
            gate.enter("", 0)
        assert raised.value.status == 503
        second.generations = [Opened()]  # now the engine counts it
        with gate.enter("", 0):
            gate.num_prefill_tokens = lambda: 50
            with pytest.raises(HTTPError):
                gate.enter("", 0)
    assert gate.rejections == ["max_num_queued_tokens"] * 2


async def test_ticket_cancelled_while_it_waits_is_gone(gate):
    with gate.enter("", 0) as first:
        await first.wait_turn()
        with anyio.move_on_after(0), gate.enter("", 0) as second:
            await second.wait_turn()
        assert gate.admission.num_requests == 1
        assert not gate.admission.waiting()


class Read(Opened):
    is_over = True


async def test_abandoned_admissions_are_found_periodically(gate):
    now = [0.0]
    gate.now = lambda: now[0]
    with gate.enter("", 0) as first, gate.enter("", 0) as second:
        gate.wait(first.entry)
        first.generations = [Opened()]
        gate.wait(second.entry)
        assert gate.admission.waiting() == [second.entry]
        first.generations = [Read()]
        gate.let_in()
        assert gate.admission.waiting() == [second.entry]  # all have just been looked at
        now[0] += LOOK_S
        gate.let_in()
        assert not gate.admission.waiting()


# Throughput and overload


def test_time_without_work_is_no_slow_work():
    pace = Throughput()
    pace.note(0, 0.0, is_busy=True)
    pace.note(1000, 1.0, is_busy=False)
    pace.note(1000, 100.0, is_busy=True)
    pace.note(2000, 101.0, is_busy=True)
    assert pace.per_s == pytest.approx(1000)
    for second in range(102, 152):
        pace.note(100 * (second - 101) + 2000, float(second), is_busy=True)
    assert pace.per_s == pytest.approx(100, rel=0.1)


def test_overload_rises_at_once_and_falls_level_at_time():
    ladder = Ladder()
    assert [ladder.look(m, 0.0) for m in (0.5, 0.92, 0.945, 0.95)] == [0, 1, 2, 3]
    assert ladder.look(0.99, 0.0) is Level.ABORT
    looks = [ladder.look(0.5, 0.0) for _ in range(4 * NUM_CALM)]
    assert looks == [*[level for level in (4, 3, 2, 1) for _ in range(NUM_CALM)][1:], 0]


def test_level_is_held_while_it_is_nearly_reached():
    ladder = Ladder()
    ladder.look(0.95, 0.0)
    assert {ladder.look(0.94, 0.0) for _ in range(100)} == {Level.SHED_ALL}


def test_a_late_event_loop_sheds_and_never_aborts():
    ladder = Ladder()
    assert ladder.look(0.0, LAG_S[Level.TIDY]) is Level.TIDY
    assert ladder.look(0.0, 1000.0) is Level.SHED_ALL


def test_memory_is_read_where_linux_says_it(tmp_path):
    assert memory_used(tmp_path) == 0.0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 250 kB\n")
    assert memory_used(tmp_path) == 0.75
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert memory_used(tmp_path) == 0.75
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text("990\n")
    (group / "memory.stat").write_text("anon 900\ninactive_file 40\n")
    assert memory_used(tmp_path) == 0.95


# The server


async def test_greedy_key_gets_429_and_other_enters(engine, wait_idle):
    app = create_app(engine, ServerSettings(api_keys=("greedy", "modest"), max_requests=8))
    app.service.gate.admission.max_started = 4
    client, answers = Client(app), {"greedy": [], "modest": []}

    async def ask(key):
        fields = {**LONG, "max_tokens": 1}
        answers[key].append(await client.post(PATH, fields, [bearer(key)]))

    async with anyio.create_task_group() as tasks, engine.paused():
        for _ in range(9):
            tasks.start_soon(ask, "greedy")
        await anyio.wait_all_tasks_blocked()
        assert [answer.status for answer in answers["greedy"]] == [503]  # full, of one key only
        tasks.start_soon(ask, "modest")
        await anyio.wait_all_tasks_blocked()
        shown_out = answers["greedy"][1]
        assert (shown_out.status, shown_out.error["code"]) == (429, "rate_limited")
        assert shown_out.error["type"] == "RateLimitError"
        assert int(shown_out.headers["retry-after"]) >= 1
    assert [answer.status for answer in answers["modest"]] == [200]
    assert [answer.status for answer in answers["greedy"][2:]] == [200] * 7
    await wait_idle()


async def test_priority_decides_who_starts_first(app, client, wait_until, wait_idle):
    admission = app.service.gate.admission
    admission.max_started = 1
    order = []

    async def ask(priority):
        fields = {**LONG, "max_tokens": 2, "priority": priority}
        assert (await client.post(PATH, fields)).status == 200
        order.append(priority)

    async with anyio.create_task_group() as tasks:
        async with client.stream("POST", PATH, body(stream=True), [JSON]) as call:
            await call.wait_for(lambda: call.num_chunks >= 1)
            for num, priority in enumerate((0, -1, 5), 1):
                tasks.start_soon(ask, priority)
                await wait_until(lambda num=num: len(admission.waiting()) == num)
            assert not order
    assert order == [5, 0, -1]
    await wait_idle()


async def test_a_burst_cannot_pass_max_num_queued_tokens(app, client, wait_idle):
    app.service.gate.max_prefill_tokens = 300
    answers = []

    async def ask():
        answers.append((await client.post(PATH, {"prompt": "x" * 400, "max_tokens": 1})).status)

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(ask)
    assert answers.count(200) == 3  # 107, 214 and 321 tokens by their bytes
    assert answers.count(503) == 7
    await wait_idle()


async def test_standing_queue_is_cut_unless_paused(
    engine, app, client, monkeypatch, wait_until, wait_idle
):
    gate, answers = app.service.gate, {}
    gate.admission.max_started = 1
    gate.delay = QueueDelay(0.0)
    monkeypatch.setattr("trouper.frontends.server.admission.overload.INTERVAL_S", 0.0)

    async def ask(number):
        answers[number] = await client.post(PATH, {**LONG, "max_tokens": 2})

    async with anyio.create_task_group() as tasks:
        async with client.stream("POST", PATH, body(stream=True), [JSON]) as call:
            await call.wait_for(lambda: call.num_chunks >= 1)
            for number in range(3):
                tasks.start_soon(ask, number)
                await wait_until(lambda num=number: len(gate.admission.waiting()) == num + 1)
            async with engine.paused():
                app.service.look(0.0)
                assert len(gate.admission.waiting()) == 3
            app.service.look(0.0)
            assert len(gate.admission.waiting()) == 1
    assert [answers[number].status for number in range(3)] == [200, 503, 503]
    assert answers[1].error["code"] == "overloaded"
    assert "retry-after" in answers[1].headers
    await wait_idle()


async def test_target_of_command_line_is_doors(engine):
    settings = settings_from({"max_queue_delay": 5.0})
    assert create_app(engine, settings).service.gate.delay.target_s == 5.0
    settings = settings_from({})
    assert create_app(engine, settings).service.gate.delay.target_s == math.inf


async def test_an_overloaded_server_sheds_by_level(app, client):
    gate = app.service.gate
    gate.level = Level.TIDY
    assert (await client.get("/version")).headers["connection"] == "close"
    gate.level = Level.SHED_LOWEST
    fields = {**LONG, "max_tokens": 1}
    assert (await client.post(PATH, {**fields, "priority": -1})).status == 503
    assert (await client.post(PATH, fields)).status == 200
    gate.level = Level.SHED_ALL
    for answer in (await client.post(PATH, fields), await client.get("/health/ready")):
        assert (answer.status, answer.error["code"]) == (503, "overloaded")
    metrics = (await client.get("/metrics")).body
    assert b'trouper:rejected_total{reason="overloaded"} 2.0' in metrics


async def test_the_worst_level_aborts_the_youngest(app, client, monkeypatch, wait_idle):
    used = [0.5]
    monkeypatch.setattr("trouper.frontends.server.service.service.memory_used", lambda: used[0])
    async with client.stream("POST", PATH, body(stream=True), [JSON]) as old:
        await old.wait_for(lambda: old.num_chunks >= 1)
        async with client.stream("POST", PATH, body(stream=True), [JSON]) as young:
            await young.wait_for(lambda: young.num_chunks >= 1)
            app.service.look(0.0)
            used[0] = 0.99
            app.service.look(0.0)
            await young.wait_complete()
            assert young.answer.events[-2]["choices"][0]["finish_reason"] == "abort"
            assert not old.answer.is_complete
            app.service.look(0.0)
            await old.wait_complete()
            assert old.answer.events[-2]["choices"][0]["finish_reason"] == "abort"
    await wait_idle()


async def test_who_waits_at_door_hears_of_abort_and_of_end(engine, wait_until, wait_idle):
    app = create_app(engine, ServerSettings(is_dev_mode=True))
    client, admission = Client(app), app.service.gate.admission
    admission.max_started = 1
    answers = {}

    async def ask(name):
        answers[name] = await client.post(PATH, LONG, [("x-request-id", name)])

    async with client.stream("POST", PATH, body(stream=True), [JSON]) as call:
        await call.wait_for(lambda: call.num_chunks >= 1)
        async with anyio.create_task_group() as tasks:
            for num, name in enumerate(("one", "two"), 1):
                tasks.start_soon(ask, name)
                await wait_until(lambda num=num: len(admission.waiting()) == num)
            answer = await client.post("/abort_requests", {"request_ids": ["one"]})
            assert answer.json["aborted"] == 1
            await wait_until(lambda: set(answers) == {"one"})
            app.service.drain()
            app.service.close_gate()
    codes = {name: (answer.status, answer.error["code"]) for name, answer in answers.items()}
    assert codes == {"one": (503, "aborted"), "two": (503, "draining")}
    await wait_idle()


async def test_large_body_counts_as_longest_prompt(engine):
    service = Service(ServerSettings())
    service.open(engine.engine)
    num_bytes = engine.config.max_model_len * BYTES_PER_TOKEN
    assert service.counted_bytes(2**25, 3) == 3 * num_bytes
    assert service.counted_bytes(100, 1) == 100


async def test_promised_work_enters_before_newcomers(gate):
    with gate.enter("", 1) as first, gate.enter("", 1) as second:
        places = [gate.promise("", 1) for _ in range(2)]
        first.leave()
        # No newcomer comes between the free place and the next promise.
        with pytest.raises(HTTPError, match="resuming"):
            gate.enter("", 1)
        with pytest.raises(HTTPError, match="resuming"):
            gate.check("", 1)
        refused_at, gate.now = gate.now(), lambda: refused_at + 9
        assert gate.refusing_s() >= 9
        with places[0]:
            ticket = await places[0].ticket()
            # A promise may be larger than what is free.
            ticket.size(1, 1, 8, 5, 0)
            second.leave()
        with places[1]:
            await places[1].ticket()
            with gate.enter("", 1):
                assert gate.admission.num_sequences == 2


@pytest.mark.parametrize("is_promised", [False, True])
async def test_promised_work_is_never_evicted(gate, is_promised):
    make = gate.promise if is_promised else gate.enter
    with make("a", 1) as first, make("a", 1) as second:
        tickets = [await each.ticket() if is_promised else each for each in (first, second)]
        for ticket in tickets:
            gate.wait(ticket.entry)
        if is_promised:
            with pytest.raises(HTTPError):
                gate.enter("b", 1)
            assert gate.admission.trim(0) == []
        else:
            with gate.enter("b", 1), pytest.raises(HTTPError):
                await tickets[1].wait_turn()
