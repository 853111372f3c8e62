"""Servers with a journal, one after the other on the same disk."""

import random
from contextlib import asynccontextmanager

import anyio

from trouper.frontends.server.apis.responses.background import resume_responses
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.asgi.routes import durable_route
from trouper.frontends.server.durable.journal import Journal
from trouper.frontends.server.durable.segments import Segments
from trouper.frontends.server.generation.durable import resume_streams
from trouper.frontends.server.shared.settings import ServerSettings

from .client import Client
from .test_journal import MODEL


def lives_on(engine, disk, **common):
    """`async with life() as client`: one server with a journal on `disk`, and with the settings `common`."""

    @asynccontextmanager
    async def life(model=MODEL, *, max_bytes=2**24, kept=(), **settings):
        dice = random.Random(len(disk.files))
        segments = Segments(disk, model, lambda: dice.randbytes(16), max_bytes=max_bytes)
        segments.begin()
        app = create_app(engine, ServerSettings(responses_store_bytes=2**20, **common, **settings))
        app.service.journal = Journal(segments, "off", retain_s=600, **dict(kept))
        client = Client(app)
        client.service = app.service
        async with anyio.create_task_group() as writers:
            await writers.start(app.service.journal.run_writer)
            async with anyio.create_task_group() as tasks:
                await tasks.start(app.service.background.run_tasks)
                responses, streams = app.service.journal.take_recovered()
                resume_responses(app.service, responses)
                resume_streams(app.service, streams, durable_route)
                yield client
                tasks.cancel_scope.cancel()
            writers.cancel_scope.cancel()
        assert app.service.gate.admission.num_requests == 0

    return life


async def until(holds):
    """Wait for what gives no sign when it happens."""
    with anyio.fail_after(30):
        while not holds():  # noqa: ASYNC110
            await anyio.sleep(0.001)
