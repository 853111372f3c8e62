"""`trouper serve`: the OpenAI-compatible server."""

import dataclasses
import importlib.util
import math
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import typer

from trouper.config.args import EngineArgs
from trouper.config.parallel import NodesConfig
from trouper.config.resolve import EngineConfig, resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid
from trouper.extras import install_hint
from trouper.frontends.cli import output
from trouper.frontends.cli.arguments.adapters import lora_modules
from trouper.frontends.cli.arguments.options import expand_options, json_object, read_config

if TYPE_CHECKING:
    from trouper.actors.executor.workers.launching import Launcher

LOOPBACK = "127.0.0.1"
LARGEST_HEAD = 2**17  # bytes; the HTTP parser itself gives up at twice this size
KEY_VARIABLES = {  # the first that is not empty counts
    "api_key": ("TROUPER_API_KEY", "VLLM_API_KEY"),
    "admin_key": ("TROUPER_ADMIN_KEY",),
}


def _server(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Server", **more)


@dataclasses.dataclass
class ServerOptions:
    """Options of the server: its listeners, its keys and its limits."""

    host: Annotated[str, _server("Address that the public listener binds.")] = LOOPBACK
    port: Annotated[
        int, _server("Port that the public listener binds; 0 takes a free one.", min=0, max=65535)
    ] = 8000
    root_path: Annotated[str, _server("Path prefix that a proxy leaves on requests.")] = ""
    uds: Annotated[str | None, _server("Socket file to listen at instead of host and port.")] = None
    api_key: Annotated[
        list[str] | None, _server("Require one of these API keys in the Authorization header; repeatable.", envvar=list(KEY_VARIABLES["api_key"]))
    ] = None  # fmt: skip
    admin_key: Annotated[
        str | None,
        _server(
            "Serve the control routes on the public listener behind this key.",
            envvar="TROUPER_ADMIN_KEY",
        ),
    ] = None
    admin_uds: Annotated[
        str | None, _server("Socket file of a listener with the control routes.")
    ] = None
    admin_port: Annotated[
        int | None,
        _server("Loopback port of a listener with the control routes.", min=0, max=65535),
    ] = None
    ssl_certfile: Annotated[
        str | None, _server("Certificate file, to serve https; it may hold the private key too.")
    ] = None
    ssl_keyfile: Annotated[str | None, _server("File with the private key of the certificate.")] = (
        None
    )
    cache_scope: Annotated[
        Literal["auto", "key", "shared"],
        _server(
            "Which requests share cached prefixes: those of one API key, or all; auto is key with two or more keys."
        ),
    ] = "auto"
    protect_metrics: Annotated[
        bool, _server("Require an API key for /metrics too.", "--protect-metrics")
    ] = False
    loop: Annotated[
        Literal["asyncio", "trio"],
        _server("Event loop: asyncio under uvicorn, or trio under hypercorn."),
    ] = "asyncio"
    disable_server_timing: Annotated[
        bool,
        _server("Leave out the header Server-Timing, which says when a first token is expected."),
    ] = False
    request_timeout: Annotated[
        float, _server("Seconds that a request may take in all.", min=0.001)
    ] = 600.0  # fmt: skip
    max_requests: Annotated[
        int | None,
        _server("Sequences that may be open at once; 4 × max-num-seqs by default.", min=1),
    ] = None
    max_waiting_tokens: Annotated[
        int | None,
        _server("Tokens that may wait to be started; by default the work of 10 s.", min=1),
    ] = None
    max_queue_delay: Annotated[
        float, _server("Seconds that the next request may have waited before the newest are refused.", min=0.001)
    ] = math.inf  # fmt: skip
    max_body: Annotated[int, _server("Maximum size of a request's body, in bytes.", min=1)] = (
        32 * 2**20
    )
    max_body_memory: Annotated[
        int | None,
        _server("Bytes of all request bodies under way; 8 × max-body by default.", min=1),
    ] = None
    body_timeout: Annotated[
        float, _server("Seconds in which a request's body must come.", min=0.001)
    ] = 30.0  # fmt: skip
    body_start_timeout: Annotated[
        float, _server("Seconds in which the first byte of a body must come.", min=0.001)
    ] = 5.0  # fmt: skip
    min_body_rate: Annotated[
        int, _server("Bytes a second that a body must bring after its first seconds.", min=1)
    ] = 4 * 2**10  # fmt: skip
    h11_max_header_count: Annotated[
        int, _server("Maximum number of headers of a request.", min=1)
    ] = 256
    h11_max_incomplete_event_size: Annotated[
        int, _server(f"Maximum size of a request's headers, in bytes; at most {LARGEST_HEAD}.", min=1)
    ] = 2**16  # fmt: skip
    response_role: Annotated[str, _server("Role of the answer in a chat.")] = "assistant"
    trust_request_chat_template: Annotated[
        bool, _server("Let requests bring their chat template.", "--trust-request-chat-template")
    ] = False
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        _server("Default variables of the chat template.", parser=json_object, metavar="JSON"),
    ] = None
    lora_modules: Annotated[
        list[str] | None,
        _server(
            "Adapter to load at start, as NAME=FOLDER or JSON; repeatable.", metavar="NAME=FOLDER"
        ),
    ] = None
    lora_root: Annotated[
        str | None,
        _server("Folder below which adapters may be loaded by HTTP; none are without it."),
    ] = None
    allow_lora_updates: Annotated[
        bool, _server("Load and unload adapters with a user's key.", envvar="TROUPER_ALLOW_RUNTIME_LORA_UPDATING", hidden=True)
    ] = False  # fmt: skip
    tool_call_parser: Annotated[
        str,
        _server(
            "Dialect of the model's tool calls: auto reads it off the chat template, none looks for no calls."
        ),
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool, _server("Accepted from vLLM's command lines: tools need no flag.", hidden=True)
    ] = False
    tool_parser_plugin: Annotated[
        Path | None,
        _server("Python file whose DIALECTS are more dialects of tool calls.", metavar="FILE.py"),
    ] = None
    tool_strict_level: Annotated[
        Literal["auto", "function", "parameter"],
        _server(
            "Checks on calls that the model is free to make: auto holds strict tools to their schema, function all to the declared names, parameter all to their schemas."
        ),
    ] = "auto"
    exclude_tools_when_tool_choice_none: Annotated[
        bool,
        _server(
            "Keep tools out of the prompt of a request that wants no call.",
            "--exclude-tools-when-tool-choice-none",
        ),
    ] = False
    reasoning_parser: Annotated[
        str,
        _server(
            "Marks around the model's reasoning: auto reads them off the chat template, none leaves it in the text."
        ),
    ] = "auto"
    reasoning_field: Annotated[
        Literal["reasoning", "reasoning_content", "both"],
        _server("Field of a message that holds the reasoning."),
    ] = "reasoning"
    enable_prompt_tokens_details: Annotated[
        bool, _server("Report cached prompt tokens in the usage.", "--enable-prompt-tokens-details")
    ] = False
    enable_force_include_usage: Annotated[
        bool, _server("Send the usage at the end of every stream.", "--enable-force-include-usage")
    ] = False
    responses_store_bytes: Annotated[
        int,
        _server("Bytes of responses that are kept in memory for follow-ups; 0 keeps none.", min=0),
    ] = 64 * 2**20
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        _server(
            "Serve the tokenizer's settings and chat template.", "--enable-tokenizer-info-endpoint"
        ),
    ] = False
    enable_per_request_metrics: Annotated[
        bool, _server("Send each request's times with its answer.", "--enable-per-request-metrics")
    ] = False
    enable_request_id_headers: Annotated[
        bool,
        _server(
            "Accepted for compatibility: every answer names its request in a header.",
            "--enable-request-id-headers",
            hidden=True,
        ),
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, _server("Name tokens by their ids in logprobs.", "--return-tokens-as-token-ids")
    ] = False
    priority_order: Annotated[
        Literal["trouper", "vllm"],
        _server("Order of priorities: larger first (trouper) or smaller first (vllm)."),
    ] = "trouper"
    sse_keep_alive_interval: Annotated[
        float,
        _server(
            "Seconds of silence in a stream before a comment is sent; 0 turns it off.", min=0.0
        ),
    ] = 0.0
    seed: Annotated[int, _server("Seed of requests that give none.")] = 0
    allowed_origins: Annotated[
        list[str] | None, _server("Origin whose pages may send requests, * for all; repeatable.")
    ] = None
    allowed_methods: Annotated[
        list[str] | None, _server("Method that pages of other origins may use; repeatable.")
    ] = None
    allowed_headers: Annotated[
        list[str] | None, _server("Header that pages of other origins may send; repeatable.")
    ] = None
    allow_credentials: Annotated[
        bool, _server("Let pages of other origins send credentials.", "--allow-credentials")
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        _server(
            "Lowest level of lines that are logged to stderr.", "--log-level", "--uvicorn-log-level"
        ),
    ] = "warning"
    access_log: Annotated[
        bool,
        _server(
            "Log one line for each answer.",
            "--access-log/--disable-uvicorn-access-log",
            show_default=False,
        ),
    ] = False
    disable_access_log_for_endpoints: Annotated[
        list[str] | None, _server("Path without lines in the access log; repeatable.")
    ] = None
    keep_alive_on_engine_death: Annotated[
        bool, _server("Keep answering with errors after the engine has died.", envvar="TROUPER_KEEP_ALIVE_ON_ENGINE_DEATH", hidden=True)
    ] = False  # fmt: skip
    dev_mode: Annotated[
        bool, _server("Serve the control routes without a key, on a loopback address only.", "--dev-mode", envvar=["TROUPER_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE"])
    ] = False  # fmt: skip


