"""`trouper launch`: start an installed coding agent with a server's model.

Each agent has its own way to set an API's address, model and context length. The settings go only into the environment
and arguments of the agent's process; no file is written, so starting the agent by its own name still uses its usual
model.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import typer

from trouper.errors import RemoteError, TrouperValidationError
from trouper.frontends.cli.chat.remote import CONNECTING, RemoteModel, RemoteOptions, RemoteServer
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.running import Interrupts, run_open

# Agents require a key, and a server without keys accepts any.
NO_KEY = "none"
PROVIDER = "trouper"
# An answer is limited to this many tokens and a quarter of the context.
MAX_OUTPUT = 32_000
OUTPUT_SHARE = 4
# Claude Code accepts no context window below 100,000 tokens.  It reserves up to 20,000 of them for an answer, and
# compacts the conversation when it uses this percentage of the rest.
CLAUDE_WINDOW = 100_000
CLAUDE_RESERVE = 20_000
CLAUDE_USED = 80

AgentName = Literal["codex", "claude", "opencode", "qwen"]


class AgentStart(NamedTuple):
    """The settings of an agent's process.

    Attributes:
        variables: environment variables to set, or to remove if the value is None.
        arguments: arguments that precede the user's own.
    """

    variables: dict[str, str | None]
    arguments: list[str]


class Agent(NamedTuple):
    """An agent: the npm package of its program, and the function that creates its settings.

    The settings are environment variables and arguments, so no file of the user is changed.
    """

    package: str
    settings: Callable[["Backend"], AgentStart]


class Backend(NamedTuple):
    """The server that an agent uses; `url` is the address of the API and ends with /v1.

    It may be trouper or another server with the same API; without a key the agent gets a placeholder.
    """

    url: str
    model: RemoteModel
    key: str | None

    @property
    def max_output(self) -> int:
        """The maximum number of tokens that an agent may request in one answer.

        Agents request their maximum in each answer, so it must leave most of the context for the conversation.
        """
        length = self.model.max_model_len
        return MAX_OUTPUT if length is None else max(1, min(MAX_OUTPUT, length // OUTPUT_SHARE))


@expand_options
def launch(
    ctx: typer.Context,
    agent: Annotated[
        AgentName,
        typer.Argument(metavar="AGENT", help="One of codex, claude, opencode and qwen."),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENT]", help="Arguments for the agent itself."),
    ] = None,
    prints: Annotated[
        bool, typer.Option("--print", help="Print the shell commands that start it, and exit.")
    ] = False,
    *,
    remote: RemoteOptions,
) -> None:
    """Start a coding agent that uses a server's model.

    For example: trouper launch claude --url http://127.0.0.1:8000

    The agent receives the address, the model and its context length in its environment and arguments; no file is
    written. Arguments after -- go to the agent: trouper launch codex -- exec "fix the tests"
    """
    program = shutil.which(agent)
    if program is None and not prints:
        package = AGENTS[agent].package
        raise TrouperValidationError(
            f"the program {agent} is not in PATH; install it with: npm install -g {package}",
            parameter="agent",
        )
    start = AGENTS[agent].settings(_find_backend(remote))
    command = [agent, *start.arguments, *(arguments or ())]
    if prints or program is None:
        print("\n".join(shell_lines(start, command)))
        return
    environment = {k: v for k, v in os.environ.items() if k not in start.variables}
    given = {k: v for k, v in start.variables.items() if v is not None}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, command, {**environment, **given})


def shell_lines(start: AgentStart, command: list[str]) -> list[str]:
    """Return the commands with which a POSIX shell starts the agent."""
    lines = [
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in start.variables.items()
    ]
    return [*lines, shlex.join(command)]


def codex(backend: Backend) -> AgentStart:
    provider = {"name": PROVIDER, "base_url": backend.url, "wire_api": "responses"}
    if backend.key is not None:
        provider["env_key"] = "TROUPER_API_KEY"
    settings = {
        "model": _toml(backend.model.id),
        "model_provider": _toml(PROVIDER),
        **{f"model_providers.{PROVIDER}.{name}": _toml(v) for name, v in provider.items()},
    }
    if backend.model.max_model_len is not None:
        settings["model_context_window"] = str(backend.model.max_model_len)
    arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return AgentStart({} if backend.key is None else {"TROUPER_API_KEY": backend.key}, arguments)


def claude(backend: Backend) -> AgentStart:
    name, length = backend.model.id, backend.model.max_model_len
    models = (
        "ANTHROPIC_MODEL",
        *(f"ANTHROPIC_DEFAULT_{k}_MODEL" for k in ("OPUS", "SONNET", "HAIKU")),
    )
    variables: dict[str, str | None] = {
        "ANTHROPIC_BASE_URL": backend.url.removesuffix("/v1"),
        "ANTHROPIC_AUTH_TOKEN": backend.key or NO_KEY,
        # The agent would send this key together with the token, and the server refuses two keys.
        "ANTHROPIC_API_KEY": None,
        **dict.fromkeys(models, name),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(backend.max_output),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if length is not None:
        window = max(length, CLAUDE_WINDOW)
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(window)
        if length < window:
            usable = window - min(backend.max_output, CLAUDE_RESERVE)
            share = max(1, CLAUDE_USED * length // usable)
            variables["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = str(share)
    return AgentStart(variables, [])


def opencode(backend: Backend) -> AgentStart:
    name, length = backend.model.id, backend.model.max_model_len
    limit = {} if length is None else {"limit": {"context": length, "output": backend.max_output}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": {"baseURL": backend.url, "apiKey": backend.key or NO_KEY},
        "models": {name: limit},
    }
    whole = f"{PROVIDER}/{name}"
    config = {"model": whole, "small_model": whole, "provider": {PROVIDER: provider}}
    return AgentStart({"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, [])


def qwen(backend: Backend) -> AgentStart:
    variables: dict[str, str | None] = {
        "OPENAI_BASE_URL": backend.url,
        "OPENAI_API_KEY": backend.key or NO_KEY,
        "OPENAI_MODEL": backend.model.id,
        "QWEN_CODE_MAX_OUTPUT_TOKENS": str(backend.max_output),
    }
    return AgentStart(variables, ["--auth-type", "openai"])


AGENTS: dict[AgentName, Agent] = {
    "codex": Agent("@openai/codex", codex),
    "claude": Agent("@anthropic-ai/claude-code", claude),
    "opencode": Agent("opencode-ai", opencode),
    "qwen": Agent("@qwen-code/qwen-code", qwen),
}


def _find_backend(remote: RemoteOptions) -> Backend:
    """Ask the server for its model.

    Raises:
        RemoteError: the server cannot be reached.
        TrouperClientError: the server refuses the key, or does not have the model of `--model`.
    """
    server = RemoteServer(remote)
    found: list[RemoteModel] = []

    async def ask(opened: RemoteServer, _: Interrupts) -> None:
        found.append(await opened.model())

    try:
        run_open(server, ask, CONNECTING)
    except RemoteError as error:
        raise RemoteError(f"{error}; is it running? trouper serve starts one") from error
    return Backend(server.url, found[0], remote.api_key)


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
