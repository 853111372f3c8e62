"""Several models behind one server, with engines that do nothing, in virtual time."""

import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import anyio
import pytest
import trio
import trio.testing

from trouper.actors.engine.lifecycle import Lifecycle
from trouper.actors.executor.devices.supervision import WorkerKilledError
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.frontends.server.asgi.app import App
from trouper.frontends.server.models.options import ModelOptions
from trouper.frontends.server.models.policy import (
    ASLEEP,
    AWAKE,
    COLD,
    DOZING,
    FAILED,
    ModelMemory,
    ResidencyLimits,
)
from trouper.frontends.server.models.residency import Residency
from trouper.frontends.server.models.sizes import ModelPlan
from trouper.frontends.server.models.table import HostedModel, ModelTable
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import HTTPError
from trouper.frontends.server.shared.settings import ServeSettings

from .client import Client

pytestmark = pytest.mark.trio
CONFIG = resolve(EngineArgs("trouper/demo", max_model_len=64, kv_cache_memory_bytes=2**24))
LOAD_S, SLEEP_S = 3.0, 0.01


class Controls:
    """Sleep and wake after a while, or fail."""

    def __init__(self, world):
        self.world, self.lifecycle = world, Lifecycle()

    async def sleep(self, level, mode):
        assert mode == "keep"
        await self._take("sleep", SLEEP_S)
        self.lifecycle.give_back(level)

    async def wake(self, tags):
        await self._take("wake", SLEEP_S)
        self.lifecycle = Lifecycle()
        return True

    async def _take(self, what, seconds):
        self.world.calls.append(what)
        await anyio.sleep(seconds)
        if self.world.failures.get(what, 0):
            self.world.failures[what] -= 1
            raise RuntimeError(f"{what} failed")


class Engine(SimpleNamespace):
    """The part of an engine that a residency uses."""

    @property
    def lifecycle(self):
        return self.controls.lifecycle


class World:
    """The engines of a residency: what was called, and what shall fail."""

    def __init__(self):
        self.calls, self.failures, self.engines = [], {}, []
        self.load_error = RuntimeError("the weights are damaged")

    @asynccontextmanager
    async def make(self, config, launcher):
        self.calls.append("load")
        await anyio.sleep(LOAD_S)
        if self.failures.get("load", 0):
            self.failures["load"] -= 1
            raise self.load_error
        controls = Controls(self)
        engine = Engine(
            config=config,
            info=SimpleNamespace(num_blocks=9, block_size=16, num_kv_tokens=lambda length: 128),
            tokenizer=None,
            metrics=None,
            controls=controls,
            dead_error=None,
            num_prefill_tokens=0,
            adapters=SimpleNamespace(requests=()),
        )
        self.engines.append(engine)
        try:
            yield SimpleNamespace(engine=engine)
        finally:
            self.calls.append("stop")


@asynccontextmanager
async def running(names="ab", budget=10, turn_s=5.0, **options):
    """Two models of which the budget holds one awake, and one asleep."""
    world = World()
    models, front = [], None
    for name in names:
        chosen = ModelOptions(name, EngineArgs(), options.get("keep_alive_s", 300.0), **{
            key: value for key, value in options.items() if key == "aliases"
        })  # fmt: skip
        plan = ModelPlan(chosen, CONFIG, ModelMemory(1, 6, 2))
        settings = ServeSettings(served_model_names=(name, *chosen.aliases))
        service = Service(settings, front=front, plan=CONFIG)
        front = front or service
        models.append(HostedModel(plan, service))
    table = ModelTable(models, None, budget)
    lines = []
    limits = ResidencyLimits(budget, turn_s, options.get("max_loaded"))
    residency = Residency(table, limits, lines.append, world.make)
    front.models = residency
    residency.world, residency.lines = world, lines
    async with anyio.create_task_group() as tasks:
        await tasks.start(residency.carry_out)
        yield residency
        tasks.cancel_scope.cancel()


