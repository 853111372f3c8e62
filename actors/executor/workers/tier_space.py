"""Compute the space of a model's files in the KV tier: a digest of everything that determines KV values except the tokens.

Two processes with the same space compute the same KV for the same tokens, so each may use the files of the other.  The digest covers
whatever might change a bit.  A superfluous fact in it only costs a recomputation; a missing one would give wrong tokens.
"""

import fcntl
import hashlib
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from trouper.actors.executor.steps.tier_files import RefusedError, TierDisk
from trouper.actors.executor.workers.model_files import weight_files
from trouper.actors.runtime.startup import num_physical_cores
from trouper.config.checkpoint.hf_config import rope_groups
from trouper.config.engine_config import EngineConfig
from trouper.kernels.codegen import choice
from trouper.kernels.select import this_processor

# Fields of the config that cannot change a bit of KV.  All others are part of the space, and so is every field added later.
NOT_SHAPING = frozenset({
    "model", "draft_model", "tokenizer", "code_path", "device_worker", "max_worker_restarts", "worker_restart_window_s",
    "step_timeout_s", "data_parallel_size", "nodes", "num_workers_here", "cpu_bind", "gpu_memory_utilization",
    "is_length_open", "is_num_seqs_open", "max_logprobs", "renderer_num_workers", "num_blocks", "kv_cache_bytes", "stream_interval",
    "chat_template", "structured_outputs", "reasoning", "enable_prompt_embeds", "media", "no_media", "shutdown_timeout_s",
    "render_timeout_s", "log_stats", "log_stats_interval_s", "metrics_prefix", "served_names", "profiler_config",
    "otlp_traces_endpoint", "max_num_queued_reqs", "max_num_queued_tokens", "scheduler", "tier", "max_model_len", "seed",
})  # fmt: skip
NOT_SHAPING_OF_MODEL = frozenset(
    {"path", "name", "eos_token_ids", "default_sampling", "sampling_source"}
)
# The options of a processor are part of the keys of its items.
NOT_SHAPING_OF_MEDIA = frozenset({
    "folder", "max_items", "processor_cache_bytes", "encoder_cache_bytes", "processor_kwargs", "in_process", "sources",
})  # fmt: skip
# Packages that compute KV, or the arrays of images and recordings.
PACKAGES = (
    "torch", "numpy", "llvmlite", "transformers", "peft", "pillow", "torchvision", "soundfile", "soxr",
)  # fmt: skip
# Folders of trouper's own code that does the same.
FOLDERS = "kernels", "actors/executor", "actors/rendering/media"
PIECE_BYTES = 2**22
# The limits of the file of digests: entries of about 200 bytes, and bytes.
MOST_DIGESTS = 10_000
MEMORY_BYTES = 2**22


def find_space(config: EngineConfig, worker: int, num_threads: int) -> bytes:
    """Return the 16 bytes that name the space.  Reads all weight files without a cached digest.

    Args:
        worker: the index of the worker within its device. Each worker stores its part of every block in a space of its own.
        num_threads: threads that compute the model, unless it is tiny.
    """
    assert config.tier is not None
    models = [model for model in (config.model, config.draft_model) if model]
    facts = [
        _without(config, NOT_SHAPING),
        [_without(model, NOT_SHAPING_OF_MODEL) for model in models],
        None if config.media is None else _without(config.media, NOT_SHAPING_OF_MEDIA),
        config.seed if config.load_format == "dummy" else None,
        config.max_model_len if any(_has_long_factors(m.hf_config) for m in models) else None,
        _digests(weight_files(config), Path(config.tier.folder) / "weights.json"),
        # How the work is divided decides which part of a block a worker stores.
        [config.num_stages, worker, [num_physical_cores(cpus) for cpus in config.cpu_bind or ()]],
        num_threads,
        _code_digest(),
        _machine(),
    ]
    text = msgspec.json.encode(facts, order="deterministic", enc_hook=repr)
    return hashlib.sha256(text).digest()[:16]


