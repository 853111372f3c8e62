"""A causal language model of the transformers library as a decoder of this engine.

T  tokens of a step    R  tokens that are read    E  hidden size    S  cache slots    D  width of a head in the cache

The library's own module computes a step as one flat batch [1, T] with its positions, without a cache of its own.
Attention goes to the engine's KV memory (`hf_attention.py`), linear layers to `LinearMethod`.  The model is cut
behind its last norm: its body gives hidden states, and its head, with whatever the family does to logits, is the
model itself with the body exchanged for one that returns the states it is given.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from trouper.actors.executor.models.decoder import KVCacheSpec, LogitsIndices
from trouper.actors.executor.models.hf_attention import HfAttention, HfStep, StepPlans
from trouper.errors import UnsupportedFeatureError
from trouper.kernels.linear import LinearMethod
from trouper.kernels.ops import HostTokens, Integers


class HfDecoder:
    """A model of transformers with weights, and its forward pass.

    Args:
        model: a causal language model with this engine's attention; `attention` has been learnt from it.
    """

    def __init__(self, model: nn.Module, attention: HfAttention, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._model, self._attention = model, attention
        self._embed = cast("nn.Module", cast("Any", model).get_input_embeddings())
        self.body = cast("nn.Module", getattr(model, _body_name(model)))
        self._states = _GivenStates()
        setattr(model, _body_name(model), self._states)
        self._first_token = torch.zeros((1, 1), dtype=torch.long)

    def __repr__(self) -> str:
        return f"<HfDecoder {type(self._model).__name__} of {len(self._attention.layers)} layers>"

    @property
    def cache_specs(self) -> tuple[KVCacheSpec, ...]:
        """Return one group for each run of consecutive layers with keys and values of one shape."""
        shapes = groupby(self._attention.layers, lambda layer: (layer.num_kv_heads, layer.head_dim))
        groups = ((shape, tuple(layers)) for shape, layers in shapes)
        return tuple(
            KVCacheSpec(
                num_layers=len(layers),
                num_heads=num_heads,
                head_dim=head_dim,
                windows=tuple(dict.fromkeys(layer.window for layer in layers)),
            )
            for (num_heads, head_dim), layers in groups
        )

    @property
    def is_recordable(self) -> bool:
        """Return False: the library's Python code computes a step, which only calls kernels in between."""
        return False

    @property
    def longest(self) -> int | None:
        """Return the length of the longest sequence for which the attention was checked at load."""
        return self._attention.max_model_len

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights that a step may read: those of the layers and the head, without the embedding."""
        modules = [*self.body.modules(), *self._model.modules()]
        embedding = {id(p) for p in self._embed.parameters()}
        plain = {id(p): p.nbytes for m in modules for p in m.parameters(recurse=False)}
        packed = {id(m): m.method.num_bytes for m in modules if isinstance(m, HfLinear)}
        return sum(n for i, n in plain.items() if i not in embedding) + sum(packed.values())

    @property
    def num_weight_bytes(self) -> int:
        """The bytes that all weights take in memory."""
        return self.num_bytes + sum(p.nbytes for p in self._embed.parameters())

    def plan(
        self,
        block_ids: np.ndarray,
        rows: Integers,
        starts: Integers,
        counts: Integers,
        window: int | None,
        are_prompts: np.ndarray | None = None,
    ) -> StepPlans:
        """Prepare the attention of a step; see `CpuOps.plan`."""
        return StepPlans(block_ids, rows, starts, counts, window, are_prompts)

    def forward(
        self,
        tokens: HostTokens,
        plans: Mapping[int | None, StepPlans],
        caches: Sequence[Tensor],
        embeds: Sequence[tuple[int, Tensor]] = (),
        read: LogitsIndices | None = None,
        hidden_TE: Tensor | None = None,
    ) -> Tensor:
        """Compute the hidden states of a step; see `Decoder.forward`. The whole model is here, so nothing precedes it."""
        assert hidden_TE is None, "models of transformers have no pipeline stages"
        inputs: dict[str, Tensor] = {"input_ids": tokens.ids_T[None]}
        if embeds:
            inputs = {"inputs_embeds": self._with_embeds(tokens.ids_T, embeds)}
        hidden_TE = self._attention.run(
            HfStep(tokens, plans, caches), lambda: self._hidden(tokens.positions_T, inputs)
        )
        return hidden_TE if read is None else hidden_TE.index_select(0, read.tokens_R)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Return [R, vocabulary] in float32."""
        self._states.hidden_RE = hidden_RE
        try:
            output = self._model(input_ids=self._first_token, use_cache=False, return_dict=True)
        finally:
            self._states.hidden_RE = None
        return output.logits[0].float()

    def num_logits(self, num_rows: int) -> int | None:
        """Return None: the library's own code computes logits, and only kernels can be recorded."""
        return None

    def learn(self, num_tokens: int) -> None:
        """Learn from a pass over one prompt what the layers' attention asks for.

        Raises:
            UnsupportedFeatureError: a layer asks for what the attention does not do.
        """
        positions_T = torch.arange(num_tokens)
        ids = {"input_ids": torch.zeros_like(positions_T)[None]}
        self._attention.learn(lambda: self._hidden(positions_T, ids))

    def wrap_linears(
        self, wrap: Callable[[str, LinearMethod], LinearMethod], row_counts: set[int]
    ) -> None:
        """Put something on top of the linear layers of the body that compute each token of a step, and no others.

        Args:
            wrap: from the name of a module and its method to the method that takes its place.
            row_counts: tokens of the passes so far, by which these layers are known.
        """
        prefix = _body_name(self._model)
        named = cast(
            "Iterator[tuple[str, nn.Module]]", cast("Any", self.body).named_modules(prefix=prefix)
        )
        for name, module in named:
            if isinstance(module, HfLinear):
                if module.row_counts == row_counts:
                    module.method = wrap(name, module.method)
                module.row_counts = None

    def _hidden(self, positions_T: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        output = self.body(
            **inputs, position_ids=positions_T[None], use_cache=False, return_dict=True
        )
        if self._states.output is None:
            self._states.output = replace(output, last_hidden_state=None)
        return output.last_hidden_state[0]

    def _with_embeds(self, ids_T: Tensor, embeds: Sequence[tuple[int, Tensor]]) -> Tensor:
        x_TE = self._embed(ids_T).clone()
        for first, rows_PE in embeds:
            x_TE[first : first + len(rows_PE)] = rows_PE
        return x_TE[None]


# The getters and methods that models may call on the weight of an exchanged layer.
QUESTIONS = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in ("dtype", "device", "shape", "ndim", "is_meta", "requires_grad", "layout")
    }
    | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point}
)


