"""A causal language model of the transformers library as a decoder of this engine.

T  tokens of a step    R  tokens that are read    E  hidden size    S  cache slots    D  width of a head in the cache

The library's own module computes a step as one flat batch [1, T] with explicit positions, and without a cache of its own.
Its attention reads and writes the engine's KV cache (`hf_attention.py`), and its linear layers are `LinearMethod`s. The model
is divided behind its last norm: its body computes hidden states. Its head, with everything that the family does to logits,
is the model itself with the body replaced by a module that returns given states.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from trouper.actors.executor.models.decoder import KVCacheSpec, LogitsIndices, StateSpec, StepStates
from trouper.actors.executor.models.hf_attention import HfAttention, HfStep, StepPlans
from trouper.actors.executor.models.hf_states import HfMixers
from trouper.actors.executor.models.traits import PlanKey
from trouper.errors import UnsupportedFeatureError
from trouper.kernels.linear import LinearMethod
from trouper.kernels.ops import HostTokens, Integers


class HfDecoder:
    """A model of the transformers library with its weights. Implements `Decoder`.

    Args:
        model: a causal language model that calls this engine's attention.
        attention: what the model's layers ask of the attention, which `learn` finds out.
    """

    def __init__(self, model: nn.Module, attention: HfAttention, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._model, self._attention = model, attention
        self._embed = cast("nn.Module", cast("Any", model).get_input_embeddings())
        self.body = cast("nn.Module", getattr(model, _body_name(model)))
        self._states = _GivenStates(self.body)
        setattr(model, _body_name(model), self._states)
        self._mixers = HfMixers(dtype)
        # The body gets a cache object only if its mixers ask for one.
        self._cache = {"cache": self._mixers.cache} if self._mixers.attach(self.body) else {}
        self._first_token = torch.zeros((1, 1), dtype=torch.long)

    def __repr__(self) -> str:
        return f"<HfDecoder {type(self._model).__name__} of {len(self._attention.layers)} layers>"

    @property
    def cache_specs(self) -> tuple[KVCacheSpec, ...]:
        """Return one group for each run of consecutive layers with keys and values of one shape.

        The shapes were observed when the model was loaded.
        """
        shapes = groupby(self._attention.layers, lambda layer: (layer.num_kv_heads, layer.head_dim))
        groups = ((shape, tuple(layers)) for shape, layers in shapes)
        return tuple(
            KVCacheSpec(
                num_layers=len(layers),
                num_heads=num_heads,
                head_dim=head_dim,
                keys=tuple(dict.fromkeys(layer.window for layer in layers)),
            )
            for (num_heads, head_dim), layers in groups
        )

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """Return the states that the mixers kept when the model was loaded."""
        return self._mixers.specs

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
        """Return the bytes of weights that a step may read: those of the layers and the head, without the embedding."""
        modules = [*self.body.modules(), *self._model.modules()]
        embedding = {id(p) for p in self._embed.parameters()}
        plain = {id(p): p.nbytes for m in modules for p in m.parameters(recurse=False)}
        packed = {id(m): m.method.num_bytes for m in modules if isinstance(m, HfLinear)}
        return sum(n for i, n in plain.items() if i not in embedding) + sum(packed.values())

    @property
    def num_weight_bytes(self) -> int:
        """Return the bytes that all weights take in memory, the embedding included.

        Packed weights count with their packed size.
        """
        return self.num_bytes + sum(p.nbytes for p in self._embed.parameters())

    def plan_tables(self, tables: Sequence[np.ndarray], *args: Any) -> list[Any]:
        """Prepare the attention of a step for each of several block tables. The library's layers share one."""
        return [self.plan(table, *args) for table in tables]

    def plan(
        self,
        block_ids: np.ndarray,
        rows: Integers,
        starts: Integers,
        counts: Integers,
        window: int | None,
        are_prompts: np.ndarray | None = None,
    ) -> StepPlans:
        """Prepare the attention of a step for one window; see `CpuOps.plan`.

        The arguments are only stored, because the shapes of heads are known when a layer asks.
        """
        return StepPlans(block_ids, rows, starts, counts, window, are_prompts)

    def forward(
        self,
        tokens: HostTokens,
        plans: Mapping[PlanKey, StepPlans],
        caches: Sequence[Tensor],
        embeds: Sequence[tuple[int, Tensor]] = (),
        read: LogitsIndices | None = None,
        hidden_TE: Tensor | None = None,
        states: StepStates | None = None,
    ) -> Tensor:
        """Compute the hidden states of a step; see `Decoder.forward`. The whole model is here, so nothing precedes it."""
        assert hidden_TE is None, "models of transformers have no pipeline stages"
        inputs: dict[str, Tensor] = {"input_ids": tokens.ids_T[None]}
        if embeds:
            inputs = {"inputs_embeds": self._with_embeds(tokens.ids_T, embeds)}

        def compute() -> Tensor:
            return self._mixers.compute(states, lambda: self._hidden(tokens.positions_T, inputs))

        hidden_TE = self._attention.serve(HfStep(tokens, plans, caches), compute)
        return hidden_TE if read is None else hidden_TE.index_select(0, read.tokens_R)

    def replay(self, states: StepStates) -> None:
        """Raise, because no step of such a model has drafts: the engine refuses them before it reads weights."""
        raise NotImplementedError("the library's models verify no drafts")

    def logits(self, hidden_RE: Tensor, head: LinearMethod | None = None) -> Tensor:
        """Return the logits [R, vocabulary] of hidden states, in float32.

        The library's model is called with a body that only returns these states, so that its own head is used.
        """
        assert head is None, "adapters of these models replace no head"
        self._states.hidden_RE = hidden_RE
        try:
            output = self._model(input_ids=self._first_token, use_cache=False, return_dict=True)
        finally:
            self._states.hidden_RE = None
        return output.logits[0].float()

    def num_logits(self, num_rows: int) -> int | None:
        """Return None, because the library's own code computes logits, and only kernels can be recorded."""
        return None

    def learn(self, num_tokens: int) -> None:
        """Find out what each layer asks of the attention, by a pass over one prompt of this many tokens.

        Raises:
            UnsupportedFeatureError: a layer asks for something that the attention does not support.
        """
        positions_T = torch.arange(num_tokens)
        ids = {"input_ids": torch.zeros_like(positions_T)[None]}

        def compute() -> None:
            self._mixers.learn(lambda: self._hidden(positions_T, ids), num_tokens)

        self._attention.learn(compute)
        if not self._attention.layers and not self._mixers.specs:
            raise UnsupportedFeatureError("its layers do not call transformers' AttentionInterface")

    def wrap_linears(
        self, wrap: Callable[[str, LinearMethod], LinearMethod], row_counts: set[int]
    ) -> None:
        """Wrap the linear layers of the body that compute every token of a step, and no others.

        Args:
            wrap: maps a module's name and its method to the method that replaces it.
            row_counts: the numbers of tokens of all passes so far. Layers with other numbers of rows remain as they are.
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
            **inputs,
            **self._cache,
            position_ids=positions_T[None],
            use_cache=False,
            return_dict=True,
        )
        if self._states.output is None:
            self._states.output = replace(output, last_hidden_state=None)
        return output.last_hidden_state[0]

    def _with_embeds(self, ids_T: Tensor, embeds: Sequence[tuple[int, Tensor]]) -> Tensor:
        x_TE = self._embed(ids_T).clone()
        for first, rows_PE in embeds:
            x_TE[first : first + len(rows_PE)] = rows_PE
        return x_TE[None]


# The getters and methods that models may call on the weight of a replaced layer.
QUESTIONS = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in ("dtype", "device", "shape", "ndim", "is_meta", "requires_grad", "layout")
    }
    | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point}
)


class AbsentWeight(Tensor):
    """A placeholder for the weight of a replaced layer, with a shape, dtype and device but without values.

    A plain tensor on the meta device would not do, because operations on it may succeed: torch multiplies it with a CPU tensor
    into uninitialised memory. This class refuses every operation.
    """

    @classmethod
    def like(cls, shape: Sequence[int], dtype: torch.dtype) -> "AbsentWeight":
        """Make the placeholder of a weight of this shape and dtype."""
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
    """A linear layer of a model, computed by one of this engine's products.

    It replaces the library's layer, and has the same result up to rounding.
    """

    def __init__(self, method: LinearMethod, dtype: torch.dtype) -> None:
        super().__init__()
        self.method = method
        self.out_features, self.in_features = method.shape
        self.weight = AbsentWeight.like(method.shape, dtype)
        self.bias = method.bias
        # The numbers of rows of its products so far, or None once they are no longer counted.
        self.row_counts: set[int] | None = set()

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b for rows x of any leading dimensions."""
        # Products read packed rows, but reshape returns a view even of a transposed tensor if possible.
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if self.row_counts is not None:
            self.row_counts.add(len(rows))
        y = self.method.apply(rows)
        return y.view(*x.shape[:-1], y.shape[-1])


class _GivenStates(nn.Module):
    """Replaces a model's body, and returns the hidden states that it is given.

    It has the body's other attributes, because some heads read them (Falcon-H1's multipliers).
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        # Not the body itself, which would become a second submodule of the model.
        self._attribute: Callable[[str], Any] = partial(getattr, body)
        self.hidden_RE: Tensor | None = None
        # An output of the body, from which other outputs are copied.
        self.output: Any = None

    @property
    def decoder(self) -> Any:
        """Replace the body's decoder too, which some heads call (OPT)."""
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self.__dict__["_attribute"](name)

    def forward(self, *_: Any, **__: Any) -> Any:
        assert self.hidden_RE is not None
        return replace(self.output, last_hidden_state=self.hidden_RE[None])


def _body_name(model: nn.Module) -> str:
    """Return the name of the module of a causal language model that ends behind the last norm.

    Raises:
        UnsupportedFeatureError: the model has no such module.
    """
    prefix = cast("str", cast("Any", model).base_model_prefix)
    for name in (prefix, "model"):
        if isinstance(getattr(model, name, None), nn.Module):
            return name
    raise UnsupportedFeatureError(f"{type(model).__name__} has no module {prefix!r}")