def _has_long_factors(config: dict[str, Any]) -> bool:
    """Check for LongRoPE, with which `max_model_len` changes the rotation of all keys, also those of short sequences.

    It is detected by its factors, because Phi-3 calls this kind of rope `su` or `yarn`.
    """
    return any(rope.get("long_factor") for rope in rope_groups(config))


def _without(struct: msgspec.Struct, names: frozenset[str]) -> dict[str, Any]:
    fields = msgspec.structs.asdict(struct)
    return {name: value for name, value in fields.items() if name not in names}


def _digests(files: Iterable[Path], memory: Path) -> list[str]:
    """Return the SHA-256 digests of whole files.  Unchanged files are not read again at the next start.

    If several processes start together, the first one reads the files, and the others wait for its digests.

    Args:
        memory: the file that caches digests.  If it is damaged, they are computed again.
    """
    labels = {_label(file): file for file in files}
    known = _read_digests(memory)
    if not labels.keys() <= known.keys():
        # The operating system releases the lock when this process ends.
        with open(memory.with_suffix(".lock"), "wb", opener=_open_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = _read_digests(memory)
            known |= {label: _digest(labels[label]) for label in labels.keys() - known.keys()}
            # If the cache cannot be written, the next start just reads the weights again.
            with suppress(OSError):
                temporary = memory.with_name(f"weights-{os.getpid()}.tmp")
                temporary.unlink(missing_ok=True)
                TierDisk().write(str(temporary), (_remembered(known),))
                temporary.replace(memory)
    return [known[label] for label in labels]


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _label(file: Path) -> str:
    """Identify the contents of a file by its metadata, with the inode's change time (ctime), which no program can set."""
    about = file.stat()
    facts = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
    return ":".join(map(str, facts))


def _read_digests(memory: Path) -> dict[str, str]:
    """Read the cached digests.  They decide which KV is used, so the file must be a regular file owned by this user."""
    try:
        return msgspec.json.decode(TierDisk().read(str(memory), MEMORY_BYTES), type=dict[str, str])
    except (OSError, RefusedError, msgspec.DecodeError):
        return {}


def _remembered(digests: dict[str, str]) -> bytes:
    """Encode the newest digests only, so that the file stays small."""
    newest = list(digests.items())[-MOST_DIGESTS:]
    return msgspec.json.encode(dict(newest))


def _digest(file: Path) -> str:
    digest, room = hashlib.sha256(), bytearray(PIECE_BYTES)
    with open(file, "rb", buffering=0) as reader:
        while count := reader.readinto(room):
            digest.update(memoryview(room)[:count])
    return digest.hexdigest()


def _code_digest() -> str:
    """Return a digest of the code that computes KV: trouper's source files, and the versions of the packages that it calls."""
    digest, package = hashlib.sha256(), Path(__file__).parents[3]
    for folder in FOLDERS:
        for file in sorted((package / folder).rglob("*.py")):
            digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    for name in PACKAGES:
        try:
            digest.update(f"{name} {version(name)}".encode())
        except PackageNotFoundError:
            digest.update(f"{name} none".encode())
    return digest.hexdigest()


def _machine() -> list[str]:
    """Describe the processor, and the instructions that kernels use on it."""
    return [
        platform.machine(),
        # Sorted, because the order of a set differs from process to process.
        *(repr(sorted(map(str, f)) if isinstance(f, frozenset) else f) for f in this_processor()),
        choice.chosen(),
        torch.backends.cpu.get_cpu_capability(),
        np.__version__,
        _processor_name(),
    ]


def _processor_name() -> str:
    """Return the processor's name and features from the kernels' compiler.  Returns an empty text without a compiler."""
    try:
        from trouper.kernels.codegen.features import target
    except ImportError:
        return ""
    return repr(target())
