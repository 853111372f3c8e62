"""A decoder that reads whole prompts and keeps nothing: causal attention over fresh keys alone.

The keys of a step lie in scratch memory of one layer, which all layers share; each prompt has whole blocks
of it, so that the decoder's attention finds them as it finds a cache.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.arrays import from_numpy
from trouper.actors.executor.models.decoder import Decoder, ops_config
from trouper.actors.executor.models.traits import DecoderTraits
from trouper.actors.executor.weights.decoder import load_decoder
from trouper.config.resolve import EngineConfig
from trouper.kernels.cpu.attention.varlen import Group
from trouper.kernels.ops import CpuOps, HostTokens
from trouper.kernels.select import make_ops

BLOCK_SIZE = 16


class UnpagedDecoder:
    """A decoder with the interface of an encoder."""

    def __init__(self, decoder: Decoder[CpuOps]) -> None:
        self._decoder = decoder

    @classmethod
    def load(cls, config: EngineConfig, traits: DecoderTraits) -> Self:
        dtype: torch.dtype = getattr(torch, config.dtype)
        decoder = load_decoder(
            config,
            traits,
            ops=lambda: make_ops(ops_config(traits, dtype, BLOCK_SIZE)),
            has_head=False,
        )
        return cls(decoder)

    @property
    def num_bytes(self) -> int:
        return self._decoder.num_bytes

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        type_ids_T: Tensor,
        groups: Sequence[Group],
    ) -> Tensor:
        """Compute the hidden states [T, E]; a decoder ignores the types."""
        traits = self._decoder.traits
        lengths = [group.length for group in groups for _ in range(group.num_sequences)]
        num_blocks = -(-np.array(lengths) // BLOCK_SIZE)
        firsts = np.cumsum(num_blocks) - num_blocks
        block_ids = firsts[:, None] + np.arange(int(num_blocks.max()))
        slots_T = from_numpy(np.repeat(firsts * BLOCK_SIZE, lengths)) + positions_T
        rows, starts = range(len(lengths)), [0] * len(lengths)
        plans = {
            window: self._decoder.ops.plan(block_ids, rows, starts, lengths, window)
            for window in traits.windows
        }
        num_slots = int(num_blocks.sum()) * BLOCK_SIZE
        scratch = torch.empty(
            (2, traits.num_kv_heads, num_slots, traits.head_dim), dtype=self._decoder.dtype
        )
        tokens = HostTokens(token_ids_T, positions_T, slots_T)
        return self._decoder.forward(tokens, plans, [scratch] * len(traits.layers))