async def nothing():
    await anyio.lowlevel.checkpoint()


@pytest.fixture
def clock(autojump_clock):
    return autojump_clock


async def test_request_loads_its_model(clock):
    async with running() as residency:
        a, b = residency.table
        seen = []

        async def act():
            seen.append((a.record.state, b.record.state, a.record.num_open))

        await residency.use(a, act)
        assert seen == [(AWAKE, COLD, 1)]
        assert trio.current_time() == pytest.approx(LOAD_S)
        assert (a.record.num_open, a.record.num_waiting) == (0, 0)


async def test_open_request_survives_a_swap(clock):
    """The first model makes room at the end of its turn, and its request goes on behind the other's."""
    async with running() as residency:
        a, b = residency.table
        states = []

        async def long():
            await anyio.sleep(20)
            states.append(a.record.state)

        async def short():
            states.append((a.record.state, b.record.state))
            await anyio.sleep(1)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(residency.use, a, long)
            await anyio.sleep(LOAD_S + 0.5)
            tasks.start_soon(residency.use, b, short)
        assert states == [(ASLEEP, AWAKE), AWAKE]
        assert residency.world.calls.count("stop") == 0


async def test_failed_load_answers_only_its_own_requests(clock):
    async with running(budget=20) as residency:
        a, b = residency.table
        residency.world.failures["load"] = 1
        with pytest.raises(HTTPError, match="damaged") as raised:
            await residency.use(a, nothing)
        assert (raised.value.status, raised.value.code) == (503, "model_failed")
        assert a.record.state is FAILED
        await residency.use(b, nothing)
        with pytest.raises(HTTPError, match="damaged"):
            await residency.use(a, nothing)
        await anyio.sleep(6)
        await residency.use(a, nothing)


async def test_killed_load_is_repeated(clock):
    async with running() as residency:
        a, _ = residency.table
        residency.world.load_error = WorkerKilledError("worker 0 died of SIGKILL")
        residency.world.failures["load"] = 2
        await residency.use(a, nothing)
        assert residency.world.calls.count("load") == 3
        residency.world.failures["load"] = 99
        with pytest.raises(HTTPError, match="SIGKILL"):
            await residency.use(residency.table.models["b"], nothing)


async def test_load_ends_the_pause_of_a_failure(clock):
    async with running() as residency:
        a, _ = residency.table
        residency.world.failures["load"] = 1
        with pytest.raises(HTTPError):
            await residency.load(a)
        begun = trio.current_time()
        await residency.load(a)
        assert trio.current_time() - begun == pytest.approx(LOAD_S)


async def test_cancelled_waiter_leaves_nothing(clock):
    async with running() as residency:
        a, _ = residency.table
        with anyio.move_on_after(1):
            await residency.use(a, nothing)
        assert (a.record.num_open, a.record.num_waiting) == (0, 0)
        await anyio.sleep(LOAD_S)
        assert a.record.state is AWAKE


async def test_failed_change_is_tried_again(clock):
    """A worker that dies while its model wakes is started again, so the model is not given up."""
    async with running() as residency:
        a, b = residency.table
        await residency.use(a, nothing)
        await residency.use(b, nothing)
        residency.world.failures["wake"] = 2
        await residency.use(a, nothing)
        assert residency.world.calls.count("wake") == 3
        assert a.record.num_open == 0


async def test_death_of_engine_is_a_failure_of_its_model(clock):
    async with running(budget=20) as residency:
        a, b = residency.table
        await residency.use(a, nothing)
        await residency.use(b, nothing)
        residency.world.engines[0].dead_error = RuntimeError("no restarts left")
        residency.note_deaths()
        await anyio.sleep(0.1)
        assert (a.record.state, b.record.state) == (FAILED, AWAKE)
        assert "no restarts left" in residency.lines[-1]


