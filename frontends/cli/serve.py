"""`trouper serve`: start the OpenAI-compatible server.

Mistakes are reported before torch is imported and the model is loaded, which takes seconds. The worker process starts
loading at the same time as the server, if there is only one.
"""

import dataclasses
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import anyio.to_thread
import msgspec
import typer

from trouper.config.args import EngineArgs
from trouper.config.engine_config import EngineConfig
from trouper.config.parallel import NodesConfig, cluster_key
from trouper.config.resolve import resolve
from trouper.errors import UnsupportedFeatureError, invalid
from trouper.extras import install_hint
from trouper.frontends.cli import output
from trouper.frontends.cli.options import (
    MODEL_TABLES,
    expand_options,
    is_given,
    read_config,
    read_model_variable,
    read_models_file,
)
from trouper.frontends.cli.server_options import variables_of
from trouper.frontends.server.models.options import bytes_of, check_one, has_several, read_models
from trouper.frontends.server.shared.settings import LARGEST_HEAD, ServeSettings

if TYPE_CHECKING:
    from trouper.actors.executor.workers.launching import Launcher
    from trouper.frontends.python.async_engine import AsyncLLMEngine
    from trouper.frontends.server.durable.journal import Journal
    from trouper.frontends.server.durable.recording import RequestRecorder
    from trouper.frontends.server.models.residency import Residency


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
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="[NAME=]PATH",
            help="The same as MODEL, or with a name one of several models; repeatable.",
            rich_help_panel="Model",
            callback=read_model_variable,
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            help="TOML file with a table for each of several models.",
            metavar="FILE",
            rich_help_panel="Server",
            envvar="TROUPER_MODELS",
            show_envvar=False,
            is_eager=True,
            callback=read_models_file,
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
    """Serve a model, or several, over HTTP with OpenAI's API."""
    server = "uvicorn" if settings.loop == "asyncio" else "hypercorn"
    if importlib.util.find_spec(server) is None:
        raise UnsupportedFeatureError(f"serve needs {server}: {install_hint('server')}")
    admin_uds = settings.admin_uds or settings.take_over
    settings = msgspec.structs.replace(settings, models=models, admin_uds=admin_uds)
    _check_keys(settings)
    several = _set_model(model_name, model or [], settings, engine_args)
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
    if several:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        _run_several(ctx, settings, engine_args, model or [])
        return
    # Reports mistakes before torch is loaded.
    resolved = resolve(engine_args, frontend="server")
    if settings.take_over is not None and resolved.nodes is not None:
        raise invalid("take_over", "is not supported with several machines", settings.take_over)
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
            _run(settings, resolved, engine_args, launcher)
    else:
        _run(settings, resolved, engine_args)


def _set_model(
    model_name: str | None, named: list[str], settings: ServeSettings, engine_args: EngineArgs
) -> bool:
    """Set the only model of the engine, unless the command line describes several.  Returns whether it does.

    MODEL is always a path, which may contain an equals sign.
    """
    if model_name is None and has_several(named, settings):
        return True
    if model_name is not None and named:
        raise typer.BadParameter("give only one of them", param_hint="MODEL and --model")
    if model_name is not None and (settings.models or settings.models_dir):
        raise typer.BadParameter("give the model a name (--model NAME=PATH)", param_hint="MODEL")
    check_one(settings)
    engine_args.model = model_name or (named[0] if named else None)
    return False


def _run_several(
    ctx: typer.Context, settings: ServeSettings, base: EngineArgs, named: list[str]
) -> None:
    """Serve a table of models.  Their options are checked before the listeners open."""
    from trouper.frontends.server.models.sizes import default_budget, plan_models

    for name in ("journal", "record", "take_over"):
        if (given_folder := getattr(settings, name)) is not None:
            raise invalid(name, "needs a server of one model", given_folder)
    names = [field.name for field in dataclasses.fields(base)]
    given = frozenset(name for name in names if name != "model" and is_given(ctx, name))
    tables: dict[str, Any] = ctx.meta.get(MODEL_TABLES, {})
    options = read_models(named, tables, settings, base, given)
    text = settings.memory_budget
    budget = default_budget() if text is None else bytes_of(text, "memory_budget")
    plans = plan_models(options, budget)

    def residency() -> "Residency":
        from trouper.frontends.server.models.build import build_residency, folder_reader

        built = build_residency(plans, settings, budget, output.complain)
        if settings.models_dir is not None:
            built.reload = folder_reader(built, settings, base, given, tables)
        return built

    _listen(settings, base.shutdown_timeout, residency=residency)


