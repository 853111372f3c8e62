"""Run one session of a coding agent with a server, in one process: `python -m tests.clients.agent_session FOLDER AGENT COMMAND…`.

The model is noise, so the requests of the agent are changed on their way to the application: in the first one that has the
case's tool a call of it is forced, with arguments of which each has one value, and every other answer is one sentence.
The agent itself is as its package has it.  On stdout is what it has asked, what it got, and how it ended, as JSON.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio
import uvicorn

from trouper import AsyncLLMEngine, EngineArgs
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.shared.settings import ServerSettings

from .agent_model import CONTEXT, make_model

MARK = "the-tool-was-here"
LAST = "All is done."
SERVED = "noise"
LIMIT_S = 100
RESULTS = ("function_call_output", "tool_result", "tool")


@dataclass
class Case:
    """Name the forced tool and its arguments."""

    tool: str
    arguments: dict[str, Any]


SHELL = {"command": f"echo {MARK}"}
CASES = {
    "codex": Case("exec_command", {"cmd": f"echo {MARK}"}),
    "claude": Case("Bash", {**SHELL, "description": "x"}),
    "opencode": Case("bash", {**SHELL, "description": "x"}),
    "qwen": Case("run_shell_command", {**SHELL, "is_background": False}),
}


@dataclass
class Session:
    """Record the events of a session."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    code: int | None = None
    stdout: str = ""
    stderr: str = ""


class Forcing:
    """Wrap the application so that the model calls the case's tool and then ends."""

    def __init__(self, app, case, session):
        self._app, self._case, self._session = app, case, session

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = {"method": scope["method"], "path": scope["path"], "status": 0, "body": None}
        self._session.requests.append(asked)
        if body:
            asked["body"] = json.loads(body)
            body = json.dumps(forced(scope["path"], json.loads(body), self._case)).encode()
        kept = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        scope = {**scope, "headers": [*kept, (b"content-length", b"%d" % len(body))]}
        bodies = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again():
            return bodies.pop() if bodies else await receive()

        async def note(message):
            if message["type"] == "http.response.start":
                asked["status"] = message["status"]
            await send(message)

        await self._app(scope, receive_again, note)


def forced(path, body, case):
    """Return the request with a forced call or a forced answer."""
    tool = find_tool(body.get("tools") or (), case.tool)
    if tool is None or has_result(body):
        return {**body, **ending(path, body)}
    schema = {
        "type": "object",
        "properties": {name: {"const": value} for name, value in case.arguments.items()},
        "required": [*case.arguments],
        "additionalProperties": False,
    }
    if path == "/v1/messages":
        tool["input_schema"] = schema
        return {**body, "tool_choice": {"type": "tool", "name": case.tool}}
    if path == "/v1/responses":
        tool["parameters"] = schema
        return {**body, "tool_choice": {"type": "function", "name": case.tool}}
    tool["function"]["parameters"] = schema
    return {**body, "tool_choice": {"type": "function", "function": {"name": case.tool}}}


def ending(path, body):
    """Return the fields that force a one-sentence answer."""
    choice = {"type": "none"} if path == "/v1/messages" else "none"
    chosen = {"tool_choice": choice} if body.get("tools") else {}
    return {**chosen, "structured_outputs": {"choice": [LAST]}}


def find_tool(tools, name):
    for tool in tools:
        if (tool.get("function") or tool).get("name") == name:
            return tool
        found = find_tool(tool.get("tools") or (), name)
        if found is not None:
            return found
    return None


def has_result(body):
    """Return whether the conversation contains a tool result."""
    messages = body.get("messages") or body.get("input") or ()
    messages = [message for message in messages if isinstance(message, dict)]
    kinds = [message.get(name) for message in messages for name in ("role", "type")]
    parts = [
        part for each in messages for part in each.get("content") or () if isinstance(part, dict)
    ]
    return any(kind in RESULTS for kind in [*kinds, *(part.get("type") for part in parts)])


async def run_session(folder: Path, case: Case, command: list[str]) -> Session:
    session = Session()
    arguments = EngineArgs(
        model=str(make_model(folder / "model")), load_format="dummy", dtype="float32", max_num_seqs=4,
        max_model_len=CONTEXT, num_gpu_blocks_override=2 * CONTEXT // 128,
    )  # fmt: skip
    async with AsyncLLMEngine.from_engine_args(arguments) as engine:
        app = create_app(engine, ServerSettings(served_model_names=(SERVED,)))
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            config = uvicorn.Config(Forcing(app, case, session), log_level="warning")
            server = uvicorn.Server(config)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.serve, [listener])
                await run_agent(session, folder, [word.replace("URL", url) for word in command])
                server.should_exit = True
    return session


async def run_agent(session, folder, command):
    """Run the agent with its own home and project folders."""
    places = {name: folder / name for name in ("home", "project")}
    for place in places.values():
        place.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(places["home"]), "CODEX_HOME": str(places["home"])}
    environment = {k: v for k, v in environment.items() if not k.startswith(("XDG_", "ANTHROPIC_"))}
    with anyio.fail_after(LIMIT_S):
        done = await anyio.run_process(
            command, check=False, cwd=places["project"], env=environment, stdin=subprocess.DEVNULL
        )
    session.code = done.returncode
    session.stdout, session.stderr = done.stdout.decode(), done.stderr.decode()


def main() -> None:
    folder, agent, *command = sys.argv[1:]
    session = anyio.run(run_session, Path(folder), CASES[agent], command)
    json.dump(asdict(session), sys.stdout)


if __name__ == "__main__":
    main()