async def test_keep_alive_of_zero_unloads_after_last_request(clock):
    async with running() as residency:
        a, _ = residency.table

        async def first():
            residency.keep(a, 0.0)
            await anyio.sleep(1)

        async def second():
            residency.keep(a, 0.0)
            await anyio.sleep(9)
            assert a.record.state is AWAKE

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(residency.use, a, first)
            tasks.start_soon(residency.use, a, second)
        await anyio.sleep(1)
        assert a.record.state is COLD
        await residency.use(a, nothing)
        await anyio.sleep(1)
        assert a.record.state is AWAKE
        residency.keep(a, 0.0)
        await residency.load(a)
        await anyio.sleep(1)
        assert a.record.state is AWAKE


async def test_model_without_config_stays_failed(clock):
    async with running() as residency:
        model = HostedModel(ModelPlan(residency.table.models["a"].options, None, ModelMemory(0, 0, 0), "no weights"),
                            residency.table.models["a"].service)  # fmt: skip
        residency.table.models["a"] = model
        await anyio.sleep(1000)
        with pytest.raises(HTTPError, match="no weights"):
            await residency.load(model)
        assert (model.state, model.record.state) == ("failed", FAILED)


async def test_unload_waits_for_requests(clock):
    async with running() as residency:
        a, _ = residency.table
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(residency.use, a, lambda: anyio.sleep(7))
            await anyio.sleep(LOAD_S + 1)
            residency.begin_unload(a, aborts=False, is_forced=False)
            await residency.wait_for(a, COLD)
            assert trio.current_time() == pytest.approx(LOAD_S + 7, abs=0.1)
        a.record.is_pinned = True
        await residency.load(a)
        with pytest.raises(HTTPError, match="pinned"):
            residency.begin_unload(a, aborts=False, is_forced=False)
        residency.begin_unload(a, aborts=False, is_forced=True)
        await residency.wait_for(a, COLD)


async def test_held_model_is_left_as_it_is(clock):
    async with running() as residency:
        a, b = residency.table
        await residency.use(a, nothing)
        residency.hold(a, True)
        with anyio.move_on_after(60):
            await residency.use(b, nothing)
        assert (a.record.state, b.record.state) == (AWAKE, COLD)
        residency.hold(a, False)
        await residency.use(b, nothing)


async def test_two_busy_models_share_the_time(clock):
    """With room for one, each is awake for about half of the time, and swaps follow the turns."""
    async with running(turn_s=5.0) as residency:
        a, b = residency.table
        awake_s = {"a": 0.0, "b": 0.0}

        async def work(model):
            while True:
                await residency.use(model, lambda: anyio.sleep(0.2))

        with anyio.move_on_after(200):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work, a)
                tasks.start_soon(work, b)
                while True:
                    await anyio.sleep(0.1)
                    for model in (a, b):
                        awake_s[model.name] += 0.1 * model.is_awake
        share = awake_s["a"] / sum(awake_s.values())
        assert 0.4 < share < 0.6
        wakes = sum(num for (_, to), num in residency.num_transitions.items() if to == "awake")
        assert wakes <= 200 / 5 + 1


async def test_busy_model_drains_for_one_without_room(clock):
    """No process fits beside an awake model, so the requests of one must end before the other is loaded."""
    async with running(budget=9) as residency:
        a, b = residency.table

        async def work():
            while True:
                await residency.use(a, lambda: anyio.sleep(0.7))

        async with anyio.create_task_group() as tasks:
            for i in range(3):
                tasks.start_soon(work, name=f"worker {i}")
            await anyio.sleep(LOAD_S + 1)
            with anyio.fail_after(15):
                await residency.use(b, nothing)
            tasks.cancel_scope.cancel()