@partial(expand_options, reads_variables=True, engine_defaults={"max_step_ms": None})
def serve(
    ctx: typer.Context,
    model_name: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            show_default=False,
            help="Folder, GGUF file or hub id; the demo when left out.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        _server(
            "Options in a TOML or YAML file; the command line wins.",
            metavar="FILE",
            is_eager=True,
            callback=read_config,
        ),
    ] = None,
    *,
    options: ServerOptions,
    engine_args: EngineArgs,
) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    server = "uvicorn" if options.loop == "asyncio" else "hypercorn"
    if importlib.util.find_spec(server) is None:
        raise UnsupportedFeatureError(f"serve needs {server}: {install_hint('server')}")
    if model_name is not None:
        if engine_args.model is not None:
            raise typer.BadParameter("give it once", param_hint="MODEL and --model")
        engine_args.model = model_name
    _check_keys(options)
    engine_args.enable_lora |= bool(lora_modules(options.lora_modules or []))
    _check_dev_mode(options)
    if not options.api_key and not _is_local(options):
        output.complain(
            f"warning: everyone who reaches {options.host} may use this server; "
            "set --api-key or TROUPER_API_KEY to require a key"
        )
    if options.h11_max_incomplete_event_size > LARGEST_HEAD:
        output.complain(
            f"warning: --h11-max-incomplete-event-size is limited to {LARGEST_HEAD} bytes"
        )
    engine_args.seed = options.seed
    # here, because it finds mistakes before torch is loaded
    resolved = resolve(engine_args, frontend="server")
    if engine_args.node_rank > 0 and resolved.nodes is not None:
        _run_host(resolved, resolved.nodes, options)
        return
    # As in `run_engine`: read when torch is loaded, and threads that spin would starve the event loop.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    is_process = resolved.device_worker == "process"
    # several inherit files, and processors are bound before torch is imported: the engine says to what
    is_alone = is_process and resolved.num_workers == 1 and resolved.nodes is None
    if is_alone and resolved.cpu_bind is None:
        from trouper.actors.executor.workers.launching import LaunchedAhead

        with LaunchedAhead() as launcher:
            _run(options, resolved, launcher)
    else:
        _run(options, resolved)


