"""Load LoRA adapters into slots: check their files, store the matrices of each adapted layer, and apply output matrices of adapters.

An adapter trained with `modules_to_save=["lm_head"]` stores a whole output matrix.  Rows of such an adapter get their logits from it
instead of the model's.  It is multiplied outside of recorded steps, only with these rows, and a row's bits do not depend on the others.

Laws:
  * An adapter is checked completely before any part of it is stored, so a bad adapter leaves its slot
    unchanged. Each stage of a pipeline checks the whole adapter and takes the matrices of its own layers, so
    all stages accept it or none does.
  * The slots outlive the layers: when a sleep level drops the weights, the layers that are read again find
    their adapters.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from trouper.actors.executor.models.names import text_names
from trouper.actors.executor.models.parameters import Cut, Parameter
from trouper.actors.executor.models.sharding import part_of
from trouper.actors.executor.steps.batch import from_numpy
from trouper.config.adapters import WEIGHTS, AdapterConfig, AdapterFiles, LoRAConfig
from trouper.errors import UnsupportedFeatureError, invalid
from trouper.kernels.linear import LinearMethod, LoRALinear, LoRAWeights, LowRank, RowSource
from trouper.kernels.select import make_linear, make_lora

Compute = Callable[[Tensor, LinearMethod], Tensor]
"""Returns the logits of hidden states by a head."""


class AdapterHeads:
    """The heads of the loaded adapters, by slot.  Each takes as much memory as the model's own head in the model's dtype.

    Args:
        shape: outputs and inputs of the model's head.
        has_bias: whether the model's head has a bias, so that an adapter's head has one too.
        is_here: whether logits are computed in this process.  Other stages only check the files.
    """

    def __init__(
        self, shape: tuple[int, int], *, has_bias: bool = False, is_here: bool = True
    ) -> None:
        self.shape, self.has_bias = shape, has_bias
        self._is_here = is_here
        self._heads: dict[int, LinearMethod] = {}

    def __repr__(self) -> str:
        return f"<AdapterHeads of slots {sorted(self._heads)}>"

    def put(self, slot: int, tensors: tuple[Tensor, Tensor | None] | None) -> None:
        """Store the weight and bias of a slot's head.  None means that its adapter uses the model's."""
        self._heads.pop(slot, None)
        if tensors is not None and self._is_here:
            self._heads[slot] = make_linear(*tensors)

    def of(self, slot: int) -> LinearMethod | None:
        """Return the head of a slot's adapter; None means the model's."""
        return self._heads.get(slot)

    def are_used(self, slots_R: np.ndarray) -> bool:
        """Whether an adapter of these rows has a head of its own."""
        return bool(self._heads) and not self._heads.keys().isdisjoint(slots_R.tolist())

    def replace(
        self, logits_RV: Tensor, hidden_RE: Tensor, slots_R: np.ndarray, compute: Compute
    ) -> None:
        """Overwrite the logits of the rows whose adapter has its own output matrix."""
        for slot in np.unique(slots_R).tolist():
            if (head := self._heads.get(slot)) is not None:
                rows = from_numpy(np.flatnonzero(slots_R == slot))
                logits_RV.index_copy_(
                    0, rows, compute(hidden_RE.index_select(0, rows), head).to(logits_RV.dtype)
                )


def finite(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of an adapter's file in the model's dtype.

    Raises:
        ValueError: its shape is another one, or a value is not finite.
    """
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)} instead of {list(shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} has the unsupported dtype {tensor.dtype}")
    converted = tensor.to(dtype)
    if not bool(converted.isfinite().all()):
        raise ValueError(f"{name} has non-finite values")
    return converted


logger = logging.getLogger(__name__)
KEY = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<side>[AB])\.weight")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_SHOWN = 4
# Names in transformers of the parts of a multimodal model other than its text model.
TOWER_NAMES = (
    "visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector", "connector", "embed_vision",
    "embed_audio",
)  # fmt: skip
TOWERS = (
    "the adapter changes %d modules of vision or audio towers, which are not served: only text is"
)
ADVICE = "language_model_only=True serves the text model with this adapter"
Make = Callable[[Sequence[int], int, int, int, torch.dtype], LoRAWeights]
"""Makes the slots of a layer from its part sizes, its inputs, the number of slots, the largest rank and the dtype."""


