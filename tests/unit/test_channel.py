"""The channels between actors: bounded, in order, and nothing is lost when a task is cancelled."""

import anyio
import pytest

from trouper.actors.channel import open_channel

pytestmark = pytest.mark.anyio


async def test_messages_come_in_order_and_the_end_behind_them():
    sender, inbox = open_channel[int](10)
    with inbox:
        with sender:
            for number in range(5):
                sender.send_nowait(number)
        assert [number async for number in inbox] == [0, 1, 2, 3, 4]


async def test_a_full_channel_takes_nothing_and_its_sender_waits():
    sender, inbox = open_channel[int](2)
    with sender, inbox:
        sender.send_nowait(0)
        sender.send_nowait(1)
        with pytest.raises(anyio.WouldBlock):
            sender.send_nowait(2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sender.send, 2)
            await anyio.wait_all_tasks_blocked()
            assert inbox.statistics() == (2, 1, 0)
            assert [await inbox.receive() for _ in range(3)] == [0, 1, 2]


async def test_each_message_goes_to_one_of_those_who_wait():
    sender, inbox = open_channel[int](10)
    found = []

    async def work(mine):
        with mine:
            async for number in mine:
                found.append(number)  # noqa: PERF401  # one by one, beside the others

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            with sender, inbox:
                for _ in range(3):
                    tasks.start_soon(work, inbox.clone())
                await anyio.wait_all_tasks_blocked()
                for number in range(7):
                    sender.send_nowait(number)
    assert sorted(found) == list(range(7))


async def test_a_cancelled_receiver_loses_no_message():
    sender, inbox = open_channel[int](10)
    found = []

    async def wait(mine, scope):
        with mine, scope:
            found.append(await mine.receive())

    scopes = [anyio.CancelScope() for _ in range(2)]
    with anyio.fail_after(5), sender, inbox:
        async with anyio.create_task_group() as tasks:
            for scope in scopes:
                tasks.start_soon(wait, inbox.clone(), scope)
                await anyio.wait_all_tasks_blocked()
            sender.send_nowait(1)
            scopes[0].cancel()  # it was told already
            sender.send_nowait(2)
        assert found + [inbox.receive_nowait() for _ in range(2 - len(found))] == [1, 2]


async def test_a_cancelled_sender_sends_nothing_and_leaves_its_turn_to_the_next():
    sender, inbox = open_channel[int](1)
    scope = anyio.CancelScope()

    async def send(number, scope):
        with scope:
            await sender.send(number)

    with anyio.fail_after(5), sender, inbox:
        sender.send_nowait(0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, 1, scope)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(send, 2, anyio.CancelScope())
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            await anyio.wait_all_tasks_blocked()
            assert [await inbox.receive() for _ in range(2)] == [0, 2]


async def test_closing_wakes_whoever_waits():
    sender, inbox = open_channel[int](1)
    told = []

    async def meet(kind, act, *args):
        with pytest.raises(kind):
            await act(*args)
        told.append(kind)

    with anyio.fail_after(5), sender:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(meet, anyio.ClosedResourceError, inbox.receive)
            await anyio.wait_all_tasks_blocked()
            inbox.close()
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(meet, anyio.BrokenResourceError, sender.send, 1)
    other, inbox = open_channel[int](1)
    with anyio.fail_after(5), inbox:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(meet, anyio.EndOfStream, inbox.receive)
            await anyio.wait_all_tasks_blocked()
            other.close()
    with pytest.raises(anyio.ClosedResourceError):
        other.send_nowait(1)
    assert len(told) == 3


async def test_an_end_that_is_left_open_is_told():
    with pytest.warns(ResourceWarning, match="left open"):
        open_channel[int](1)


async def test_who_finds_messages_gives_others_a_turn():
    sender, inbox = open_channel[int](100)
    order = []

    async def take():
        for _ in range(50):
            order.append(await inbox.receive())  # noqa: PERF401  # the same

    async def other():
        order.append("other")

    with sender, inbox:
        for number in range(50):
            sender.send_nowait(number)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take)
            tasks.start_soon(other)
    assert order.index("other") < 3
