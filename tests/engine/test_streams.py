"""What actors rely on in anyio's memory object streams: a wait that is cancelled loses no message."""

import anyio
import pytest

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("sends_first", [True, False])
@pytest.mark.parametrize("num_waiting", [1, 2])
async def test_message_survives_cancelled_receiver(sends_first, num_waiting):
    sender, inbox = anyio.create_memory_object_stream[int](1)
    scopes, received = [], []

    async def receive():
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            received.append(await inbox.receive())

    with sender, inbox:
        async with anyio.create_task_group() as tasks:
            for _ in range(num_waiting):
                tasks.start_soon(receive)
            await anyio.wait_all_tasks_blocked()
            acts = [lambda: sender.send_nowait(7), scopes[0].cancel]
            for act in acts if sends_first else acts[::-1]:
                act()
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        received += [inbox.receive_nowait()] if inbox.statistics().current_buffer_used else []
    assert received == [7]
