"""Turn dataclasses into command-line options, and read options from files and environment variables.

Commands share dozens of options. `expand_options` replaces each dataclass among a command's parameters by one option
for each field, so the fields of `EngineArgs` are not declared a second time.
"""

import dataclasses
import inspect
import json
import os
import tomllib
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, cast, get_args, get_origin

import typer

from trouper.config.args import NOT_IMPLEMENTED, EngineArgs
from trouper.frontends.cli import output
from trouper.frontends.cli.other_programs import FOR_ENGINE, VLLM_SERVER, take
from trouper.frontends.cli.server_options import (
    option_names,
    setting_parameters,
    settings_from,
)
from trouper.frontends.cli.values import integers, json_object
from trouper.frontends.server.shared.settings import ServeSettings
from trouper.params import SamplingParams
from trouper.sampling_fields import FIELDS
from trouper.structured_outputs import StructuredOutputsParams

# The key in a command's context under which the tables of a file of models are stored.
MODEL_TABLES = "trouper.models"
# Used if the model has no default of its own; the library's 16 are too few at a terminal.
DEFAULT_MAX_TOKENS = 128

SHORT = {
    "model": "-m",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
}
# The panels of `--help`, with every field of EngineArgs except `seed`, a sampling option.  Switches also get `--no-…`.
ENGINE_HELP: dict[str, dict[str, str]] = {
    "Model": {
        "model": "Folder, GGUF file or hub id (ORG/NAME, or ORG/NAME:Q4_K_M); by default the bundled demo model.",
        "tokenizer": "Folder or hub id of the tokenizer; by default the model's own.",
        "skip_tokenizer_init": "Load no tokenizer: prompts and outputs are token ids.",
        "trust_remote_code": "Run a model's own Python code, from a local folder or --code-revision, if no other code implements it.",
        "revision": "Branch, tag or commit of the model on the hub.",
        "code_revision": "Full commit on the hub with the Python code to run.",
        "tokenizer_revision": "Branch, tag or commit of the tokenizer on the hub.",
        "hf_token": "Access token for the model hub.",
        "download_dir": "Folder for downloads.",
        "load_format": "auto, safetensors, gguf, or dummy for random weights of a folder or of a preset such as qwen3-0.6b.",
        "model_impl": "Implementation of the model: trouper, transformers, or auto (trouper if it has one).",
        "hf_overrides": "Fields that override the model's config.json, as JSON.",
        "device": "Device to run on: auto (a usable GPU, else the CPU), cpu or cuda.",
        "device_worker": "Where the model runs: inline (a thread of this process), process (a worker process, restarted "
        "if it dies), or auto (process when serving a model that generates on the CPU, else inline).",
        "tensor_parallel_size": "Number of processes that divide each layer by heads and MLP width; on GPUs one for each GPU.",
        "pipeline_parallel_size": "Number of processes that divide the layers, as stages of a pipeline.",
        "data_parallel_size": "Number of replicas of the model, which divide the requests.",
        "distributed_executor_backend": "Launcher of the workers: mp (this machine, or those of --nnodes) or ray.",
        "nnodes": "Number of machines with workers; all need the same TROUPER_CLUSTER_KEY.",
        "node_rank": "Number of this machine: 0 serves, the others only run workers.",
        "master_addr": "Address of machine 0 for the other machines.",
        "master_port": "Port of machine 0 for the other machines.",
        "dtype": "Type of the weights: auto (as stored), float32, bfloat16 or float16.",
        "quantization": "Round the weights while loading: int8, or int4 in groups of 32.",
        "compress_weights": "Store bfloat16 weights losslessly in 12 bits; by default with --max-num-seqs below 8.",
        "max_model_len": "Maximum length of prompt plus output, e.g. 4096 or 8k; by default (auto) the model's own, or what fits the KV cache.",
        "generation_config": "Source of sampling defaults: auto (the model's), vllm (only temperature 1), or a folder.",
        "override_generation_config": "Sampling defaults that override the model's.",
        "enable_prompt_embeds": "Accept embeddings as prompts.",
        "chat_template": "Chat template, or a file with one, instead of the model's.",
        "structured_outputs_config": "Defaults of structured outputs as JSON: backend, disable_any_whitespace, "
        "disable_additional_properties, enable_in_reasoning.",
        "reasoning_config": "Marks around the model's reasoning as JSON: reasoning_start_str, reasoning_end_str.",
        "served_model_name": "Name of the model for clients; repeatable.",
    },
    "Images": {
        "limit_mm_per_prompt": 'Maximum number of images or recordings of one prompt as JSON, e.g. {"image": 2}; 0 does not load the tower.',
        "language_model_only": "Serve only the text model of a model that takes images or audio.",
        "mm_processor_kwargs": "Options of the image processor as JSON.",
        "mm_processor_cache_gb": "GiB for processed images and recordings, so that the same one is not processed again.",
        "media_processor": "Where images and recordings are decoded and processed: process (with limits of time and memory) or thread.",
        "encoder_cache_gb": "GiB for the rows that the tower computed of images and recordings.",
        "allowed_media_domains": "Host from which images and recordings of https: URLs are fetched, such as example.org, *.example.org or *; repeatable; by default none.",
        "allowed_local_media_path": "Folder whose files may be named by file: URLs.",
        "allow_http_media": "Fetch files of http: URLs, too, which are not encrypted.",
        "allow_private_media_hosts": "Fetch also from hosts with addresses of private networks or of this machine.",
        "encode_ms": "Milliseconds of a step with streams in which images and recordings are encoded; 0 encodes each at once.",
    },
    "Pooling": {
        "runner": "Kind of engine: auto, generate or pooling.",
        "convert": "Conversion into a pooling model: auto, none, embed or classify.",
        "pooler_config": "Settings of the pooler as JSON.",
    },
    "KV cache": {
        "block_size": "Tokens in a block of the KV cache.",
        "num_gpu_blocks_override": "Number of KV blocks, instead of as many as fit into memory.",
        "kv_cache_memory_bytes": "Memory for the KV cache in bytes, e.g. 8G; by default half of the memory left by the weights.",
        "gpu_memory_utilization": "Share of the device's memory to use.",
        "enable_prefix_caching": "Reuse the blocks of equal prefixes; on by default.",
        "prefix_caching_hash_algo": "Hash of prefixes: only sha256 is supported.",
        "kv_tier_dir": "Folder in which KV blocks are kept on disk, for later runs; by default none.",
        "kv_tier_size": "Maximum bytes of the files in that folder, e.g. 20GiB; by default 20 GiB, or a quarter of the free space if that is less.",
        "kv_tier_min_free": "Share of the file system that the tier leaves free; by default 0.05.",
        "kv_tier_write_rate": "Bytes written to the folder in a second, e.g. 64M (the default).",
        "kv_transfer_config": "vLLM's connector to such a folder as JSON; --kv-tier-dir is shorter.",
    },
    "Scheduler": {
        "max_num_seqs": "Maximum number of running sequences.",
        "max_num_batched_tokens": "Maximum number of tokens in one step.",
        "max_num_scheduled_tokens": "Token budget of a step; max-num-batched-tokens by default.",
        "max_num_active_seqs": "Maximum number of running sequences, without changing the size of buffers.",
        "max_num_queued_reqs": "Refuse new requests while this many are open.",
        "max_num_queued_tokens": "Refuse new requests while this many prompt tokens are waiting.",
        "enable_chunked_prefill": "Split long prompts over several steps; on by default.",
        "long_prefill_token_threshold": "Maximum tokens of one long prompt in a step; 0 means no maximum.",
        "long_prefill_token_threshold_adaptive": "Apply the threshold only under load.",
        "scheduling_policy": "Order of waiting requests: priority or fcfs.",
        "max_step_ms": "Maximum duration of a step in milliseconds, so that streams do not pause longer; a server learns it; 0 means no limit.",
        "async_scheduling": "Plan a step while the previous one runs; on by default.",
        "speculative_config": 'Verify drafted tokens, e.g. {"method": "ngram", "num_speculative_tokens": 5}; the text stays the same.',
        "scheduler_reserve_full_isl": "Admit a prompt only if all its blocks fit; on by default.",
        "watermark": "Share of blocks to keep free when admitting requests.",
        "stream_interval": "Number of tokens between two outputs of a stream.",
    },
    "Adapters": {
        "enable_lora": "Serve requests with LoRA adapters.",
        "max_loras": "Maximum number of different adapters among the running requests.",
        "max_lora_rank": "Maximum rank of an adapter.",
        "max_cpu_loras": "Maximum number of loaded adapters; by default 32, or 8 on a GPU.",
        "lora_dtype": "Type of the adapters' matrices; auto means the model's.",
        "lora_target_modules": "Module that adapters may change, such as q_proj; repeatable; by default all.",
    },
    "Engine": {
        "renderer_num_workers": "Number of tasks that tokenize prompts.",
        "max_logprobs": "Maximum logprobs of a request; -1 means the whole vocabulary.",
        "enforce_eager": "Run without CUDA graphs, and on the CPU without recorded decode steps.",
        "cudagraph_capture_sizes": "Batch sizes to capture, e.g. 1,2,4,8.",
        "batch_invariant": "Generate bit-identical tokens in any batch; slower on a GPU.",
        "enable_sleep_mode": "Accepted for compatibility; sleeping always works.",
        "max_worker_restarts": "Number of unexplained worker deaths within the window that the engine survives.",
        "worker_restart_window": "Seconds in which worker deaths are counted.",
        "step_timeout": "Seconds after which a step counts as hung; by default learned from earlier steps.",
        "shutdown_timeout": "Seconds that open requests have to finish at shutdown.",
        "disable_log_stats": "Neither collect nor log statistics.",
        "otlp_traces_endpoint": "Address to send spans to; needs OpenTelemetry.",
        "profiler_config": "Settings of the profiler as JSON.",
    },
}