async def test_routes_know_cold_models(clock):
    async with running() as residency:
        client = Client(App(residency.table.default.service, is_admin_listener=True))
        cards = (await client.get("/v1/models")).json["data"]
        assert [(card["id"], card["state"]) for card in cards] == [("a", "cold"), ("b", "cold")]
        assert (await client.get("/models")).json["data"][0]["status"] == {"value": "unloaded"}
        for body, status, code in (
            ({"model": "c"}, 404, "model_not_found"),
            ({}, 400, "model_required"),
        ):
            answer = await client.post("/v1/completions", {**body, "prompt": "x"})
            assert (answer.status, answer.error["code"]) == (status, code)
        answer = await client.post("/v1/completions?autoload=false", {"model": "a", "prompt": "x"})
        assert (answer.status, answer.error["code"]) == (503, "model_not_loaded")
        assert (await client.get("/health/ready")).status == 200
        assert (await client.get("/health/ready?model=a")).status == 503
        assert (await client.get("/api/ps")).json == {"models": []}
        metrics = (await client.get("/metrics")).body.decode()
        assert 'trouper:model_state{model_name="a",state="cold"} 1.0' in metrics
        assert (await client.post("/sleep?model=a", {})).status == 409
        answer = await client.post("/models/load", {"model": "a"})
        assert (answer.status, answer.json["state"]) == (200, "awake")
        answer = await client.post("/models/unload", {"model": "a"})
        assert (answer.status, answer.json["state"]) == (200, "cold")
        assert (await client.post("/models/unload", {"model": "a", "mode": "now"})).status == 400
        assert (await client.post("/models/reload", {})).status == 400


async def test_closing_refuses_the_waiting(clock):
    async with running() as residency:
        a, _ = residency.table
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: _refused(residency, a))
            await anyio.sleep(1)
            residency.close()


async def _refused(residency, model):
    with pytest.raises(HTTPError, match="shutting down"):
        await residency.use(model, nothing)


async def test_names_find_models(clock):
    async with running(aliases=()) as residency:
        table = residency.table
        assert table.find("a:latest").name == "a"
        statuses = table.statuses(0.0)
        assert [(each.name, each.state) for each in statuses] == [("a", "cold"), ("b", "cold")]
        assert json.loads(json.dumps(statuses[0].bytes))["now"] == 0
        assert residency.table.models["a"].record.memory.bytes_in(DOZING) == 7


async def test_watchers_get_each_change(clock):
    async with running() as residency:
        service = residency.table.default.service
        client = Client(App(service, is_admin_listener=True))
        async with anyio.create_task_group() as tasks:

            async def change():
                await anyio.sleep(1)
                await client.post("/models/load", {"model": "b"})
                del residency.table.models["a"]
                residency.note_table()
                service.drain()
                residency.close()

            tasks.start_soon(change)
            answer = await client.get("/models/events")
        frames = [each.split("\ndata: ") for each in answer.body.decode().split("\n\n")[:-1]]
        events = [(name.removeprefix("event: "), json.loads(data)) for name, data in frames]
        assert {name for name, _ in events} == {"model_status", "model_remove"}
        assert [(each["model"], each.get("state")) for _, each in events] == [
            ("a", "cold"), ("b", "cold"), ("b", "loading"), ("b", "awake"), ("a", None),
        ]  # fmt: skip
        assert events[3][1]["status"] == {"value": "loaded"}
        assert events[3][1]["seconds"] == LOAD_S
        assert residency.num_watchers == 0


async def test_watchers_are_bounded(clock):
    async with running() as residency:
        client = Client(App(residency.table.default.service))
        residency.num_watchers = 32
        answer = await client.get("/models/sse")
        assert (answer.status, answer.error["code"]) == (503, "too_many_watchers")


async def test_star_means_all_models(clock):
    async with running(budget=20) as residency:
        a, b = residency.table
        client = Client(App(a.service, is_admin_listener=True))
        await residency.load(a)
        await residency.load(b)
        assert (await client.post("/sleep?model=*&mode=keep", {})).status == 200
        assert a.is_paused
        assert b.is_paused
        assert (await client.post("/wake_up?model=*", {})).json["status"] == "awake"
        assert not a.is_paused
        assert not b.is_paused
        assert (await client.get("/is_sleeping?model=*")).status == 404
