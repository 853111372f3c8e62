"""Read the tensors of a GGUF file: as stored integers with scales and minima, or as dequantized numbers.

`gguf_types.py` unpacks the blocks of each type.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of view, split and some others open.

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.models.parameters import WHOLE, Cut, HeadOrder, Parameter, Span
from trouper.actors.executor.models.sharding import part_of, part_of_integers, row_order
from trouper.actors.executor.steps.batch import from_numpy
from trouper.actors.executor.weights.gguf_types import READERS, Affine, dequantized_affine
from trouper.config.gguf.encoders import encoder_shapes
from trouper.config.gguf.header import Gguf, GgufTensor, read_gguf
from trouper.config.gguf.names import Place, family_of, hf_config, place_of
from trouper.errors import UnsupportedFeatureError, invalid
from trouper.kernels.codegen.units import LANES
from trouper.kernels.cpu.linear.quantization import IntegerWeight, ScaleBlocks, StackedWeight
from trouper.kernels.formats import CENTRES, Format

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The tensor with gate and up of all experts, and the names that it replaces.
FUSED, SEPARATE = "ffn_gate_up_exps", re.compile("ffn_(gate|up)_exps")
# How the names of layers' tensors begin, and the tables of rotary frequencies in old files, which follow from the header.
LAYER, UNREAD = "blk.", "rot_embd"
# The formats of types whose values are evenly spaced. The others have eight bits.
FORMATS: dict[str, Format] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "TQ1_0", "TQ2_0"), "int4"),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K"), "int5"),
    "Q6_K": "int6",
    "MXFP4": "fp4",
}
# A layer of more parts of several types becomes one of eight bits, because each part is a launch.
MAX_PARTS = 4
FEW_ROWS = 1024  # dequantised at once: the numbers in between take some ten bytes each, and stay in a cache


class MappedFiles:
    """The files of a model. Each is mapped into memory when one of its tensors is first read."""

    def __init__(self) -> None:
        self._maps: dict[Path, np.ndarray] = {}

    def plain(self, tensor: GgufTensor, first: int, stop: int) -> Tensor:
        blocks = self.blocks(tensor, first, stop)
        if tensor.type.name in PLAIN:
            return blocks.view(PLAIN[tensor.type.name]).view(stop - first, *tensor.shape[1:])
        return dequantized_affine(READERS[tensor.type.name](blocks))

    def blocks(self, tensor: GgufTensor, first: int, stop: int) -> Tensor:
        """Return the stored bytes of some rows as a view of the file, [rows, blocks of a row, bytes of a block].

        Nothing is copied before it is unpacked.
        """
        if tensor.file not in self._maps:
            # Mode "c" (copy on write) is needed because torch has no tensors of read-only memory.
            self._maps[tensor.file] = np.memmap(tensor.file, dtype=np.uint8, mode="c")
        row_bytes = tensor.num_bytes // tensor.shape[0]
        begin, end = tensor.offset + first * row_bytes, tensor.offset + stop * row_bytes
        return from_numpy(self._maps[tensor.file][begin:end]).view(
            stop - first, -1, tensor.type.num_bytes
        )


class GgufCheckpoint:
    """The mapped files of a decoder. Its tensors have the names of a folder of safetensors."""

    def __init__(self, path: Path) -> None:
        self._header: Gguf = read_gguf(path)
        self._family = family_of(self._header)
        self._config = hf_config(self._header)
        self._files = MappedFiles()

    def check(self, parameters: Iterable[Parameter]) -> None:
        """Compare all names, shapes and types.

        Packed types store blocks along the rows of a matrix, so a vector, such as a norm, must have a plain type.

        Raises:
            TrouperValidationError: tensors are missing, or have another shape or an impossible type; the message names them.
            UnsupportedFeatureError: a layer has a tensor that no parameter reads; the message names it.
        """
        needed = set[str]()
        for parameter in parameters:
            for name, shape in parameter.sources:
                place = self._place(name)
                needed.add(place.name)
                tensor = self._header.tensors.get(place.name)
                wanted = shape
                if place.expert is not None:
                    num_out = shape[0] * (2 if FUSED in place.name else 1)
                    wanted = (self._num_experts, num_out, *shape[1:])
                if tensor is None or not _are_same(tensor.shape, wanted):
                    has = "lacks" if tensor is None else f"has {list(tensor.shape)} for"
                    rule = f"{self._header.path.name}: {has} {place.name} {list(wanted)}"
                    raise invalid("model", rule, str(self._header.path))
                kind = tensor.type
                if kind.name not in PLAIN and (len(shape) < 2 or shape[-1] % kind.length):
                    rule = f"{self._header.path.name}: {place.name} {list(shape)} may not be of type {kind.name}"
                    raise invalid(
                        "model", f"{rule}, only {', '.join(PLAIN)}", str(self._header.path)
                    )
        self._check_all_read(needed)

    def _check_all_read(self, needed: set[str]) -> None:
        """Check that the model reads every tensor of its layers, because an ignored bias would change every token.

        Tensors outside the layers and those after the last layer are exempt, since they have other uses.  So are biases of zeros.
        """
        layers = {name.partition(".")[2].partition(".")[0] for name in needed if name[:4] == LAYER}
        others = [
            name
            for name in sorted(self._header.tensors.keys() - needed)
            if name[:4] == LAYER
            and name.split(".")[1] in layers
            and UNREAD not in name
            and not self._is_zero_bias(name)
        ]
        if others:
            shown = ", ".join(others[:4]) + ", …" * (len(others) > 4)
            rule = f"{self._header.path.name} has {len(others)} tensors that {self._family.architecture} does not use: {shown}"
            raise UnsupportedFeatureError(rule, parameter="model")

    def _is_zero_bias(self, name: str) -> bool:
        """Return whether a bias consists of zeros, which some writers store for projections without a bias."""
        tensor = self._header.tensors[name]
        if not name.endswith(".bias") or tensor.type.name not in PLAIN:
            return False
        return not self._files.plain(tensor, 0, tensor.shape[0]).any()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        whole = torch.empty(shape)
        self.read_into(name, shape, WHOLE, whole)
        return whole

    def read_into(self, name: str, shape: tuple[int, ...], cut: Cut, out: Tensor) -> None:
        """Read a part of a tensor into `out`, some rows at a time: a whole embedding in float32 would double the peak memory."""
        tensor = self._tensor(name, shape)
        columns, filled = Cut(columns=cut.columns), 0
        for first, last in self._rows_of(cut, shape[0]):
            order = self._row_order(name, shape[0], first, last, cut)
            step = FEW_ROWS if len(shape) == 2 and order is None else last - first
            for begin in range(first, last, step):
                end = min(last, begin + step)
                rows = self._as_in_checkpoint(name, self._files.plain(tensor, begin, end))
                rows = part_of(rows if order is None else rows[order], columns)
                out[filled : filled + len(rows)] = rows
                filled += len(rows)

    def _as_in_checkpoint(self, name: str, rows: Tensor) -> Tensor:
        """Undo what converters do to the numbers of some tensors, and to the columns of value heads."""
        if name.endswith("A_log"):
            return (-rows).log()
        if (order := self._value_columns(name)) is not None:
            return rows[:, order]
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            return rows - self._family.norm_offset if self._family.norm_offset else rows
        return rows

    def mapped(self, name: str, dtype: torch.dtype) -> None:
        """Return None, because embeddings in GGUF files seldom have the model's dtype, so they are not shared."""

    def integers(
        self, parameter: Parameter, dtype: torch.dtype
    ) -> IntegerWeight | StackedWeight | None:
        """Read a matrix as the integers that kernels multiply with: the same numbers, in as few bits as they allow.

        Parts of several types stay separate, except in experts, whose launches need one form, and in layers of many parts. Returns
        None if a part is plain, or for other dtypes than bfloat16, which the kernels of integers multiply.
        """
        tensors = [self._tensor(name, shape) for name, shape in parameter.sources]
        if dtype != torch.bfloat16 or not all(t.type.name in READERS for t in tensors):
            return None
        runs: list[tuple[str, list[Affine]]] = []
        for (name, shape, cut), tensor in zip(parameter.parts, tensors, strict=True):
            kind = tensor.type.name
            for first, last in self._rows_of(cut, shape[0]):
                part = READERS[kind](self._files.blocks(tensor, first, last))
                order = self._row_order(name, shape[0], first, last, cut)
                if order is not None:
                    part = reordered(part, order)
                if not runs or runs[-1][0] != kind:
                    runs.append((kind, []))
                runs[-1][1].append(part)
        is_expert = self._place(parameter.sources[0][0]).expert is not None
        heights = [sum(len(part.q_OI) for part in parts) for _, parts in runs]
        if is_expert or len(runs) > MAX_PARTS or any(height % LANES for height in heights):
            parts = [part for _, of_run in runs for part in of_run]
            return self._integers_of({kind for kind, _ in runs}, parts, parameter)
        weights = [self._integers_of({kind}, parts, parameter) for kind, parts in runs]
        return weights[0] if len(weights) == 1 else StackedWeight(tuple(weights))

    def _integers_of(
        self, kinds: set[str], parts: Sequence[Affine], parameter: Parameter
    ) -> IntegerWeight:
        """Concatenate parts to one weight, of eight bits if the formats of the types differ."""
        formats: set[Format] = {FORMATS.get(kind, "int8") for kind in kinds}
        fmt: Format = formats.pop() if len(formats) == 1 else "int8"
        whole = stacked([centred(part, CENTRES[fmt]) for part in parts])
        if (order := self._value_columns(parameter.sources[0][0])) is not None:
            whole = _with_columns(whole, order, self._config["linear_value_head_dim"])
        q_OI, scales_OG, minima_OG, blocks = whole
        if fmt == "fp4":
            scales_OG = scales_OG.bfloat16()  # powers of two
        rows = IntegerWeight(
            fmt, torch.bfloat16, q_OI, scales_OG, minima_OG=minima_OG, blocks=blocks
        )
        columns = parameter.parts[0][2].columns  # of all parts the same
        return part_of_integers(rows, Cut(columns=columns), parameter.sources[0][0])

    def _rows_of(self, cut: Cut, num_rows: int) -> Iterable[Span]:
        """Map rows of a checkpoint to rows of the file. Rows of a checkpoint may be grouped by KV head: queries, key, value.

        Such a cut has one head in each range.
        """
        rows = cut.rows or ((0, num_rows),)
        if not self._family.is_regrouped or len(rows) == 1:
            return rows
        num_q, num_kv = (self._config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
        width = num_rows // (num_q + 2 * num_kv)
        num_shared = num_q // num_kv
        found: list[Span] = []
        for first, _ in rows:
            group, place = divmod(first // width, num_shared + 2)
            kinds = (num_q + group, num_q + num_kv + group)
            is_query = place < num_shared
            head = group * num_shared + place if is_query else kinds[place - num_shared]
            found.append((head * width, (head + 1) * width))
        return found

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        """Find a tensor, or an expert's part of the tensor for all experts."""
        place = self._place(name)
        tensor = self._header.tensors[place.name]
        if place.expert is None:
            return tensor._replace(shape=shape)
        num_bytes = tensor.num_bytes // tensor.shape[0]
        first = num_bytes * place.expert
        if FUSED in place.name:
            # The rows of up follow those of gate.
            first += num_bytes // 2 * (".up_proj." in name or ".w3." in name)
        return tensor._replace(offset=tensor.offset + first, shape=shape)

    def _place(self, name: str) -> Place:
        """Return the place of a tensor; gate and up of all experts may be one tensor."""
        place = place_of(self._family, name)
        if place.expert is None or place.name in self._header.tensors:
            return place
        fused = SEPARATE.sub(FUSED, place.name)
        return place._replace(name=fused) if fused in self._header.tensors else place

    @property
    def _num_experts(self) -> int:
        return self._config.get("num_experts") or self._config["num_local_experts"]

    def _row_order(
        self, name: str, num_rows: int, first: int, last: int, cut: Cut
    ) -> Tensor | None:
        """Reorder rows of whole heads from interleaved rotary pairs to halves, which `models/layers.py` expects."""
        if cut.heads is not None:
            return row_order(last - first, cut.heads)
        if (heads := self._value_heads()) is not None:
            return _value_rows(name, num_rows, *heads)
        is_k = ".k_proj." in name
        if not self._family.is_permuted or not (is_k or ".q_proj." in name):
            return None
        num_heads = self._config["num_key_value_heads" if is_k else "num_attention_heads"]
        head_dim = num_rows // num_heads
        return row_order(last - first, HeadOrder(head_dim, head_dim))

    def _value_heads(self) -> tuple[Tensor, int] | None:
        """Return the place in the file of each value head of gated delta nets, and their width. None if the order is the same."""
        if not self._family.is_tiled:
            return None
        num_k, num_v = (self._config.get(f"linear_num_{kind}_heads") for kind in ("key", "value"))
        if num_k is None or num_v is None or num_k == num_v:
            return None
        order = torch.arange(num_v).view(num_v // num_k, num_k).T.flatten()
        return order, self._config["linear_value_head_dim"]

    def _value_columns(self, name: str) -> Tensor | None:
        heads = self._value_heads() if name.endswith("linear_attn.out_proj.weight") else None
        return None if heads is None else _spread(*heads)


class GgufEncoder:
    """The tensors of an encoder in a GGUF file, under the names and shapes of a folder of safetensors."""

    def __init__(self, path: Path) -> None:
        self._header = read_gguf(path)
        self._stored = encoder_shapes(self._header)
        self._files = MappedFiles()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (_, shape) in self._stored.items()}

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor of a known shape as plain numbers.

        Raises:
            TrouperValidationError: a vector has a packed type, which only matrices may have.
        """
        stored = self._stored[name][0]
        tensor = self._header.tensors[stored]._replace(shape=shape)
        if tensor.type.length > 1 and len(shape) < 2:
            rule = f"{self._header.path.name}: {stored} {list(shape)} may not be of type {tensor.type.name}"
            raise invalid("model", f"{rule}, only {', '.join(PLAIN)}", str(self._header.path))
        return self._files.plain(tensor, 0, shape[0])


def _value_rows(name: str, num_rows: int, order: Tensor, width: int) -> Tensor | None:
    """Return the rows of a file in the order of a checkpoint, if the last rows belong to value heads."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    if last in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return order
    if last not in ("in_proj_qkv", "in_proj_z", "conv1d"):
        return None
    num_before = num_rows - len(order) * width
    return torch.cat((torch.arange(num_before), num_before + _spread(order, width)))


def _spread(order: Tensor, width: int) -> Tensor:
    """Return the order of numbers for an order of heads of this width."""
    return (order[:, None] * width + torch.arange(width)).flatten()


def _with_columns(affine: Affine, order: Tensor, width: int) -> Affine:
    """Reorder whole heads of columns, with the scales of their groups.

    Raises:
        UnsupportedFeatureError: a group of columns with one scale contains several heads.
    """
    num_columns, num_groups = affine.q_OI.shape[1], affine.scales_OG.shape[1]
    size = num_columns // num_groups
    if width % size:
        rule = f"heads of {width} numbers in groups of {size} with one scale are not supported"
        raise UnsupportedFeatureError(rule, parameter="model")
    groups = order[::size] // size
    minima = affine.minima_OG
    return Affine(
        affine.q_OI[:, order],
        affine.scales_OG[:, groups],
        None if minima is None else minima[:, groups],
    )


def _are_same(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor has the wanted shape, but for dimensions of 1: the gate of a shared expert is stored as a row.

    The numbers of a vector may be stored in groups, like those of Mamba-2's norm.
    """
    if len(wanted) == 1:
        return math.prod(stored) == wanted[0]
    found, needed = ([size for size in shape if size > 1] for shape in (stored, wanted))
    return found == needed


def centred(affine: Affine, centre: int) -> Affine:
    """Shift integers without a sign, those of weights with minima, to the range of a format with this centre."""
    if affine.minima_OG is None or not centre:
        return affine
    minima_OG = affine.minima_OG + centre * affine.scales_OG
    return affine._replace(q_OI=affine.q_OI - centre, minima_OG=minima_OG)


def reordered(affine: Affine, order: Tensor) -> Affine:
    """Return the outputs of a matrix in another order."""
    q_OI, scales_OG, minima_OG, blocks = affine
    if blocks is not None:
        minima = [None if x is None else x[order] for x in blocks[2:]]
        blocks = ScaleBlocks(blocks.scales_OG[order], blocks.scale_factors_OB[order], *minima)
    minima_OG = None if minima_OG is None else minima_OG[order]
    return Affine(q_OI[order], scales_OG[order], minima_OG, blocks)


def stacked(parts: Sequence[Affine]) -> Affine:
    """Concatenate the outputs of matrices, in the smallest of their group sizes.

    Groups are split if the matrices have different group sizes; the numbers stay the same.
    """
    num_groups = max(part.scales_OG.shape[1] for part in parts)

    def finer(x: Tensor) -> Tensor:
        return x.repeat_interleave(num_groups // x.shape[1], 1)

    if len(parts) == 1:
        return parts[0]
    minima = [part.minima_OG for part in parts]
    has_minima = any(each is not None for each in minima)
    return Affine(
        torch.cat([part.q_OI for part in parts]),
        torch.cat([finer(part.scales_OG) for part in parts]),
        torch.cat(
            [
                finer(torch.zeros_like(part.scales_OG) if each is None else each)
                for part, each in zip(parts, minima, strict=True)
            ]
        )
        if has_minima
        else None,
        _stacked_blocks([part.blocks for part in parts]),
    )


def _stacked_blocks(blocks: Sequence[ScaleBlocks | None]) -> ScaleBlocks | None:
    """Concatenate the outputs of blocks of scales. Returns None if a matrix has none, or other groups than the first."""
    found = [each for each in blocks if each is not None]
    forms = {(each.scales_OG.shape[1], each.minima_OG is None) for each in found}
    if len(found) < len(blocks) or len(forms) > 1:
        return None
    minima = [each.minima_OG for each in found if each.minima_OG is not None]
    factors = [each.minimum_factors_OB for each in found if each.minimum_factors_OB is not None]
    return ScaleBlocks(
        torch.cat([each.scales_OG for each in found]),
        torch.cat([each.scale_factors_OB for each in found]),
        torch.cat(minima) if minima else None,
        torch.cat(factors) if factors else None,
    )
