"""Which adapters are loaded, into which slots, and when they go: one behaviour at a time."""

import anyio
import anyio.lowlevel
import pytest
import trio.testing

from trouper.actors.engine.adapters import Adapters
from trouper.config.adapters import AdapterConfig, AdapterFiles, LoRAConfig
from trouper.errors import (
    AdaptersInUseError,
    EngineDeadError,
    LoRAAdapterNotFoundError,
    RetryableRequestError,
    TrouperValidationError,
    invalid,
)
from trouper.lora import LoRARequest

pytestmark = pytest.mark.trio


class Device:
    """Slots with the folders that were loaded into them; `is_broken` refuses loads."""

    def __init__(self, num_slots=2, *, has_replicas=False):
        self.slots, self.is_broken, self.is_lost = {}, False, False
        self.adapters = Adapters(
            LoRAConfig(num_slots=num_slots), self.read, self.load, has_replicas=has_replicas
        )

    async def read(self, request, root):
        await anyio.lowlevel.checkpoint()
        return AdapterFiles.of(AdapterConfig(), request.lora_path.encode())

    async def load(self, slot, files, done):
        await anyio.lowlevel.checkpoint()
        if self.is_broken:
            raise invalid("lora_path", "does not fit")
        if self.is_lost:
            raise RetryableRequestError("the device is being started again", "device_restarting")
        self.slots[slot] = files.weights
        done()


def named(number, **options):
    return LoRARequest(f"adapter {number}", number, f"/{number}", **options)


def loaded(device):
    return [request.lora_int_id for request in device.adapters.requests]


async def test_an_adapter_is_loaded_once():
    device = Device()
    assert [await device.adapters.load(named(1)) for _ in range(2)] == [True, False]
    assert device.slots == {1: b"/1"}


async def test_the_one_that_is_unused_longest_gives_way():
    device = Device()
    for number in (1, 2):
        await device.adapters.load(named(number))
    device.adapters.leave(device.adapters.enter(named(1)))
    await device.adapters.load(named(3))
    assert loaded(device) == [1, 3]
    with pytest.raises(LoRAAdapterNotFoundError, match="adapter 2"):
        device.adapters.enter(named(2))


async def test_a_pinned_one_stays():
    device = Device()
    for number in (1, 2):
        await device.adapters.load(named(number))
    assert device.adapters.pin(1)
    assert not device.adapters.pin(7)
    for number in (3, 4):
        await device.adapters.load(named(number))
    assert loaded(device) == [1, 4]


async def test_with_all_in_use_load_may_be_tried_again_later():
    device = Device()
    held = []
    for number in (1, 2):
        await device.adapters.load(named(number))
        held.append(device.adapters.enter(named(number)))
    with pytest.raises(AdaptersInUseError, match="max_cpu_loras"):
        await device.adapters.load(named(3))
    device.adapters.leave(held[0])
    assert await device.adapters.load(named(3))


def is_open():
    """The engine takes requests."""


async def full(device):
    """What two requests hold, which use both slots."""
    held = []
    for number in (1, 2):
        await device.adapters.load(named(number))
        held.append(device.adapters.enter(named(number)))
    return held


async def test_requests_waiting_for_adapter_slot_take_turns():
    device = Device()
    held = await full(device)
    order = []

    async def wait(number):
        await device.adapters.load_in_turn(named(number), is_open)
        held.append(device.adapters.enter(named(number)))
        order.append(number)

    async with anyio.create_task_group() as tasks:
        for number in (3, 4, 5):
            tasks.start_soon(wait, number)
            await trio.testing.wait_all_tasks_blocked()
        tasks.start_soon(wait, 2)  # it is loaded
        await trio.testing.wait_all_tasks_blocked()
        assert order == [2]
        for _ in range(4):  # two requests have adapter 2
            device.adapters.leave(held.pop(0))
            await trio.testing.wait_all_tasks_blocked()
    assert order == [2, 3, 4, 5]


async def test_one_that_leaves_its_turn_gives_it_to_next():
    device = Device()
    (first, _) = await full(device)
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await device.adapters.load_in_turn(named(3), is_open)
        tasks.start_soon(device.adapters.load_in_turn, named(4), is_open)
        await trio.testing.wait_all_tasks_blocked()
        device.adapters.leave(first)
    assert loaded(device) == [2, 4]