def _sampling(text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Sampling", metavar=metavar)


MATCHED = ("json_object", "regex", "choice")  # options that become fields of `structured_outputs`


OPTION_TYPES = {"integer": int | None, "number": float | None, "flag": bool}
# The options of the sampling fields with a help text, from their declarations.
DeclaredOptions: Any = dataclasses.make_dataclass(
    "DeclaredOptions",
    [
        (
            name,
            Annotated[
                OPTION_TYPES[field.kind], _sampling(field.help, f"--{name.replace('_', '-')}")
            ],
            False if field.kind == "flag" else None,
        )
        for name, field in FIELDS.items()
        if field.help and field.kind in OPTION_TYPES
    ],
)


@dataclasses.dataclass
class SamplingOptions(DeclaredOptions):
    """The sampling options of a command line; None leaves the model's own default.

    Commands share them, and `/set` in a session changes them.  Help texts come from the declarations of the fields.
    """

    stop: Annotated[list[str] | None, _sampling(FIELDS["stop"].help, metavar="TEXT")] = None
    json_schema: Annotated[
        str | None,
        _sampling(
            "Make the text JSON that the schema allows: a file, or the schema itself if it begins with {.",
            metavar="FILE|JSON",
        ),
    ] = None
    json_object: Annotated[bool, _sampling("Make the text a JSON object.", "--json-object")] = False
    regex: Annotated[
        str | None, _sampling("Make the whole text match this regular expression.", metavar="TEXT")
    ] = None
    choice: Annotated[
        list[str] | None,
        _sampling("Make the text this one, or another of these; repeatable.", metavar="TEXT"),
    ] = None

    def given(self) -> dict[str, Any]:
        """Return only the options that the command line sets, as the fields of a request.

        Raises:
            typer.BadParameter: the file of the schema cannot be read.
        """
        fields = {
            name: value
            for name, value in vars(self).items()
            if value is not None and value is not False
        }
        matched = {name: fields.pop(name) for name in MATCHED if name in fields}
        schema = fields.pop("json_schema", None)
        if schema is not None:
            matched["json"] = _schema_text(schema)
        return {**fields, "structured_outputs": matched} if matched else fields

    def params(self, model_defaults: dict[str, Any], **more: Any) -> SamplingParams:
        """Return sampling parameters: given options win over the model's defaults, and those over the library's.

        Raises:
            TrouperValidationError: a value outside its range; the message names the parameter.
        """
        values: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS, **model_defaults}
        given = self.given()
        matched = given.pop("structured_outputs", None)
        if matched is not None:
            given["structured_outputs"] = StructuredOutputsParams(**matched)
        return SamplingParams(**{**values, **given, **more})


