"""Report the progress of loading, and summarise a server when it is ready."""

import logging
from collections.abc import Sequence
from typing import Any, TextIO

import anyio

from trouper.actors.executor.device import DeviceInfo
from trouper.config.engine_config import EngineConfig
from trouper.config.generation import describe_sampling
from trouper.config.media import ITEMS, NO_IMAGES, modality_of
from trouper.extras import missing_features

REDRAW_S = 0.25
CLEAR = "\r\x1b[K"  # of a terminal's line


def summarise(
    name: str, config: EngineConfig, info: DeviceInfo, addresses: Sequence[str], seconds: float
) -> list[str]:
    """Describe a ready server by its addresses, model, memory and limits, with one line for each.

    Among others, operators can see whether the context length was reduced and how many tokens fit the KV cache.
    """
    whole = config.model.max_position_embeddings
    of = f" of {whole:,}" if config.max_model_len < whole else ""
    context = f"{config.max_model_len:,}{of} tokens of context"
    lines = [f"serving {name} at {', '.join(addresses)}"]
    facts = {
        "model": f"{config.model.architecture}, {info.dtype}, {context}",
        "weights": _weights(config, info),
        "device": f"{info.name}, {_workers(config)}",
        "KV cache": _kv_cache(config, info),
        _shown_media(config): _media(config),
        "sampling": _sampling(config),
        "loaded in": f"{seconds:.1f} s",
    }
    lines += [f"{fact}: {text}" for fact, text in facts.items() if text]
    if config.pooler is None:
        lines += [f"not available: {name} ({hint})" for name, hint in missing_features().items()]
    return lines


def _shown_media(config: EngineConfig) -> str:
    return ITEMS[modality_of(config.model.source_config)]


def _media(config: EngineConfig) -> str:
    """Describe how many images or recordings a request may contain, or why none although the model supports them."""
    if config.media is not None:
        return f"at most {config.media.max_items} in a request"
    return "" if config.no_media == NO_IMAGES else f"none: {config.no_media}"


def _sampling(config: EngineConfig) -> str:
    """Describe the default sampling."""
    if config.pooler is not None:
        return ""
    model = config.model
    return f"{describe_sampling(model.default_sampling)} (defaults: {model.sampling_source})"


def _weights(config: EngineConfig, info: DeviceInfo) -> str:
    """Describe the memory of the weights of all stages."""
    if not info.num_weight_bytes:
        return ""
    stored: dict[str, Any] = config.model.hf_config.get("quantization_config") or {}
    method: str | None = stored.get("quant_method")
    of = f", of a checkpoint in {method}" if method else ""
    return f"{info.num_weight_bytes / 1e9:.2f} GB in memory{of}"


def _workers(config: EngineConfig) -> str:
    if config.device_worker == "inline":
        return "in the server's process"
    num_replicas, nodes = config.data_parallel_size, config.nodes
    where = (
        "" if nodes is None
        else " by Ray" if nodes.backend == "ray"
        else f" on {nodes.num_nodes} machines"
    )  # fmt: skip
    if config.workers_per_replica > 1:
        part = (
            "a stage" if config.tensor_parallel_size == 1
            else "a rank" if config.num_stages == 1
            else "a rank of a stage"
        )  # fmt: skip
        whole = "the model" if num_replicas == 1 else "a replica"
        num_workers = config.workers_per_replica * num_replicas
        return f"in {num_workers} worker processes{where}, {part} of {whole} each"
    if num_replicas > 1:
        return f"in {num_replicas} worker processes{where}, a replica each"
    return f"in a worker process{where}"


def _kv_cache(config: EngineConfig, info: DeviceInfo) -> str:
    if config.pooler is not None:
        return ""
    num_blocks = info.num_blocks - 1  # all but the null block
    num_seqs = config.scheduler.max_num_seqs
    each = ", of each replica" if config.data_parallel_size > 1 else ""
    return (
        f"{num_blocks:,} blocks of {info.block_size} tokens ({info.num_kv_tokens(config.max_model_len):,} in all), "
        f"for at most {num_seqs:,} sequences at once{each}"
    )


class LoadingLine(logging.Handler):
    """Show the current step of loading and the elapsed time in one redrawn terminal line.

    While it is drawn, log records of `trouper.loading` appear only in this line.
    """

    def __init__(self, terminal: TextIO) -> None:
        super().__init__()
        self._terminal = terminal
        self._logger = logging.getLogger("trouper.loading")
        self._last = "loading the model"

    def emit(self, record: logging.LogRecord) -> None:
        self._last = record.getMessage()

    def draw(self, seconds: float) -> None:
        """Replace the line, with the elapsed time in seconds."""
        self._terminal.write(f"{CLEAR}trouper: {self._last} … {seconds:.0f} s")
        self._terminal.flush()

    async def keep_drawn(self) -> None:
        """Redraw the line until cancelled, then clear it."""
        begun_s = anyio.current_time()
        before = self._logger.level, self._logger.propagate
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        try:
            while True:
                self.draw(anyio.current_time() - begun_s)
                await anyio.sleep(REDRAW_S)
        finally:
            self._logger.removeHandler(self)
            self._logger.level, self._logger.propagate = before
            self._terminal.write(CLEAR)
            self._terminal.flush()