class AdapterSlots:
    """The loaded adapters, in slots from 1 on.

    Args:
        dtype: dtype of the model, in which the matrices are kept.
        rows: provides the adapter of each row of a step.
        make: creates the slots of a layer on the model's device; the CPU by default.
        heads: the heads that adapters replace.  Without it such adapters are refused.
        has_tower: images or audio are served, so an adapter that changes the tower is refused.
    """

    def __init__(
        self,
        config: LoRAConfig,
        dtype: torch.dtype,
        rows: RowSource,
        make: Make = make_lora,
        heads: AdapterHeads | None = None,
        *,
        has_tower: bool = False,
    ) -> None:
        self._config, self._dtype, self.heads = config, dtype, heads
        self._has_tower = has_tower
        self._rows, self._make = rows, make
        # Layers by the name of their parameter's first source.
        self._layers: dict[str, _Layer] = {}
        self._parts: dict[
            str, tuple[int, int]
        ] = {}  # outputs and inputs by module, of the whole model

    def __repr__(self) -> str:
        return f"<AdapterSlots of {len(self._parts)} modules>"

    def wrap(self, parameter: Parameter, linear: LinearMethod) -> LinearMethod:
        """Return the layer with its adapters, or the layer itself if no adapter may change it."""
        modules = [name.removesuffix(".weight") for name, _ in parameter.sources]
        if not any(map(self._is_target, modules)):
            return linear
        layer = self._layers.get(modules[0])
        if layer is None:
            self.know(parameter)
            sizes, num_in = [rows for rows, _ in parameter.part_shapes], parameter.part_shapes[0][1]
            weights = self._make(
                sizes, num_in, self._config.num_slots, self._config.max_rank, self._dtype
            )
            cuts = [cut for *_, cut in parameter.parts]
            layer = self._layers[modules[0]] = _Layer(modules, cuts, weights)
        return LoRALinear(linear, layer.weights, self._rows)

    def know(self, parameter: Parameter) -> None:
        """Register a layer that an adapter may change, on this stage or another.

        The check of an adapter's files needs all of them, because it names modules of every stage.
        """
        for name, (num_out, num_in) in parameter.sources:
            self._parts[name.removesuffix(".weight")] = num_out, num_in

    def load(self, slot: int, files: AdapterFiles) -> None:
        """Load an adapter into a slot.

        Raises:
            TrouperValidationError: it does not fit the model, or is malformed; the slot is unchanged.
            UnsupportedFeatureError: it contains more than the matrices of linear layers.
        """
        tensors = _tensors(files.weights)
        head = self._head_of(files.config, tensors)
        found = self._checked(files.config, tensors)
        if self.heads is not None:
            self.heads.put(slot, head)
        for layer in self._layers.values():
            parts = [
                None if module not in found else _part_of_adapter(found[module], cut)
                for module, cut in zip(layer.modules, layer.cuts, strict=True)
            ]
            if any(part is not None for part in parts):
                layer.weights.load(slot, parts)
            else:
                layer.weights.clear(slot)

    def _head_of(
        self, config: AdapterConfig, tensors: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None] | None:
        """Take the tensors of the adapter's own head out of its file.  Returns None if it has none.

        Raises:
            TrouperValidationError: the head does not fit the model.
            UnsupportedFeatureError: this model or device does not replace heads.
        """
        if not config.modules_to_save:
            return None
        if self.heads is None:
            raise UnsupportedFeatureError(
                f"modules_to_save={list(config.modules_to_save)}: an adapter replaces the head only on the CPU, in models of trouper's own code without tensor parallelism; merge the adapter into its model",
                parameter="lora_path",
            )
        names = "|".join(config.modules_to_save)
        pattern = re.compile(rf"base_model\.model\.(?:[\w.]+\.)?(?:{names})\.(weight|bias)")
        found = {match[1]: key for key in tensors if (match := pattern.fullmatch(key))}
        if "weight" not in found or ("bias" in found) != self.heads.has_bias:
            raise _bad(f"modules_to_save: it has {sorted(found) or 'no tensor'} of the head")
        num_out, num_in = self.heads.shape
        shapes = {"weight": (num_out, num_in), "bias": (num_out,)}
        try:
            parts = {
                side: finite(key, tensors.pop(key), shapes[side], self._dtype)
                for side, key in found.items()
            }
        except ValueError as error:
            raise _bad(str(error)) from None
        return parts["weight"], parts.get("bias")

    def _checked(self, config: AdapterConfig, tensors: Mapping[str, Tensor]) -> dict[str, LowRank]:
        """Return the matrices of each module, scaled and in the model's dtype."""
        # Matrices by the adapter's module names.
        sides: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            matched = KEY.fullmatch(key)
            if matched is None:
                raise _unexpected(key)
            sides.setdefault(matched["module"], {})[matched["side"]] = tensor
        named = self._own_names(list(sides))
        unknown = [given for given in sides if given not in named and not _is_of_tower(given)]
        if unknown:
            raise _bad(
                f"the model has no such modules, or they cannot be adapted: {_listed(unknown)}"
            )
        if unused := [given for given in sides if given not in named]:
            if self._has_tower:
                advice = f"; {ADVICE}" if named else ""
                rule = f"it changes {len(unused)} modules of the vision or audio tower, whose adapters are not supported: {_listed(unused)}{advice}"
                raise UnsupportedFeatureError(f"lora_path: {rule}", parameter="lora_path")
            if not named:
                raise _bad(
                    f"it changes only a vision or audio tower, which is not served: {_listed(unused)}"
                )
            logger.info(TOWERS, len(unused))
        if not named:
            raise _bad("it contains no matrix")
        return {
            module: self._low_rank(given, self._parts[module], config, sides[given])
            for given, module in sorted(named.items())
        }

    def _own_names(self, given: Sequence[str]) -> dict[str, str]:
        """Map the adapter's module names to the model's. Names of a text model inside a larger model have a
        different prefix.
        """
        named = {name: name for name in given if self._takes(name)}
        if len(named) < len(given):
            inner = {stored: plain for plain, stored in text_names(given).items()}
            named |= {name: inner[name] for name in given if self._takes(inner.get(name, ""))}
        return named

    def _low_rank(
        self, module: str, shape: tuple[int, int], config: AdapterConfig, pair: dict[str, Tensor]
    ) -> LowRank:
        """Check and scale the two matrices of a module, given by the adapter's name of it."""
        if len(pair) < 2:
            raise _bad(f"{module} has only lora_{min(pair)}")
        (num_out, num_in), rank = shape, config.rank_of(module)
        if rank > self._config.max_rank:
            raise invalid(
                "lora_path",
                f"LoRA rank {rank} is greater than max_lora_rank {self._config.max_rank}, at {module}",
            )
        for side, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            tensor = pair[side]
            if tuple(tensor.shape) != shape:
                raise _bad(
                    f"{module}.lora_{side} has shape {list(tensor.shape)} instead of {list(shape)}"
                )
            if tensor.dtype not in DTYPES:
                raise _bad(f"{module}.lora_{side} has the unsupported dtype {tensor.dtype}")
        b_OR = (pair["B"].float() * config.scale_of(module)).to(self._dtype)
        found = LowRank(pair["A"].to(self._dtype), b_OR)
        if not all(bool(matrix.isfinite().all()) for matrix in found):
            raise _bad(f"{module} has non-finite values")
        return found

    def _takes(self, module: str) -> bool:
        return module in self._parts and self._is_target(module)

    def _is_target(self, module: str) -> bool:
        targets = self._config.target_modules
        return targets is None or module.rpartition(".")[2] in targets


