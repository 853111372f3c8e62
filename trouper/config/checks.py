"""Check the types, ranges and choices of the values in `EngineArgs`, without a model."""

import dataclasses
import logging
import math
import operator
import os
import stat
from pathlib import Path
from typing import Any, cast

from trouper.config.args import EngineArgs
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid

logger = logging.getLogger("trouper")
AT_LEAST = {
    "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_num_scheduled_tokens": 1,
    "max_num_active_seqs": 1, "block_size": 1, "renderer_num_workers": 1, "stream_interval": 1,
    "num_gpu_blocks_override": 1, "kv_cache_memory_bytes": 1, "max_num_queued_reqs": 0,
    "max_num_queued_tokens": 0, "max_step_ms": 0, "encode_ms": 0, "long_prefill_token_threshold": 0, "max_logprobs": -1,
    "shutdown_timeout": 0, "seed": -(2**63), "max_worker_restarts": 0,
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1,
    "nnodes": 1, "node_rank": 0, "master_port": 1,
    "max_loras": 1, "max_lora_rank": 1, "max_cpu_loras": 1,
}  # fmt: skip
AT_MOST = {
    "seed": 2**63 - 1,
    "data_parallel_size": 64,
    "nnodes": 64,
    "master_port": 65535,
    "max_loras": 1024,
    "max_lora_rank": 1024,
    "max_cpu_loras": 1024,
}
# The formats to which plain weights can be rounded.
ROUNDED = ("int8", "int4")
# Formats of quantized checkpoints, including vLLM's names of its kernels.
METHODS = (
    "awq", "awq_marlin", "gptq", "gptq_marlin", "fp8", "compressed-tensors", "mxfp4", "gguf", "modelopt", "modelopt_fp4",
    "auto-round", "inc", "bitsandbytes",
)  # fmt: skip
METHOD_ALIASES = {
    "awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": "modelopt", "modelopt_fp8": "modelopt", "inc": "auto-round",
    "auto_round": "auto-round", "intel/auto-round": "auto-round",
}  # fmt: skip
ONE_OF = {
    "scheduling_policy": ("priority", "fcfs"),
    "device_worker": ("auto", "inline", "process"),
    "quantization": (None, *ROUNDED, *METHODS),
    "model_impl": ("auto", "trouper", "transformers"),
    "prefix_caching_hash_algo": ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
}
UNITS = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
IDLE_ON_CPU = ("cudagraph_capture_sizes", "gpu_memory_utilization")


def check_engine_args(args: EngineArgs) -> None:
    """Convert paths and numpy integers to plain values, and check all values.

    Raises:
        TrouperValidationError: a value has the wrong type or is out of range; the message names the option.
        UnsupportedFeatureError: a value selects a feature that trouper lacks.
    """
    _check_types(args)
    _check_numbers(args)
    _check_adaptive_threshold(args)
    for name, choices in ONE_OF.items():
        if getattr(args, name) not in choices:
            raise invalid(name, f"must be {' or '.join(map(str, choices))}", getattr(args, name))
    if args.prefix_caching_hash_algo != "sha256":
        raise UnsupportedFeatureError(
            f"prefix_caching_hash_algo={args.prefix_caching_hash_algo!r} is not supported yet; "
            "leave it at 'sha256'"
        )


def _check_adaptive_threshold(args: EngineArgs) -> None:
    if args.long_prefill_token_threshold_adaptive and not args.long_prefill_token_threshold:
        raise invalid(
            "long_prefill_token_threshold_adaptive",
            "has no effect without long_prefill_token_threshold (--long-prefill-token-threshold); set it, e.g. to 512",
            True,
        )


def log_idle_options(args: EngineArgs) -> None:
    """Log in one line which of the given GPU options have no effect on this engine.

    They are accepted, so that scripts for GPUs run unchanged on a CPU.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    idle = [name for name in IDLE_ON_CPU if getattr(args, name) != defaults[name]]
    if idle:
        logger.info("these options have no effect on the CPU: %s", ", ".join(idle))


def human_int(value: Any, parameter: str) -> int:
    """Parse a number such as `8k`, `1M`, `64MiB` or `4096`.

    Lower-case suffixes are decimal; upper-case suffixes and those with `iB` are binary.

    Raises:
        TrouperValidationError: the value is not a number; the message names the parameter.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        if not isinstance(value, str):
            return operator.index(value)
        text = value.strip()
        if text.endswith("iB"):
            text = text[:-2].upper()
        return int(float(text[:-1]) * UNITS[text[-1]]) if text[-1:] in UNITS else int(text)
    except (OverflowError, TypeError, ValueError):
        raise invalid(parameter, "must be a number such as 4096, 8k or 1M", value) from None


