"""Fit a model of the transformers library to this engine's products and attention, and check at each load that it still computes the same.

Its linear layers are replaced by this engine's products.  A layer is exchanged only if the model calls it as a layer.  Some models
also multiply with a layer's weight directly (Mamba: `self.dt_proj.weight @ x`), which a packed or rounded weight cannot serve, so such a
layer keeps the library's own product.  A pass of the unchanged model shows which layers these are, and gives the expected logits.

The logits of two sequences of random tokens, computed in chunks and in one batch like in a busy engine, are compared with
the library's own eager attention. They differ if a model derives positions from its batch, or keeps a state outside of the
KV cache. This module also finds the classes of a folder's own Python code, which runs only if the caller has allowed it.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trouper.actors.executor.models.decoder import StepStates, plan_keys_of
from trouper.actors.executor.models.hf_attention import StepPlans
from trouper.actors.executor.models.hf_decoder import QUESTIONS, HfDecoder, HfLinear
from trouper.actors.executor.models.traits import PlanKey
from trouper.actors.executor.steps.batch import from_numpy
from trouper.actors.executor.steps.cache_memory import KVCache, StatePool
from trouper.config.engine_config import EngineConfig
from trouper.config.model import ModelConfig
from trouper.errors import UnsupportedFeatureError
from trouper.kernels.cpu.linear.quantization import can_quantize, dequantized, quantize
from trouper.kernels.formats import Format
from trouper.kernels.linear import LinearConfig
from trouper.kernels.ops import HostTokens
from trouper.kernels.reference.recurrent import NO_SAVES
from trouper.kernels.select import make_linear

logger = logging.getLogger(__name__)
NEEDED = (
    "it needs its own code, which is run with trust_remote_code=True from a local folder, "
    "or from the hub with code_revision, a full commit"
)


def own_code(model: ModelConfig, code_path: str | None) -> tuple[Any, Any]:
    """Return the class and config that a model folder's own code defines.

    Raises:
        UnsupportedFeatureError: the code may not be run, it fails, or it defines no causal language model.
    """
    if code_path is None:
        raise UnsupportedFeatureError(NEEDED, parameter="trust_remote_code")
    from transformers import dynamic_module_utils

    auto_map: dict[str, Any] = model.source_config["auto_map"]
    found: list[Any] = []
    for name in ("AutoConfig", "AutoModelForCausalLM"):
        reference = auto_map.get(name)
        # "other/repository--file.Class" refers to code of another repository, which the caller has not allowed.
        if not isinstance(reference, str) or not re.fullmatch(r"\w+\.\w+", reference):
            raise UnsupportedFeatureError(
                f"auto_map has no class of its folder as {name}: {reference!r}"
            )
        found.append(reference)
    logger.warning("%s runs Python code of its own, from %s", model.name, code_path)
    load_class = cast(
        "Callable[..., Any]", cast("Any", dynamic_module_utils).get_class_from_dynamic_module
    )
    try:
        config_class, cls = (
            load_class(reference, code_path, local_files_only=True) for reference in found
        )
        return cls, config_class.from_dict(dict(model.source_config))
    except Exception as error:  # whatever that code raises
        line = str(error).strip().partition("\n")[0]
        raise UnsupportedFeatureError(f"its code fails ({type(error).__name__}: {line})") from error


TRIAL_TOKENS = 5
LENGTHS = (13, 9)
# (sequence, row, tokens) of each entry of each step. A row has its own blocks, and its own recurrent states.
STEPS = (((0, 0, 7), (1, 1, 3)), ((0, 0, 1), (1, 1, 5)), ((0, 0, 5), (1, 1, 1)))
# Then, in a model with recurrent states, the second sequence begins in the row that the first one has left.
REUSE = ((1, 0, 6),)
# Between two steps, the states of row 0 are saved in this row, lost, and restored.
SPARE_ROW = 2
# The tokens of all passes through replaced layers, in the trial and in the steps.
ROW_COUNTS = {TRIAL_TOKENS, *(sum(num for *_, num in entries) for entries in (*STEPS, REUSE))}
# Relative to the norm of a row of logits. Rounding causes errors of 1e-6 and 1e-2; positions wrong by one cause 0.1 or more.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}


def random_tokens(vocab_size: int) -> list[np.ndarray]:
    """Draw the two sequences of the check, always the same ones.

    Their lengths differ, so that a dependence on other sequences of the batch is detected.
    """
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, length) for length in LENGTHS]


def eager_logits(model: nn.Module, vocab_size: int) -> list[Tensor]:
    """Compute the logits of the check's sequences one at a time with the library's eager attention."""
    found: list[Tensor] = []
    for token_ids in random_tokens(vocab_size):
        ids_1T, positions_T = from_numpy(token_ids)[None], torch.arange(len(token_ids))
        output = cast("Any", model)(
            input_ids=ids_1T, position_ids=positions_T[None], use_cache=False
        )
        found.append(output.logits[0].float())
    if found[0].shape[1] != vocab_size:
        raise UnsupportedFeatureError(
            f"its logits have {found[0].shape[1]} columns, but config.json has a vocabulary of {vocab_size}"
        )
    return found


def check_logits(decoder: HfDecoder, expected: Sequence[Tensor], block_size: int) -> None:
    """Compare the logits of the decoder with expected ones.

    Raises:
        UnsupportedFeatureError: they differ by more than rounding explains.
    """
    tolerance = TOLERANCES[decoder.dtype]
    memory = _Memory(decoder, block_size)
    prompts = random_tokens(expected[0].shape[1])
    has_states = bool(decoder.state_specs)
    done = [0] * len(LENGTHS)
    for number, entries in enumerate((*STEPS, REUSE) if has_states else STEPS):
        if entries is REUSE:
            done[1] = 0
        if has_states and number == 1:
            memory.save_and_restore()
        spans = [(sequence, done[sequence], done[sequence] + n) for sequence, _, n in entries]
        token_ids = np.concatenate([prompts[sequence][i:j] for sequence, i, j in spans])
        rows, counts = (np.array([e[i] for e in entries], np.int64) for i in (1, 2))
        starts = np.array([first for _, first, _ in spans], np.int64)
        hidden_TE = memory.forward(token_ids, rows, starts, counts)
        logits = torch.split(decoder.logits(hidden_TE), counts.tolist())
        for (sequence, first, end), found in zip(spans, logits, strict=True):
            wanted = expected[sequence][first:end]
            norm = cast("Callable[..., Tensor]", cast("Any", torch.linalg).vector_norm)
            errors = norm(found - wanted, dim=1) / norm(wanted, dim=1).clamp_min(1e-9)
            error = float(errors.median())
            if not error <= tolerance:
                rule = (
                    f"its logits at positions {first} to {end - 1} differ by {error:.2g} of their size "
                    "from those of its own attention"
                )
                if decoder.dtype != torch.float32:
                    name = str(decoder.dtype).removeprefix("torch.")
                    rule += f"; if {name} only rounds too coarsely, dtype='float32' works"
                raise UnsupportedFeatureError(rule)
            done[sequence] = end


class _Memory:
    """The KV cache and the recurrent states of the check, full of NaN at first."""

    def __init__(self, decoder: HfDecoder, block_size: int) -> None:
        self._decoder, self._block_size = decoder, block_size
        num_blocks = -(-max(LENGTHS) // block_size)
        # The blocks of the second row precede those of the first.
        numbers = np.arange(len(LENGTHS) * num_blocks).reshape(len(LENGTHS), num_blocks)
        self._block_ids = numbers[::-1].copy()
        self._caches = KVCache.allocate(
            decoder.cache_specs,
            num_blocks=self._block_ids.size,
            block_size=block_size,
            empty=lambda shape: torch.full(shape, torch.nan, dtype=decoder.dtype),
        ).layers
        self._states = StatePool(decoder.state_specs, SPARE_ROW + 1, decoder.dtype)
        for row in range(SPARE_ROW + 1):
            self._states.fill(row, torch.nan)

    def forward(
        self, token_ids: np.ndarray, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> Tensor:
        """Compute the hidden states of a step."""
        size, firsts = self._block_size, np.cumsum(counts) - counts
        positions = np.arange(len(token_ids)) - np.repeat(firsts - starts, counts)
        blocks = self._block_ids[np.repeat(rows, counts), positions // size]
        arrays = token_ids, positions, blocks * size + positions % size
        decoder = self._decoder
        # Models of the library have one table, so that each key is a window.
        plans = dict[PlanKey, StepPlans]()
        for key in plan_keys_of(decoder.cache_specs):
            assert not isinstance(key, tuple)
            plans[key] = decoder.plan(self._block_ids, rows, starts, counts, key)
        columns = firsts, counts, rows, starts, counts, np.zeros_like(counts), NO_SAVES
        states = StepStates(*columns, mixers=self._states.mixers)
        return decoder.forward(
            HostTokens(*map(from_numpy, arrays)), plans, self._caches, states=states
        )

    def save_and_restore(self) -> None:
        """Copy the states of row 0 to the spare row and back, and lose them in between."""
        self._states.copy(0, SPARE_ROW)
        self._states.fill(0, torch.nan)
        self._states.copy(SPARE_ROW, 0)


# Outputs.  Routers are smaller, and rounding costs them more accuracy than it saves time.
MIN_QUANTIZED = 64


class Layer(NamedTuple):
    """A linear layer of the model, and the format in which this engine keeps its weight."""

    parent: nn.Module
    name: str
    module: nn.Module
    quantization: Format | None


def linear_layers(model: nn.Module, quantization: Format | None) -> list[Layer]:
    """List the linear layers that can be replaced. Subclasses are omitted, because they compute something else."""
    from transformers.pytorch_utils import Conv1D

    head = cast("Any", model).get_output_embeddings()
    found: list[Layer] = []
    for parent in model.modules():
        for name, module in parent.named_children():
            if type(module) in (nn.Linear, Conv1D):
                kept = _kept_as(module, quantization, is_head=module is head)
                found.append(Layer(parent, name, module, kept))
    return found


def observed(
    layers: Sequence[Layer], run: Callable[[], list[Tensor]]
) -> tuple[list[Tensor], list[Layer]]:
    """Run the unchanged model, and find which layers it only calls, without using their weights directly.

    Weights that this engine will round are rounded for this run too, one at a time, so that its results differ from
    those of the exchanged model by no more than the order of additions.

    Returns:
        What `run` returned, and the layers that can be exchanged.
    """
    watch = _WeightWatch(layers)
    hooks = [
        hook for layer in layers for hook in (_entering(layer, watch), _rounding(layer, watch))
    ]
    try:
        with watch:
            results = run()
    finally:
        for hook in hooks:
            hook.remove()
    return results, [layer for layer in layers if id(layer.module) not in watch.used_directly]


def exchange(layers: Sequence[Layer], config: EngineConfig, dtype: torch.dtype) -> None:
    """Replace each layer by this engine's product, with the same weights.

    The library's own weights are freed one layer at a time, so the peak of memory stays low.
    """
    linear = LinearConfig(is_compressed=config.compress_weights)
    for layer in layers:
        weight, bias = _matrix(layer.module)
        method = make_linear(weight.data, None, linear._replace(quantization=layer.quantization))
        method.bias = None if bias is None else bias.data
        setattr(layer.parent, layer.name, HfLinear(method, dtype))


class _WeightWatch(TorchFunctionMode):
    """Records each layer with a weight used as an operand while the layer itself is not running."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.used_directly: set[int] = set()
        self.running: list[nn.Module] = []
        self._owners = {id(layer.module.weight): layer.module for layer in layers}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A tied embedding looks rows up in the head's weight; it keeps that tensor when the head is exchanged.
        if func not in QUESTIONS and func is not F.embedding:
            for operand in _operands((*args, *kwargs.values())):
                owner = self._owners.get(id(operand))
                if owner is not None and (not self.running or self.running[-1] is not owner):
                    self.used_directly.add(id(owner))
        return func(*args, **kwargs)


