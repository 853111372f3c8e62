"""Run the recurrent mixers of transformers' models on the engine's states.

    T  tokens of a step    C  channels    H  heads    K  taps

A mixer of transformers reads its state from a cache object, and calls functions of its module by global name: one function for
whole prompts and another for single tokens. Our cache object has no state, so the mixer always calls the function for prompts,
with the flat batch [1, T] of a step. Its `forward` runs with a private copy of its module's globals, in which these functions are
replaced by ones that map tokens to rows of the engine's states. No module of transformers is changed.

A model calls these functions in the same order in every pass. The first pass, a trial on one short prompt, records the shape
of each state. Law: a state is identified by the order of these calls, so no code depends on a model's name.
"""

import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trouper.actors.executor.models.decoder import StateSpec, StepStates
from trouper.errors import UnsupportedFeatureError
from trouper.kernels.reference.recurrent import Entries, turns
from trouper.kernels.select import make_recurrent_ops

CONVOLUTIONS = {"causal_conv1d_fn"}
SCANS = {
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba_selective_scan",
}
# Methods of a cache by which mixers store states, and the functions that may compute them: a mixer must call one.
UPDATES = {"update_conv_state": CONVOLUTIONS, "update_recurrent_state": SCANS}
UNKNOWN_STATE = "the engine does not support its recurrent state (class {})"
# Names of variables by which mixers without this protocol pass on their states.
OTHER_STATES = {"state", "recurrent_states", "c_state"}
# The first version of transformers in which mixers follow this protocol.
SINCE = (5, 24)


class _FirstPass:
    """Record each state of the trial pass in call order, and return zeros for it."""

    def __init__(self, num_tokens: int) -> None:
        self.entries = Entries(*(torch.tensor([n]) for n in (0, num_tokens, 0, 0, num_tokens, 0)))
        self.specs: list[StateSpec] = []

    def state(
        self, layer: int, shape: tuple[int, ...], dtype: torch.dtype, *, is_conv: bool
    ) -> Tensor:
        index = sum(spec.layer == layer for spec in self.specs)
        kept: dict[str, Any] = {"conv" if is_conv else "matrix": shape}
        self.specs.append(StateSpec(layer=layer, index=index, **kept))
        return torch.zeros((1, *shape), dtype=dtype)


class _Step:
    """Return the states of one step in call order."""

    def __init__(self, states: StepStates) -> None:
        *columns, _ = states
        self.entries = Entries.of(*columns)
        self._mixers = iter(states.mixers.values())

    def state(
        self, layer: int, shape: tuple[int, ...], dtype: torch.dtype, *, is_conv: bool
    ) -> Tensor:
        mixer = next(self._mixers)
        found = mixer.conv if is_conv else mixer.matrix
        assert found is not None, "the order of calls differs from the trial pass"
        assert found.shape[1:] == shape, "the shape of a state differs from the trial pass"
        return found