def _run_host(config: EngineConfig, nodes: NodesConfig, settings: ServeSettings) -> None:
    """Run workers for one coordinator after another, until a signal comes.

    Raises:
        TrouperValidationError: the coordinator refuses this machine; the message has the reason.
    """
    # An ordinary server does not need the code of other machines' workers.
    from trouper.actors.executor.workers.machines.host import Host
    from trouper.actors.executor.workers.model_files import MachineFacts
    from trouper.frontends.server.http.logs import log_lines

    async def serve_workers() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_at_signal, tasks.cancel_scope)
            await Host(nodes, cluster_key(), MachineFacts.of(config)).serve()

    with log_lines("trouper", settings.log_level):
        anyio.run(serve_workers, backend=settings.loop)


async def _cancel_at_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()


def _run(
    settings: ServeSettings,
    config: EngineConfig,
    args: EngineArgs,
    launcher: "Launcher | None" = None,
) -> None:
    from trouper.frontends.server.durable.opening import fingerprint, open_journal
    from trouper.frontends.server.durable.recording import open_recorder

    def engine() -> "AsyncLLMEngine":
        from trouper.frontends.python.async_engine import AsyncLLMEngine

        return AsyncLLMEngine(config, launcher=launcher)

    has_workers = config.device_worker == "process"

    _listen(
        settings,
        config.shutdown_timeout_s,
        engine=engine,
        open_journal=lambda: open_journal(settings, config),
        name_model=lambda: b"" if settings.journal is None else fingerprint(config),
        open_recorder=lambda: open_recorder(settings, config, args),
        has_workers=has_workers,
    )


def _listen(
    settings: ServeSettings,
    shutdown_timeout_s: float,
    *,
    engine: "Callable[[], AsyncLLMEngine] | None" = None,
    residency: "Callable[[], Residency] | None" = None,
    open_journal: "Callable[[], Journal | None]" = lambda: None,
    name_model: Callable[[], bytes] = bytes,
    open_recorder: "Callable[[], RequestRecorder | None]" = lambda: None,
    has_workers: bool = False,
) -> None:
    """Open the listeners and serve: the engine of one model, or the residency of several."""
    from trouper.frontends.server.http.listeners import OpenListeners
    from trouper.frontends.server.http.logs import log_lines
    from trouper.frontends.server.models.residency import Residency
    from trouper.frontends.server.program.hand_over import Predecessor, describe_server, offering
    from trouper.frontends.server.program.server import Server, loop_options
    from trouper.frontends.server.service.service import Service

    description = describe_server(settings)
    predecessor: Predecessor | None = None
    with ExitStack() as stack:
        stack.enter_context(log_lines("trouper", settings.log_level))
        if settings.loop == "asyncio":
            # Errors that the application did not turn into a response.
            stack.enter_context(log_lines("uvicorn.error", "error"))
        if settings.logs_access:
            stack.enter_context(log_lines("trouper.access", "info"))
        if settings.take_over is not None:
            predecessor = Predecessor.ask(settings.take_over, description)
            stack.callback(predecessor.close)
        taken = {} if predecessor is None else predecessor.sockets
        listeners = stack.enter_context(OpenListeners(taken))
        listeners.open(settings)
        offered = None
        if settings.admin_uds is not None and engine is not None:
            offered = offering(listeners, settings.admin_uds, output.complain)

        # With workers the server shows the progress of loading, because a worker's stderr is a pipe.
        terminal = sys.stderr if has_workers and sys.stderr.isatty() else None

        async def main() -> None:
            # Both are made inside the event loop, to which their events belong.
            unopened = engine() if engine is not None else residency() if residency else None
            assert unopened is not None
            service = Service(settings)
            if isinstance(unopened, Residency):
                service = unopened.table.default.service.front
            if predecessor is None:
                service.journal = await anyio.to_thread.run_sync(open_journal)
            service.recorder = await anyio.to_thread.run_sync(open_recorder)
            server = Server(
                service,
                shutdown_timeout_s=shutdown_timeout_s,
                report=output.complain,
                root_path=settings.root_path,
                names=(settings.host, socket.gethostname()),
                stays_dead=settings.keep_alive_on_engine_death,
                terminal=terminal,
            )
            if predecessor is not None:
                server.succeed(predecessor, open_journal, name_model)
            if offered is not None:
                server.offer(description, offered)
            await server.run(unopened, listeners, settings.loop)

        anyio.run(main, backend=settings.loop, backend_options=loop_options(settings.loop))


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
