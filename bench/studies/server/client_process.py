"""Run a server in this event loop, and a client in another process that repeats one request."""

import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from trouper.frontends.python.async_engine import AsyncLLMEngine
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.http.listeners import Listener, Shutdown, bind_tcp
from trouper.frontends.server.program.server import listener_task
from trouper.frontends.server.shared.settings import ServerSettings

MAX_BODY = 128 * 2**20
# Sends the file's bytes once for each line on stdin, and prints the status of the answer.
CLIENT = """
import socket, sys
request = open(sys.argv[2], "rb").read()
print("ready", flush=True)
for _ in sys.stdin:
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as client:
        client.sendall(request)
        answer = b"".join(iter(lambda: client.recv(2**16), b""))
    print(answer[9:12].decode(), flush=True)
"""
Ask = Callable[[], Awaitable[None]]


@asynccontextmanager
async def client_of(
    engine: AsyncLLMEngine, path: str, content: dict[str, Any], folder: Path
) -> AsyncGenerator[Ask]:
    """Run a client process that posts `content` to `path`, with the request stored in `folder`.

    Yields an async function that sends the request once and waits for its answer.
    """
    request, body = folder / "request", json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    request.write_bytes(head.encode() + body)
    listener, shutdown = Listener(bind_tcp("127.0.0.1", 0)), Shutdown()
    port = listener.sock.getsockname()[1]
    # The studies that call this function run on trio.
    serve = listener_task("trio")
    app: Any = create_app(engine, ServerSettings(max_body=MAX_BODY))
    command = [sys.executable, "-c", CLIENT, str(port), str(request)]
    async with (
        anyio.create_task_group() as tasks,
        await anyio.open_process(command, stderr=subprocess.DEVNULL) as client,
    ):
        assert client.stdin is not None
        assert client.stdout is not None
        to_client, answers = client.stdin, BufferedByteReceiveStream(client.stdout)
        tasks.start_soon(serve, app, listener, shutdown)
        # The client has printed "ready".
        await answers.receive_until(b"\n", 16)

        async def ask() -> None:
            await to_client.send(b"\n")
            if (answer := await answers.receive_until(b"\n", 16)) != b"200":
                raise SystemExit(f"answered with {answer!r}")

        yield ask
        await to_client.aclose()
        shutdown.closing.set()
