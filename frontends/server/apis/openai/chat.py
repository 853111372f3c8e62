"""Serve `POST /v1/chat/completions`, and `…/batch`, which takes several conversations and answers each by one choice.

Both generate through the streaming driver. The adapters here turn a choice's text into content, reasoning and calls of a message.
"""

from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET

from trouper.errors import UnsupportedFeatureError, invalid
from trouper.frontends.dialects.calls import MAX_HELD
from trouper.frontends.dialects.core import AnswerParser, ReasoningTokens
from trouper.frontends.dialects.table import BY_NAME
from trouper.frontends.server.apis.openai.requests import (
    FINGERPRINT,
    ChatBatchRequest,
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatReply,
    ChatRequest,
    Message,
    WholeMessage,
)
from trouper.frontends.server.apis.openai.sampling import (
    NO_GRAMMAR,
    chat_beams,
    chat_params,
    choices_of,
    parsed_request,
)
from trouper.frontends.server.generation.adapter import (
    ChoiceUpdate,
    LastMetrics,
    ParsedRequest,
    ReplyHead,
    ServedModel,
    StreamEvent,
    call_deltas,
)
from trouper.frontends.server.generation.driver import drive
from trouper.frontends.server.generation.logprobs import (
    ChatLogprobs,
    chat_logprobs,
    prompt_logprobs,
)
from trouper.frontends.server.generation.parsers import (
    CallsAndReasoning,
    OneCall,
    Parser,
    ParserChain,
    StopStrings,
    VisibleContent,
    WithoutReasoning,
)
from trouper.frontends.server.generation.request_fields import way_of
from trouper.frontends.server.generation.tools import CallDeltas, ToolUse, num_calls, tool_use
from trouper.frontends.server.generation.transcript import chat_prompt
from trouper.frontends.server.http.context import DONE, RequestContext
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.usage import Usage
from trouper.outputs import CompletionOutput, RequestOutput
from trouper.params import SamplingParams
from trouper.structured_outputs import StructuredOutputsParams

# The stage before this one has rendered and tokenised the conversation: its ids take the place of the messages.
FORWARDED_IDS = "kv_transfer_params.prompt_token_ids"
# The last tokens of a prompt without a text, which may open the reasoning.
TAIL = 16
NEW_NAMES = {"logprobs": "top_logprobs", "max_tokens": "max_completion_tokens"}


def create_chat(service: Service, context: RequestContext, request: ChatRequest) -> Awaitable[None]:
    """Answer a conversation, as one reply or as a stream.

    With `n` > 1 each choice is generated from the same prompt, which is computed once.
    """
    return drive(service, context, request, ChatAdapter)