class _Layer:
    """One linear layer: the checkpoint's modules that form it, the part of each that this worker has, and their
    adapters.
    """

    def __init__(self, modules: Sequence[str], cuts: Sequence[Cut], weights: LoRAWeights) -> None:
        self.modules, self.cuts, self.weights = modules, cuts, weights


def _part_of_adapter(adapter: LowRank, cut: Cut) -> LowRank:
    """Return the inputs of A and the outputs of B that belong to this worker's part of a matrix."""
    a_RI, b_OR = adapter
    return LowRank(
        part_of(a_RI, Cut(columns=cut.columns)).contiguous(),
        part_of(b_OR, Cut(rows=cut.rows, heads=cut.heads)).contiguous(),
    )


def _is_of_tower(module: str) -> bool:
    """Whether a module belongs to a vision or audio tower or a projector."""
    return any(name in module.split(".") for name in TOWER_NAMES)


def _tensors(data: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise _bad(f"it cannot be read: {error}") from None


def _unexpected(key: str) -> Exception:
    for mark in ("lora_embedding", "lora_magnitude_vector", "bias", "modules_to_save"):
        if mark in key:
            return UnsupportedFeatureError(
                f"{WEIGHTS}: {_listed([key])}: only matrices of linear layers are supported",
                parameter="lora_path",
            )
    return _bad(f"it has unexpected tensors: {_listed([key])}")


def _bad(rule: str) -> Exception:
    return invalid("lora_path", f"{WEIGHTS}: {rule}")


def _listed(names: Sequence[str]) -> str:
    shown = [name if len(name) <= 100 else name[:100] + "…" for name in sorted(names)[:MAX_SHOWN]]
    return ", ".join(shown) + (", …" if len(names) > MAX_SHOWN else "")