def _schema_text(given: str) -> str:
    if given.lstrip().startswith("{"):
        return given
    try:
        return Path(given).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{given}: {error}", param_hint="--json-schema") from None


def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Use the values of a TOML or YAML file as the defaults of this command's options.

    Raises:
        typer.BadParameter: the file has neither format, or a name in it is not an option.
    """
    if path is None:
        return None
    set_defaults(ctx, path, _read_table(path))
    return path


def is_given(ctx: typer.Context, name: str) -> bool:
    """Return whether the command line, an environment variable or a file sets an option."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def read_model_variable(ctx: typer.Context, given: list[str] | None) -> list[str] | None:
    """Return the models of the command line, else those of TROUPER_MODEL: one per line, because paths may contain spaces."""
    source, text = ctx.get_parameter_source("model"), os.environ.get("TROUPER_MODEL")
    is_on_line = source is not None and source.name == "COMMANDLINE"
    return text.splitlines() if text and not is_on_line else given


def read_models_file(ctx: typer.Context, path: str | None) -> str | None:
    """Use the plain values of a file of models as defaults of options, and keep its tables for the command.

    Raises:
        typer.BadParameter: it is not TOML, or a value outside its tables is not an option.
    """
    if path is None:
        return None
    table = _read_table(Path(path))
    options = {p.name for p in ctx.command.params}
    tables: dict[str, Any] = {
        name: value
        for name, value in table.items()
        if isinstance(value, dict) and name.replace("-", "_") not in options
    }
    ctx.meta[MODEL_TABLES] = tables
    set_defaults(ctx, Path(path), {n: v for n, v in table.items() if n not in tables})
    return path


