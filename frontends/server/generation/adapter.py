"""Define the interface between the driver and an API: how to parse its requests and render its replies.

An adapter is pure and synchronous.  It sees one request, but neither the engine nor the connection; the driver does everything
asynchronous.  So an API is tested without a server, and all APIs share one path of cancellation and errors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec

from trouper.actors.messages.requests import NO_OPTIONS, RequestOptions
from trouper.frontends.dialects.core import AnswerFormat
from trouper.frontends.server.generation.parsers import ParserChain, Part, no_parsers
from trouper.frontends.server.generation.tools import NO_TOOL_USE, CallDeltas, CallIds, ToolUse
from trouper.frontends.server.shared.settings import ServerSettings
from trouper.frontends.server.shared.usage import RequestMetrics, Usage
from trouper.outputs import CompletionOutput, RequestOutput, RequestStateStats
from trouper.params import BeamSearchParams, SamplingParams


class GenerationRequest(Protocol):
    """The fields of a decoded body that the driver itself reads.

    Everything else in a body belongs to the adapter of its API.
    """

    @property
    def model(self) -> str | None: ...

    @property
    def request_id(self) -> str | None: ...


class ServedModel(NamedTuple):
    """Hold the facts about the server and its model that adapters may read.

    Adapters are pure, so they get these values instead of the service and its engine.
    """

    settings: ServerSettings
    # The name under which the client knows it.
    name: str
    # Defaults from the model's generation_config.json.
    default_sampling: Mapping[str, Any]
    max_model_len: int
    token_text: Callable[[int], str]
    token_bytes: Callable[[int], bytes]
    answers: AnswerFormat
    # Whether a grammar applies from the first token on, reasoning included.
    grammar_is_first: bool = False
    # Tokens of a block of the prefix cache, or 0 without a cache.
    cache_block_size: int = 0


class ReplyHead(NamedTuple):
    """Hold the ids and the creation time of a reply, which all chunks of a stream repeat.

    `created` is the time at which the request was accepted, in seconds of the wall clock.
    """

    # The client's id of the request, or else the server's.
    request_id: str
    # The server's own id.
    unique_id: str
    # Seconds of the wall clock.
    created: int


class BeamRequest(NamedTuple):
    """A beam search instead of sampling.  Its width is the number of choices.

    The driver then asks the engine once for each beam and round, instead of once for each choice.
    """

    params: BeamSearchParams
    # Logprobs to show for each position.
    num_logprobs: int | None = None


class ParsedRequest(msgspec.Struct, kw_only=True):
    """One API's request in the engine's terms, made by `Adapter.parse`.

    From here on the driver is the same for all APIs; only the rendering of the reply differs.
    """

    prompts: Sequence[Any]
    # The client's name for each prompt, for errors.
    places: Sequence[str]
    # For a beam search only n and max_tokens are used.
    params: SamplingParams
    beams: BeamRequest | None = None
    options: RequestOptions = NO_OPTIONS
    is_stream: bool = False
    # Whether every event of a stream has the usage.
    shows_usage: bool = False
    ends_with_usage: bool = False
    shows_cached: bool = False  # in the usage
    shows_metrics: bool = False
    # Whether the text of the prompt begins each choice.
    shows_prompt: bool = False
    # Whether the generated text is dropped.
    is_prompt_only: bool = False
    # The tool calls that the answer may contain.
    tools: ToolUse = NO_TOOL_USE
    num_calls_before: int = 0  # in the conversation
    # for each choice, from the output that it begins with
    make_parsers: Callable[[RequestOutput], ParserChain] = no_parsers

    @property
    def num_choices(self) -> int:
        return self.params.n * len(self.prompts)

    def set_options(self, **changes: Any) -> None:
        """Change some of the options with which the engine serves the request.

        Options are values for the engine and not for the model, such as the adapter, the priority or the deadline.
        """
        self.options = msgspec.structs.replace(self.options, **changes)


def call_ids(parsed: ParsedRequest, model: ServedModel, head: ReplyHead) -> CallIds:
    """Return the object that makes the ids of a reply's tool calls.

    Their form depends on the model, because some templates accept only ids like those of their training.
    """
    tools = model.answers.tools
    form = "random" if tools is None else tools.id_form
    return CallIds(form, head.unique_id, parsed.num_calls_before)


def call_deltas(parsed: ParsedRequest, model: ServedModel, head: ReplyHead) -> list[CallDeltas]:
    """Return a converter of tool calls for each choice of a reply."""
    ids = call_ids(parsed, model, head)
    return [CallDeltas(ids, i) for i in range(parsed.num_choices)]


class LastMetrics:
    """Keep the times of a request for the end of its reply.

    Replies with several choices show none, because the format has only one place for them.
    """

    def __init__(self, parsed: ParsedRequest) -> None:
        self._is_shown = parsed.shows_metrics and parsed.num_choices == 1
        # Written by the adapter, from each output.
        self.stats: RequestStateStats | None = None

    @property
    def shown(self) -> RequestMetrics | None:
        return RequestMetrics.of(self.stats) if self._is_shown else None


class ChoiceUpdate(msgspec.Struct, frozen=True):
    """The output of a choice since its last update.  Without streaming, it is the whole output.

    `parts` are the parsed pieces: text, reasoning and calls.  An update without parts can still carry tokens and
    logprobs.
    """

    index: int  # among all choices of the reply
    is_first: bool
    parts: Sequence[Part]
    # The content and the reasoning among the parts.
    text: str
    reasoning: str
    completion: CompletionOutput
    output: RequestOutput
    # The prompt's text in the first update, if the request wants it shown.
    prompt_text: str


class StreamEvent(NamedTuple):
    """One server-sent event.

    `name` is the event's type in APIs that use named events, and None in the others.
    """

    content: object
    name: str | None = None


class Adapter(Protocol):
    """The requests and replies of one API.

    A stream calls `begin`, `render` for each update, then `end`.  A whole reply calls `add` for each update, then `reply`.
    The usage counts all tokens so far; it is None if the client does not want it yet.
    """

    STREAM_END: ClassVar[bytes]

    @staticmethod
    def parse(request: Any, model: ServedModel) -> ParsedRequest:
        """Read a request.

        Raises:
            TrouperValidationError, UnsupportedFeatureError: naming the field.

        It is a pure function: it must not read the clock or the state of the server.
        """
        ...

    @staticmethod
    def client_name(request: Any, parameter: str) -> str:
        """Return the client's name of an engine parameter, for errors.

        The engine's parameter may be one that the client has set indirectly, under another name.
        """
        ...

    def __init__(
        self, request: Any, parsed: ParsedRequest, model: ServedModel, head: ReplyHead
    ) -> None: ...

    def begin(self, output: RequestOutput, usage: Usage | None) -> Iterable[StreamEvent]:
        """Render the events before the first update.  `output` is the first output.

        `usage` is given if each event shall show it.  APIs without such events return nothing.
        """
        ...

    def render(self, update: ChoiceUpdate, usage: Usage | None) -> Iterable[StreamEvent]: ...

    def end(self, usage: Usage) -> Iterable[StreamEvent]: ...

    def add(self, update: ChoiceUpdate) -> None: ...

    def reply(self, usage: Usage) -> object: ...