def _run_host(config: EngineConfig, nodes: NodesConfig, options: ServerOptions) -> None:
    from trouper.frontends.cli.host import run_host
    from trouper.frontends.server.http.logs import log_lines

    with log_lines("trouper", options.log_level):
        anyio.run(run_host, config, nodes, backend=options.loop)


def _run(options: ServerOptions, config: EngineConfig, launcher: "Launcher | None" = None) -> None:
    from trouper.frontends.server.http.listeners import Listener, bind_tcp, bind_unix
    from trouper.frontends.server.http.logs import log_lines
    from trouper.frontends.server.program.server import Server, loop_options
    from trouper.frontends.server.service.service import Service

    for name, value in vars(options).items():
        if isinstance(value, float) and math.isnan(
            value
        ):  # it passes every comparison with a limit
            raise TrouperValidationError("must be a number", parameter=name)
    with ExitStack() as stack:
        stack.enter_context(log_lines("trouper", options.log_level))
        if options.loop == "asyncio":  # failures of an application that it did not answer itself
            stack.enter_context(log_lines("uvicorn.error", "error"))
        if options.access_log:
            stack.enter_context(log_lines("trouper.access", "info"))
        if options.uds is not None:
            sock = stack.enter_context(bind_unix(options.uds))
        else:
            sock = stack.enter_context(bind_tcp(options.host, options.port))
        public = Listener(sock, options.ssl_certfile, options.ssl_keyfile)
        public.tls_context()  # here, because a bad file must not cost the time of loading a model
        admin: list[Listener] = []
        if options.admin_uds is not None:
            admin.append(Listener(stack.enter_context(bind_unix(options.admin_uds))))
        if options.admin_port is not None:
            admin.append(Listener(stack.enter_context(bind_tcp(LOOPBACK, options.admin_port))))

        # Inline, the bar of the weights has the terminal; of a worker, whose stderr is a pipe, there is none.
        has_workers = config.device_worker == "process"
        terminal = sys.stderr if has_workers and sys.stderr.isatty() else None

        async def main() -> None:
            from trouper.frontends.python.async_engine import AsyncLLMEngine

            service = Service(_settings(options))
            server = Server(
                service,
                shutdown_timeout_s=config.shutdown_timeout_s,
                report=output.complain,
                root_path=options.root_path,
                stays_dead=options.keep_alive_on_engine_death,
                terminal=terminal,
            )
            await server.run(
                AsyncLLMEngine(config, launcher=launcher),
                [public],
                admin,
                options.loop,
            )

        anyio.run(main, backend=options.loop, backend_options=loop_options(options.loop))