class ChatAdapter:
    """Render n choices of one conversation.  A stream begins with the role of each choice.

    Reasoning and tool calls are fields of the message, found by the parsers of the model's dialect.
    """

    STREAM_END: ClassVar[bytes] = DONE

    @staticmethod
    def parse(request: ChatRequest, model: ServedModel) -> ParsedRequest:
        prompt = chat_prompt(request, model.settings)
        parallel = request.parallel_tool_calls
        tools = tool_use(request.tools, request.tool_choice, is_parallel=parallel)
        grammar = tools.grammar(model.answers, model.settings.tool_strict_level)
        num_calls_before = num_calls(request.messages)
        limits = model.default_sampling, model.max_model_len
        beams = chat_beams(request, *limits) if request.use_beam_search else None
        params = chat_params(request, *limits) if beams is None else choices_of(beams)
        reasoning = model.answers.reasoning
        parsed = parsed_request(request, model.settings, [prompt], ["messages"], params, reasoning)
        ids = (request.kv_transfer_params or {}).get("prompt_token_ids")
        if ids is not None and not request.echo:
            salt = {} if request.cache_salt is None else {"cache_salt": request.cache_salt}
            parsed.prompts = [{"prompt_token_ids": ids, **salt}]
            parsed.places = [FORWARDED_IDS]
        parsed.beams = beams
        parsed.num_calls_before = num_calls_before
        parsed.tools = tools
        if grammar is not None and beams is not None:
            name = "tool_choice" if tools.is_forced else "tools"
            raise UnsupportedFeatureError(f"{name}: {NO_GRAMMAR}", parameter=name)
        if grammar is not None and (tools.is_forced or params.structured_outputs is None):
            params.structured_outputs = StructuredOutputsParams(grammar=grammar)
        if model.grammar_is_first:
            is_free = grammar is not None and not tools.is_forced
            model = _without_reasoning(model, params, is_free=is_free)
        finds_calls = tools.is_forced or (tools.schemas and model.answers.tools is not None)
        if finds_calls or model.answers.reasoning is not None:
            if model.answers.has_special_marks:
                params.skip_special_tokens = False
                if beams is not None:
                    beams.params.skip_special_tokens = False
            parsed.make_parsers = partial(_parsers, request, params, model, tools)
            if params.stop_strings:
                parsed.set_options(visible=partial(_visible_content, model, tools))
        return parsed

    @staticmethod
    def client_name(request: ChatRequest, parameter: str) -> str:
        if parameter == "structured_outputs":
            has_format = request.response_format or request.structured_outputs
            is_of_tools = not has_format and tool_use(request.tools, request.tool_choice).schemas
            return "tools" if is_of_tools else way_of(request)
        if parameter == "beam_width":
            return "n"
        new_name = NEW_NAMES.get(parameter)
        is_used = new_name is not None and getattr(request, new_name) is not None
        return new_name if new_name and is_used else parameter

    def __init__(
        self, request: ChatRequest, parsed: ParsedRequest, model: ServedModel, head: ReplyHead
    ) -> None:
        self._request = request
        self._ends_with_usage = parsed.ends_with_usage
        self._id = f"chatcmpl-{head.request_id}"
        self._created = head.created
        self._model = model.name
        self._bytes_of = model.token_bytes
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._as_ids |= model.settings.return_tokens_as_token_ids
        self._role = model.settings.response_role
        if request.add_generation_prompt is False:
            self._role = str(request.messages[-1].get("role", self._role))
        self._echo = _echoed(request, self._role)
        self._reasoning_field = model.settings.reasoning_field
        # OpenAI's word for a call that the request itself has named
        self._called = "stop" if parsed.tools.is_named else "tool_calls"
        # The content of a message with calls: like in vLLM, an empty text if the request named the tool, and otherwise null.
        self._no_content = "" if parsed.tools.is_named else None
        # Without tools an answer has no calls.
        self._finds_calls = bool(parsed.tools.is_forced or parsed.tools.schemas)
        self._metrics = LastMetrics(parsed)
        self._num_choices = parsed.num_choices
        self._calls = call_deltas(parsed, model, head)
        self._choices: list[ChatChoice] = []
        self._output: RequestOutput | None = None

    # Streamed

    def begin(self, output: RequestOutput, usage: Usage | None) -> list[StreamEvent]:
        """Render the role of each choice, and the echoed message."""
        chunks: list[ChatChunk] = []
        for index in range(self._num_choices):
            role = Message(role=self._role, content="")
            bare = usage and Usage(usage.prompt_tokens, 0, usage.prompt_tokens)
            chunks.append(self._chunk(ChatDelta(index=index, delta=role), bare))
            chunks[-1].prompt_token_ids = None
            if self._echo:
                echo = Message(content=self._echo)
                chunks.append(self._chunk(ChatDelta(index=index, delta=echo), bare))
        if self._request.return_token_ids:
            chunks[0].prompt_token_ids = output.prompt_token_ids
        if self._request.return_prompt_text:
            chunks[0].prompt_text = output.prompt
        return [StreamEvent(chunk) for chunk in chunks]

    def render(self, update: ChoiceUpdate, usage: Usage | None) -> list[StreamEvent]:
        self._metrics.stats = update.output.metrics
        completion, text, reasoning = update.completion, update.text, update.reasoning
        calls = self._calls[update.index]
        tool_calls = calls.render(update.parts) if self._finds_calls else []
        shows_ids = self._request.return_token_ids and completion.token_ids
        is_news = text or reasoning or tool_calls or completion.logprobs or shows_ids
        if not (is_news or completion.finish_reason):
            return []
        message = Message(content=text or UNSET, tool_calls=tool_calls or UNSET)
        self._put_reasoning(reasoning, message)
        delta = ChatDelta(
            index=update.index,
            delta=message,
            logprobs=self._logprobs(completion),
            finish_reason=self._finish_reason(completion, calls),
            stop_reason=UNSET if completion.finish_reason is None else completion.stop_reason,
            token_ids=completion.token_ids if self._request.return_token_ids else None,
        )
        chunk = self._chunk(delta, usage and usage.without_details())
        if delta.finish_reason is not None and not self._ends_with_usage:
            chunk.system_fingerprint = FINGERPRINT
        return [StreamEvent(chunk)]

    def end(self, usage: Usage) -> list[StreamEvent]:
        if not self._ends_with_usage:
            return []
        chunk = self._chunk(None, usage)
        chunk.system_fingerprint = FINGERPRINT
        chunk.metrics = self._metrics.shown or UNSET
        return [StreamEvent(chunk)]

    # Whole

    def add(self, update: ChoiceUpdate) -> None:
        completion = update.completion
        self._output = update.output
        self._metrics.stats = update.output.metrics
        calls = self._calls[update.index]
        tool_calls = calls.render(update.parts)
        for call in tool_calls:
            call.index = UNSET
        text = self._echo + update.text
        message = WholeMessage(
            role=self._role,
            content=self._no_content if tool_calls and not text.strip() else text,
            tool_calls=tool_calls or UNSET,
        )
        self._put_reasoning(update.reasoning, message)
        self._choices.append(
            ChatChoice(
                index=update.index,
                message=message,
                logprobs=self._logprobs(completion),
                finish_reason=self._finish_reason(completion, calls),
                stop_reason=completion.stop_reason,
                token_ids=completion.token_ids if self._request.return_token_ids else None,
            )
        )

    def reply(self, usage: Usage) -> ChatReply:
        reply = ChatReply(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=self._choices,
            usage=usage.with_nulls(),
            metrics=self._metrics.shown,
        )
        if self._output is not None:
            if self._request.return_token_ids:
                reply.prompt_token_ids = self._output.prompt_token_ids
            if self._request.return_prompt_text:
                reply.prompt_text = self._output.prompt
            if self._output.prompt_logprobs is not None:
                reply.prompt_logprobs = prompt_logprobs(self._output.prompt_logprobs)
        return reply

    # Both

    def _finish_reason(self, completion: CompletionOutput, calls: CallDeltas) -> str | None:
        reason = completion.finish_reason
        return self._called if reason == "stop" and calls.has_calls else reason

    def _put_reasoning(self, text: str, message: Message) -> None:
        """Put the reasoning into the configured fields of the message."""
        if text and self._reasoning_field != "reasoning_content":
            message.reasoning = text
        if text and self._reasoning_field != "reasoning":
            message.reasoning_content = text

    def _chunk(self, delta: ChatDelta | None, usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[] if delta is None else [delta],
            usage=UNSET if usage is None else usage,
        )

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self._request.logprobs or completion.logprobs is None:
            return None
        num_top = self._request.top_logprobs or 0
        if self._request.logprob_token_ids is not None:
            num_top = -1  # all requested by id
        return chat_logprobs(
            completion.token_ids,
            completion.logprobs,
            num_top,
            bytes_of=self._bytes_of,
            as_ids=self._as_ids,
        )