def _operands(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _operands(value)
        else:
            yield value


def _entering(layer: Layer, watch: _WeightWatch) -> Any:
    return layer.module.register_forward_pre_hook(lambda module, _: watch.running.append(module))


def _rounding(layer: Layer, watch: _WeightWatch) -> Any:
    def leave(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        rounded = None
        if layer.quantization is not None:
            weight, bias = _matrix(module)
            integers = quantize(weight.data, layer.quantization)
            rounded = F.linear(inputs[0], dequantized(integers).to(output.dtype), bias)
        watch.running.pop()
        return rounded

    return layer.module.register_forward_hook(leave)


def _kept_as(module: nn.Module, wanted: Format | None, *, is_head: bool) -> Format | None:
    """Choose the format of a weight. Returns None for weights that stay plain: small ones, and those without whole groups."""
    if wanted is None:
        return None
    if is_head:
        return "int8"
    num_out, num_in = _matrix(module)[0].shape
    return wanted if num_out >= MIN_QUANTIZED and can_quantize(num_in, wanted) else None


def _matrix(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight [O, I] and bias of a linear layer."""
    weight = cast("Tensor", module.weight)
    # Conv1D stores [I, O].
    is_turned = not isinstance(module, nn.Linear)
    return weight.T.contiguous() if is_turned else weight, cast("Tensor | None", module.bias)