class AbsentWeight(Tensor):
    """Stands in for the weight of an exchanged layer: it has a shape, dtype and device but no values.

    Computing with a plain tensor on the meta device does not fail everywhere: torch multiplies it with a tensor of
    the CPU into uninitialised memory.  This class refuses every operation.
    """

    @classmethod
    def like(cls, shape: Sequence[int], dtype: torch.dtype) -> "AbsentWeight":
        """Make the stand-in of a weight of this shape and dtype."""
        return torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in QUESTIONS:
            name = getattr(func, "__name__", str(func))
            raise UnsupportedFeatureError(f"it uses the weight of a linear layer directly ({name})")
        parent: Any = super()
        return parent.__torch_function__(func, types, args, kwargs or {})


class HfLinear(nn.Module):
    """A linear layer of a model, computed by a `LinearMethod`."""

    def __init__(self, method: LinearMethod, dtype: torch.dtype) -> None:
        super().__init__()
        self.method = method
        self.out_features, self.in_features = method.shape
        self.weight = AbsentWeight.like(method.shape, dtype)
        self.bias = method.bias
        self.row_counts: set[int] | None = set()  # of its products so far; None = no longer counted

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b for rows x of any leading dimensions."""
        # The products read rows as packed, and reshape returns a view of a turned tensor where it can.
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if self.row_counts is not None:
            self.row_counts.add(len(rows))
        y = self.method.apply(rows)
        return y.view(*x.shape[:-1], y.shape[-1])


class _GivenStates(nn.Module):
    """In place of a model's body: returns the hidden states that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_RE: Tensor | None = None
        self.output: Any = None  # of the body, as a pattern

    @property
    def decoder(self) -> Any:
        """Stand in for the body's decoder too, which some heads call (OPT)."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        assert self.hidden_RE is not None
        return replace(self.output, last_hidden_state=self.hidden_RE[None])


def _body_name(model: nn.Module) -> str:
    """Return the name of the part of a causal language model that ends behind the last norm.

    Raises:
        UnsupportedFeatureError: the model has no such part.
    """
    prefix = cast("str", cast("Any", model).base_model_prefix)
    for name in (prefix, "model"):
        if isinstance(getattr(model, name, None), nn.Module):
            return name
    raise UnsupportedFeatureError(f"{type(model).__name__} has no module {prefix!r}")
