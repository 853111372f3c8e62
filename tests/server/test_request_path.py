"""The path of a request through the server's modules stays short."""

import asyncio
import sys
from pathlib import Path

import pytest

import trouper

from .client import Client

pytestmark = pytest.mark.anyio

PACKAGE = str(Path(trouper.__file__).parent)
# It was 221 before the second redesign.  Raise it for a new feature with a path of its own, not for another wrapper.
MAX_RETURNS = 120
CHAT = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 3,
    "ignore_eos": True,
    "stream": True,
}


class PathTrace:
    """Records which of our modules the handler's task enters, in order.  Its connection never waits."""

    def __init__(self, app):
        self._app = app
        self.modules = []

    async def __call__(self, scope, receive, send):
        received, sent = [await receive()], []

        async def receive_now():
            return received.pop() if received else await receive()

        async def send_now(message):
            sent.append(message)

        self._task, self.modules = asyncio.current_task(), []
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            await self._app(scope, receive_now, send_now)
        finally:
            sys.setprofile(before)
        for message in sent:
            await send(message)

    def _note(self, frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            try:
                is_ours = asyncio.current_task() is self._task
            except RuntimeError:
                return
            if is_ours:
                self.modules.append(frame.f_code.co_filename)


def count_returns(modules):
    """Count the changes to a module that was left before."""
    left, now, num = set(), None, 0
    for module in modules:
        if module != now:
            left.add(now)
            num += module in left
            now = module
    return num


def test_count_returns_ignores_calls_within_one_module():
    assert count_returns(["a", "a", "b", "b", "c"]) == 0
    assert count_returns(["a", "b", "a", "a", "b"]) == 2


async def test_streamed_chat_seldom_returns_to_modules(app):
    traced = PathTrace(app)
    client = Client(traced)
    for _ in range(3):
        assert (await client.post("/v1/chat/completions", CHAT)).status == 200
    assert len(set(traced.modules)) > 25, "the trace is not that of a chat"
    assert count_returns(traced.modules) <= MAX_RETURNS
