"""The answers of `/api/chat` and `/api/generate`: JSON lines in a stream, or one object.

A tool call is one line, which comes when its arguments are complete; one that the limit of tokens cut is not sent.  The
last line has the counts, and the times of the request in nanoseconds.
"""

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from trouper.errors import invalid
from trouper.frontends.dialects.calls import Arguments, CallEnded, CallStarted, ParserEvent
from trouper.frontends.server.generation.adapter import (
    ChoiceUpdate,
    ParsedRequest,
    ReplyHead,
    ServedModel,
    StreamEvent,
)
from trouper.frontends.server.generation.logprobs import chat_logprobs
from trouper.frontends.server.ollama.requests import (
    CLIENT_NAMES,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    chat_of,
    chat_of_prompt,
    completion_of,
)
from trouper.frontends.server.openai.chat import ChatAdapter
from trouper.frontends.server.openai.completions import CompletionAdapter
from trouper.frontends.server.openai.requests import ChatRequest, CompletionRequest
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
