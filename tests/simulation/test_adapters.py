"""Adapters that are loaded, used and unloaded at once, in virtual time and drawn orders.

Each request must get the tokens of the content that its adapter had when the request was opened, whatever else
is loaded, unloaded or loaded anew meanwhile; a request that would be one adapter too many waits for another to end; and in
the end nothing is counted any more.
"""

import random

import anyio
import msgspec
import pytest
import trio
import trio.testing

from tests.support.engines import STEP_S, VOCAB_SIZE, engine_config, simulated_engine
from trouper.actors.messages.requests import RequestOptions
from trouper.actors.messages.steps import Sampling
from trouper.config.adapters import AdapterConfig, AdapterFiles, LoRAConfig
from trouper.errors import (
    AdaptersInUseError,
    LoRAAdapterNotFoundError,
    TrouperValidationError,
    invalid,
)
from trouper.lora import LoRARequest
from trouper.params import SamplingParams

from .ports import SimThreads
from .simulated_device import Conditions, simulated_tokens

pytestmark = pytest.mark.trio
NUM_SLOTS, MAX_LORAS, NUM_ADAPTERS = 3, 2, 5
NUM_SEEDS = 12
EXPECTED = (LoRAAdapterNotFoundError, TrouperValidationError)


class FlakyLoads(Conditions):
    """Some loads fail on the device."""

    def __init__(self, dice):
        super().__init__(STEP_S)
        self._dice = dice

    def call_s(self, method):
        if method == "load_adapter" and self._dice.random() < 0.2:
            raise invalid("lora_path", "does not fit")
        return 3 * STEP_S * self._dice.random()


class World:
    """An engine, the folders of its adapters, and the tasks that use them."""

    def __init__(self, engine, dice, versions):
        self.engine, self.dice, self.versions = engine, dice, versions
        self.contents = {}  # by the digest of its files
        self.entered = {}  # by task: the content that its request got
        self.num_compared = 0
        adapters = engine.adapters
        self._enter, self._take_in = adapters.enter, adapters._take_in
        adapters.enter, adapters._take_in = self.enter, self.take_in

    def take_in(self, loaded, known):
        self.contents[loaded.adapter.digest] = self.engine.device._adapters[loaded.adapter.slot]
        self._take_in(loaded, known)

    def enter(self, request):
        adapter = self._enter(request)
        self.entered[trio.lowlevel.current_task()] = self.contents[adapter.digest]
        return adapter

    def request(self, number, **options):
        return LoRARequest(f"adapter {number}", number, f"/{number}", **options)

    async def client(self, index):
        dice = self.dice
        for turn in range(4):
            await anyio.sleep(dice.random() * 10 * STEP_S)
            number = dice.randrange(NUM_ADAPTERS + 1)
            prompt = tuple(range(dice.choice((3, 9, 14))))
            num_tokens = dice.choice((1, 6, 20))
            params = SamplingParams(temperature=0, max_tokens=num_tokens)
            adapter = self.request(number) if number else None
            leaves_after_s = dice.choice((None, None, None, 8 * STEP_S * dice.random()))
            loads_adapter = dice.random() < 0.7  # or is it one that a server knows
            generation = self.engine.generate(
                prompt,
                params,
                f"{index}-{turn}",
                RequestOptions(lora_request=adapter, loads_adapter=loads_adapter),
            )
            output = None
            try:
                with anyio.move_on_after(leaves_after_s or 1000) as scope:
                    async with generation as stream:
                        async for output in stream:  # noqa: B007
                            pass
            except EXPECTED:
                continue
            if scope.cancelled_caught:
                continue
            content = self.entered[trio.lowlevel.current_task()] if adapter else b""
            expected = simulated_tokens(
                prompt, Sampling(temperature=0.0), num_tokens, VOCAB_SIZE, content
            )
            assert output.outputs[0].token_ids == expected
            self.num_compared += 1

    async def operator(self):
        dice = self.dice
        for _ in range(12):
            await anyio.sleep(dice.random() * 8 * STEP_S)
            number = dice.randrange(1, NUM_ADAPTERS + 1)
            adapters = self.engine.adapters
            load = dice.choice((adapters.load, adapters.load_named))
            match dice.randrange(3):
                case 0:
                    adapters.unload(number)
                case 1:
                    self.versions[number] = self.versions.get(number, 0) + 1
                    await self._load(load, number, load_inplace=True)
                case _:
                    await self._load(load, number)

    async def _load(self, load, number, **options):
        with anyio.move_on_after(self.dice.choice((1000, 4 * STEP_S * self.dice.random()))):
            try:
                await load(self.request(number, **options))
            except (*EXPECTED, AdaptersInUseError):
                pass


async def play(seed, monkeypatch):
    """Run one drawn world; returns how many answers were compared."""
    dice = random.Random(seed)
    versions = {}

    def read(path, root):
        if dice.random() < 0.1:
            raise invalid("lora_path", "cannot be read")
        content = f"{path} {versions.get(int(path[1:]), 0)}"
        return AdapterFiles.of(AdapterConfig(), content.encode())

    monkeypatch.setattr("trouper.actors.engine.engine.read_adapter", read)
    config = engine_config(max_loras=MAX_LORAS, max_num_seqs=4, max_num_active_seqs=4)
    config = msgspec.structs.replace(
        config, lora=LoRAConfig(max_loras=MAX_LORAS, num_slots=NUM_SLOTS)
    )
    threads = SimThreads(random.Random(seed + 1), 2, STEP_S)
    async with simulated_engine(
        config=config, threads=threads, conditions=FlakyLoads(dice), num_blocks=24
    ) as engine:
        world = World(engine, dice, versions)
        async with anyio.create_task_group() as tasks:
            for index in range(8):
                tasks.start_soon(world.client, index)
            for _ in range(2):
                tasks.start_soon(world.operator)
        adapters = engine.adapters
        for request in adapters.requests:
            adapters.unload(request.lora_int_id)
        await trio.testing.wait_all_tasks_blocked()
        assert adapters.num_free_slots == NUM_SLOTS
        return world.num_compared


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
async def test_load_use_and_unload_at_once(seed, autojump_clock, monkeypatch):
    assert await play(seed, monkeypatch) > 8
