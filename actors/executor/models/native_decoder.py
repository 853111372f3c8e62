"""Trouper's own decoder: one class for every architecture of the registry, parametrised by its traits.

    T  tokens of all sequences of a step, one after the other      N  query heads    H  KV heads
    E  hidden size                M  MLP width                      D  head width     S  cache slots

The operations between matrix products come from an object, which exists for the CPU and for a GPU. The tokens of a step and
the plans of their attention are opaque here: only these operations use them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.models.decoder import KVCacheSpec, LogitsIndices, StateSpec, StepStates
from trouper.actors.executor.models.layers import Mlp, compose_rope_table, make_rope_table
from trouper.actors.executor.models.mixers import RecurrentMixer, state_specs
from trouper.actors.executor.models.sharding import Shard
from trouper.actors.executor.models.traits import DecoderTraits, LayerTraits, PlanKey
from trouper.kernels.codegen.units import LANES
from trouper.kernels.linear import LinearMethod, LoRALinear
from trouper.kernels.ops import CpuOps, Ops, OpsConfig, RankShare, SharedOps
from trouper.kernels.recurrent import RecurrentOps
from trouper.kernels.reference.recurrent import Entries

OpsT = TypeVar("OpsT", bound=Ops)


def kv_cache_specs(traits: DecoderTraits) -> tuple[KVCacheSpec, ...]:
    """Return what the layers keep of each token: one tensor, because they differ only in their windows and block tables."""
    layers = [layer for layer in traits.layers if layer.mixer == "attention"]
    if not layers:
        return ()
    numbers: dict[int | None, int] = {}
    places: list[int] = []
    for layer in layers:
        place = numbers.get(layer.table, 0)
        numbers[layer.table] = place + 1
        places.append(place)
    return (
        KVCacheSpec(
            num_layers=max(places) + 1,
            num_heads=traits.num_kv_heads,
            head_dim=traits.head_dim,
            keys=tuple(dict.fromkeys(layer.plan_key for layer in layers)),
            places=tuple(places),
            windows=traits.table_windows,
        ),
    )


class DecoderLayer:
    """The weights of one layer. A norm is None if the architecture does not have it.

    The weights and biases of a layer norm are one tensor of two rows. RMS norms have no biases.
    """

    def __init__(
        self,
        traits: LayerTraits,
        *,
        qkv: LinearMethod | None,  # E -> (N + 2 H) D, or with gates of the outputs (2 N + 2 H) D
        o: LinearMethod | None,  # N D -> E
        mixer: RecurrentMixer | None = None,  # in place of qkv and o
        mlp: Mlp,
        attention_norm: Tensor | None = None,
        attention_post_norm: Tensor | None = None,
        mlp_norm: Tensor | None = None,
        mlp_post_norm: Tensor | None = None,
        head_norm: Tensor | None = None,  # [N + H, D] or [N + H, 2, D], for each head of q and k
        q_norm: Tensor | None = None,  # [N D], for all heads together
        k_norm: Tensor | None = None,  # [H D]
        sinks: Tensor | None = None,  # [N], scores
    ) -> None:
        self.traits = traits
        self.qkv, self.o, self.mixer, self.mlp = qkv, o, mixer, mlp
        self.attention_norm, self.attention_post_norm = attention_norm, attention_post_norm
        self.mlp_norm, self.mlp_post_norm = mlp_norm, mlp_post_norm
        self.head_norm, self.q_norm, self.k_norm = head_norm, q_norm, k_norm
        self.sinks = sinks

    @property
    def linears(self) -> Sequence[LinearMethod]:
        """Return all matrix products of the layer: attention first, then the MLP.

        The order is fixed, so that ranks and adapters agree on it.
        """
        of_mixer = (self.qkv, self.o) if self.mixer is None else self.mixer.linears
        return *(linear for linear in of_mixer if linear is not None), *self.mlp.linears


class NativeDecoder(Generic[OpsT]):
    """The weights of a model or of one worker's part of it, and the forward pass. Implements `Decoder`.

    A pipeline stage has some of the layers: the first stage has the embedding, the last one the final norm and the head. A
    tensor-parallel rank has a part of each layer and of the head, and a group through which it calls the other ranks.

    Args:
        traits: those of this part of the model.
        embedding: [vocabulary, E], on the first stage.
        positions: [positions, E], learnt positions that the first stage adds to the embeddings.
        norm: the final norm, on the last stage.
        head: computes logits, on the last stage of a model that generates.
        max_model_len: the length of the longest sequence, which bounds positions.
        ops: the operations between matrix products, for the device of the weights.
        recurrent: the operations of recurrent mixers and gates; by torch if it is None.
        shared: the operations in which all ranks take part. Without other ranks they are those of `ops`.
    """

    def __init__(
        self,
        traits: DecoderTraits,
        *,
        embedding: Tensor | None,
        positions: Tensor | None = None,
        layers: Sequence[DecoderLayer],
        norm: Tensor | None,
        head: LinearMethod | None,
        max_model_len: int,
        ops: OpsT,
        recurrent: RecurrentOps | None = None,
        shared: SharedOps | None = None,
        dtype: torch.dtype,
    ) -> None:
        self.traits = traits
        self.dtype = dtype
        self.ops = ops
        self._shared: SharedOps = ops if shared is None else shared
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head
        self._positions = positions
        self._recurrent = recurrent or RecurrentOps()
        # transformers rounds the scale to the model's dtype before it multiplies.
        self._embedding_scale = float(torch.tensor(traits.embedding_scale, dtype=self.dtype))
        self._rope_tables: list[Tensor] = [
            make_rope_table(rope, max_model_len, self.dtype) for rope in traits.ropes
        ]
        if embedding is not None:
            self._rope_tables = [table.to(embedding.device) for table in self._rope_tables]

    def forward(
        self,
        tokens: Any,
        plans: Mapping[PlanKey, Any],
        caches: Sequence[Tensor],
        embeds: Sequence[tuple[int, Tensor]] = (),
        read: LogitsIndices | None = None,
        hidden_TE: Tensor | None = None,
        states: StepStates | None = None,
    ) -> Tensor:
        """Compute the hidden states of a step and write its keys and values into the caches; see `Decoder.forward`."""
        ops = self.ops
        # Not stored as an attribute: a bound method would be a reference cycle that keeps the weights after a sleep.
        add = self._add_in_parallel if self.traits.is_parallel else self._add_in_turn
        x_TE, step = self._begin_step(tokens, embeds, hidden_TE)
        steps = self._steps_of_tables(tokens, step)
        first_norm = self._layers[0].attention_norm
        y_TE = x_TE if first_norm is None else ops.norm(x_TE, first_norm)
        following = [*(layer.attention_norm for layer in self._layers[1:]), self._norm]
        deep = self._deep_rows(embeds)
        left, entries = iter(caches), None
        if states is not None:
            entries = _entries(states)
        for i, (layer, next_norm) in enumerate(zip(self._layers, following, strict=True)):
            chosen = read if layer is self._layers[-1] else None
            if layer.mixer is None:
                own = steps[layer.traits.table or 0]
                mixed = self._attention(layer, y_TE, own, next(left), plans, chosen)
            else:
                assert states is not None, "the model keeps states"
                assert entries is not None
                mixed = layer.mixer.forward(y_TE, self._recurrent, states.mixers[i, 0], entries)
                mixed = mixed if chosen is None else _selected(mixed, chosen.tokens_R)
            if chosen is not None:
                x_TE = _selected(x_TE, chosen.tokens_R)
                if self.traits.is_parallel:
                    y_TE = _selected(y_TE, chosen.tokens_R)
                if not len(x_TE):
                    return x_TE
            y_TE = add(layer, x_TE, y_TE, mixed, next_norm, deep[i] if i < len(deep) else ())
        return y_TE

    def replay(self, states: StepStates) -> None:
        """Move states forward over drafts that turned out right, from the inputs that the last step kept.

        Args:
            states: `firsts` and `counts` are rows of the kept inputs.
        """
        entries = _entries(states)
        for i, layer in enumerate(self._layers):
            if layer.mixer is not None:
                layer.mixer.replay(self._recurrent, states.mixers[i, 0], entries)

    def _attention(
        self,
        layer: DecoderLayer,
        y_TE: Tensor,
        step: Any,
        cache: Tensor,
        plans: Mapping[PlanKey, Any],
        read: LogitsIndices | None,
    ) -> Tensor:
        """Compute keys and values of all tokens, and the output of attention for all of them or for those of `read`."""
        assert layer.qkv is not None
        assert layer.o is not None
        qkv_TND = self._projections(layer, layer.qkv, y_TE, step, cache)
        if read is not None:
            plans, qkv_TND = read.plans, _selected(qkv_TND, read.tokens_R)
        out_TX = self.ops.attend(qkv_TND, cache, plans[layer.traits.plan_key], layer.sinks)
        if self.traits.attention_gate:
            num_heads = self.traits.num_q_heads
            gate_TX = qkv_TND.narrow(1, qkv_TND.shape[1] - num_heads, num_heads).flatten(1)
            out_TX = self._recurrent.mul_sigmoid(out_TX, gate_TX)
        return layer.o.apply(out_TX)

    def _add_in_turn(
        self,
        layer: DecoderLayer,
        x_TE: Tensor,
        _y_TE: Tensor,
        attended_TE: Tensor,
        next_norm: Tensor | None,
        deep: Sequence[tuple[int, Tensor]],
    ) -> Tensor:
        """Add the attention's output to x, and the MLP's output for that sum. Returns the normalised input of the next layer.

        Args:
            deep: rows of images to add to the MLP's output, with the first token of each.
        """
        shared = self._shared
        y_TE = shared.fused_add_norm(x_TE, attended_TE, layer.mlp_norm, layer.attention_post_norm)
        y_TE = layer.mlp.forward(y_TE, self.ops)
        for first, rows_PE in deep:
            y_TE.narrow(0, first, len(rows_PE)).add_(rows_PE)
        return shared.fused_add_norm(x_TE, y_TE, next_norm, layer.mlp_post_norm)

    def _add_in_parallel(
        self,
        layer: DecoderLayer,
        x_TE: Tensor,
        y_TE: Tensor,
        attended_TE: Tensor,
        next_norm: Tensor | None,
        _deep: Sequence[tuple[int, Tensor]],
    ) -> Tensor:
        """Add to x the attention's output and the MLP's, whose input is that of the attention or x with another norm.

        Returns the normalised input of the next layer.
        """
        if layer.mlp_norm is not None:
            y_TE = self.ops.norm(x_TE, layer.mlp_norm)
        self._shared.fused_add_norm(x_TE, attended_TE, None)
        y_TE = layer.mlp.forward(y_TE, self.ops)
        return self._shared.fused_add_norm(x_TE, y_TE, next_norm)

    @property
    def longest(self) -> int | None:
        """Return None, because there is no limit of its own.

        The rotary tables are made for `max_model_len`, whatever it is.
        """
        return None

    @property
    def is_recordable(self) -> bool:
        """Return True: a step is expected to consist of kernels. Recording itself finds the exceptions."""
        return True

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """Return the states that the recurrent layers of this part keep of a sequence."""
        return state_specs(self.traits)

    @property
    def cache_specs(self) -> tuple[KVCacheSpec, ...]:
        """Return what the layers of this part keep of each token.

        In a pipeline these are the layers of one stage. The other stages allocate their own caches.
        """
        return kv_cache_specs(self.traits)

    def plan(self, *args: Any) -> Any:
        """Plan the attention of a step for one window. See `CpuOps.plan` and `TritonOps.plan` for the arguments."""
        return cast("Any", self.ops).plan(*args)

    def plan_tables(self, tables: Sequence[np.ndarray], *args: Any) -> list[Any]:
        """Plan the attention of a step for one window and several block tables; see `CpuOps.plan_tables`."""
        return cast("CpuOps", self.ops).plan_tables(tables, *args)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that a step of many tokens reads.

        These are all weights but the embedding, because only a few of its rows are read.
        """
        return sum(linear.num_bytes for linear in self._linears)

    @property
    def num_weight_bytes(self) -> int:
        """Return the bytes that the weights take in memory.

        Norms and biases are not included, because they are small compared with the matrices.
        """
        return self.num_bytes + (0 if self._embedding is None else self._embedding.nbytes)

    @property
    def _linears(self) -> list[LinearMethod]:
        head = () if self._head is None else (self._head,)
        return [*head, *(x for layer in self._layers for x in layer.linears)]

    def move(self, place: Callable[[Tensor], Tensor]) -> None:
        """Replace each weight by what `place` returns for it. Weights that share memory (a tied head) still do so afterwards."""
        moved: dict[int, Tensor] = {}
        # Keeps replaced tensors alive until the end, so that no other tensor gets the id of one of them.
        before: list[Tensor] = []
        embedding = self._embedding
        bases = [linear.base for linear in self._linears if isinstance(linear, LoRALinear)]
        for owner in (self, *self._layers, *self._linears, *bases):
            for name in vars(owner):
                tensor = getattr(owner, name)
                if isinstance(tensor, Tensor):
                    if id(tensor) not in moved:
                        before.append(tensor)
                        is_part = embedding is not None and _shares(tensor, embedding)
                        if is_part and id(embedding) in moved:
                            moved[id(tensor)] = _same_part(tensor, moved[id(embedding)])
                        else:
                            moved[id(tensor)] = place(tensor)
                    setattr(owner, name, moved[id(tensor)])
        self._rope_tables = [place(table) for table in self._rope_tables]

    def logits(self, hidden_RE: Tensor, head: LinearMethod | None = None) -> Tensor:
        """Return the logits [R, vocabulary]; see `Decoder.logits`. They are complete only on the first rank."""
        head = head or self._head
        assert head is not None
        product = head.apply(hidden_RE)
        return self._shared.finish_logits(
            product, self.traits.logits_scale, self.traits.final_softcap
        )

    def num_logits(self, num_rows: int) -> int | None:
        """Return how many logits this many rows have, if their product can be part of a recorded step; see `Decoder`."""
        vocab_size = self.traits.vocab_size
        # All ranks must return the same answer, and the last rank's part of another vocabulary has another method.
        if self._head is None or not self._head.is_recordable or vocab_size % LANES:
            return None
        return num_rows * vocab_size

    def _begin_step(
        self, tokens: Any, embeds: Sequence[tuple[int, Tensor]], hidden_TE: Tensor | None
    ) -> tuple[Tensor, Any]:
        if self._embedding is None:
            assert hidden_TE is not None, "only the first stage embeds"
            # Only the CPU has stages.
            ops = cast("CpuOps", self.ops)
            return hidden_TE, ops.begin(tokens.positions_T, tokens.slots_T, self._rope_tables)
        x_TE, step = self.ops.begin_step(
            tokens, self._embedding, self._embedding_scale, self._rope_tables
        )
        self._replace_embeddings(x_TE, embeds)
        # Tokens of a GPU have no such field, since images are computed on the CPU only.
        axes_3T: Tensor | None = getattr(tokens, "axes_3T", None)
        if axes_3T is not None:
            assert all(rope.sections for rope in self.traits.ropes), "the runner has checked it"
            ropes = zip(self._rope_tables, self.traits.ropes, strict=True)
            tables = [compose_rope_table(table, rope, axes_3T) for table, rope in ropes]
            rows_T = torch.arange(axes_3T.shape[1])
            step = cast("CpuOps", self.ops).begin(rows_T, tokens.slots_T, tables)
        if self._positions is not None:
            ops = cast("CpuOps", self.ops)
            rows_TE = ops.embed(self._positions, tokens.positions_T, 1.0)
            ops.fused_add_norm(x_TE, rows_TE, None)
        return x_TE, step

    def _steps_of_tables(self, tokens: Any, step: Any) -> list[Any]:
        """Return the data of a step for each block table. They differ in the cache slots to which keys are written."""
        if all(layer.traits.table is None for layer in self._layers):
            return [step]
        # Only the CPU has several tables.
        ops = cast("CpuOps", self.ops)
        return [ops.with_slots(step, slots_T) for slots_T in tokens.slots_T.unbind(0)]

    def _deep_rows(self, embeds: Sequence[tuple[int, Tensor]]) -> list[list[tuple[int, Tensor]]]:
        """Return for each of the first layers what images add to its output: the columns behind those of the embedding."""
        size = self.traits.hidden_size
        found: list[list[tuple[int, Tensor]]] = []
        for first, rows_PX in embeds:
            for level in range(1, rows_PX.shape[1] // size):
                if len(found) < level:
                    found.append([])
                found[level - 1].append((first, rows_PX.narrow(1, level * size, size)))
        assert len(found) < len(self._layers), "all tokens of these layers must be computed"
        return found

    def _replace_embeddings(self, x_TE: Tensor, embeds: Sequence[tuple[int, Tensor]]) -> None:
        for first, rows_PX in embeds:
            rows_PE = rows_PX.narrow(1, 0, x_TE.shape[1])
            part_PE = x_TE.narrow(0, first, len(rows_PE)).copy_(rows_PE)
            if not self.traits.embeds_are_scaled:
                part_PE *= self._embedding_scale

    def _projections(
        self,
        layer: DecoderLayer,
        qkv: LinearMethod,
        x_TE: Tensor,
        step: Any,
        cache_2HSD: Tensor,
    ) -> Tensor:
        """Compute queries, keys and values [T, N + 2 H, D], and write keys and values into the cache."""
        traits = self.traits
        num_heads = (1 + traits.attention_gate) * traits.num_q_heads + 2 * traits.num_kv_heads
        qkv_TND = qkv.apply(x_TE).view(-1, num_heads, traits.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            self._shared.all_heads_norm_(qkv_TND, layer.q_norm, layer.k_norm)
        self.ops.qk_norm_rope_kv_write(
            qkv_TND,
            layer.head_norm,
            step,
            layer.traits.rope,
            cache_2HSD,
            layer.traits.query_rope,
        )
        return qkv_TND


def _entries(states: StepStates) -> Entries:
    *columns, _ = states
    return Entries.of(*columns)


def _selected(x_TX: Tensor, tokens_R: Tensor) -> Tensor:
    return x_TX.index_select(0, tokens_R)  # pyright: ignore[reportUnknownMemberType]  # torch's stubs


def _shares(part: Tensor, whole: Tensor) -> bool:
    """Whether a tensor shares the memory of another, such as a rank's rows of a tied head and the embedding."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _same_part(part: Tensor, whole: Tensor) -> Tensor:
    """Return the view of `whole` that `part` was of the tensor which `whole` replaces."""
    return whole.as_strided(part.size(), part.stride(), part.storage_offset())


def ops_config(traits: DecoderTraits, dtype: torch.dtype, block_size: int) -> OpsConfig:
    """Return the sizes and constants of a model on which the operations between products depend.

    Kernels are compiled for these values, so a model with other values needs others.
    """
    return OpsConfig(
        dtype=dtype,
        num_q_heads=traits.num_q_heads,
        num_kv_heads=traits.num_kv_heads,
        head_dim=traits.head_dim,
        hidden_size=traits.hidden_size,
        # If it is a multiple of a register's lanes, the width of every MLP is.
        intermediate_size=math.gcd(*traits.mlp_widths),
        block_size=block_size,
        norm=traits.norm,
        norm_eps=traits.norm_eps,
        residual_scale=traits.residual_scale,
        activation=traits.mlp.activation,
        swiglu_alpha=traits.mlp.swiglu_alpha,
        swiglu_limit=traits.mlp.swiglu_limit,
        scale=traits.attention_scale,
        softcap=traits.attention_softcap,
        is_norm_last=traits.is_norm_last,
    )


def rank_share(traits: DecoderTraits, shard: Shard) -> RankShare:
    """Return the sizes and constants on which the operations of one rank depend.

    Args:
        traits: those of the whole model.
    """
    return RankShare(
        vocab_size=traits.vocab_size,
        norm=traits.norm,
        norm_eps=traits.norm_eps,
        residual_scale=traits.residual_scale,
        first_logit=shard.vocabulary(traits.vocab_size)[0],
        num_logits=Shard(0, shard.size).vocabulary(traits.vocab_size)[1],
        num_kv_copies=max(1, shard.size // traits.num_kv_heads),
    )