class HfMixers:
    """Compute all recurrent mixers of one model.

    Args:
        dtype: the model's dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._ops = make_recurrent_ops(dtype)
        self.dtype = dtype
        self.specs: tuple[StateSpec, ...] = ()
        self.cache = _NoStates()
        self._now: _FirstPass | _Step | None = None
        # Weights of convolutions as [K, C] in float32, by address: a mixer passes a new view of its weight in each call.
        self._turned: dict[int, Tensor] = {}

    def attach(self, body: nn.Module) -> bool:
        """Make the mixers of a model call this object's functions. Returns whether the model has any mixers.

        Raises:
            UnsupportedFeatureError: a mixer stores a state that none of the replaced functions computes.
        """
        has_any = False
        for module in body.modules():
            forward: Any = inspect.unwrap(type(module).forward)
            names = _names(forward)
            if names.isdisjoint(UPDATES):
                continue
            check_mixer(type(module), names)
            replaced = {name: getattr(self, name) for name in names & (CONVOLUTIONS | SCANS)}
            own = types.FunctionType(
                forward.__code__,
                {**forward.__globals__, **replaced},
                forward.__name__,
                forward.__defaults__,
                forward.__closure__,
            )
            own.__kwdefaults__ = forward.__kwdefaults__
            module.forward = types.MethodType(own, module)
            has_any = True
        return has_any

    def learn(self, run: Callable[[], object], num_tokens: int) -> None:
        """Record the states of all mixers in a trial pass over one prompt of this many tokens.

        Afterwards `specs` has one element for each call of a replaced function, in the order of the calls.
        """
        trial = self._now = _FirstPass(num_tokens)
        try:
            run()
        finally:
            self._now = None
        self.specs = tuple(trial.specs)

    def compute(self, states: StepStates | None, run: Callable[[], Tensor]) -> Tensor:
        """Call `run`, a pass of the model over a step.

        Args:
            states: the states of the mixers. None if the model has none, or if `run` computes only its head.
        """
        if states is None:
            return run()
        self._now = _Step(states)
        try:
            return run()
        finally:
            self._now = None

    def _state(
        self, shape: Iterable[int], dtype: torch.dtype, *, is_conv: bool = False
    ) -> tuple[Tensor, Entries]:
        assert self._now is not None, "a mixer was called outside of a step"
        shape = tuple(shape)
        return self._now.state(self.cache.layer, shape, dtype, is_conv=is_conv), self._now.entries

    def _by_taps(self, weight_CK: Tensor) -> Tensor:
        found = self._turned.get(weight_CK.data_ptr())
        if found is None:
            found = self._turned[weight_CK.data_ptr()] = weight_CK.T.float().contiguous()
        return found

    # The functions below replace those of transformers, with the same names, arguments and results.

    def causal_conv1d_fn(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        x_TC, (channels, taps) = _rows(hidden_states[0].T), weight.shape
        state, entries = self._state((taps - 1, channels), self.dtype, is_conv=True)
        has_silu = activation in ("silu", "swish")
        y_TC = self._ops.causal_conv(
            x_TC.to(self.dtype),
            self._by_taps(weight),
            None if bias is None else bias.float(),
            state,
            entries,
            has_silu=has_silu,
        )
        if activation is not None and not has_silu:
            from transformers.activations import ACT2FN

            y_TC = cast("Tensor", ACT2FN[activation](y_TC))
        return y_TC.T[None].to(hidden_states.dtype)

    def torch_chunk_gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_heads(x[0].to(self.dtype)) for x in (query, key, value))
        shape = v.shape[1], k.shape[2], v.shape[2]
        state, entries = self._state(shape, torch.float32)
        out = self._ops.gated_delta(
            q,
            k,
            v,
            g[0].float().exp().contiguous(),
            beta[0].float().contiguous(),
            state,
            entries,
            normalises=use_qk_l2norm_in_kernel,
        )
        return out[None].to(query.dtype), state

    # The same function, because the kernel accepts one decay for each row of a state as well as one for the whole state.
    chunk_kimi_delta_attention = torch_chunk_gated_delta_rule

    def mamba2_chunk_scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int = 0,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        z: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        x_THP, b_TGN, c_TGN = (_heads(x[0].to(self.dtype)) for x in (hidden_states, B, C))
        delta_TH = _delta(dt[0], dt_bias, has_softplus=dt_softplus).clamp(*dt_limit)
        shape = x_THP.shape[1], x_THP.shape[2], b_TGN.shape[2]
        state, entries = self._state(shape, torch.float32)
        out_THP = self._ops.ssd(
            x_THP,
            delta_TH.contiguous(),
            torch.exp(A.float() * delta_TH),
            b_TGN,
            c_TGN,
            None if D is None else D.float(),
            state,
            entries,
        )
        if z is not None:
            out_THP = out_THP * F.silu(z[0].float())
        return out_THP[None], state

    def mamba_selective_scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        x_TC, b_TN, c_TN = (x[0].T.float() for x in (hidden_states, B, C))
        delta_TC = _delta(dt[0].T, delta_bias, has_softplus=delta_softplus)
        state, entries = self._state((x_TC.shape[1], b_TN.shape[1]), torch.float32)
        out_TC = torch.empty(x_TC.shape)
        for tokens, rows, are_first in turns(entries, state):
            delta = delta_TC[tokens][..., None]
            before = state[rows].masked_fill(are_first[:, None, None], 0)
            inputs = delta * x_TC[tokens][..., None] * b_TN[tokens][:, None]
            after = before * torch.exp(A.float() * delta) + inputs
            state[rows] = after
            out_TC[tokens] = (after * c_TN[tokens][:, None]).sum(-1)
        if D is not None:
            out_TC += D.float() * x_TC
        if z is not None:
            out_TC *= F.silu(z[0].T.float())
        return out_TC.T[None].to(hidden_states.dtype), state


class _NoStates:
    """Replace transformers' cache object: it has no states, and records which layer calls it."""

    is_compileable = False
    is_sliding = is_linear = is_dummy = ()

    def __init__(self) -> None:
        self.layer = 0

    def get_query_offset(self, *_: Any) -> int:
        return 0

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        return query_length, 0

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_conv_state(self, layer_idx: int, *_: Any, **__: Any) -> None:
        self.layer = layer_idx

    get_recurrent_state = get_conv_state

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        self.layer = layer_idx
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return recurrent_states


class MixerClass(NamedTuple):
    """Pair a class of modules with the names that its `forward` uses."""

    cls: type
    names: set[str]


def mixers_near(cls: type) -> list[MixerClass]:
    """List the classes of recurrent mixers in the Python module of a model's class.

    Checking classes refuses an unsupported model before it takes time and memory to build.
    """
    return [mixer for mixer in _modules_near(cls) if not mixer.names.isdisjoint(UPDATES)]


def keeper_near(cls: type) -> str:
    """Return the name of a class in the model's Python module that passes on a state, or else the model's own name.

    An error contains it, so that a reader can find the code of the unsupported state.
    """
    found = [x.cls.__name__ for x in _modules_near(cls) if not x.names.isdisjoint(OTHER_STATES)]
    return found[0] if found else cls.__name__


def _modules_near(cls: type) -> list[MixerClass]:
    members = vars(sys.modules[cls.__module__]).values()
    classes = [x for x in members if isinstance(x, type) and issubclass(x, nn.Module)]
    return [MixerClass(x, _names(inspect.unwrap(x.forward))) for x in classes]


def check_mixer(cls: type, names: set[str]) -> None:
    """Check that the engine can compute the states that a mixer stores.

    Raises:
        UnsupportedFeatureError: the mixer stores a state without calling any function that the engine replaces.
    """
    for update, functions in UPDATES.items():
        if update in names and names.isdisjoint(functions):
            raise UnsupportedFeatureError(UNKNOWN_STATE.format(cls.__name__))


def _names(function: Any) -> set[str]:
    code = getattr(function, "__code__", None)
    if code is None:
        return set()
    return {*code.co_names, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}


def _delta(dt: Tensor, bias: Tensor | None, *, has_softplus: bool) -> Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(dt) if has_softplus else dt


def _rows(x_TC: Tensor) -> Tensor:
    """Return the tensor with contiguous rows, which kernels need."""
    return x_TC if x_TC.stride(-1) == 1 else x_TC.contiguous()


def _heads(x_THD: Tensor) -> Tensor:
    """Return the tensor with contiguous heads, which kernels need."""
    is_packed = x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]
    return x_THD if is_packed else x_THD.contiguous()