async def test_unloaded_adapter_makes_room_for_one_that_waits():
    device = Device()
    (first, _) = await full(device)
    device.adapters.pin(1)
    device.adapters.pin(2)
    assert device.adapters.unload(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(device.adapters.load_in_turn, named(3), is_open)
        await trio.testing.wait_all_tasks_blocked()
        device.adapters.leave(first)
    assert loaded(device) == [2, 3]


async def test_none_waits_for_adapters_that_are_pinned():
    device = Device()
    await full(device)
    for number in (1, 2):
        device.adapters.pin(number)
    with pytest.raises(AdaptersInUseError):
        await device.adapters.load_in_turn(named(3), is_open)


async def test_the_engines_end_ends_the_waiting():
    device = Device()
    (first, _) = await full(device)

    def refuse():
        raise EngineDeadError

    async def wait():
        with pytest.raises(EngineDeadError):
            await device.adapters.load_in_turn(named(3), refuse)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        device.adapters.leave(first)


async def test_unloaded_one_keeps_its_slot_until_its_last_request_ends():
    device = Device()
    await device.adapters.load(named(1))
    held = [device.adapters.enter(named(1)) for _ in range(2)]
    assert device.adapters.unload(1)
    assert not device.adapters.unload(1)
    for adapter in held:
        assert device.adapters.num_free_slots == 1
        device.adapters.leave(adapter)
    assert device.adapters.num_free_slots == 2


async def test_loading_in_place_affects_only_new_requests():
    device = Device()
    await device.adapters.load(named(1))
    before = device.adapters.enter(named(1))
    assert await device.adapters.load(named(1, load_inplace=True))
    after = device.adapters.enter(named(1))
    assert before.slot != after.slot
    assert before.digest == after.digest
    for adapter in (before, after):
        device.adapters.leave(adapter)
    assert device.adapters.num_free_slots == 1


async def test_a_load_that_fails_changes_nothing():
    device = Device(num_slots=1)
    await device.adapters.load(named(1))
    device.is_broken = True
    for request in (named(2), named(1, load_inplace=True)):
        with pytest.raises(TrouperValidationError, match="does not fit"):
            await device.adapters.load(request)
        assert (loaded(device), device.slots) == ([1], {1: b"/1"})


@pytest.mark.parametrize("has_replicas", [False, True])
async def test_slot_that_some_replicas_may_have_loaded_is_nobodys(has_replicas):
    device = Device(num_slots=1, has_replicas=has_replicas)
    await device.adapters.load(named(1))
    device.is_lost = True
    with pytest.raises(RetryableRequestError):
        await device.adapters.load(named(2))
    assert loaded(device) == ([] if has_replicas else [1])
    device.is_lost = False
    assert await device.adapters.load(named(2))
    assert loaded(device) == [2]


@pytest.mark.parametrize(
    ("request_", "parameter"),
    [
        (LoRARequest("other", 1, "/1"), "lora_int_id"),
        (LoRARequest("adapter 1", 2, "/1"), "lora_name"),
        (LoRARequest("adapter 1", 1, "/2"), "lora_path"),
    ],
)
async def test_numbers_and_names_belong_to_one_adapter(request_, parameter):
    device = Device()
    await device.adapters.load(named(1))
    with pytest.raises(TrouperValidationError) as caught:
        await device.adapters.load(request_)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        (("", 1, "/a"), "lora_name"),
        (("a/b", 1, "/a"), "lora_name"),
        (("a", 0, "/a"), "lora_int_id"),
        (("a", True, "/a"), "lora_int_id"),
        (("a", 1, ""), "lora_path"),
        (("a", 1, "/a\0b"), "lora_path"),
    ],
)
async def test_a_request_checks_its_fields(fields, parameter):
    with pytest.raises(TrouperValidationError) as caught:
        LoRARequest(*fields)
    assert caught.value.parameter == parameter


async def test_named_one_gives_way_and_is_loaded_again():
    device = Device()
    for number in (1, 2, 3):
        await device.adapters.load_named(named(number))
    assert loaded(device) == [1, 2, 3]
    assert set(device.slots.values()) == {b"/2", b"/3"}
    await device.adapters.load_in_turn(named(1), is_open, loads_new=False)
    device.adapters.enter(named(1))
    assert set(device.slots.values()) == {b"/1", b"/3"}


async def test_evicted_adapter_keeps_name_and_number():
    device = Device(num_slots=1)
    for number in (1, 2):
        await device.adapters.load_named(named(number))
    for other in (LoRARequest("adapter 1", 5, "/1"), LoRARequest("adapter 5", 1, "/1")):
        with pytest.raises(TrouperValidationError):
            await device.adapters.load(other)


@pytest.mark.parametrize(
    "num_turns", range(4)
)  # of the event loop, which reading takes and loading
async def test_one_unloaded_while_it_is_loaded_again_stays_so(num_turns):
    device = Device(num_slots=1)
    for number in (1, 2):
        await device.adapters.load_named(named(number))

    async def load_again():
        with pytest.raises(LoRAAdapterNotFoundError):
            await device.adapters.load_in_turn(named(1), is_open, loads_new=False)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load_again)
        for _ in range(num_turns):
            await anyio.lowlevel.checkpoint()
        assert device.adapters.unload(1)
    assert loaded(device) == [2]
    device.adapters.unload(2)
    assert device.adapters.num_free_slots == 1
    with pytest.raises(LoRAAdapterNotFoundError):
        await device.adapters.load_in_turn(named(1), is_open, loads_new=False)


async def test_adapter_with_changed_files_is_not_found():
    device = Device(num_slots=1)
    for number in (1, 2):
        await device.adapters.load_named(named(number))
    device.is_broken = True
    with pytest.raises(LoRAAdapterNotFoundError, match="does not fit"):
        await device.adapters.load_in_turn(named(1), is_open, loads_new=False)
    device.adapters.enter(named(2))


async def test_adapter_is_named_by_its_files():
    device = Device()
    await device.adapters.load(named(1))
    first = device.adapters.enter(named(1))
    again = Device()
    await again.adapters.load(named(2))
    await again.adapters.load(named(1))
    assert again.adapters.enter(named(1)).digest == first.digest
    assert again.adapters.enter(named(2)).digest != first.digest


async def test_digest_covers_both_files():
    config = AdapterConfig(rank_pattern={"q": 2, "k": 4})
    digests = {
        AdapterFiles.of(config, b"x").digest,
        AdapterFiles.of(config, b"y").digest,
        AdapterFiles.of(AdapterConfig(rank_pattern={"k": 4, "q": 2}), b"x").digest,
        AdapterFiles.of(AdapterConfig(lora_alpha=2), b"x").digest,
    }
    assert len(digests) == 4