def _check_keys(options: ServerOptions) -> None:
    """Refuse an empty variable: it asks for a key, and the parser takes it for no variable at all."""
    for name, given in (("api_key", options.api_key), ("admin_key", options.admin_key)):
        keys = [given] if isinstance(given, str) else given or []
        if not keys and any(variable in os.environ for variable in KEY_VARIABLES[name]):
            keys = [""]
        if not all(key.strip() for key in keys):
            raise TrouperValidationError(f"{name}: a key must not be empty", parameter=name)


def _is_local(options: ServerOptions) -> bool:
    """Tell whether only programs on this machine can reach the public listener."""
    is_local = options.uds is not None or options.host in ("localhost", "::1")
    return is_local or options.host.startswith("127.")


def _check_dev_mode(options: ServerOptions) -> None:
    """Refuse control routes without a key where other machines can reach them."""
    if options.dev_mode and options.admin_key is None and not _is_local(options):
        raise invalid(
            "dev_mode", f"needs a loopback host or an admin key, and host is {options.host}"
        )


def _settings(options: ServerOptions) -> Any:
    from trouper.frontends.python.parsing import read_plugin
    from trouper.frontends.server.shared.settings import ServerSettings

    return ServerSettings(
        api_keys=tuple(options.api_key or ()),
        admin_key=options.admin_key,
        is_dev_mode=options.dev_mode,
        cache_scope=options.cache_scope,
        protect_metrics=options.protect_metrics,
        max_requests=options.max_requests,
        max_waiting_tokens=options.max_waiting_tokens,
        max_queue_delay_s=options.max_queue_delay,
        request_timeout_s=options.request_timeout,
        has_timing=not options.disable_server_timing,
        max_body=options.max_body,
        max_body_memory=options.max_body_memory,
        body_timeout_s=options.body_timeout,
        body_start_timeout_s=options.body_start_timeout,
        min_body_rate=options.min_body_rate,
        max_headers=options.h11_max_header_count,
        max_header_bytes=min(options.h11_max_incomplete_event_size, LARGEST_HEAD),
        response_role=options.response_role,
        trust_request_chat_template=options.trust_request_chat_template,
        default_chat_template_kwargs=options.default_chat_template_kwargs or {},
        lora_modules=lora_modules(options.lora_modules or []),
        lora_root=options.lora_root,
        allows_lora_updates=options.allow_lora_updates,
        tool_call_parser=options.tool_call_parser,
        dialects=()
        if options.tool_parser_plugin is None
        else read_plugin(options.tool_parser_plugin),
        tool_strict_level=options.tool_strict_level,
        exclude_tools_when_tool_choice_none=options.exclude_tools_when_tool_choice_none,
        reasoning_parser=options.reasoning_parser,
        reasoning_field=options.reasoning_field,
        enable_prompt_tokens_details=options.enable_prompt_tokens_details,
        force_include_usage=options.enable_force_include_usage,
        responses_store_bytes=options.responses_store_bytes,
        shows_tokenizer_info=options.enable_tokenizer_info_endpoint,
        shows_metrics=options.enable_per_request_metrics,
        return_tokens_as_token_ids=options.return_tokens_as_token_ids,
        is_smaller_priority_first=options.priority_order == "vllm",
        sse_keep_alive_interval_s=options.sse_keep_alive_interval,
        allowed_origins=tuple(options.allowed_origins or ()),
        allowed_methods=tuple(options.allowed_methods or ("*",)),
        allowed_headers=tuple(options.allowed_headers or ("*",)),
        allow_credentials=options.allow_credentials,
        logs_access=options.access_log,
        unlogged_paths=tuple(options.disable_access_log_for_endpoints or ()),
    )
