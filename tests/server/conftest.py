"""One engine on the bundled model for each module and backend."""

import anyio
import pytest

from trouper import AsyncLLMEngine, EngineArgs
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.shared.settings import ServerSettings
from trouper.params import RequestOutputKind

from .client import Client
from .scripted import ScriptedEngine, completion, output

SMALL = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 64,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def anyio_backend():
    """The loop that `trouper serve` runs on; modules that also test the other one override this."""
    return "asyncio"


@pytest.fixture(scope="module")
async def engine(anyio_backend):
    async with AsyncLLMEngine.from_engine_args(EngineArgs(**SMALL)) as engine:
        yield engine


@pytest.fixture
def app(engine):
    return create_app(engine)


@pytest.fixture
def client(app):
    return Client(app)


@pytest.fixture
def make_client(engine):
    """A client of a server with these settings."""

    def make_client(*headers, **settings):
        return Client(create_app(engine, ServerSettings(**settings)), headers)

    return make_client


@pytest.fixture
def says(engine):
    """A client of a server whose model says these pieces, every time; `client.engine.asked` is what it was asked."""

    def says(*pieces, finish_reason="stop", stop_reason=None, **settings):
        def script(number, params):
            is_whole = params.output_kind is RequestOutputKind.FINAL_ONLY
            found = ["".join(pieces)] if is_whole else pieces
            for i, piece in enumerate(found):
                is_last = i == len(found) - 1
                end = (
                    {"finish_reason": finish_reason, "stop_reason": stop_reason} if is_last else {}
                )
                yield output(completion(piece, i, **end), is_last=is_last)

        scripted = ScriptedEngine(engine, script)
        client = Client(create_app(scripted, ServerSettings(**settings)))
        client.engine = scripted
        return client

    return says


@pytest.fixture
def wait_until():
    """For what gives no sign when it happens."""

    async def wait_until(holds):
        with anyio.fail_after(30):
            while not holds():  # noqa: ASYNC110
                await anyio.sleep(0.001)

    return wait_until


@pytest.fixture
def wait_idle(engine):
    """Every table of the engine is empty, soon."""

    async def wait_idle():
        with anyio.fail_after(30):
            while True:
                stats = engine.statistics()
                tables = (stats.num_open_requests, stats.num_tracked, stats.scheduler.num_running)
                if not any((*tables, stats.scheduler.num_waiting)):
                    break
                await anyio.sleep(0.001)
        assert stats.scheduler.num_blocks_free == stats.scheduler.num_blocks_total

    return wait_idle
