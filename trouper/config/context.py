"""The length of the context, and the memory for the KV cache that it needs.

A length that is not given is what fits: the model's own, or less where the KV cache has no room for it.  On a CPU the
cache may by default take half of what the weights leave of the memory that is available.  Its pages take memory when
they are first used, so a large cache costs nothing at start.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from trouper.config.args import EngineArgs
from trouper.config.checks import METHOD_ALIASES, human_int
from trouper.config.gguf.header import read_gguf
from trouper.config.model import ITEM_BYTES, ModelConfig
from trouper.errors import TrouperValidationError, invalid

GIB = 2**30
# Of the KV cache on a system that does not say how much memory is available.
UNKNOWN_KV_CACHE_BYTES = 2 * GIB
# Of what the weights leave: activations, adapters, prompts and other programs need the rest.
KV_SHARE = 0.5
# The interpreter, torch and the activations of a step, in each process that computes.
PROGRAM_BYTES = 384 * 2**20
# A shorter context answers no real question, so an engine that has no memory for it does not start unasked.
LEAST_CONTEXT = 1024
# What weights take that are rounded at load, as a share of bfloat16; the table of embeddings stays as it is.
ROUNDED_SHARES = {"int8": 0.55, "int4": 0.36}
COMPRESSED_SHARE = 0.77
# Estimates of weights are too high by less than this where they are too high.
SURE_SHARE = 0.85
MORE = "kv_cache_memory_bytes (--kv-cache-memory-bytes)"


class Sizes(NamedTuple):
    """Sizes of an engine that are known before the weights are read."""

    longest: int  # tokens of the longest sequence that the model can compute
    block_size: int
    token_bytes: int | None  # of one token's keys and values in one worker
    weight_bytes: int  # of all replicas that are on this machine
    num_workers: int  # on this machine


class Context(NamedTuple):
    """The length in force, and the memory for it."""

    max_model_len: int
    kv_cache_bytes: int | None  # of each worker
    is_open: bool  # the length was not given, so it may be shortened


def choose_context(args: EngineArgs, sizes: Sizes, kv_cache_bytes: int | None) -> Context:
    """Choose the length of a model that generates.

    Args:
        kv_cache_bytes: the memory that the user gives; None leaves it to the device.

    Raises:
        TrouperValidationError: the length that the user gave is none, or beyond the model's own.
    """
    given = given_length(args.max_model_len, sizes.longest)
    if given is not None:
        return Context(given, kv_cache_bytes, False)
    num_blocks = args.num_gpu_blocks_override
    if num_blocks is None and sizes.token_bytes and kv_cache_bytes:
        num_blocks = kv_cache_bytes // (sizes.token_bytes * sizes.block_size)
    fits = sizes.longest if num_blocks is None else num_blocks * sizes.block_size
    return Context(max(1, min(sizes.longest, fits)), kv_cache_bytes, True)


def default_kv_cache_bytes(args: EngineArgs, sizes: Sizes, available: int | None) -> int:
    """Choose the memory of each worker's KV cache on a CPU.

    Half of what the weights leave, or all of it where a context that was asked for, or the least one, needs it.

    Args:
        available: bytes that the machine can give; None where it does not say.

    Raises:
        TrouperValidationError: not even the least context fits beside the weights.
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
            f"and a context of {least:,} tokens {_gb(sizes.num_workers * needed)}, but this machine can give "
            f"{_gb(available)}: take a smaller or a quantised model, free memory, or set {MORE} to start anyway",
            args.model,
        )
    return max(int(room * KV_SHARE), min(needed, room), 1)


def check_weights_fit(args: EngineArgs, weight_bytes: int, available: int | None) -> None:
    """Refuse weights that are certainly larger than memory, which the system would end the process for.

    Args:
        available: bytes that the machine can give, swap included; None where it does not say.

    Raises:
        TrouperValidationError: it says how large they are and how much there is.
    """
    if available is not None and weight_bytes * SURE_SHARE > available:
        raise invalid(
            "model",
            f"the weights take about {_gb(weight_bytes)}, but this machine can give {_gb(available)}: "
            "take a smaller or a quantised model, or quantization='int4' (--quantization int4)",
            args.model,
        )


def given_length(value: Any, longest: int) -> int | None:
    """Read the length that the user gave; None leaves it open: no value, -1 or auto.

    Args:
        longest: the model's own length.

    Raises:
        TrouperValidationError: it is no number, or beyond the model's own length.
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
    """Estimate what the weights of one replica take in memory; 0 where nothing says."""
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
    """Return how many bytes in memory each byte of a quantised checkpoint takes: some formats are read as wider ones."""
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
    """Sum up the files of weights of a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _gguf_bytes(path: Path, dtype: str) -> int:
    """Sum up the tensors of a GGUF file as they are held: integers of few bits become bytes beside bfloat16, else plain."""
    tensors, size = read_gguf(path).tensors, 0.0
    is_tied = "output.weight" not in tensors
    for name, tensor in tensors.items():
        plain = ITEM_BYTES[dtype]
        held = tensor.type.held if dtype == "bfloat16" and tensor.type.length > 1 else plain
        if name == "token_embd.weight":
            # Rows are looked up in a plain table; the head multiplies with integers.
            held = held + plain if is_tied else plain
        size += math.prod(tensor.shape) * held
    return int(size)


def _num_weights(config: Mapping[str, Any]) -> int:
    """Count the weights of a decoder's layers from its config.json; 0 where that does not say."""
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
