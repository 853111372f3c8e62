"""Write the replies of Ollama's API: answers, as JSON lines in a stream or as one object, and descriptions of models.

A tool call is one line, which comes when its arguments are complete; one that the limit of tokens cut is not sent.  The
last line has the counts, and the times of the request in nanoseconds.

Ollama's clients fail on a field of a model that is missing or null, so each is present.
"""

import json
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from trouper import __version__
from trouper.config.model import ModelFiles
from trouper.errors import invalid
from trouper.frontends.dialects.calls import Arguments, CallEnded, CallStarted, ParserEvent
from trouper.frontends.server.apis.ollama.requests import (
    CLIENT_NAMES,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    chat_of,
    chat_of_prompt,
    completion_of,
)
from trouper.frontends.server.apis.openai.chat import ChatAdapter
from trouper.frontends.server.apis.openai.completions import CompletionAdapter
from trouper.frontends.server.apis.openai.requests import ChatRequest, CompletionRequest
from trouper.frontends.server.generation.adapter import (
    ChoiceUpdate,
    ParsedRequest,
    ReplyHead,
    ServedModel,
    StreamEvent,
)
from trouper.frontends.server.generation.logprobs import chat_logprobs
from trouper.frontends.server.models.table import ModelStatus, capabilities
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.usage import Usage
from trouper.outputs import RequestStateStats

JSONObject = dict[str, Any]
IN_CONTENT = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]")


class OllamaTurn:
    """A request, and the chat or the completion that it asks for.

    Args:
        max_model_len: the limit of an answer that has no other.
    """

    def __init__(
        self,
        body: OllamaChatRequest | OllamaGenerateRequest,
        options: OllamaOptions,
        max_model_len: int,
    ) -> None:
        self.model = body.model
        self.request_id = None
        self.body = body
        self.asked: ChatRequest | CompletionRequest
        if isinstance(body, OllamaChatRequest):
            self.asked = chat_of(body, options)
        elif body.raw or body.suffix:
            self.asked = completion_of(body, options, max_model_len)
        else:
            self.asked = chat_of_prompt(body, options)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, OllamaChatRequest)

    def client_name(self, parameter: str) -> str:
        """Return the client's name for a parameter of the chat or completion."""
        if (image := IN_CONTENT.match(parameter)) is not None:
            parameter = self._image_name(*image.groups())
        if not self.is_chat and parameter.startswith("messages"):
            return "prompt"
        if self.is_chat and parameter == "prompt":
            return "messages"
        if parameter == "structured_outputs" and not self.body.format:
            return "tools"
        return CLIENT_NAMES.get(parameter, parameter)

    def _image_name(self, message: str, part: str) -> str:
        """Return the client's name of a part, if it is an image: images are the first parts of a message."""
        messages = (self.body.messages or []) if isinstance(self.body, OllamaChatRequest) else None
        if messages is None:
            return f"images[{part}]"
        images = messages[int(message)].get("images") or () if int(message) < len(messages) else ()
        return f"messages[{message}].images[{part}]" if int(part) < len(images) else "messages"


