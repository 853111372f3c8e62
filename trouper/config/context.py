"""Choose the context length and the size of the KV cache, within the memory of this machine and of this process's container.

If the user sets no length, the engine uses the model's own, or a shorter one that fits the KV cache.  On a CPU the cache by default
takes half of the memory that remains after loading the weights.  A page uses memory only when it is first written, so a large cache
costs nothing at start.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from trouper.config.args import EngineArgs
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.config.checks import METHOD_ALIASES, environ_number, human_int
from trouper.config.devices import DeviceKind
from trouper.config.engine_config import EngineConfig
from trouper.config.gguf.header import read_gguf
from trouper.config.model import ITEM_BYTES, ModelConfig
from trouper.errors import TrouperValidationError, invalid

MEMBERSHIPS = Path("proc/self/cgroup")
GROUPS = Path("sys/fs/cgroup")
# Version 1 of cgroups represents "no limit" by a number above this one.
UNLIMITED = 2**60
# For cgroup versions 2 and 1: the files with the limit and the usage, and the field of memory.stat that counts reclaimable
# file pages.
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/"), *, with_swap: bool = False) -> int | None:
    """Return the bytes that can be allocated before memory must be reclaimed, or None if the system does not report it.

    It is the minimum over the machine, the cgroup of this process, and the cgroup's parents.
    """
    kib = _numbers(root / "proc/meminfo")
    if "MemAvailable" not in kib:
        return None
    left = [(kib["MemAvailable"] + (kib.get("SwapFree", 0) if with_swap else 0)) * 2**10]
    for folder in control_groups(root / MEMBERSHIPS, root / GROUPS):
        for limit_file, used_file, cache in FILES:
            limit, used = read_number(folder / limit_file), read_number(folder / used_file)
            if limit is not None and used is not None and limit < UNLIMITED:
                left.append(limit - used + _numbers(folder / "memory.stat").get(cache, 0))
    return max(0, min(left))


def control_groups(memberships: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups, each followed by its parents, since the limit of any of them applies.

    Handles both versions of cgroups: version 1 has a folder for each controller below `root`.
    """
    for line in read_text(memberships).splitlines():
        _, controllers, path = line.split(":", 2)
        top = root / controllers if controllers else root
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            yield folder


