"""Measure the cost of HTTP for each streamed token, relative to a bare ASGI application that streams the same bytes.

    python -m trouper.bench.studies.server.http_overhead [--streams 64] [--tokens 400] [--loop asyncio] [--profile] [--output FILE.json]

The device is simulated and takes no time, so the processor time of this process is that of the server; the clients run
in another process. Each line is for one token of one stream.
"""

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from tests.simulation.simulated_device import Conditions, SimulatedDevice
from trouper.actors.engine.wiring import open_engine
from trouper.actors.runtime.event_loop import WorkerThreads
from trouper.bench.report import about, write
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.frontends.python.async_engine import AsyncLLMEngine
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.http.listeners import Listener, Shutdown, bind_tcp
from trouper.frontends.server.program.server import listener_task, loop_options
from trouper.params import RequestOutputKind, SamplingParams

PATH = "/v1/completions"
# Reads every stream to its end.  It runs in a child process, so that its processor time is not counted.
CLIENTS = """
import selectors, socket, sys
port, streams, request = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
waiting = selectors.DefaultSelector()
for _ in range(streams):
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(request)
    waiting.register(client, selectors.EVENT_READ)
while waiting.get_map():
    for key, _ in waiting.select():
        piece = key.fileobj.recv(2**20)
        if not piece or piece.endswith(b"0\\r\\n\\r\\n"):
            waiting.unregister(key.fileobj)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure the cost of HTTP for each streamed token."
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--loop", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--profile", action="store_true", help="Also print a profile of the app.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    act = partial(measure, options.streams, options.tokens, options.profile, options.loop)
    results = anyio.run(act, backend=options.loop, backend_options=loop_options(options.loop))
    for name, microseconds in results.items():
        print(f"{name:40} {microseconds:7.1f} µs")
    if options.output:
        report = {"about": about(sys.argv[1:]), "results": results}
        write(str(options.output), report)


async def measure(
    num_streams: int, num_tokens: int, is_profiled: bool, loop: str
) -> dict[str, float]:
    """Return the processor time in µs per token for each way of streaming."""
    arguments = EngineArgs(max_num_seqs=num_streams, dtype="float32", skip_tokenizer_init=True)
    config = resolve(arguments)
    credits = config.scheduler.max_steps_in_flight
    device = SimulatedDevice(
        num_streams * 200 + 1, 16, config.model.vocab_size, credits, Conditions(step_s=0.0)
    )
    fields = {"prompt": [5, 6, 7], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps({**fields, "return_token_ids": True}).encode()
    results: dict[str, float] = {}

    async def timed(name: str, run: Callable[[], Awaitable[None]]) -> None:
        # Warms up.
        await run()
        begin = time.process_time()
        await run()
        results[name] = 1e6 * (time.process_time() - begin) / (num_streams * num_tokens)

    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(open_engine(config, device, WorkerThreads(30.0)))
        face = AsyncLLMEngine(arguments)
        # `async with` would start an engine with the real device.
        face._engine = engine
        app = create_app(face)
        frames: list[bytes] = []
        await call(app, body, frames.append)
        bare = make_bare(frames[1:])

        async def of_engine() -> None:
            await together(num_streams, lambda i: read(engine, num_tokens, f"{time.time()}-{i}"))

        async def of_app() -> None:
            await together(num_streams, lambda _: call(app, body, len))

        async def of_bare() -> None:
            await together(num_streams, lambda _: call(bare, body, len))

        await timed("engine alone", of_engine)
        await timed("engine and app, in memory", of_app)
        await timed("bare app, in memory", of_bare)
        for name, served in (("engine, app", app), ("bare app", bare)):
            over = partial(over_sockets, served, body, num_streams, loop)
            await timed(f"{name} and HTTP server", over)
        if is_profiled:
            with cProfile.Profile() as profile:
                await of_app()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return results


async def together(num: int, act: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    async with anyio.create_task_group() as tasks:
        for i in range(num):
            tasks.start_soon(act, i)


async def read(engine: Any, num_tokens: int, request_id: str) -> None:
    params = SamplingParams(
        max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA,
        detokenize=False,
    )  # fmt: skip
    async for _ in engine.generate({"prompt_token_ids": [5, 6, 7]}, params, request_id):
        pass


async def call(app: Any, body: bytes, take: Callable[[bytes], object]) -> None:
    """Send one request to an ASGI application without a socket, and pass each piece of the answer's body to `take`."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Any) -> None:
        await anyio.lowlevel.checkpoint()
        take(message.get("body", b""))

    scope = {
        "type": "http", "method": "POST", "path": PATH, "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    await app(scope, receive, send)


def make_bare(frames: list[bytes]) -> Any:
    """Return an ASGI application that sends each frame as one message, after a pass of the event loop."""

    async def bare(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise NotImplementedError("no lifespan here")
        await receive()
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for frame in frames:
            await anyio.lowlevel.checkpoint()
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return bare


async def over_sockets(app: Any, body: bytes, num_streams: int, loop: str) -> None:
    listener, shutdown = Listener(bind_tcp("127.0.0.1", 0)), Shutdown()
    port = listener.sock.getsockname()[1]
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener_task(loop), app, listener, shutdown)
        await anyio.run_process(
            [sys.executable, "-c", CLIENTS, str(port), str(num_streams), head + body.decode()],
            stdout=subprocess.DEVNULL,
        )
        shutdown.closing.set()


if __name__ == "__main__":
    main()
