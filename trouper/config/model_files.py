"""Sizes, shapes and types of a model's weight files, read from their headers.

`trouper show` and Ollama's API describe models with them.  Only headers are read, so a model of any size takes milliseconds.
"""

import hashlib
import math
from pathlib import Path
from typing import Any

import msgspec

from trouper.config.gguf.header import Gguf, read_gguf
from trouper.config.gguf.names import gguf_models, gguf_names
from trouper.config.model import ModelConfig

# The largest size of a safetensors header in bytes; the largest known one is under 20 MiB.
MAX_HEADER = 2**27
STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class ModelFiles(msgspec.Struct, frozen=True):
    """Sizes and shapes of a model's weight files, known without reading the weights.

    `digest` identifies the files by name, size and time of change; it is no hash of their contents,
    which would take minutes for a large model.
    """

    num_bytes: int
    num_parameters: int
    modified_s: float
    digest: str
    family: str
    level: str  # quantization level

    @property
    def parameters(self) -> str:
        """The number of parameters as a text: 135M, 8.0B."""
        for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
            if self.num_parameters >= size:
                digits = 0 if self.num_parameters >= 100 * size else 1
                return f"{self.num_parameters / size:.{digits}f}{unit}"
        return str(self.num_parameters)

    @classmethod
    def of(cls, model: ModelConfig) -> "ModelFiles":
        """Inspect the files of a model.  A geometry with dummy weights has no files and no bytes."""
        path = Path(model.path)
        files = weight_files(path)
        stats = [(file, file.stat()) for file in files]
        digest = hashlib.sha256()
        for file, stat in stats:
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        header = read_gguf(path) if model.is_gguf else None
        family = model.hf_config.get("model_type")
        if header is not None:
            family = header.metadata.get("general.architecture") or family
        return cls(
            sum(stat.st_size for _, stat in stats),
            _num_parameters(files, header),
            max((stat.st_mtime for _, stat in stats), default=0.0),
            digest.hexdigest(),
            str(family or "unknown"),
            _level(model, header),
        )


def weight_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    if not path.is_file():
        return []
    for files in gguf_models(gguf_names(path.parent)).values():
        # The first file of a split model represents all of them.
        if files[0] == path.name:
            return [path.parent / file for file in files]
    return [path]


def _num_parameters(files: list[Path], header: Gguf | None) -> int:
    if header is not None:
        return sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    return sum(_num_numbers(file) for file in files)


def _num_numbers(file: Path) -> int:
    """Count the numbers in a safetensors file by the shapes in its header."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = msgspec.json.decode(opened.read(min(size, MAX_HEADER)))
    return sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__")


def _level(model: ModelConfig, header: Gguf | None) -> str:
    if header is not None:
        types = [t.type.name for t in header.tensors.values() if len(t.shape) > 1]
        return max(set(types), key=types.count) if types else "F32"
    quantization: dict[str, Any] = model.hf_config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    return str(method).upper() if method else STORED.get(model.dtype, model.dtype.upper())