def _without_reasoning(model: ServedModel, params: SamplingParams, *, is_free: bool) -> ServedModel:
    """Turn reasoning detection off if the grammar, which applies from the first token on, constrains the reasoning."""
    is_whole = params.structured_outputs is not None and not is_free
    if not is_whole or params.thinking_token_budget is not None:
        return model
    return model._replace(answers=msgspec.structs.replace(model.answers, reasoning=None))


def _answer_parser(model: ServedModel, tools: ToolUse, prompt: str) -> AnswerParser:
    answers = model.answers
    if tools.is_forced and answers.tools is None:
        answers = msgspec.structs.replace(answers, tools=BY_NAME["json"])
    # Calls made by a grammar are always valid.
    max_held = 0 if tools.is_forced else MAX_HELD
    return answers.parser(tools.schemas, prompt, max_held)


def _visible_content(
    model: ServedModel, tools: ToolUse, prompt: str | None, prompt_token_ids: Sequence[int]
) -> VisibleContent:
    """Return the factory of the parser that extracts the visible content from the text of an answer."""
    text = _end_of_prompt(model, prompt, prompt_token_ids)
    return VisibleContent(_answer_parser(model, tools, text))


def _end_of_prompt(model: ServedModel, prompt: str | None, prompt_token_ids: Sequence[int]) -> str:
    return "".join(map(model.token_text, prompt_token_ids[-TAIL:])) if prompt is None else prompt


