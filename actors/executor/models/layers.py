"""The parts of a layer that compute each token independently of all others: its MLP, and the rotation for its position.

A layer calls its MLP without knowing the kind: gated, plain, or a mixture of experts.

Attention reads rotations (RoPE) from a table of cosines and sines, see `kernels/reference/norms.py`.  Models scale the frequencies in
several ways to support sequences beyond the length of their training.  The formulas are linear (Chen et al. 2023), llama3 (Meta's
reference code), yarn (Peng et al. 2023, 2309.00071) and longrope (Ding et al. 2024, 2402.13753), evaluated in float32 and in the same
order as in transformers.

T  tokens    E  hidden size    M  MLP width    P  positions    R  rotated numbers of a head
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from trouper.actors.executor.models.traits import RopeTraits
from trouper.kernels.experts import Experts
from trouper.kernels.linear import LinearMethod
from trouper.kernels.ops import Ops
from trouper.kernels.reference.norms import rope_table


class Mlp(Protocol):
    """One kind of MLP, with its weights.

    A layer calls it without distinguishing dense MLPs from mixtures of experts.
    """

    @property
    def linears(self) -> Sequence[LinearMethod]:
        """Return all matrix products, in a fixed order.

        Adapters and the moving of weights between memories iterate over them.
        """
        ...

    def forward(self, x_TE: Tensor, ops: Ops) -> Tensor:
        """Compute the output [T, E] of all tokens. The input may be overwritten."""
        ...


class GatedMlp:
    """The MLP down(act(gate(x)) · up(x)), with gate and up in one product.

    One product of twice the width reads the input only once. Most decoders have this kind.
    """

    def __init__(self, gate_up: LinearMethod, down: LinearMethod) -> None:
        self._gate_up = gate_up  # E -> 2 M
        self._down = down  # M -> E

    @property
    def linears(self) -> Sequence[LinearMethod]:
        return self._gate_up, self._down

    def forward(self, x_TE: Tensor, ops: Ops) -> Tensor:
        return self._down.apply(ops.act_and_mul(self._gate_up.apply(x_TE)))


class PlainMlp:
    """The MLP down(act(up(x))), without a gate. GPT-2 and other older families have it, usually with biases."""

    def __init__(self, up: LinearMethod, down: LinearMethod) -> None:
        self._up = up  # E -> M
        self._down = down  # M -> E

    @property
    def linears(self) -> Sequence[LinearMethod]:
        return self._up, self._down

    def forward(self, x_TE: Tensor, ops: Ops) -> Tensor:
        return self._down.apply(ops.activate(self._up.apply(x_TE)))


class SparseMlp:
    """A mixture of experts: the router chooses a few experts for each token. A shared expert, if any, computes all tokens.

    Args:
        router: E -> experts, and the gate of the shared expert; rounded up to whole registers.
    """

    def __init__(self, router: LinearMethod, experts: Experts, shared: GatedMlp | None) -> None:
        self._router = router
        self._experts = experts
        self._shared = shared

    @property
    def linears(self) -> Sequence[LinearMethod]:
        shared = () if self._shared is None else self._shared.linears
        return self._router, *shared, *self._experts.linears

    def forward(self, x_TE: Tensor, ops: Ops) -> Tensor:
        shared_TE = None if self._shared is None else self._shared.forward(x_TE, ops)
        logits_TX = self._router.apply(x_TE)
        return self._experts.forward(x_TE, logits_TX, shared_TE, ops.act_and_mul)


def make_rope_table(rope: RopeTraits, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Compute the table [P, 2, R] of cosines and sines for P positions, the length of the engine's longest sequence.

    Longrope uses its long factors for all sequences if P exceeds the original length. A choice by the length of each
    sequence would invalidate cached keys.
    """
    frequencies = inverse_frequencies(rope, num_positions)
    table = rope_table(frequencies, num_positions, rope.attention_factor, torch.float32)
    if rope.growth:
        positions = torch.arange(num_positions, dtype=torch.float32)
        growth = rope.growth * torch.log(1 + torch.floor(positions / rope.growth_length))
        table *= (1 + growth).view(-1, 1, 1)
    return table.to(dtype)


def compose_rope_table(table_P2R: Tensor, rope: RopeTraits, axes_3T: Tensor) -> Tensor:
    """Compute the table [T, 2, R] in float32 of T tokens with positions in time, height and width.

    Args:
        table_P2R: the table of positions in one dimension.
        axes_3T: the three positions of each token.
    """
    half = rope.width // 2
    axis_R = torch.repeat_interleave(torch.arange(3), torch.tensor(rope.sections))
    if rope.is_interleaved:
        axis_R = torch.zeros(half, dtype=torch.int64)
        for axis in (1, 2):
            axis_R[axis : 3 * rope.sections[axis] : 3] = axis
    positions_TR = axes_3T[axis_R.repeat(2)].T
    columns_R = torch.arange(2 * half)
    parts = [table_P2R[positions_TR, part, columns_R] for part in (0, 1)]
    return torch.stack(parts, dim=1).float().contiguous()


def inverse_frequencies(rope: RopeTraits, num_positions: int) -> Tensor:
    """Compute the frequencies [R / 2] in float32: radians per position for each pair of rotated numbers."""
    exponents = torch.arange(0, rope.width, 2, dtype=torch.float32) / rope.width
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    if rope.kind == "longrope":
        is_long = num_positions > rope.original_max_position
        return plain / torch.tensor(rope.long_factors if is_long else rope.short_factors)
    return plain


def _llama3(rope: RopeTraits, plain: Tensor) -> Tensor:
    """Scale low frequencies, keep high ones, and interpolate in between."""
    # Full turns within the original length.
    turns = rope.original_max_position * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeTraits, plain: Tensor) -> Tensor:
    """Scale dimensions that turn seldom within the original length, keep the others, and interpolate in between."""

    def dimension_of(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return rope.width * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    steps = torch.arange(rope.width // 2, dtype=torch.float32)
    scaled = ((steps - low) / (high - low or 0.001)).clamp(0, 1)
    return scaled * plain / rope.factor + (1 - scaled) * plain
