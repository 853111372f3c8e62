"""The operations of `kernels/cuda/` whose rows are grouped, by adapter: cases of `cuda_kernels.py`."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trouper.bench.kernels import Case, Shapes
from trouper.kernels.cuda.lora import (
    BLOCK_ROWS,
    TritonLoRA,
    lora_expand_,
    lora_shrink,
    max_blocks,
    num_splits,
)
from trouper.kernels.lora import LowRank, RowTable

NUM_CHECKED = 8  # tokens; a reference in float64 takes longer than everything else
NUM_LORAS, RANK = 8, 16


class _Adapted(NamedTuple):
    """The product of gate and up with adapters, whose rows take turns."""

    weights: TritonLoRA
    parts: list[LowRank]  # of the first adapter
    x: Tensor
    order: Tensor
    blocks: Tensor
    num_blocks: int
    num_loras: int

    @classmethod
    def of(cls, s: Shapes) -> "_Adapted":
        num_loras = min(s.num_tokens, NUM_LORAS)
        table = RowTable(s.num_tokens, BLOCK_ROWS)
        table.fill(1 + np.arange(s.num_tokens) % num_loras)
        weights = TritonLoRA(
            (s.mlp, s.mlp), s.hidden, num_loras, RANK,
            empty=lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device=s.device),
            dtype=s.dtype,
        )  # fmt: skip
        host = s._replace(device="cpu")
        parts = [
            LowRank(normal(host, RANK, s.hidden) / s.hidden**0.5, normal(host, s.mlp, RANK))
            for _ in range(2)
        ]
        for slot in range(num_loras):
            weights.load(slot + 1, parts)
        x, bound = normal(s, s.num_tokens, s.hidden), max_blocks(s.num_tokens, num_loras)
        rows = ids(s, table.order), ids(s, table.blocks)
        return cls(weights, parts, x, *rows, bound, num_loras)

    def shrunk(self) -> Tensor:
        """Return the reference of the first rows' h."""
        x = self.x[:NUM_CHECKED].cpu().double()
        h = torch.cat([x @ part.a_RI.double().T for part in self.parts], dim=1)
        return h.float().to(self.x.device)


def shrinking(s: Shapes) -> Iterator[Case]:
    step = _Adapted.of(s)
    w, x = step.weights, step.x

    def launch() -> Tensor:
        return lora_shrink(x, w.a, w.ranks, step.order, step.blocks, max_blocks=step.num_blocks)

    width = 2 * RANK
    yield Case(
        f"[{s.num_tokens}, {s.hidden}] -> {width}",
        lambda: launch().sum(0),
        step.shrunk,
        s.item * s.hidden * (step.num_loras * width + s.num_tokens),
        2 * s.num_tokens * s.hidden * width,
    )


def expanding(s: Shapes) -> Iterator[Case]:
    step = _Adapted.of(s)
    w, width = step.weights, 2 * RANK
    h = torch.randn(num_splits(s.hidden), s.num_tokens, width, device=s.device)
    y = torch.zeros(s.num_tokens, 2 * s.mlp, dtype=s.dtype, device=s.device)

    def launch() -> Tensor:
        lora_expand_(
            y, h, w.b, w.ranks, w.tiles, step.order, step.blocks, max_blocks=step.num_blocks
        )
        return y

    def reference() -> Tensor:
        few = h[:, :NUM_CHECKED].sum(0).cpu().double().split(RANK, dim=1)
        both = [x @ part.b_OR.double().T for x, part in zip(few, step.parts, strict=True)]
        return torch.cat(both, dim=1).to(s.dtype).to(y.device)

    yield Case(
        f"{width} -> [{s.num_tokens}, {2 * s.mlp}]",
        launch,
        reference,
        s.item * 2 * s.mlp * (step.num_loras * RANK + 2 * s.num_tokens),
        2 * s.num_tokens * 2 * s.mlp * RANK,
    )


def normal(s: Shapes, *shape: int) -> Tensor:
    return torch.randn(shape, device=s.device, dtype=s.dtype)


def ids(s: Shapes, values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(s.device)
