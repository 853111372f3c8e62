"""Read a folder of safetensors: check the name, shape and dtype of every tensor, then read them one at a time.

Nothing is ever unpickled. `layouts.py` describes how the tensors of quantised checkpoints are stored.

A folder often contains more than its checkpoint: an older copy, the same weights in Mistral's own format
(`consolidated.safetensors`), an adapter. The files are therefore chosen like transformers does. If all files were read, a stray
one could replace tensors of the checkpoint.

`RandomWeights` stands in for a checkpoint to measure speed and memory without one (`load_format="dummy"`).  Its tensors are the same for every
division of a model among workers.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors
import torch
from torch import Tensor

from trouper.actors.executor.models.names import text_names
from trouper.actors.executor.models.parameters import Cut, Parameter
from trouper.actors.executor.models.sharding import part_of, part_of_integers
from trouper.actors.executor.weights.layouts import (
    BNB_STATES,
    OF_ACTIVATIONS,
    OF_KV_CACHE,
    StackedPart,
    StoredTensor,
    Views,
    WeightLayout,
    base_of,
)
from trouper.actors.executor.weights.quantized import (
    joined,
    matrix,
    of_expert,
    shape_of_codes,
    widened,
)
from trouper.actors.executor.weights.schemes import Scheme
from trouper.actors.runtime.startup import num_physical_cores
from trouper.config.adapters import WEIGHTS as ADAPTER
from trouper.config.checkpoint.files import check_folder, checked, read_object
from trouper.errors import TrouperValidationError, invalid
from trouper.kernels.cpu.linear.quantization import IntegerWeight, dequantized

MARKS = {"qweight": "weight", "weight_packed": "weight", "_blocks": "", "weight": "weight"}
PLAIN = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2")  # dtypes that are cast to the model's


class Checkpoint:
    """The safetensors files of a folder, opened lazily. `prefix` is added to every requested name.

    Args:
        is_part: whether the folder contains a multimodal model, from which only the text model's tensors are read.
        views: finds tensors stored in another shape, if there are any.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str = "",
        scheme: Scheme | None = None,
        *,
        is_part: bool = False,
        views: Views | None = None,
    ) -> None:
        self._folder, self._views = folder, views
        self._scheme = scheme
        self._files: dict[str, Any] = {}
        stored: dict[str, str] = {}  # names, and their files
        for file in tensor_files(folder):
            try:
                opened = safetensors.safe_open(folder / file, framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                raise TrouperValidationError(
                    f"cannot be read: {error}", parameter="model", value=str(folder / file)
                ) from error
            self._files[file] = opened
            # safetensors types it as an object without `keys`.
            names: list[str] = cast("Any", opened).keys()
            for name in names:
                if name in stored:
                    rule = f"the tensor {name} is in {stored[name]} and in {file}; keep only one of these files"
                    raise invalid("model", rule, str(folder))
                stored[name] = file
        found = text_names(stored) if is_part else {prefix + name: name for name in stored}
        self._stored_name = found
        self._file_of = {name: stored[found[name]] for name in found}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by name.

        Quantised matrices appear under the names of their stored tensors.
        """
        return {name: self._shape(name) for name in self._file_of}

    @property
    def num_unused_scales(self) -> int:
        """Return how many scales of activations and of a KV cache a quantised checkpoint contains; they are not used."""
        return sum(map(self._is_unused_scale, self._file_of))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor by its name in safetensors, such as "BF16"."""
        return self._slice(name).get_dtype()

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two plain tensors have equal numbers. Quantised tensors count as different.

        A tied head may be stored twice, and then needs memory only once.
        """
        if any(x not in self or self._layout(x) is not None for x in (name, other)):
            return False
        return torch.equal(self._tensor(name), self._tensor(other))

    def check(self, parameters: Iterable[Parameter], *, ignored: frozenset[str]) -> None:
        """Compare all names, shapes and dtypes with the parameters of the model.

        Raises:
            TrouperValidationError: tensors are missing, unexpected or of another shape or dtype; the message names them.
            UnsupportedFeatureError: a tensor is quantised in a way that cannot be read.
        """
        sources = (source for parameter in parameters for source in parameter.sources)
        wanted = {
            stored: part for source in sources for stored, part in self._parts(*source).items()
        }
        unexpected: list[str] = []
        for name in self._file_of:
            if (
                name in wanted
                or name in ignored
                or self._is_unused_scale(name)
                or name.endswith("rotary_emb.inv_freq")
                or self._is_idle_bias(name)
            ):
                continue
            unexpected.append(name)
        self._compare(wanted, unexpected)

    def _is_unused_scale(self, name: str) -> bool:
        """Whether a tensor is a scale of activations, keys or values, which stay in the model's dtype."""
        last = name.rpartition(".")[2]
        return self._scheme is not None and last in (*OF_ACTIVATIONS, *OF_KV_CACHE)

    def _compare(self, wanted: Mapping[str, StoredTensor], unexpected: Sequence[str] = ()) -> None:
        """Raise TrouperValidationError for missing or unexpected tensors, or for another shape or dtype."""
        missing = [name for name in wanted if name not in self]
        misshapen = [
            f"{name} {list(found)} instead of {list(part.shapes[0])}"
            for name, part in wanted.items()
            if name in self and part.shapes and (found := self._shape(name)) not in part.shapes
        ]
        mistyped = [
            f"{name} {found} instead of {' or '.join(part.dtypes)}"
            for name, part in wanted.items()
            if name in self and (found := self.dtype(name)) not in part.dtypes
        ]
        for problem, names in (
            ("lacks", missing),
            ("has unexpected", unexpected),
            ("has misshapen", misshapen),
            ("has mistyped", mistyped),
        ):
            if shown := sorted(names)[:4]:
                found = ", ".join(shown) + (", …" if len(names) > 4 else "")
                raise TrouperValidationError(
                    f"the checkpoint {problem} {len(names)} tensors: {found}",
                    parameter="model",
                    value=str(self._folder),
                )

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if (part := self._part(name, shape)) is not None:
            integers = self._expert(part, torch.float32)
            return part.of(self._tensor(part.name)) if integers is None else dequantized(integers)
        layout = self._layout(name)
        if layout is None:
            return self._tensor(name)
        return widened(layout, name, shape, self._read_parts(layout, name, shape))

    def read_into(self, name: str, shape: tuple[int, ...], cut: Cut, out: Tensor) -> None:
        """Read a part of a tensor.

        The file is mapped, so no more of a plain tensor is read from it. Quantised tensors are dequantized first.
        """
        out.copy_(part_of(self.read(name, shape), cut))

    def mapped(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Return a view of the mapped file, which remains valid if the file is deleted, or None if the dtype differs."""
        whole = self._tensor(name) if self._layout(name) is None else None
        return whole if whole is not None and whole.dtype == dtype else None

    def integers(self, parameter: Parameter, dtype: torch.dtype) -> IntegerWeight | None:
        found: list[IntegerWeight] = []
        for name, shape, cut in parameter.parts:
            whole = self._matrix(name, shape, dtype)
            if whole is None:
                return None
            found.append(part_of_integers(whole, cut, name))
        return joined(found)

    def _matrix(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> IntegerWeight | None:
        if (part := self._part(name, shape)) is not None:
            return self._expert(part, dtype)
        layout = self._layout(name)
        if layout is None or layout.method == "bnb4" or len(shape) != 2:
            return None
        return matrix(layout, name, shape, self._read_parts(layout, name, shape), dtype)

    def _part(self, name: str, shape: tuple[int, ...]) -> StackedPart | None:
        found = None if self._views is None else self._views.find(name, shape)
        if found is None or self._views is None or not self._views.is_optional:
            return found
        if found.name not in self:
            return None
        if found.witness is None or found.witness[0] not in self:
            return found
        return found.stored_as(self._shape(found.witness[0]))

    def _expert(self, part: StackedPart, dtype: torch.dtype) -> IntegerWeight | None:
        """Read the integers of one expert from a tensor for all experts, or return None if it is plain."""
        layout = self._layout(part.name)
        if layout is None:
            return None
        return of_expert(part, self._read_parts(layout, part.name, part.shape), dtype)

    def plain(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, with quantised ones dequantized, and without scales of activations."""
        read: set[str] = set()
        for mark in self._file_of:
            name, layout = self._marked(mark)
            if layout is not None:
                shape = self._shape_of_matrix(layout, name)
                parts = self._stored(layout, name, shape)
                self._compare(parts)
                read.update(parts)
                yield name, widened(layout, name, shape, self._read_parts(layout, name, shape))
        for name in self._file_of:
            is_idle = self._is_unused_scale(name) or self._is_idle_bias(name)
            if name not in read and not is_idle:
                yield name, self._tensor(name)

    def _marked(self, mark: str) -> tuple[str, WeightLayout | None]:
        """Return the quantised tensor that has `mark` as its first part, and its layout, if there is one."""
        for last, whole in MARKS.items():
            if mark.endswith(last):
                name = mark.removesuffix(last) + whole
                return name, self._layout(name)
        return mark, None

    def _shape_of_matrix(self, layout: WeightLayout, name: str) -> tuple[int, ...]:
        if layout.method != "bnb4":
            return layout.shape(name, self._shape)
        base = base_of(name)
        for state in BNB_STATES.values():
            if base + state in self:
                return shape_of_codes(base, self._tensor(base + state))
        raise invalid("model", f"the checkpoint lacks {base}{BNB_STATES['nf4']}")

    def _layout(self, name: str) -> WeightLayout | None:
        if self._scheme is None:
            return None
        return self._scheme.layout(name, self, self._name_in_file(name))

    def _name_in_file(self, name: str) -> str | None:
        """Return the stored name of a matrix if the parts of it are stored under another name, else None."""
        base = base_of(name)
        for last in MARKS:
            found = self._stored_name.get(base + last)
            if found is not None:
                whole = found.removesuffix(last) + "weight"
                return whole if whole != name else None
        return None

    def _parts(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        """List the stored tensors of a tensor: itself, its quantised parts, or the tensor of all experts."""
        if (part := self._part(name, shape)) is not None:
            name, shape = part.name, part.shape
        layout = self._layout(name)
        if layout is None:
            return {name: StoredTensor((shape,), PLAIN)}
        return self._stored(layout, name, shape)

    def _stored(
        self, layout: WeightLayout, name: str, shape: tuple[int, ...]
    ) -> dict[str, StoredTensor]:
        base = base_of(name)
        return {base + last: part for last, part in layout.parts(name, shape, self).items()}

    def _read_parts(
        self, layout: WeightLayout, name: str, shape: tuple[int, ...]
    ) -> dict[str, Tensor]:
        base = base_of(name)
        return {last: self._tensor(base + last) for last in layout.parts(name, shape, self)}

    def _tensor(self, name: str) -> Tensor:
        return self._files[self._file_of[name]].get_tensor(self._stored_name[name])

    def _is_idle_bias(self, name: str) -> bool:
        """Whether a bias consists of zeros: GPTQ's writers store such a bias for projections without one."""
        of = name.removesuffix("bias") + "qweight"
        return name.endswith(".bias") and of in self and not self._tensor(name).any()

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(self._stored_name[name])


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


def tensor_files(folder: Path) -> list[str]:
    """List the files of a checkpoint: `model.safetensors`, else those of the index, else all except those of an adapter.

    Raises:
        TrouperValidationError: there are none, a numbered shard is missing, or the index names a file outside the folder.
    """
    check_folder(folder)
    if (folder / SINGLE).is_file():
        return [SINGLE]
    index = read_object(folder / INDEX)
    if index is None:
        names = sorted(path.name for path in folder.glob("*.safetensors") if path.name != ADAPTER)
        check_numbers(names)
    else:
        weight_map = checked(index.get("weight_map"), dict[str, str], f"{INDEX}: weight_map")
        names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise invalid("model", f"{INDEX}: weight_map: not the name of a safetensors file", name)
    if not names:
        raise invalid("model", "no safetensors in the model folder", str(folder))
    return names


def check_numbers(names: list[str]) -> None:
    """Refuse shards with names, such as `model-00002-of-00003.safetensors`, that show others to be missing."""
    present = set(names)
    for name in names:
        if shard := SHARD.fullmatch(name):
            stem, _, count = shard.groups()
            # The first missing one is at most the number of files + 1, whatever count a stray's name claims.
            for number in range(1, min(int(count), len(names) + 1) + 1):
                wanted = f"{stem}-{number:05}-of-{count}.safetensors"
                if wanted not in present:
                    raise invalid("model", f"the folder lacks {wanted}, which belongs to", name)


DUMMY_STD = 0.02
# Each thread draws this many numbers at once: 8 MiB.
CHUNK = 2**22


class RandomWeights:
    """Uniform numbers with a standard deviation of 0.02, and norms of 1, so activations and logits stay around 1.

    The i-th number of a tensor is 16 bits of Philox with the key (seed, name), so it depends neither on the number of threads
    nor on the order of reading. A core of Zen 4 draws 190 million numbers per second.
    """

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self._seed, self._dtype = seed, dtype

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype)
        out = torch.empty(shape, dtype=self._dtype)
        flat, first = out.view(-1), 0
        for chunk in self._chunks(name, flat.numel()):
            flat[first : first + len(chunk)] = torch.frombuffer(chunk, dtype=torch.int16)
            first += len(chunk)
        return out.mul_(DUMMY_STD * 3**0.5 / 2**15)

    def read_into(self, name: str, shape: tuple[int, ...], cut: Cut, out: Tensor) -> None:
        """Draw a part of a tensor. The whole tensor is drawn first, so a part does not depend on how it is divided."""
        out.copy_(part_of(self.read(name, shape), cut))

    def mapped(self, name: str, dtype: torch.dtype) -> None:
        """Return None, because there is no file to map."""

    def integers(self, parameter: Parameter, dtype: torch.dtype) -> None:
        """Return None, because no tensor is quantized."""

    def _chunks(self, name: str, size: int) -> Iterator[np.ndarray]:
        """Yield the numbers of a tensor in order, as int16."""
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=16).digest()
        key = int.from_bytes(digest, "little")

        def draw(first: int) -> np.ndarray:
            num = min(CHUNK, size - first)
            bits = np.random.Philox(key=key, counter=first << 64).random_raw(-(-num // 4))
            return bits.view(np.int16)[:num]

        firsts = range(0, size, CHUNK)
        if len(firsts) == 1:
            yield draw(0)
            return
        with ThreadPoolExecutor(num_physical_cores(), "trouper-dummy") as pool:
            yield from pool.map(draw, firsts)
