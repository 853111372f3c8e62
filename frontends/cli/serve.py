"""`trouper serve`: start the OpenAI-compatible server.

Mistakes are reported before torch is imported and the model is loaded, which takes seconds. The worker process starts
loading at the same time as the server, if there is only one.
"""

import importlib.util
import os
import socket
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import msgspec
import typer

from trouper.config.args import EngineArgs
from trouper.config.engine_config import EngineConfig
from trouper.config.parallel import NodesConfig
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid
from trouper.extras import install_hint
from trouper.frontends.cli import output
from trouper.frontends.cli.arguments.options import expand_options, read_config
from trouper.frontends.cli.arguments.server_options import variables_of
from trouper.frontends.server.shared.settings import LARGEST_HEAD, ServeSettings

if TYPE_CHECKING:
    from trouper.actors.executor.workers.launching import Launcher

LOOPBACK = "127.0.0.1"
OLLAMA_PORT = 11434


@partial(expand_options, reads_variables=True, engine_defaults={"max_step_ms": None})
def serve(
    ctx: typer.Context,
    model_name: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            show_default=False,
            help="Folder, GGUF file or hub id; the demo model by default.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML or YAML file with options; the command line overrides it.",
            metavar="FILE",
            rich_help_panel="Server",
            is_eager=True,
            callback=read_config,
        ),
    ] = None,
    *,
    settings: ServeSettings,
    engine_args: EngineArgs,
) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    server = "uvicorn" if settings.loop == "asyncio" else "hypercorn"
    if importlib.util.find_spec(server) is None:
        raise UnsupportedFeatureError(f"serve needs {server}: {install_hint('server')}")
    if model_name is not None:
        if engine_args.model is not None:
            raise typer.BadParameter("give only one of them", param_hint="MODEL and --model")
        engine_args.model = model_name
    _check_keys(settings)
    engine_args.enable_lora |= bool(settings.lora_modules)
    _check_dev_mode(settings)
    if not settings.api_keys and not _is_local(settings):
        output.complain(
            f"warning: everyone who can reach {settings.host} can use this server; "
            "set --api-key or TROUPER_API_KEY to require a key"
        )
    if settings.max_header_bytes > LARGEST_HEAD:
        settings = msgspec.structs.replace(settings, max_header_bytes=LARGEST_HEAD)
        output.complain(
            f"warning: --h11-max-incomplete-event-size is limited to {LARGEST_HEAD} bytes"
        )
    engine_args.seed = settings.seed
    # Reports mistakes before torch is loaded.
    resolved = resolve(engine_args, frontend="server")
    if engine_args.node_rank > 0 and resolved.nodes is not None:
        _run_host(resolved, resolved.nodes, settings)
        return
    # torch reads it when it is loaded.  Threads that wait actively would starve the event loop.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    is_process = resolved.device_worker == "process"
    # Several workers inherit files from the engine, and their processors must be bound before torch is imported, so
    # only a single unbound worker can start before the engine.
    is_alone = is_process and resolved.num_workers == 1 and resolved.nodes is None
    if is_alone and resolved.cpu_bind is None:
        from trouper.actors.executor.workers.launching import LaunchedAhead

        with LaunchedAhead() as launcher:
            _run(settings, resolved, launcher)
    else:
        _run(settings, resolved)


def _run_host(config: EngineConfig, nodes: NodesConfig, settings: ServeSettings) -> None:
    from trouper.frontends.cli.host import run_host
    from trouper.frontends.server.http.logs import log_lines

    with log_lines("trouper", settings.log_level):
        anyio.run(run_host, config, nodes, backend=settings.loop)


def _run(settings: ServeSettings, config: EngineConfig, launcher: "Launcher | None" = None) -> None:
    from trouper.frontends.server.http.listeners import Listener, bind_tcp, bind_unix
    from trouper.frontends.server.http.logs import log_lines
    from trouper.frontends.server.program.server import Server, loop_options
    from trouper.frontends.server.service.service import Service

    with ExitStack() as stack:
        stack.enter_context(log_lines("trouper", settings.log_level))
        if settings.loop == "asyncio":
            # Errors that the application did not turn into a response.
            stack.enter_context(log_lines("uvicorn.error", "error"))
        if settings.logs_access:
            stack.enter_context(log_lines("trouper.access", "info"))
        if settings.uds is not None:
            sock = stack.enter_context(bind_unix(settings.uds))
        else:
            sock = stack.enter_context(bind_tcp(settings.host, settings.port))
        public = [Listener(sock, settings.ssl_certfile, settings.ssl_keyfile)]
        # Reports an invalid file before the model is loaded.
        public[0].tls_context()
        if settings.ollama:
            public.append(Listener(stack.enter_context(_bind_ollama())))
        admin: list[Listener] = []
        if settings.admin_uds is not None:
            admin.append(Listener(stack.enter_context(bind_unix(settings.admin_uds))))
        if settings.admin_port is not None:
            admin.append(Listener(stack.enter_context(bind_tcp(LOOPBACK, settings.admin_port))))

        # With workers the server shows the progress of loading, because a worker's stderr is a pipe.
        has_workers = config.device_worker == "process"
        terminal = sys.stderr if has_workers and sys.stderr.isatty() else None

        async def main() -> None:
            from trouper.frontends.python.async_engine import AsyncLLMEngine

            service = Service(settings)
            server = Server(
                service,
                shutdown_timeout_s=config.shutdown_timeout_s,
                report=output.complain,
                root_path=settings.root_path,
                names=(settings.host, socket.gethostname()),
                stays_dead=settings.keep_alive_on_engine_death,
                terminal=terminal,
            )
            await server.run(
                AsyncLLMEngine(config, launcher=launcher),
                public,
                admin,
                settings.loop,
            )

        anyio.run(main, backend=settings.loop, backend_options=loop_options(settings.loop))


def _bind_ollama() -> socket.socket:
    """Listen at Ollama's address.  Raises TrouperValidationError if another program does, which is usually Ollama."""
    from trouper.frontends.server.http.listeners import bind_tcp

    try:
        return bind_tcp(LOOPBACK, OLLAMA_PORT)
    except TrouperValidationError as error:
        text = f"{error.message}; perhaps Ollama itself is running"
        raise TrouperValidationError(text, parameter="ollama") from None


def _check_keys(settings: ServeSettings) -> None:
    """Raise TrouperValidationError for a variable with an empty key, which the parser treats as if it were not set."""
    for name, given in (("api_key", settings.api_keys), ("admin_key", settings.admin_key)):
        if not given and any(variable in os.environ for variable in variables_of(name)):
            raise invalid(name, "a key must not be empty")


def _is_local(settings: ServeSettings) -> bool:
    """Return whether only programs on this machine can reach the public listener."""
    is_local = settings.uds is not None or settings.host in ("localhost", "::1")
    return is_local or settings.host.startswith("127.")


def _check_dev_mode(settings: ServeSettings) -> None:
    """Raise TrouperValidationError if other machines could use control routes without a key."""
    if settings.is_dev_mode and settings.admin_key is None and not _is_local(settings):
        raise invalid(
            "dev_mode", f"needs a loopback host or an admin key, but the host is {settings.host}"
        )
