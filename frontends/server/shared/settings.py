"""Settings of a server, fixed at its start.  Each is declared once, together with its command-line option.

`trouper serve` makes its options from these declarations, so a setting that the command line offers has the same default,
range and meaning in an application made by `create_app`.
"""

import math
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from trouper.errors import invalid
from trouper.frontends.dialects.table import AUTO, Dialect
from trouper.lora import LoRARequest

KIB, MIB = 2**10, 2**20
LARGEST_HEAD = 128 * KIB  # bytes; the HTTP parser itself gives up at twice this size


class CommandOption(NamedTuple):
    """The option of `trouper serve` that sets a field.

    Attributes:
        help: one sentence for `--help`.
        name: the option's name with underscores, if it differs from the field's.
        flags: its spellings, if they differ from `--name`, or if a flag has no `--no-` form.
        min, max: the range that the command line accepts.
        variables: environment variables besides `TROUPER_<NAME>`.
        is_hidden: leaves the option out of `--help`.
        metavar: the placeholder of the value in `--help`.
    """

    help: str
    name: str | None = None
    flags: tuple[str, ...] = ()
    min: float | None = None
    max: float | None = None
    variables: tuple[str, ...] = ()
    is_hidden: bool = False
    metavar: str | None = None


Opt = CommandOption


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an application: its keys, its limits, and the form of its replies.

    docs/security.md describes the limits.  None means that the limit is derived from the engine.

    Raises:
        TrouperValidationError: a key is empty, a scope of caches needs keys, or the memory for bodies cannot hold one body.
    """

    # Names of the model for clients.  Empty means those of the engine's configuration.
    served_model_names: tuple[str, ...] = ()
    api_keys: Annotated[
        tuple[str, ...],
        Opt(
            "Require one of these API keys in the Authorization header; repeatable.",
            name="api_key",
            variables=("TROUPER_API_KEY", "VLLM_API_KEY"),
        ),
    ] = ()
    admin_key: Annotated[
        str | None,
        Opt(
            "Serve the control routes on the public listener behind this key.",
            variables=("TROUPER_ADMIN_KEY",),
        ),
    ] = None
    is_dev_mode: Annotated[
        bool,
        Opt(
            "Serve the control routes without a key, on a loopback address only.",
            name="dev_mode",
            flags=("--dev-mode",),
            variables=("TROUPER_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE"),
        ),
    ] = False
    cache_scope: Annotated[
        Literal["auto", "key", "shared"],
        Opt(
            "Which requests share cached prefixes: those of one API key, or all; auto is key with two or more keys."
        ),
    ] = "auto"
    protect_metrics: Annotated[
        bool, Opt("Require an API key for /metrics too.", flags=("--protect-metrics",))
    ] = False
    disable_server_timing: Annotated[
        bool, Opt("Leave out the header Server-Timing, which announces the first token's time.")
    ] = False
    request_timeout_s: Annotated[
        float, Opt("Seconds that a request may take in all.", name="request_timeout", min=0.001)
    ] = 600.0
    # /health/step fails after this time without a step while there is work.
    max_step_age_s: float = 10.0
    # /health/ready fails after all requests were refused for this time.
    max_refusing_s: float = 5.0
    max_requests: Annotated[
        int | None, Opt("Sequences that may be open at once; 4 × max-num-seqs by default.", min=1)
    ] = None
    max_waiting_tokens: Annotated[
        int | None, Opt("Tokens that may wait to be started; by default the work of 10 s.", min=1)
    ] = None
    max_queue_delay_s: Annotated[
        float,
        Opt(
            "Seconds that the next request may have waited before the newest are refused.",
            name="max_queue_delay",
            min=0.001,
        ),
    ] = math.inf
    max_body: Annotated[int, Opt("Maximum size of a request's body, in bytes.", min=1)] = 32 * MIB
    max_body_memory: Annotated[
        int | None, Opt("Bytes of all request bodies under way; 8 × max-body by default.", min=1)
    ] = None
    body_timeout_s: Annotated[
        float, Opt("Seconds in which a request's body must come.", name="body_timeout", min=0.001)
    ] = 30.0
    body_start_timeout_s: Annotated[
        float,
        Opt(
            "Seconds in which the first byte of a body must come.",
            name="body_start_timeout",
            min=0.001,
        ),
    ] = 5.0
    min_body_rate: Annotated[
        int, Opt("Bytes a second that a body must bring after its first seconds.", min=1)
    ] = 4 * KIB
    max_headers: Annotated[
        int, Opt("Maximum number of headers of a request.", name="h11_max_header_count", min=1)
    ] = 256
    max_header_bytes: Annotated[
        int,
        Opt(
            f"Maximum size of a request's headers, in bytes; at most {LARGEST_HEAD}.",
            name="h11_max_incomplete_event_size",
            min=1,
        ),
    ] = 64 * KIB
    max_path: int = 8 * KIB
    response_role: Annotated[str, Opt("Role of the answer in a chat.")] = "assistant"
    trust_request_chat_template: Annotated[
        bool,
        Opt("Let requests bring their chat template.", flags=("--trust-request-chat-template",)),
    ] = False
    trust_request_mm_kwargs: Annotated[
        bool,
        Opt(
            "Let requests give options of the image processor.",
            flags=("--trust-request-mm-kwargs",),
        ),
    ] = False
    default_chat_template_kwargs: Annotated[
        dict[str, Any], Opt("Default variables of the chat template.", metavar="JSON")
    ] = {}
    lora_modules: Annotated[
        tuple[LoRARequest, ...],
        Opt("Adapter to load at start, as NAME=FOLDER or JSON; repeatable.", metavar="NAME=FOLDER"),
    ] = ()
    lora_root: Annotated[
        str | None, Opt("Folder below which adapters may be loaded by HTTP; none are without it.")
    ] = None
    allows_lora_updates: Annotated[
        bool,
        Opt(
            "Load and unload adapters with a user's key.",
            name="allow_lora_updates",
            variables=("TROUPER_ALLOW_RUNTIME_LORA_UPDATING",),
            is_hidden=True,
        ),
    ] = False
    tool_call_parser: Annotated[
        str,
        Opt(
            "Dialect of the model's tool calls: auto detects it from the chat template, none looks for no calls."
        ),
    ] = AUTO
    dialects: Annotated[
        tuple[Dialect, ...],
        Opt(
            "Python file whose DIALECTS are more dialects of tool calls.",
            name="tool_parser_plugin",
            metavar="FILE.py",
        ),
    ] = ()
    tool_strict_level: Annotated[
        Literal["auto", "function", "parameter"],
        Opt(
            "Checks on calls that the model is free to make: auto holds strict tools to their schema, "
            "function all to the declared names, parameter all to their schemas."
        ),
    ] = "auto"
    exclude_tools_when_tool_choice_none: Annotated[
        bool,
        Opt(
            "Keep tools out of the prompt of a request that wants no call.",
            flags=("--exclude-tools-when-tool-choice-none",),
        ),
    ] = False
    reasoning_parser: Annotated[
        str,
        Opt(
            "Marks around the model's reasoning: auto detects them from the chat template, none leaves it in the text."
        ),
    ] = AUTO
    reasoning_field: Annotated[
        Literal["reasoning", "reasoning_content", "both"],
        Opt("Field of a message that holds the reasoning."),
    ] = "reasoning"
    enable_prompt_tokens_details: Annotated[
        bool,
        Opt("Report cached prompt tokens in the usage.", flags=("--enable-prompt-tokens-details",)),
    ] = False
    force_include_usage: Annotated[
        bool,
        Opt(
            "Send the usage at the end of every stream.",
            name="enable_force_include_usage",
            flags=("--enable-force-include-usage",),
        ),
    ] = False
    responses_store_bytes: Annotated[
        int, Opt("Bytes of responses that are kept in memory for follow-ups; 0 keeps none.", min=0)
    ] = 64 * MIB
    shows_tokenizer_info: Annotated[
        bool,
        Opt(
            "Serve the tokenizer's settings and chat template.",
            name="enable_tokenizer_info_endpoint",
            flags=("--enable-tokenizer-info-endpoint",),
        ),
    ] = False
    shows_metrics: Annotated[
        bool,
        Opt(
            "Send each request's times with its answer.",
            name="enable_per_request_metrics",
            flags=("--enable-per-request-metrics",),
        ),
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool,
        Opt("Name tokens by their ids in logprobs.", flags=("--return-tokens-as-token-ids",)),
    ] = False
    priority_order: Annotated[
        Literal["trouper", "vllm"],
        Opt("Order of priorities: larger first (trouper) or smaller first (vllm)."),
    ] = "trouper"
    sse_keep_alive_interval_s: Annotated[
        float,
        Opt(
            "Seconds of silence in a stream before a comment is sent; 0 turns it off.",
            name="sse_keep_alive_interval",
            min=0.0,
        ),
    ] = 0.0
    ui: Annotated[
        bool | None,
        Opt(
            "Serve the page that shows the server, at /; by default on loopback addresses only.",
            flags=("--ui/--no-ui",),
        ),
    ] = None
    ui_hosts: Annotated[
        tuple[str, ...],
        Opt("Further host name by which browsers may open the page; repeatable.", name="ui_host"),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], Opt("Origin whose pages may send requests, * for all; repeatable.")
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...], Opt("Method that pages of other origins may use; repeatable.")
    ] = ("*",)
    allowed_headers: Annotated[
        tuple[str, ...], Opt("Header that pages of other origins may send; repeatable.")
    ] = ("*",)
    allow_credentials: Annotated[
        bool,
        Opt("Let pages of other origins send credentials.", flags=("--allow-credentials",)),
    ] = False
    logs_access: Annotated[
        bool,
        Opt(
            "Log one line for each answer.",
            name="access_log",
            flags=("--access-log/--disable-uvicorn-access-log",),
        ),
    ] = False
    unlogged_paths: Annotated[
        tuple[str, ...],
        Opt(
            "Path without lines in the access log; repeatable.",
            name="disable_access_log_for_endpoints",
        ),
    ] = ()

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, float) and math.isnan(value):
                raise invalid(name.removesuffix("_s"), "must be a number")
        # Imported here: the parsers need numpy, and the command line, which reads the options above, starts without it.
        from trouper.frontends.dialects.core import check_parser_names

        check_parser_names(self.tool_call_parser, self.reasoning_parser, self.dialects)
        for name, keys in (("api_key", self.api_keys), ("admin_key", (self.admin_key,))):
            if any(key is not None and not key.strip() for key in keys):
                raise invalid(name, "a key must not be empty")
        if self.cache_scope == "key" and not self.api_keys:
            raise invalid("cache_scope", "key needs API keys (--api-key)", self.cache_scope)
        if self.max_body_memory is not None and self.max_body_memory < self.max_body:
            raise invalid("max_body_memory", f"must be at least max_body ({self.max_body})")


class ServeSettings(ServerSettings, frozen=True, kw_only=True):
    """Settings of `trouper serve`: those of the application, its listeners, its event loop and its log."""

    host: Annotated[str, Opt("Address that the public listener binds.")] = "127.0.0.1"
    port: Annotated[
        int, Opt("Port that the public listener binds; 0 takes a free one.", min=0, max=65535)
    ] = 8000
    root_path: Annotated[str, Opt("Path prefix that a proxy leaves on requests.")] = ""
    uds: Annotated[str | None, Opt("Socket file to listen at instead of host and port.")] = None
    ollama: Annotated[
        bool, Opt("Also listen at Ollama's address, 127.0.0.1:11434, without TLS.")
    ] = False
    admin_uds: Annotated[str | None, Opt("Socket file of a listener with the control routes.")] = (
        None
    )
    admin_port: Annotated[
        int | None, Opt("Loopback port of a listener with the control routes.", min=0, max=65535)
    ] = None
    take_over: Annotated[
        str | None,
        Opt(
            "Take the listeners over from the running server with this --admin-uds, which then ends.",
            metavar="SOCKET",
        ),
    ] = None
    ssl_certfile: Annotated[
        str | None, Opt("Certificate file, to serve https; it may hold the private key too.")
    ] = None
    ssl_keyfile: Annotated[str | None, Opt("File with the private key of the certificate.")] = None
    loop: Annotated[
        Literal["asyncio", "trio"],
        Opt("Event loop: asyncio under uvicorn, or trio under hypercorn."),
    ] = "asyncio"
    seed: Annotated[int, Opt("Seed of requests that give none.")] = 0
    journal: Annotated[
        str | None,
        Opt("Folder that keeps durable answers, so that they go on after the server's end."),
    ] = None
    journal_size: Annotated[int, Opt("Maximum bytes of the journal.", min=1 * MIB)] = 256 * MIB
    journal_sync: Annotated[
        Literal["off", "group", "step"],
        Opt("When the journal waits for the disk: never, every 0.1 s, or for every write."),
    ] = "group"
    journal_strict: Annotated[
        bool,
        Opt(
            "Refuse to start with a journal that keeps answers of another model.",
            flags=("--journal-strict",),
        ),
    ] = False
    durable_streams: Annotated[
        Literal["asked", "all"],
        Opt("Answers that the journal keeps: of requests with an Idempotency-Key, or all."),
    ] = "asked"
    stream_grace_s: Annotated[
        float,
        Opt(
            "Seconds for which a durable answer without a reader goes on.",
            name="stream_grace",
            min=0.0,
        ),
    ] = 60.0
    stream_retain_s: Annotated[
        float,
        Opt(
            "Seconds for which the journal keeps an answer after its end.",
            name="stream_retain",
            min=0.0,
        ),
    ] = 600.0
    record: Annotated[
        str | None,
        Opt(
            "Folder for a record of each request, which `trouper replay` computes again.",
            metavar="DIR",
        ),
    ] = None
    record_content: Annotated[
        bool,
        Opt(
            "Write token ids into the records too, not only their digests.",
            flags=("--record-content",),
        ),
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Opt(
            "Lowest level of lines that are logged to stderr.",
            flags=("--log-level", "--uvicorn-log-level"),
        ),
    ] = "warning"
    keep_alive_on_engine_death: Annotated[
        bool,
        Opt(
            "Keep answering with errors after the engine has died.",
            variables=("TROUPER_KEEP_ALIVE_ON_ENGINE_DEATH",),
            is_hidden=True,
        ),
    ] = False
    # The options of a server with several models.  `models` is the file with their tables.
    models: str | None = None
    models_dir: Annotated[
        str | None,
        Opt("Folder whose models are served by name and loaded by requests.", metavar="DIR"),
    ] = None
    memory_budget: Annotated[
        str | None,
        Opt(
            "Memory for all of several models, such as 12GiB; by default 0.8 of the free memory.",
            metavar="BYTES",
        ),
    ] = None
    keep_alive: Annotated[
        str | None,
        Opt(
            "Idle time after which a model gives up its KV cache, twice that its weights, six times its process; -1 never; 5m by default.",
            metavar="TIME",
        ),
    ] = None
    turn: Annotated[
        str | None,
        Opt(
            "Time that a model with requests keeps memory that another one needs; 5s by default.",
            metavar="TIME",
        ),
    ] = None
    max_loaded: Annotated[
        int | None, Opt("Models with weights in memory at once; no limit by default.", min=1)
    ] = None
    default_model: Annotated[
        str | None, Opt("Model of requests that name none of several.", metavar="NAME")
    ] = None
    preload: Annotated[
        tuple[str, ...],
        Opt("Model to load at start, which readiness waits for; repeatable.", metavar="NAME"),
    ] = ()
    pin: Annotated[
        tuple[str, ...],
        Opt("Model that is loaded at start and stays; repeatable.", metavar="NAME"),
    ] = ()
    autoload: Annotated[
        bool,
        Opt("Load a model when a request names it.", flags=("--autoload/--no-autoload",)),
    ] = True
    # vLLM's command lines contain these two, and nothing has to be done for them.
    enable_auto_tool_choice: Annotated[
        bool, Opt("Accepted from vLLM's command lines: tools need no flag.", is_hidden=True)
    ] = False
    enable_request_id_headers: Annotated[
        bool,
        Opt(
            "Accepted for compatibility: every answer names its request in a header.",
            flags=("--enable-request-id-headers",),
            is_hidden=True,
        ),
    ] = False