def read_number(path: Path) -> int | None:
    """Read a file with one number.  Returns None for another text, and if the file does not exist."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None


def read_text(path: Path) -> str:
    """Read a file.  Returns an empty text if it is absent or unreadable."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _numbers(path: Path) -> dict[str, int]:
    """Read lines with a name and a number."""
    lines = (line.replace(":", " ").split() for line in read_text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


GIB = 2**30
# The size of the KV cache on a system that does not report its available memory.
UNKNOWN_KV_CACHE_BYTES = 2 * GIB
# The KV cache's share of the memory that the weights leave.  Activations, adapters, prompts and other programs need the rest.
KV_SHARE = 0.5
# Estimated memory of the interpreter, torch and the activations of a step, in each process that computes.
PROGRAM_BYTES = 384 * 2**20
# The shortest useful context: an engine without memory for it does not start, unless the user asks for a shorter one.
LEAST_CONTEXT = 1024
# The size of a model with rounded weights relative to bfloat16.  The embedding is not rounded.
ROUNDED_SHARES = {"int8": 0.55, "int4": 0.36}
COMPRESSED_SHARE = 0.77
# The true size of the weights is at least this share of the estimate.
SURE_SHARE = 0.85
MORE = "kv_cache_memory_bytes (--kv-cache-memory-bytes)"


class Sizes(NamedTuple):
    """Sizes of an engine known before its weights are read."""

    # The tokens of the longest sequence that the model can compute.
    longest: int
    block_size: int
    # The bytes of one token's keys and values in one worker.
    token_bytes: int | None
    # The share of `token_bytes` in layers without a window.  Layers with a window store few tokens of a long sequence.
    lasting_share: float
    # The bytes of the weights of all replicas on this machine.
    weight_bytes: int
    # The number of workers on this machine.
    num_workers: int


class Context(NamedTuple):
    """The context length, and the memory of the KV cache."""

    max_model_len: int
    kv_cache_bytes: int | None  # bytes of each worker
    # Whether the user gave no length, so that the engine may shorten it.
    is_open: bool


def choose_context(args: EngineArgs, sizes: Sizes, kv_cache_bytes: int | None) -> Context:
    """Choose the context length of a generative model.

    Args:
        kv_cache_bytes: the memory that the user gives, or None to leave it to the device.

    Raises:
        TrouperValidationError: the user's length is not a number, or exceeds the model's own.
    """
    given = given_length(args.max_model_len, sizes.longest)
    if given is not None:
        return Context(given, kv_cache_bytes, False)
    num_blocks = args.num_gpu_blocks_override
    if num_blocks is None and sizes.token_bytes and kv_cache_bytes:
        # Layers with a window need little more memory; the devices shorten the length further if it does not fit.
        lasting_bytes = max(1, int(sizes.token_bytes * sizes.lasting_share))
        num_blocks = kv_cache_bytes // (lasting_bytes * sizes.block_size)
    fits = sizes.longest if num_blocks is None else num_blocks * sizes.block_size
    return Context(max(1, min(sizes.longest, fits)), kv_cache_bytes, True)


def default_kv_cache_bytes(args: EngineArgs, sizes: Sizes, available: int | None) -> int:
    """Choose the memory of each worker's KV cache on a CPU.

    It is half of the memory that the weights leave, or up to all of it if the requested context, or `LEAST_CONTEXT`, needs more.

    Args:
        available: bytes that the machine can provide, or None if the system does not report it.

    Raises:
        TrouperValidationError: the weights leave too little memory for the least context.
    """
    if available is None:
        return UNKNOWN_KV_CACHE_BYTES
    left = available - sizes.weight_bytes - sizes.num_workers * PROGRAM_BYTES
    room = max(0, left // sizes.num_workers)
    wanted = given_length(args.max_model_len, sizes.longest)
    least = min(sizes.longest, wanted or LEAST_CONTEXT)
    needed = -(-least // sizes.block_size) * sizes.block_size * (sizes.token_bytes or 0)
    if wanted is None and needed > room and args.num_gpu_blocks_override is None:
        raise invalid(
            "model",
            f"the weights take about {_gb(sizes.weight_bytes)}, the program {_gb(sizes.num_workers * PROGRAM_BYTES)} "
            f"and a context of {least:,} tokens {_gb(sizes.num_workers * needed)}, but this machine has only "
            f"{_gb(available)} available: use a smaller or quantized model, free memory, or set {MORE} to start anyway",
            args.model,
        )
    return max(int(room * KV_SHARE), min(needed, room), 1)


def check_weights_fit(args: EngineArgs, weight_bytes: int, available: int | None) -> None:
    """Refuse weights that certainly exceed memory, because the system would kill the process during the load.

    Args:
        available: bytes that the machine can provide, including swap, or None if the system does not report it.

    Raises:
        TrouperValidationError: the message names the size of the weights and the available memory.
    """
    if available is not None and weight_bytes * SURE_SHARE > available:
        raise invalid(
            "model",
            f"the weights take about {_gb(weight_bytes)}, but this machine has only {_gb(available)} available: "
            "use a smaller or quantized model, or quantization='int4' (--quantization int4)",
            args.model,
        )


def given_length(value: Any, longest: int) -> int | None:
    """Parse the user's length.  Returns None for no value, -1 or auto, which leave the length open.

    Args:
        longest: the model's own length.

    Raises:
        TrouperValidationError: the value is not a number, or exceeds the model's own length.
    """
    if value is None or value == -1:
        return None
    if isinstance(value, str) and value.strip().lower() in ("auto", "-1"):
        return None
    length = human_int(value, "max_model_len")
    if not 1 <= length <= longest:
        rule = f"max_model_len must be in [1, {longest}] for this model"
        raise TrouperValidationError(rule, parameter="max_model_len", value=value)
    return length


def weight_bytes(args: EngineArgs, model: ModelConfig, dtype: str) -> int:
    """Estimate the memory of the weights of one replica in bytes, before they are read.

    Accounts for the dtype, quantization and compression that will be applied.  Returns 0 if the
    model's files do not determine it.
    """
    if model.is_gguf:
        return _gguf_bytes(Path(model.path), dtype)
    stored = _file_bytes(Path(model.path)) if args.load_format != "dummy" else 0
    if stored and (scheme := model.hf_config.get("quantization_config")):
        return int(stored * _growth(cast("dict[str, Any]", scheme), ITEM_BYTES[dtype]))
    size = stored * ITEM_BYTES[dtype] // ITEM_BYTES[model.dtype]
    tables = 2 * int(model.vocab_size) * model.hidden_size * ITEM_BYTES[dtype]
    if not stored:
        size = _num_weights(model.hf_config) * ITEM_BYTES[dtype] + tables
    elif model.hf_config.get("tie_word_embeddings"):
        size += tables // 2
    share = ROUNDED_SHARES.get(
        args.quantization or "", COMPRESSED_SHARE if args.compress_weights else 1
    )
    return int(size * share)


def _growth(scheme: dict[str, Any], item_bytes: int) -> float:
    """Return how many bytes in memory each byte of a quantized checkpoint takes; some formats are widened at load."""
    match METHOD_ALIASES.get(scheme.get("quant_method", ""), scheme.get("quant_method")):
        case "fp8" | "fbgemm_fp8":
            return item_bytes
        case "bitsandbytes":
            return 1 if scheme.get("load_in_8bit") else 2 * item_bytes
        case "modelopt":
            algorithm = (scheme.get("quantization") or scheme).get("quant_algo")
            return 2 if algorithm == "NVFP4" else item_bytes
        case _:
            return 1


def _file_bytes(folder: Path) -> int:
    """Add up the sizes of the weight files in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _gguf_bytes(path: Path, dtype: str) -> int:
    """Add up the tensors of a GGUF file by their size in memory.

    With bfloat16, integers of few bits become bytes; with other dtypes they are widened.
    """
    tensors, size = read_gguf(path).tensors, 0.0
    is_tied = "output.weight" not in tensors
    for name, tensor in tensors.items():
        plain = ITEM_BYTES[dtype]
        held = tensor.type.held if dtype == "bfloat16" and tensor.type.length > 1 else plain
        if name == "token_embd.weight":
            # The embedding stays a plain table; the head is stored as integers, also if both are the same tensor.
            held = held + plain if is_tied else plain
        size += math.prod(tensor.shape) * held
    return int(size)


def _num_weights(config: Mapping[str, Any]) -> int:
    """Count the weights of a decoder's layers by its config.json.  Returns 0 if the fields are missing."""
    try:
        hidden, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        head_dim = int(config.get("head_dim") or hidden // num_heads)
        num_experts = int(config.get("num_local_experts") or config.get("num_experts") or 1)
        width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
        attention = 2 * hidden * head_dim * (num_heads + num_kv_heads)
        return int(config["num_hidden_layers"]) * (attention + 3 * hidden * width * num_experts)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return 0


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def find_context(
    args: EngineArgs, sizes: Sizes, device: DeviceKind, pooler: PoolerSpec | None
) -> Context:
    """Choose the context length and the memory of the KV cache; a pooling model has no cache."""
    kv_cache_bytes = cast("int | None", args.kv_cache_memory_bytes)  # a text is already parsed
    if kv_cache_bytes is None and device == "cpu":
        kv_cache_bytes = int(environ_number("TROUPER_CPU_KVCACHE_SPACE", 0.0) * 2**30) or None
    measures = kv_cache_bytes is None and device == "cpu"
    if measures:
        check_weights_fit(args, sizes.weight_bytes, available_bytes(with_swap=True))
    if pooler is not None:
        length = given_length(args.max_model_len, sizes.longest)
        default = min(sizes.longest, pooler.max_length or sizes.longest)
        return Context(default if length is None else length, kv_cache_bytes, length is None)
    if measures:
        kv_cache_bytes = default_kv_cache_bytes(args, sizes, available_bytes())
    return choose_context(args, sizes, kv_cache_bytes)


def fitted(config: EngineConfig, num_tokens: int, longest: int | None = None) -> EngineConfig:
    """Shorten the context of an engine to the length that its devices can hold.

    Args:
        num_tokens: the length of the longest sequence that the KV blocks hold.
        longest: the largest length that the model's code can compute, if it is less than the model's own.
    """
    fits = min(num_tokens, longest or sys.maxsize)
    if not config.is_length_open or config.pooler is not None or fits >= config.max_model_len:
        return config
    scheduler = msgspec.structs.replace(config.scheduler, max_model_len=fits)
    return msgspec.structs.replace(
        config, max_model_len=fits, scheduler=scheduler, model=config.model.with_lengths_below(fits)
    )


def with_state_rows(config: EngineConfig, num_rows: int) -> EngineConfig:
    """Lower the number of running sequences to the recurrent states that the devices can hold.

    Args:
        num_rows: the number of sequences whose recurrent states fit; 0 for a model without such states.
    """
    scheduler = config.scheduler
    if not num_rows or num_rows >= scheduler.max_num_seqs:
        return config
    most_active = min(scheduler.max_num_active_seqs, num_rows)
    lowered = msgspec.structs.replace(
        scheduler, max_num_seqs=num_rows, max_num_active_seqs=most_active
    )
    return msgspec.structs.replace(config, scheduler=lowered)


def states_line(config: EngineConfig, num_rows: int, row_bytes: int) -> str | None:
    """Describe how recurrent states limit the number of running sequences.  Returns None if they do not."""
    if not num_rows or num_rows >= config.scheduler.max_num_seqs:
        return None
    return (
        f"recurrent states take {row_bytes / 1e6:.3g} MB per sequence: at most {num_rows} sequences run at once; "
        "increase --kv-cache-memory-bytes for more"
    )


def context_line(config: EngineConfig, longest: int | None = None) -> str | None:
    """Describe a context shorter than the model's: why, and how to get more.  Returns None for a full one."""
    length, whole = config.max_model_len, config.model.max_position_embeddings
    if not config.is_length_open or config.pooler is not None or length >= whole:
        return None
    if length == longest:
        why = "in a longer one the model's code makes a sequence depend on the length of others"
    elif config.device == "cuda":
        why = "a longer one does not fit the KV cache; increase --gpu-memory-utilization"
    else:
        why = "a longer one does not fit the KV cache; increase --kv-cache-memory-bytes"
    return f"context {length:,} of {whole:,} tokens: {why}"