def set_defaults(ctx: typer.Context, path: Path, table: Mapping[str, Any]) -> None:
    """Use values of a file as the defaults of this command's options, in addition to those of an earlier file.

    Raises:
        typer.BadParameter: a name is not an option.
    """
    given = {name.replace("-", "_"): value for name, value in table.items()}
    options = {p.name: p for p in ctx.command.params if p.param_type_name == "option"}
    foreign = ctx.meta.setdefault(FOR_ENGINE, {})
    for name in given.keys() & (NOT_IMPLEMENTED.keys() | VLLM_SERVER.keys()) - options.keys():
        value = given.pop(name)
        if name not in foreign:
            take(foreign, name, value, name)
    if unknown := given.keys() - options.keys() | given.keys() & {"config"}:
        raise typer.BadParameter(f"{path} has unknown options: {', '.join(sorted(unknown))}")
    defaults = {
        name: _as_list(value) if options[name].multiple else _as_typed(value)
        for name, value in given.items()
    }
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _read_table(path: Path) -> dict[str, Any]:
    """Read options from a file: YAML, as in vLLM, if its name ends in .yaml or .yml, else TOML.

    Options without a value are ignored, as in vLLM.
    """
    try:
        text = path.read_text("utf-8")
        if path.suffix not in (".yaml", ".yml"):
            return _toml(text)
        # The package is installed, because huggingface_hub needs it.
        table: Any = import_module("yaml").safe_load(text)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from None
    except Exception as error:
        # The YAML package's own errors have no common base class with TOML's.
        raise typer.BadParameter(f"{path}: {' '.join(str(error).split())}") from None
    if table is None:
        return {}
    if not isinstance(table, dict) or not all(
        isinstance(n, str) for n in cast("dict[Any, Any]", table)
    ):
        raise typer.BadParameter(f"{path}: must have lines such as `max-num-seqs: 8`")
    return {n: v for n, v in cast("dict[str, Any]", table).items() if v is not None}


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ValueError(
            f"{error}; files are read as TOML, or as YAML if the name ends in .yaml or .yml"
        ) from None


def _as_list(value: Any) -> Any:
    """Return the values of a repeatable option as a list.  A single text is one value."""
    return [value] if isinstance(value, str) else value


def _as_typed(value: Any) -> Any:
    """Convert lists and tables to the text that a command line would have."""
    if isinstance(value, list):
        return ",".join(map(str, cast("list[Any]", value)))
    return json.dumps(value) if isinstance(value, dict) else value


