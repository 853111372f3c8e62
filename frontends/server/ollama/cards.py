"""Models as Ollama's API describes them.  Clients fail on a field that is missing or null, so each is there."""

import json
import time
from datetime import UTC, datetime
from typing import Any

from trouper import __version__
from trouper.actors.rendering.prompts.infill import marks_of
from trouper.config.media import IMAGE
from trouper.config.model import ModelFiles
from trouper.errors import TrouperError
from trouper.frontends.server.models.table import ModelStatus
from trouper.frontends.server.service.service import Service

JSONObject = dict[str, Any]
# The release of Ollama whose routes and fields these are; clients compare it with the release that they need.
OLLAMA_VERSION = "0.12.6"
FOR_EVER = "9999-12-31T23:59:59Z"
# Continue offers no completion unless the template of a model mentions the suffix in Go's way.
HAS_SUFFIX = "{{- /* .Suffix */ -}}"


def tag(service: Service, files: ModelFiles, name: str) -> JSONObject:
    """Describe a model for `/api/tags`.

    A name without a tag gets `:latest`, because Ollama's clients compare full names.
    """
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


def running(
    service: Service, files: ModelFiles, name: str, status: ModelStatus | None
) -> JSONObject:
    """Describe a model for `/api/ps`.

    Without a status it never expires, because a server with one model keeps it until it ends.
    """
    info = service.engine.info
    num_bytes = info.num_weight_bytes or files.num_bytes
    expires_at = FOR_EVER
    if status is not None:
        num_bytes = status.bytes["now"]
        if status.expires_s is not None:
            expires_at = _time(time.time() + status.expires_s)
    return {
        **tag(service, files, name),
        "expires_at": expires_at,
        "size": num_bytes,
        "size_vram": 0 if service.config.device == "cpu" else num_bytes,
        "context_length": service.config.max_model_len,
    }


def show(service: Service, files: ModelFiles, name: str) -> JSONObject:
    """Describe a model for `/api/show`.

    It contains the chat template, sampling defaults and the model's sizes, under Ollama's keys.
    """
    config = service.config
    template = config.chat_template or ""
    tokenizer = service.tokenizer
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
    """Return what the model can do, in Ollama's words.

    They follow from the chat template and the vocabulary, not from the model's name.
    """
    if service.config.pooler is not None:
        return ["embedding"]
    found = ["completion"]
    if service.config.media is not None and service.config.media.modality == IMAGE:
        found.append("vision")
    if service.answers.tools is not None:
        found.append("tools")
    if service.answers.reasoning is not None:
        found.append("thinking")
    if _fills_gaps(service):
        found.append("insert")
    return found


def _fills_gaps(service: Service) -> bool:
    tokenizer = service.tokenizer
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
        "parameter_size": files.parameters,
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


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