class OllamaAdapter:
    """One choice, in the form of `/api/chat` or of `/api/generate`.

    Times are in nanoseconds, and the last line contains the counts.
    """

    # The last line itself marks the end.
    STREAM_END: ClassVar[bytes] = b""

    @staticmethod
    def parse(request: OllamaTurn, model: ServedModel) -> ParsedRequest:
        if request.body.think and model.answers.reasoning is None:
            raise invalid("think", f'"{model.name}" does not support thinking')
        if getattr(request.asked, "tools", None) and model.answers.tools is None:
            raise invalid("tools", f'"{model.name}" does not support tools')
        asked = request.asked
        if asked.max_tokens is not None:
            # Agents ask for more tokens than the model has.
            limit = min(asked.max_tokens, model.max_model_len)
            asked = msgspec.structs.replace(asked, max_tokens=max(1, limit))
        if isinstance(asked, ChatRequest):
            parsed = ChatAdapter.parse(asked, model)
        else:
            parsed = CompletionAdapter.parse(asked, model)
        parsed.is_prompt_only = request.asked.max_tokens == 0
        return parsed

    @staticmethod
    def client_name(request: OllamaTurn, parameter: str) -> str:
        return request.client_name(parameter)

    def __init__(
        self, request: OllamaTurn, parsed: ParsedRequest, model: ServedModel, head: ReplyHead
    ) -> None:
        self._is_chat = request.is_chat
        self._shows_logprobs = bool(request.body.logprobs)
        self._num_top = request.body.top_logprobs or 0
        self._bytes_of = model.token_bytes
        self._model = model.name
        self._calls = _WholeCalls()
        self._num_tokens = 0
        self._end: JSONObject = {}
        self._whole: JSONObject = {}

    def begin(self, output: object, usage: Usage | None) -> list[StreamEvent]:
        return []

    def render(self, update: ChoiceUpdate, usage: Usage | None) -> list[StreamEvent]:
        lines: list[JSONObject] = []
        found = self._found(update)
        if any(found.values()):
            lines.append(self._line(found, is_done=False))
        if self._end:
            lines.append(self._line({}, is_done=True))
        return [StreamEvent(line) for line in lines]

    def end(self, usage: Usage) -> list[StreamEvent]:
        return []

    def add(self, update: ChoiceUpdate) -> None:
        self._whole = self._found(update)

    def reply(self, usage: Usage) -> JSONObject:
        return self._line(self._whole, is_done=True)

    def _found(self, update: ChoiceUpdate) -> JSONObject:
        """Return what is new, and note the end."""
        completion = update.completion
        self._num_tokens += len(completion.token_ids)
        found: JSONObject = {
            "content": update.text,
            "thinking": update.reasoning,
            "tool_calls": self._calls.feed(update.parts),
        }
        if self._shows_logprobs and completion.logprobs:
            shown = chat_logprobs(
                completion.token_ids, completion.logprobs, self._num_top, bytes_of=self._bytes_of
            )
            found["logprobs"] = shown.content
        if completion.finish_reason is not None:
            self._end = {
                "done_reason": completion.finish_reason,
                **_durations(update.output.metrics),
                "prompt_eval_count": len(update.output.prompt_token_ids),
                "eval_count": self._num_tokens,
            }
        return found

    def _line(self, found: JSONObject, *, is_done: bool) -> JSONObject:
        line = reply_head(self._model)
        text = found.get("content", "")
        more = {name: found[name] for name in ("thinking", "tool_calls") if found.get(name)}
        if self._is_chat:
            line["message"] = {"role": "assistant", "content": text, **more}
        else:
            line |= {"response": text, **more}
        line["done"] = is_done
        if found.get("logprobs"):
            line["logprobs"] = found["logprobs"]
        return line | self._end if is_done else line


def reply_head(model: str) -> JSONObject:
    """Return what every line begins with.

    It has the model's name as the client wrote it, and the current time in UTC.
    """
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now}


class _WholeCalls:
    """Collects tool calls until they are complete."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[str, list[str]]] = {}
        self._num = 0

    def feed(self, parts: Sequence[ParserEvent]) -> list[JSONObject]:
        whole: list[JSONObject] = []
        for part in parts:
            match part:
                case CallStarted(index, name):
                    self._open[index] = name, []
                case Arguments(index, text):
                    self._open[index][1].append(text)
                case CallEnded(index):
                    name, pieces = self._open.pop(index)
                    whole += self._call(name, "".join(pieces))
                case _:
                    pass
        return whole

    def _call(self, name: str, text: str) -> list[JSONObject]:
        try:
            arguments: Any = json.loads(text)
        except ValueError:
            return []  # cut by the limit of tokens
        function = {"index": self._num, "name": name, "arguments": arguments}
        self._num += 1
        return [{"function": function}]


def _durations(stats: RequestStateStats | None) -> JSONObject:
    if stats is None:
        return {}
    begin, first, last = stats.arrival_ts, stats.first_token_ts, stats.last_token_ts
    if first is None or last is None:
        return {}
    queued = begin if stats.queued_ts is None else stats.queued_ts
    return {
        "total_duration": _ns(last - begin),
        "load_duration": 0,
        "prompt_eval_duration": _ns(first - queued),
        "eval_duration": _ns(last - first),
    }


def _ns(seconds: float) -> int:
    return max(0, round(1e9 * seconds))


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