def _parsers(
    request: ChatRequest,
    params: SamplingParams,
    model: ServedModel,
    tools: ToolUse,
    output: RequestOutput,
) -> ParserChain:
    """Make the parsers of a choice from its first output."""
    answers = model.answers
    prompt = _end_of_prompt(model, output.prompt, output.prompt_token_ids)
    parsers: list[Parser] = [CallsAndReasoning(_answer_parser(model, tools, prompt))]
    if params.stop_strings:
        link = StopStrings(
            params.stop_strings,
            is_included=params.include_stop_str_in_output,
            is_late=params.min_tokens > 0,
        )
        parsers.append(link)
    if not tools.is_parallel:
        parsers.append(OneCall())
    if request.include_reasoning is False:
        parsers.append(WithoutReasoning())
    if answers.reasoning is None:
        return ParserChain(parsers)
    tokens = ReasoningTokens(
        answers.reasoning,
        begins_inside=answers.begins_in_reasoning(prompt),
        text_of=model.token_text,
    )
    return ParserChain(parsers, tokens)


def _echoed(request: ChatRequest, role: str) -> str:
    """Return the message that the reply continues, if the client wants to see it again."""
    last = request.messages[-1]
    content = last.get("content")
    is_wanted = request.echo and last.get("role") == role and isinstance(content, str)
    return str(content) if is_wanted else ""


MAX_CONVERSATIONS = 1024


def create_chat_batch(
    service: Service, context: RequestContext, request: ChatBatchRequest
) -> Awaitable[None]:
    """Answer several conversations in one reply.

    The conversations share one admission ticket and their sampling fields.  Streams are not supported.
    """
    return drive(service, context, request, ChatBatchAdapter)


class ChatBatchAdapter(ChatAdapter):
    """Render a chat in which each choice answers its own conversation.

    Choice i belongs to conversation i, so clients get one reply for the whole batch.
    """

    @staticmethod
    def parse(request: ChatRequest, model: ServedModel) -> ParsedRequest:
        if request.stream:
            raise invalid("stream", "not with a batch of conversations")
        if request.n not in (None, 1):
            raise invalid("n", "a batch has one choice for each conversation", request.n)
        if request.use_beam_search:
            raise invalid("use_beam_search", "not with a batch of conversations")
        if request.tools:
            raise invalid("tools", "not with a batch of conversations")
        if request.echo:
            raise invalid("echo", "not with a batch of conversations")
        if (request.kv_transfer_params or {}).get("prompt_token_ids") is not None:
            raise invalid("kv_transfer_params", "prompt_token_ids are of one conversation")
        conversations: list[Any] = request.messages
        if not conversations:
            raise invalid("messages", "must not be empty")
        if len(conversations) > MAX_CONVERSATIONS:
            rule = f"at most {MAX_CONVERSATIONS} conversations"
            raise invalid("messages", rule, len(conversations))
        alone = [
            ChatAdapter.parse(_with_messages(request, messages), model)
            for messages in conversations
        ]
        parsed = alone[0]
        parsed.prompts = [prompt for each in alone for prompt in each.prompts]
        parsed.places = [f"messages[{i}]" for i in range(len(alone))]
        return parsed

    def __init__(
        self, request: ChatRequest, parsed: ParsedRequest, model: ServedModel, head: ReplyHead
    ) -> None:
        super().__init__(_with_messages(request, request.messages[0]), parsed, model, head)


def _with_messages(request: ChatRequest, messages: Any) -> ChatRequest:
    """Return the request of one conversation."""
    fields = {**msgspec.structs.asdict(request), "messages": messages}
    return ChatRequest(**fields)
