"""Many requests of one caller leave the loop its turns."""

import anyio
import pytest

from trouper.actors.runtime import event_loop
from trouper.actors.runtime.event_loop import ITEMS_PER_TURN, YieldingIterator

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("num_items", "num_turns"),
    [
        (0, 0),
        (1, 0),
        (ITEMS_PER_TURN - 1, 0),
        (ITEMS_PER_TURN, 1),
        (2 * ITEMS_PER_TURN + 1, 2),
        (3 * ITEMS_PER_TURN, 3),
    ],
)
async def test_loop_has_turn_after_so_many_items(num_items, num_turns, monkeypatch):
    seen: list[int] = []
    at: list[int] = []
    right = anyio.lowlevel.checkpoint

    async def checkpoint():
        at.append(len(seen))
        await right()

    monkeypatch.setattr(event_loop.anyio.lowlevel, "checkpoint", checkpoint)
    async for item in YieldingIterator(range(num_items)):
        seen.append(item)  # noqa: PERF401  # a checkpoint looks at it
    assert seen == list(range(num_items))
    assert at == [ITEMS_PER_TURN * (i + 1) for i in range(num_turns)]


async def test_who_is_cancelled_in_turn_has_taken_no_item():
    items, seen = iter(range(1000)), []
    with anyio.CancelScope() as scope:
        async for item in YieldingIterator(items):
            seen.append(item)
            scope.cancel()
    assert seen == list(range(ITEMS_PER_TURN))
    assert next(items) == ITEMS_PER_TURN
