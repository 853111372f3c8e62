"""The two ways to compute a generating model on the CPU: trouper's own code, and the code of the transformers library.

A runner is given one of them and treats both alike. Own code is faster, and it supports pipeline stages, tensor-parallel
ranks, speculation and recorded steps. The library's code supports every other architecture, on the whole model only.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from trouper.actors.executor.models.decoder import KVCacheSpec, StateSpec
from trouper.actors.executor.models.hf_decoder import HfDecoder
from trouper.actors.executor.models.mixers import state_specs
from trouper.actors.executor.models.native_decoder import (
    NativeDecoder,
    kv_cache_specs,
    ops_config,
)
from trouper.actors.executor.models.sharding import ALONE, ModelPart, Shard
from trouper.actors.executor.steps.adapter_heads import AdapterHeads
from trouper.actors.executor.steps.kv_memory import KVCache
from trouper.actors.executor.weights.decoder import Wrap, adapted_parameters, load_decoder
from trouper.config.engine_config import EngineConfig
from trouper.config.parallel import Stage
from trouper.kernels.cpu.sample import compile_sample
from trouper.kernels.ops import CpuOps, RankGroup
from trouper.kernels.select import make_ops


class Share(NamedTuple):
    """The share of each step that one worker computes; without other workers it is the whole step."""

    # Whether the last layer, and therefore the logits, are here.
    is_last: bool = True
    # Whether tokens are sampled here. Only one rank of the last stage does.
    samples: bool = True
    # The other ranks of this stage.
    group: RankGroup | None = None
    # [T, E], the memory for the output of the previous stage.
    hidden_TE: Tensor | None = None
    # The states of recurrent mixers in each other stage.
    states_elsewhere: tuple[tuple[StateSpec, ...], ...] = ()


WHOLE_STEP = Share()


class NativeModel:
    """A model, or one worker's part of it, that trouper's own code computes.

    Args:
        config: resolved; `model.path` contains safetensors or is a GGUF file, unless `load_format` is "dummy".
        stage: the pipeline stage of this worker. All layers by default.
        group: the tensor-parallel ranks of the stage, if there are several.
    """

    def __init__(
        self, config: EngineConfig, stage: Stage | None = None, group: RankGroup | None = None
    ) -> None:
        self._config, self._group = config, group
        self._part = ModelPart.of(
            config, stage, ALONE if group is None else Shard(group.rank, group.size)
        )
        self.cache_specs = kv_cache_specs(self._part.traits)
        self.state_specs: tuple[StateSpec, ...] | None = state_specs(self._part.traits)
        # Every stage checks an adapter for all layers, so that all stages accept it or none does.
        self.adapted = tuple(adapted_parameters(self._part.whole))
        traits, stage = self._part.whole, self._part.stage
        # Ranks have a part of the head each, and adapters store it whole.
        self.heads = (
            None
            if group is not None
            else AdapterHeads(
                (traits.vocab_size, traits.hidden_size),
                has_bias=traits.head_bias,
                is_here=stage.is_last,
            )
        )

    @property
    def has_three_positions(self) -> bool:
        """Whether all layers take positions in time, height and width (M-RoPE)."""
        return all(rope.sections for rope in self._part.traits.ropes)

    def load(self, wrap: Wrap | None = None) -> NativeDecoder[CpuOps]:
        """Read the weights, while another thread compiles the kernels.

        Raises:
            TrouperValidationError: the checkpoint does not fit the config.
        """
        config, part = self._config, self._part
        shape = ops_config(part.traits, getattr(torch, config.dtype), config.block_size)
        with ThreadPoolExecutor(1, "trouper-compile") as pool:
            ops = pool.submit(partial(make_ops, shape))
            draw = pool.submit(compile_sample)
            decoder = load_decoder(
                config,
                part.whole,
                ops=ops.result,
                shared=self._group,
                stage=part.stage,
                shard=part.shard,
                wrap=wrap,
            )
            draw.result()
            return decoder


class HfModel:
    """A model that the transformers library's code computes, with this engine's attention and linear layers.

    What its layers keep and which of them adapters may change is known only after its weights have been read.

    Args:
        config: resolved; `model.path` is a folder of safetensors unless `load_format` is "dummy".
    """

    cache_specs = None
    state_specs = None
    adapted = ()
    heads = None

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def load(self, wrap: Wrap | None = None) -> HfDecoder:
        """Build the library's model, read its weights, and compare its logits with the library's own.

        Raises:
            UnsupportedFeatureError: the model cannot be computed this way; the message gives the reason.
            TrouperValidationError: the checkpoint does not fit the model's class.
        """
        # Imported here because it imports transformers, which other models do not need.
        from trouper.actors.executor.weights.hf_model import load_hf_decoder

        return load_hf_decoder(self._config, wrap)


def allocate_kv_cache(
    specs: Sequence[KVCacheSpec],
    num_blocks: int,
    *,
    block_size: int,
    empty: Callable[[tuple[int, ...]], Tensor],
) -> KVCache:
    """Allocate the KV cache in host memory.

    It is not set to zeros: pages that no sequence has touched take no memory. The system provides them on first use.
    """
    return KVCache.allocate(
        specs,
        num_blocks=num_blocks,
        block_size=block_size,
        empty=empty,
    )
