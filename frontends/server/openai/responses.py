"""`POST /v1/responses`: a conversation without memory, whole or as typed events.

It is a chat in other words: the request becomes a `ChatRequest`, and the same rules hold.
"""

import time
from typing import Any

from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.server.http.exchange import Exchange
from trouper.frontends.server.openai.chat import chat_prompt
from trouper.frontends.server.openai.requests import ChatRequest, ResponsesRequest
from trouper.frontends.server.openai.sampling import chat_params
from trouper.frontends.server.service import Service
from trouper.frontends.server.streams import Counted, each_output, final_outputs
from trouper.outputs import CompletionOutput, RequestOutput

CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
SAME_NAME = ("model", "temperature", "top_p", "top_k", "seed", "stream", "priority", "cache_salt")


async def create_response(service: Service, exchange: Exchange, request: ResponsesRequest) -> None:
    try:
        answer = _Answer(service, exchange, request)
        await (answer.stream() if request.stream else answer.whole())
    except TrouperValidationError as error:
        name, bracket, rest = str(error.parameter).partition("[")
        error.parameter = CHAT_NAMES.get(name, name) + bracket + rest
        raise


class _Answer:
    """One request on its way, and the one message that answers it."""

    def __init__(self, service: Service, exchange: Exchange, request: ResponsesRequest) -> None:
        chat = _as_chat(request)
        model = service.check_model(request.model)
        self._service = service
        self._exchange = exchange
        self._params = chat_params(
            chat, service.config.model.default_sampling, service.config.max_model_len
        )
        prompt: Any = chat_prompt(chat, service.settings)
        exchange.name_by(request.request_id)
        self._generations = service.generations(exchange, [prompt], self._params, chat)
        self._counted = Counted(1, shows_cached=False)
        self._num_cached = 0
        self._num_events = 0
        self._text: list[str] = []
        self._message_id = f"msg_{exchange.id}"
        self._response: dict[str, Any] = {
            "id": f"resp_{exchange.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": model,
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": self._params.top_p,
            "usage": None,
            "metadata": request.metadata or {},
        }

    async def whole(self) -> None:
        (output,) = await final_outputs(
            self._service, self._exchange, self._generations, ["messages"]
        )
        self._take(output)
        await self._exchange.send_json(self._finished(output.outputs[0]))

    async def stream(self) -> None:
        last: list[CompletionOutput] = []

        async def pump(_: int, output: RequestOutput) -> None:
            if not self._exchange.has_started:
                await self._begin()
            self._take(output)
            (completion,) = output.outputs
            last[:] = [completion]
            if completion.text:
                await self._tell_part("response.output_text.delta", delta=completion.text)

        await each_output(self._service, self._exchange, self._generations, ["messages"], pump)
        response = self._finished(last[0])
        (item,) = response["output"]
        await self._tell_part("response.output_text.done", text=item["content"][0]["text"])
        await self._tell_part("response.content_part.done", part=item["content"][0])
        await self._tell("response.output_item.done", output_index=0, item=item)
        await self._tell(f"response.{response['status']}", response=response)
        await self._exchange.end_events(b"")

    async def _begin(self) -> None:
        await self._exchange.start_events()
        await self._tell("response.created", response=self._response)
        await self._tell("response.in_progress", response=self._response)
        item = {**self._item("", "in_progress"), "content": []}
        await self._tell("response.output_item.added", output_index=0, item=item)
        await self._tell_part("response.content_part.added", part=_part(""))

    async def _tell_part(self, kind: str, **content: Any) -> None:
        is_text = kind.startswith("response.output_text")
        await self._tell(
            kind,
            item_id=self._message_id,
            output_index=0,
            content_index=0,
            **content,
            **({"logprobs": []} if is_text else {}),
        )

    async def _tell(self, kind: str, **content: Any) -> None:
        event = {"type": kind, "sequence_number": self._num_events, **content}
        self._num_events += 1
        await self._exchange.send_event(event, kind)

    def _take(self, output: RequestOutput) -> None:
        self._counted.add(0, output)
        self._num_cached = output.num_cached_tokens or self._num_cached
        self._text += [completion.text for completion in output.outputs]

    def _finished(self, completion: CompletionOutput) -> dict[str, Any]:
        usage = self._counted.usage
        is_whole = completion.finish_reason == "stop"
        reason = "max_output_tokens" if completion.finish_reason == "length" else "aborted"
        status = "completed" if is_whole else "incomplete"
        return {
            **self._response,
            "status": status,
            "incomplete_details": None if is_whole else {"reason": reason},
            "output": [self._item("".join(self._text), status)],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": self._num_cached},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            },
        }

    def _item(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)],
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _as_chat(request: ResponsesRequest) -> ChatRequest:
    for name in ("previous_response_id", "background", "tools"):
        if getattr(request, name):
            raise UnsupportedFeatureError(f"{name} is not supported yet")
    if (request.text or {}).get("format") not in (None, {"type": "text"}):
        raise UnsupportedFeatureError("text.format: only text is supported yet")
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    elif not request.input:
        raise TrouperValidationError("input: must not be empty", parameter="input")
    else:
        messages += [_message(i, item) for i, item in enumerate(request.input)]
    fields = {name: getattr(request, name) for name in SAME_NAME}
    return ChatRequest(messages=messages, max_completion_tokens=request.max_output_tokens, **fields)


def _message(i: int, item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind != "message":
        raise UnsupportedFeatureError(f"input[{i}]: only messages are supported yet")
    role = item.get("role")
    return {"role": "system" if role == "developer" else role, "content": item.get("content")}
