"""Models as Ollama's API describes them.  Clients fail on a field that is missing or null, so each is there."""

import hashlib
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from trouper import __version__
from trouper.actors.rendering.prompts.infill import marks_of
from trouper.config.gguf.files import gguf_models, gguf_names
from trouper.config.gguf.header import read_gguf
from trouper.config.model import ModelConfig
from trouper.errors import TrouperError
from trouper.frontends.server.service.service import Service

JSONObject = dict[str, Any]
# The release of Ollama whose routes and fields these are; clients compare it with the release that they need.
OLLAMA_VERSION = "0.12.6"
FOR_EVER = "9999-12-31T23:59:59Z"
MAX_HEADER = 2**27  # bytes of a safetensors header; the largest known is under 20 MiB
# Continue offers no completion unless the template of a model mentions the suffix in Go's way.
HAS_SUFFIX = "{{- /* .Suffix */ -}}"
STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class ModelFiles(msgspec.Struct, frozen=True):
    """Sizes and shapes of a model's weight files, which are known without reading the weights."""

    num_bytes: int
    num_parameters: int
    modified_s: float
    digest: str
    family: str
    level: str  # of quantisation

    @classmethod
    def of(cls, model: ModelConfig) -> "ModelFiles":
        """Look at the files of a model; one that has none, a geometry with dummy weights, has no bytes."""
        path = Path(model.path)
        files = _weight_files(path)
        stats = [(file, file.stat()) for file in files]
        digest = hashlib.sha256()
        for file, stat in stats:
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        metadata = read_gguf(path).metadata if model.is_gguf else {}
        family = metadata.get("general.architecture") or model.hf_config.get("model_type")
        return cls(
            sum(stat.st_size for _, stat in stats),
            _num_parameters(path, files, is_gguf=model.is_gguf),
            max((stat.st_mtime for _, stat in stats), default=0.0),
            digest.hexdigest(),
            str(family or "unknown"),
            _level(model, path),
        )


def tag(service: Service, files: ModelFiles, name: str) -> JSONObject:
    """Describe a model for `/api/tags`."""
    full = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    return {
        "name": full,
        "model": full,
        "modified_at": _time(files.modified_s),
        "size": files.num_bytes,
        "digest": files.digest,
        "details": _details(service, files),
        "capabilities": capabilities(service),
    }


def running(service: Service, files: ModelFiles, name: str) -> JSONObject:
    """Describe a model for `/api/ps`; it stays loaded."""
    info = service.engine.info
    num_bytes = info.num_weight_bytes or files.num_bytes
    return {
        **tag(service, files, name),
        "expires_at": FOR_EVER,
        "size": num_bytes,
        "size_vram": 0 if service.config.device == "cpu" else num_bytes,
        "context_length": service.config.max_model_len,
    }


def show(service: Service, files: ModelFiles, name: str) -> JSONObject:
    """Describe a model for `/api/show`."""
    config = service.config
    template = config.chat_template or ""
    tokenizer = service.engine.tokenizer
    if not template and tokenizer is not None:
        template = tokenizer.chat_templates.get("default", "")
    does = capabilities(service)
    return {
        "license": "",
        "modelfile": f"# served by trouper {__version__}\nFROM {name}\n",
        "parameters": _parameters(config.model.default_sampling),
        "template": HAS_SUFFIX + template if "insert" in does else template,
        "details": _details(service, files),
        "model_info": _model_info(service, files),
        "capabilities": does,
        "modified_at": _time(files.modified_s),
    }


def capabilities(service: Service) -> list[str]:
    """Return what the model can do, in Ollama's words."""
    if service.config.pooler is not None:
        return ["embedding"]
    found = ["completion"]
    if service.answers.tools is not None:
        found.append("tools")
    if service.answers.reasoning is not None:
        found.append("thinking")
    if _fills_gaps(service):
        found.append("insert")
    return found


def _fills_gaps(service: Service) -> bool:
    tokenizer = service.engine.tokenizer
    if tokenizer is None:
        return False
    try:
        marks_of(tokenizer)
    except TrouperError:
        return False
    return True


def _details(service: Service, files: ModelFiles) -> JSONObject:
    return {
        "parent_model": "",
        "format": "gguf" if service.config.model.is_gguf else "safetensors",
        "family": files.family,
        "families": [files.family],
        "parameter_size": _short(files.num_parameters),
        "quantization_level": files.level,
    }


def _model_info(service: Service, files: ModelFiles) -> JSONObject:
    config, family = service.config.model.hf_config, files.family
    sizes = {
        "embedding_length": config.get("hidden_size"),
        "block_count": config.get("num_hidden_layers"),
        "attention.head_count": config.get("num_attention_heads"),
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "feed_forward_length": config.get("intermediate_size"),
        "vocab_size": service.config.model.vocab_size,
    }
    return {
        "general.architecture": family,
        "general.parameter_count": files.num_parameters,
        f"{family}.context_length": service.config.max_model_len,
        **{f"{family}.{name}": size for name, size in sizes.items() if size is not None},
    }


def _parameters(sampling: JSONObject) -> str:
    """Return the defaults of sampling in a Modelfile's lines; no line is empty, since clients cannot read one."""
    names = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
    return "\n".join(
        f"{names.get(name, name):<30} {json.dumps(value)}" for name, value in sampling.items()
    )


def _weight_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    if not path.is_file():
        return []
    for files in gguf_models(gguf_names(path.parent)).values():
        if files[0] == path.name:  # the first of a split stands for all
            return [path.parent / file for file in files]
    return [path]


def _num_parameters(path: Path, files: list[Path], *, is_gguf: bool) -> int:
    if is_gguf:
        return sum(math.prod(tensor.shape) for tensor in read_gguf(path).tensors.values())
    return sum(_num_numbers(file) for file in files)


def _num_numbers(file: Path) -> int:
    """Count the numbers in a safetensors file by the shapes in its header."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = msgspec.json.decode(opened.read(min(size, MAX_HEADER)))
    return sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__")


def _level(model: ModelConfig, path: Path) -> str:
    if model.is_gguf:
        types = [t.type.name for t in read_gguf(path).tensors.values() if len(t.shape) > 1]
        return max(set(types), key=types.count) if types else "F32"
    quantization: JSONObject = model.hf_config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    return str(method).upper() if method else STORED.get(model.dtype, model.dtype.upper())


def _short(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.{0 if number >= 100 * size else 1}f}{unit}"
    return str(number)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