def check_private_folder(path: Path, parameter: str) -> None:
    """Create a folder with access for this user only, or check an existing one.

    Raises:
        TrouperValidationError: it belongs to another user, others may write to it, or it cannot be created.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        is_usable = stat.S_ISDIR(found.st_mode) and os.access(path, os.R_OK | os.W_OK | os.X_OK)
    except OSError as error:
        rule = f"the folder cannot be used: {error.strerror}"
        raise invalid(parameter, rule, str(path)) from None
    if found.st_uid != os.geteuid():
        raise invalid(parameter, "the folder belongs to another user", str(path))
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise invalid(
            parameter, "other users may write to the folder; run chmod 700 on it", str(path)
        )
    if not is_usable:
        raise invalid(parameter, "the folder cannot be read and written", str(path))


def _check_types(args: EngineArgs) -> None:
    for field in dataclasses.fields(args):
        name, value = field.name, getattr(args, field.name)
        if isinstance(value, os.PathLike):
            value = os.fspath(cast("os.PathLike[str]", value))
            setattr(args, name, value)
        if value is None and field.default is None:
            continue
        if field.type in (bool, bool | None) and not isinstance(value, bool):
            raise invalid(name, "must be True or False", getattr(args, name))
        is_text = (
            field.type in (str, str | None) and name != "dtype"
        )  # a torch dtype also has a name
        if is_text and not isinstance(value, str):
            raise invalid(name, "must be a string", getattr(args, name))
        if field.type == dict[str, Any] | None and not isinstance(value, dict):
            raise invalid(name, "must be a dict", getattr(args, name))
    if not isinstance(args.hf_token, str | bool | None):  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
        raise invalid("hf_token", "must be a string or a bool", args.hf_token)
    _check_lists(args)


def _check_lists(args: EngineArgs) -> None:
    names: Any = args.served_model_name
    if names is not None and not isinstance(names, str) and not _is_list_of(names, str):
        raise invalid(
            "served_model_name", "must be a string or a list of strings", args.served_model_name
        )
    targets: Any = args.lora_target_modules
    if targets is not None and not _is_list_of(targets, str):
        raise invalid("lora_target_modules", "must be a list of strings", args.lora_target_modules)
    sizes: Any = args.cudagraph_capture_sizes
    if sizes is not None and not _is_list_of(sizes, int):
        raise invalid(
            "cudagraph_capture_sizes", "must be a list of integers", args.cudagraph_capture_sizes
        )
    if sizes is not None and min(sizes, default=1) < 1:
        raise invalid(
            "cudagraph_capture_sizes", "must be at least 1 each", args.cudagraph_capture_sizes
        )


def _check_numbers(args: EngineArgs) -> None:
    memory = args.kv_cache_memory_bytes
    if isinstance(memory, str):
        args.kv_cache_memory_bytes = human_int(memory, "kv_cache_memory_bytes")
    for name in AT_LEAST:
        value = _as_integer(getattr(args, name))
        setattr(args, name, value)
        if value is not None or not _is_optional(args, name):
            _check_number(args, name, value)
    for name in ("watermark", "gpu_memory_utilization"):
        if not _is_number(getattr(args, name)):
            raise invalid(name, "must be a number", getattr(args, name))
    for name in ("worker_restart_window", "step_timeout"):
        value = getattr(args, name)
        if value is not None and not (_is_number(value) and 0 < value < math.inf):
            raise invalid(name, "must be a number of seconds above 0", value)
    if not 0 <= args.watermark < 1:
        raise invalid("watermark", "must be in [0, 1)", args.watermark)
    if not 0 < args.gpu_memory_utilization <= 1:
        raise invalid("gpu_memory_utilization", "must be in (0, 1]", args.gpu_memory_utilization)


def _check_number(args: EngineArgs, name: str, value: Any) -> None:
    low, high = AT_LEAST[name], AT_MOST.get(name)
    if not _is_number(value):
        raise invalid(name, "must be a number", getattr(args, name))
    if not value >= low:
        raise invalid(name, f"must be at least {low}", getattr(args, name))
    if high is not None and value > high:
        raise invalid(name, f"must be at most {high}", getattr(args, name))
    if name != "shutdown_timeout" and not isinstance(value, int):
        raise invalid(name, "must be an integer", getattr(args, name))


def _is_optional(args: EngineArgs, name: str) -> bool:
    (field,) = (field for field in dataclasses.fields(args) if field.name == name)
    return field.default is None or field.type == int | None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list_of(values: Any, kind: type[Any]) -> bool:
    return isinstance(values, list | tuple) and all(
        isinstance(value, kind) and not isinstance(value, bool)
        for value in cast("list[Any]", values)
    )


def _as_integer(value: Any) -> Any:
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def environ_number(name: str, default: float) -> float:
    """Read a number ≥ 0 from an environment variable."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise TrouperValidationError("must be a number ≥ 0", parameter=name, value=text)
    return value
