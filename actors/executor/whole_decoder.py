"""A decoder that reads whole prompts and keeps nothing: causal attention over fresh keys alone.

The decoder's paged attention takes its keys from the step itself where a prompt is computed in one tile;
what several tiles need of each other lies in scratch memory of one layer, which all layers share.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.models.decoder import Decoder
from trouper.actors.executor.models.traits import DecoderTraits
from trouper.actors.executor.weights import load_decoder
from trouper.config import EngineConfig
from trouper.kernels.attention_plan import plan_attention
from trouper.kernels.paged_attention import MAX_TILE_CAPPED
from trouper.kernels.varlen_attention import Group


class WholeDecoder:
    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._max_tile = MAX_TILE_CAPPED if decoder.traits.attention_softcap else None

    @classmethod
    def load(cls, config: EngineConfig, traits: DecoderTraits) -> Self:
        decoder = load_decoder(
            Path(config.model.path),
            traits,
            dtype=getattr(torch, config.dtype),
            max_model_len=config.max_model_len,
            load_format=config.load_format,
            seed=config.seed,
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
        type_ids_T: Tensor | None,
        groups: Sequence[Group],
    ) -> Tensor:
        """Hidden states [T, E]; a decoder has no types."""
        traits = self._decoder.traits
        lengths = [group.length for group in groups for _ in range(group.num_sequences)]
        slots = np.arange(len(token_ids_T))
        tables = np.split(slots, np.cumsum(lengths)[:-1])  # blocks of one token
        plans = {
            window: plan_attention(
                tables, [0] * len(lengths), lengths, block_size=1, window=window,
                max_tile=self._max_tile,
            )
            for window in traits.windows
        }  # fmt: skip
        scratch = torch.empty(
            (2, traits.num_kv_heads, len(slots), traits.head_dim), dtype=self._decoder.dtype
        )
        return self._decoder.forward(
            token_ids_T, positions_T, torch.from_numpy(slots), plans, [scratch] * len(traits.layers)
        )
