"""Implement recurrent mixers, which replace the attention of a layer and store a state of fixed size instead of keys and values.

    gated_delta    convolution -> gated delta rule -> gated norm -> product        (Qwen3-Next, Qwen3.5)
    mamba2         convolution -> Mamba-2's recurrence -> gated norm -> product    (Granite 4, Bamba)
    short_conv     gated convolution of three taps -> product                      (LFM2)

A layer calls its mixer through one protocol for all kinds. `kernels/recurrent.py` has the operations and their laws.

T  tokens    E  hidden size    K  taps    C  channels of a convolution
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch does not declare the types of unflatten, repeat and some others.

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from trouper.actors.executor.models.decoder import MixerState, StateSpec
from trouper.actors.executor.models.traits import (
    DecoderTraits,
    GatedDeltaTraits,
    Mamba2Traits,
    Mixer,
)
from trouper.kernels.linear import LinearMethod
from trouper.kernels.recurrent import RecurrentOps
from trouper.kernels.reference.recurrent import Entries


class RecurrentMixer(Protocol):
    """Compute one kind of recurrent mixer, with its weights."""

    @property
    def linears(self) -> Sequence[LinearMethod]:
        """Return all matrix products, in a fixed order."""
        ...

    def forward(
        self, x_TE: Tensor, ops: RecurrentOps, state: MixerState, entries: Entries
    ) -> Tensor:
        """Compute the output [T, E] of all tokens, and advance the states of their sequences.

        Drafted tokens do not advance a state; their inputs are stored in `state.inputs` for `replay`.
        """
        ...

    def replay(self, ops: RecurrentOps, state: MixerState, entries: Entries) -> None:
        """Advance states over the accepted drafts.

        Args:
            entries: describe rows of `state.inputs`, not tokens of a step.
        """
        ...


class Convolution:
    """Hold the weights of a causal convolution in the layout of the kernels."""

    def __init__(self, weight_C1K: Tensor, bias_C: Tensor | None) -> None:
        self.weight_KC = weight_C1K.squeeze(1).T.contiguous()
        self.bias_C = bias_C


class GatedDeltaMixer:
    """Compute a gated delta net.

    Args:
        in_proj: E -> q, k, v and the gate z of the output.
        gates: E -> b and a of each value head, padded to whole vector registers.
        a_log: [value heads], the logarithm of the decay rate.
        dt_bias: [value heads].
        norm: [v_dim], weights shared by all heads.
    """

    def __init__(
        self,
        traits: GatedDeltaTraits,
        eps: float,
        *,
        in_proj: LinearMethod,
        gates: LinearMethod,
        out_proj: LinearMethod,
        convolution: Convolution,
        a_log: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
    ) -> None:
        self._traits, self._eps = traits, eps
        self._in_proj, self._gates, self._out_proj = in_proj, gates, out_proj
        self._convolution = convolution
        self._rates, self._dt_bias, self._norm = -a_log.exp(), dt_bias, norm

    @property
    def linears(self) -> Sequence[LinearMethod]:
        return self._in_proj, self._gates, self._out_proj

    def forward(
        self, x_TE: Tensor, ops: RecurrentOps, state: MixerState, entries: Entries
    ) -> Tensor:
        qkvz_TX, gates_TX = self._in_proj.apply(x_TE), self._gates.apply(x_TE)
        _keep_drafts(ops, state, entries, qkvz_TX, gates_TX)
        out_THV = self._mix(qkvz_TX, gates_TX, ops, state, entries)
        traits = self._traits
        z_TX = qkvz_TX.narrow(1, traits.num_channels, traits.v_size)
        normed_TX = ops.gated_norm(
            out_THV.flatten(1), z_TX, self._norm, self._eps, group=traits.v_dim
        )
        return self._out_proj.apply(normed_TX)

    def replay(self, ops: RecurrentOps, state: MixerState, entries: Entries) -> None:
        qkvz_DX, gates_DX = state.inputs
        self._mix(qkvz_DX, gates_DX, ops, state, entries)

    def _mix(
        self,
        qkvz_TX: Tensor,
        gates_TX: Tensor,
        ops: RecurrentOps,
        state: MixerState,
        entries: Entries,
    ) -> Tensor:
        """Advance the states over tokens with these inputs.  Returns the results of the queries, [T, H, dv]."""
        traits, conv = self._traits, self._convolution
        assert state.conv is not None
        assert state.matrix is not None
        b_TH, a_TH = (
            gates_TX.narrow(1, i * traits.num_v_heads, traits.num_v_heads) for i in range(2)
        )
        decay_TH, beta_TH = ops.delta_gates(a_TH, b_TH, self._rates, self._dt_bias)
        qkv_TC = ops.causal_conv(
            qkvz_TX.narrow(1, 0, traits.num_channels),
            conv.weight_KC,
            conv.bias_C,
            state.conv,
            entries,
            has_silu=True,
        )
        k_shape, size = (traits.num_k_heads, traits.k_dim), traits.k_size
        return ops.gated_delta(
            qkv_TC.narrow(1, 0, size).unflatten(1, k_shape),
            qkv_TC.narrow(1, size, size).unflatten(1, k_shape),
            qkv_TC.narrow(1, 2 * size, traits.v_size).unflatten(
                1, (traits.num_v_heads, traits.v_dim)
            ),
            decay_TH,
            beta_TH,
            state.matrix,
            entries,
        )


class Mamba2Mixer:
    """Compute a Mamba-2 mixer.

    Args:
        in_proj: E -> the gate of the output, inputs, B, C and time steps.
        a_log: [heads], the logarithm of the decay rate.
        dt_bias: [heads].
        skip: [heads], D: the inputs are multiplied by it and added to the outputs.
        norm: [heads · head width].
    """

    def __init__(
        self,
        traits: Mamba2Traits,
        eps: float,
        *,
        in_proj: LinearMethod,
        out_proj: LinearMethod,
        convolution: Convolution,
        a_log: Tensor,
        dt_bias: Tensor,
        skip: Tensor,
        norm: Tensor,
    ) -> None:
        self._traits, self._eps = traits, eps
        self._in_proj, self._out_proj, self._convolution = in_proj, out_proj, convolution
        self._rates, self._dt_bias, self._skip, self._norm = -a_log.exp(), dt_bias, skip, norm

    @property
    def linears(self) -> Sequence[LinearMethod]:
        return self._in_proj, self._out_proj

    def forward(
        self, x_TE: Tensor, ops: RecurrentOps, state: MixerState, entries: Entries
    ) -> Tensor:
        all_TX = self._in_proj.apply(x_TE)
        _keep_drafts(ops, state, entries, all_TX)
        out_THP = self._mix(all_TX, ops, state, entries)
        size = self._traits.size
        normed_TX = ops.gated_norm(
            out_THP.flatten(1),
            all_TX.narrow(1, 0, size),
            self._norm,
            self._eps,
            group=size // self._traits.num_groups,
            is_gate_first=True,
        )
        return self._out_proj.apply(normed_TX)

    def replay(self, ops: RecurrentOps, state: MixerState, entries: Entries) -> None:
        self._mix(*state.inputs, ops=ops, state=state, entries=entries)

    def _mix(
        self, all_TX: Tensor, ops: RecurrentOps, state: MixerState, entries: Entries
    ) -> Tensor:
        """Advance the states over tokens with these inputs.  Returns the outputs [T, H, P]."""
        traits, conv = self._traits, self._convolution
        assert state.conv is not None
        assert state.matrix is not None
        size, shape = traits.size, (traits.num_groups, traits.num_states)
        dt_TH = all_TX.narrow(1, size + traits.num_channels, traits.num_heads)
        high = math.inf if traits.high is None else traits.high
        gates = ops.ssd_gates(dt_TH, self._rates, self._dt_bias, traits.low, high)
        mixed_TC = ops.causal_conv(
            all_TX.narrow(1, size, traits.num_channels),
            conv.weight_KC,
            conv.bias_C,
            state.conv,
            entries,
            has_silu=True,
        )
        num_shared = math.prod(shape)
        return ops.ssd(
            mixed_TC.narrow(1, 0, size).unflatten(1, (traits.num_heads, traits.head_dim)),
            *gates,
            mixed_TC.narrow(1, size, num_shared).unflatten(1, shape),
            mixed_TC.narrow(1, size + num_shared, num_shared).unflatten(1, shape),
            self._skip,
            state.matrix,
            entries,
        )


class ShortConvMixer:
    """Compute a short convolution with a gate before and after it.

    Args:
        in_proj: E -> both gates and the inputs.
    """

    def __init__(
        self, *, in_proj: LinearMethod, out_proj: LinearMethod, convolution: Convolution
    ) -> None:
        self._in_proj, self._out_proj, self._convolution = in_proj, out_proj, convolution

    @property
    def linears(self) -> Sequence[LinearMethod]:
        return self._in_proj, self._out_proj

    def forward(
        self, x_TE: Tensor, ops: RecurrentOps, state: MixerState, entries: Entries
    ) -> Tensor:
        bcx_TX = self._in_proj.apply(x_TE)
        _keep_drafts(ops, state, entries, bcx_TX)
        return self._out_proj.apply(self._mix(bcx_TX, ops, state, entries))

    def replay(self, ops: RecurrentOps, state: MixerState, entries: Entries) -> None:
        self._mix(*state.inputs, ops=ops, state=state, entries=entries)

    def _mix(
        self, bcx_TX: Tensor, ops: RecurrentOps, state: MixerState, entries: Entries
    ) -> Tensor:
        """Advance the states over tokens with these inputs.  Returns the gated outputs [T, E]."""
        assert state.conv is not None
        conv = self._convolution
        return ops.short_conv(bcx_TX, conv.weight_KC, conv.bias_C, state.conv, entries)


def _keep_drafts(
    ops: RecurrentOps, state: MixerState, entries: Entries, *inputs_TX: Tensor
) -> None:
    """Store the inputs of drafted tokens for `replay`.  Does nothing in an engine without speculation."""
    if state.inputs:
        for x_TX, kept_DX in zip(inputs_TX, state.inputs, strict=True):
            ops.keep_drafts(x_TX, kept_DX, entries)


def make_mixer(
    kind: Mixer,
    traits: DecoderTraits,
    projections: Mapping[str, LinearMethod],
    tensors: Mapping[str, Tensor],
) -> RecurrentMixer:
    """Build a mixer from the parameters of its layer.

    Args:
        projections: `in_proj`, `out_proj` and, for gated delta nets, `gates`.
        tensors: float32 tensors by their names in `parameters.MIXER_TENSORS`.
    """
    in_proj, out_proj = projections["in_proj"], projections["out_proj"]
    convolution = Convolution(tensors["conv_weight"], tensors.get("conv_bias"))
    if traits.gated_delta is not None and kind == "gated_delta":
        return GatedDeltaMixer(
            traits.gated_delta,
            traits.norm_eps,
            in_proj=in_proj,
            gates=projections["gates"],
            out_proj=out_proj,
            convolution=convolution,
            a_log=tensors["a_log"],
            dt_bias=tensors["dt_bias"],
            norm=tensors["gated_norm"],
        )
    if traits.mamba2 is not None and kind == "mamba2":
        return Mamba2Mixer(
            traits.mamba2,
            traits.norm_eps,
            in_proj=in_proj,
            out_proj=out_proj,
            convolution=convolution,
            a_log=tensors["a_log"],
            dt_bias=tensors["dt_bias"],
            skip=tensors["skip"],
            norm=tensors["gated_norm"],
        )
    assert kind == "short_conv"
    return ShortConvMixer(in_proj=in_proj, out_proj=out_proj, convolution=convolution)


def state_specs(traits: DecoderTraits) -> tuple[StateSpec, ...]:
    """Return the shape of each recurrent layer's state, in layer order."""
    return tuple(_state_specs(traits))


def _state_specs(traits: DecoderTraits) -> Iterator[StateSpec]:
    delta, mamba, short = traits.gated_delta, traits.mamba2, traits.short_conv
    for i, layer in enumerate(traits.layers):
        if layer.mixer == "gated_delta" and delta is not None:
            matrix = delta.num_v_heads, delta.k_dim, delta.v_dim
            conv = delta.taps - 1, delta.num_channels
            widths = delta.num_channels + delta.v_size, 2 * delta.num_v_heads
            yield StateSpec(layer=i, conv=conv, matrix=matrix, inputs=widths)
        elif layer.mixer == "mamba2" and mamba is not None:
            matrix = mamba.num_heads, mamba.head_dim, mamba.num_states
            conv = mamba.taps - 1, mamba.num_channels
            width = mamba.size + mamba.num_channels + mamba.num_heads
            yield StateSpec(layer=i, conv=conv, matrix=matrix, inputs=(width,))
        elif layer.mixer == "short_conv" and short is not None:
            size = traits.hidden_size
            yield StateSpec(layer=i, conv=(short.taps - 1, size), inputs=(3 * size,))