def expand_options(
    command: Callable[..., None],
    *,
    reads_variables: bool = False,
    engine_defaults: Mapping[str, Any] | None = None,
) -> Callable[..., None]:
    """Give a command one option for each field of its dataclass parameters and server settings, and `--debug`.

    Args:
        reads_variables: use environment variables `TROUPER_…` as defaults.
        engine_defaults: the command's own defaults for options of the engine.
    """
    own = inspect.signature(command).parameters
    groups: dict[str, Any] = {
        p.name: p.annotation
        for p in own.values()
        if dataclasses.is_dataclass(p.annotation) or p.annotation is ServeSettings
    }
    parameters = [p for p in own.values() if p.name not in groups]
    for group in groups.values():
        if group is EngineArgs:
            options = _engine_options(engine_defaults or {}, own)
        elif group is ServeSettings:
            options = setting_parameters()
        else:
            options = _options_of(group)
        parameters += map(_read_from_variable, options) if reads_variables else options
    parameters += [_debug_option()]

    @wraps(command)
    def expanded(**values: Any) -> None:
        if values.pop("debug"):
            values["ctx"].obj["debug"] = True
        for name, group in groups.items():
            if group is ServeSettings:
                values[name] = settings_from({n: values.pop(n) for n in option_names()})
                continue
            # An option declared by the command itself is passed to the command, not to the dataclass.
            fields = [field.name for field in dataclasses.fields(group) if field.name not in own]
            foreign: dict[str, Any] = {}
            if group is EngineArgs:
                foreign = values["ctx"].meta.get(FOR_ENGINE, {})
            values[name] = group(**{f: values.pop(f) for f in fields if f in values}, **foreign)
        try:
            command(**values)
        except BrokenPipeError:
            # The reader of stdout has exited, for example in `trouper generate … | head -1`.
            output.silence_stdout()
            raise typer.Exit(output.EXIT_BROKEN_PIPE) from None

    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    expanded.__annotations__ = {p.name: p.annotation for p in parameters}
    return expanded


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword_only, default=default, annotation=annotation)


def _read_from_variable(parameter: inspect.Parameter) -> inspect.Parameter:
    """Make an environment variable `TROUPER_…` the default of an option."""
    (option,) = parameter.annotation.__metadata__
    own = f"TROUPER_{parameter.name.upper()}"
    others = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
    option.envvar = list(dict.fromkeys([own, *others]))
    option.show_envvar = False
    return parameter


def _options_of(group: type[Any]) -> list[inspect.Parameter]:
    return [_parameter(f.name, f.default, f.type) for f in dataclasses.fields(group)]


def _engine_options(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> list[inspect.Parameter]:
    """Return one option for each field of the engine's arguments, except the seed and the command's own."""
    fields = {field.name: field for field in dataclasses.fields(EngineArgs)}
    parameters: list[inspect.Parameter] = []
    for panel, texts in ENGINE_HELP.items():
        for name, text in texts.items():
            if name in own:
                continue
            option = _engine_option(name, fields[name].type, panel, text)
            default = defaults.get(name, fields[name].default)
            parameters.append(_parameter(name, default, option))
    return parameters


def _engine_option(name: str, wished: Any, panel: str, text: str) -> Any:
    """Return the option for a field, with a type supported by typer: bool, int, float, str or list[str]."""
    kinds = set(get_args(wished)) - {NoneType} if get_args(wished) else {wished}
    flag = f"--{name.replace('_', '-')}"
    settings: dict[str, Any] = {"help": text, "rich_help_panel": panel}
    shown: Any = str
    if kinds == {bool}:
        shown, flag = bool, f"{flag}/{flag.replace('--', '--no-', 1)}"
        # The help texts name the switches that are on by default.
        settings["show_default"] = False
    elif list[str] in kinds:
        shown, settings["metavar"] = list[str], "TEXT"
    elif list[int] in kinds:
        settings |= {"parser": integers, "metavar": "N,N,…"}
    elif Any in kinds or any(get_origin(kind) is dict for kind in kinds):
        settings |= {"parser": json_object, "metavar": "JSON"}
    elif str not in kinds:
        (shown,) = kinds
    flags = [flag, SHORT[name]] if name in SHORT else [flag]
    return Annotated[shown | None, typer.Option(*flags, **settings)]


def _debug_option() -> inspect.Parameter:
    text = "Show the traceback of an error."
    option = typer.Option("--debug", help=text, rich_help_panel="Engine")
    return _parameter("debug", False, Annotated[bool, option])
