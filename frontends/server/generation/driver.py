"""Drive one request from the engine to the client: generation → parser chain → events of the API's adapter.

One driver serves all APIs, so cancellation, back-pressure and errors behave the same in each.  Everything asynchronous is here;
adapters and parsers are pure.  Every exit closes the generations, which aborts them in the engine.  A failure is raised; the
application renders it as the reply, or as the last event of a started stream.
"""

import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import anyio.lowlevel
import msgspec

from trouper.actors.runtime.event_loop import ITEMS_PER_TURN
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, rename_parameter
from trouper.frontends.server.generation.adapter import (
    Adapter,
    ChoiceUpdate,
    GenerationRequest,
    ParsedRequest,
    ReplyHead,
    ServedModel,
    StreamEvent,
)
from trouper.frontends.server.generation.parsers import End, ParserChain, Part, texts_of
from trouper.frontends.server.generation.streams import (
    Consume,
    beam_outputs,
    final_outputs,
    open_generations,
    read_each,
)
from trouper.frontends.server.generation.token_keeper import joined
from trouper.frontends.server.http.context import TEXT, RequestContext
from trouper.frontends.server.http.headers import REQUEST_HEADER, load_report, read_placement
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.usage import CachedTokens, ReasoningUsage, Usage
from trouper.outputs import CompletionOutput, RequestOutput
from trouper.params import SamplingParams

if TYPE_CHECKING:
    from trouper.actors.engine.generation import Generation
    from trouper.frontends.server.durable.recording import RequestRecording

# Characters to parse before other tasks get a turn: at most 5 ms, even for a hostile text.
AT_ONCE = 1024


A = TypeVar("A", bound=Adapter)


async def drive(
    service: Service,
    context: RequestContext,
    request: GenerationRequest,
    api: type[Adapter],
) -> None:
    """Answer one request, as one reply or as a stream.

    Raises:
        Exception: the request is invalid, or its generation failed.  Parameters have the client's names.
    """
    with client_names(partial(api.client_name, request)):
        await prepare(service, context, request, api).answer()


def prepare(
    service: Service,
    context: RequestContext,
    request: GenerationRequest,
    api: type[A],
    created: int | None = None,
) -> "Driver[A]":
    """Parse a request and make its driver.  Nothing is sent to the engine yet.

    Raises:
        TrouperClientError, UnsupportedFeatureError: the request is invalid.

    The adapter of the driver is new for each request.  The ids of the reply are chosen here.
    """
    model = _served_model(service, request.model)
    lora_request = service.adapter(request.model)
    parsed = api.parse(request, model)
    if lora_request is not None:
        parsed.set_options(lora_request=lora_request)
    context.name_by(request.request_id)
    request_id = context.request_id
    if context.durable is not None:
        # The id of a durable answer finds it later, so a client cannot choose it.
        created, request_id = context.durable.created, context.id
    created = int(time.time()) if created is None else created
    head = ReplyHead(request_id, context.id, created)
    adapter = api(request, parsed, model, head)
    driver = Driver(service, context, parsed, adapter, model.cache_block_size)
    if context.durable is not None:
        context.durable.attach(driver)
    return driver


@contextmanager
def client_names(name_of: Callable[[str], str]) -> Generator[None]:
    """Replace the engine's parameter name in an error, and at the start of its message, by the client's name.

    Clients can act only on names that they have sent.
    """
    try:
        yield
    except (TrouperValidationError, UnsupportedFeatureError) as error:
        if error.parameter is not None:
            rename_parameter(error, name_of(error.parameter))
        raise


class UsageCounter:
    """Count the tokens of one reply while it is generated.

    Args:
        cache_block_size: the block size of the prefix cache in tokens, which stores only full blocks; 0 without a cache.
    """

    def __init__(self, num_prompts: int, *, shows_cached: bool, cache_block_size: int = 0) -> None:
        self._block_size = cache_block_size
        self._num_prompt = [0] * num_prompts
        self._num_cached = [0] * num_prompts
        # By modality, then by prompt.
        self._num_media: dict[str, dict[int, int]] = {}
        self._shows_cached = shows_cached
        self._num_completion = 0
        # Written by the driver; None unless reasoning is counted.
        self.num_reasoning: int | None = None

    def add(self, i: int, output: RequestOutput) -> None:
        """Count an output of prompt `i`, which must contain only the tokens since the last output.

        As in OpenAI's usage, a prompt counts once, even with several choices.
        """
        self._num_prompt[i] = len(output.prompt_token_ids)
        self._num_cached[i] = output.num_cached_tokens or self._num_cached[i]
        self._num_completion += sum(len(choice.token_ids) for choice in output.outputs)
        for modality, places in (output.multi_modal_placeholders or {}).items():
            num_tokens = sum(length for _, length in places)
            self._num_media.setdefault(modality, {})[i] = num_tokens

    @property
    def _num_created(self) -> int:
        if not self._block_size:
            return 0
        pairs = zip(self._num_prompt, self._num_cached, strict=True)
        return sum(max(0, num - num % self._block_size - cached) for num, cached in pairs)

    @property
    def usage(self) -> Usage:
        num_prompt = sum(self._num_prompt)
        usage = Usage(num_prompt, self._num_completion, num_prompt + self._num_completion)
        if self._shows_cached:
            media = {f"{name}_tokens": sum(n.values()) for name, n in self._num_media.items()}
            usage.prompt_tokens_details = CachedTokens(
                sum(self._num_cached), self._num_created, **media
            )
        if self.num_reasoning is not None:
            usage.completion_tokens_details = ReasoningUsage(self.num_reasoning)
        return usage


class MakeResumed(Protocol):
    """Extend `Make` by the known tokens of a resumed answer."""

    def __call__(
        self,
        prompt: Any,
        params: SamplingParams,
        name: str,
        is_raw: bool,
        resumed: tuple[int, ...] = (),
        /,
    ) -> "Generation[RequestOutput]": ...


class OutputKeeper(Protocol):
    """Persist the outputs of a durable request, and replay those of an earlier process."""

    @property
    def known(self) -> Sequence[tuple[int, RequestOutput]]:
        """The recorded outputs of an earlier process, with one token each, as (index of the prompt, output)."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether all choices have ended."""
        ...

    def open_choices(self) -> Mapping[int, tuple[int, ...]]:
        """Return the unfinished choices with their recorded tokens."""
        ...

    async def keep(self, i: int, output: RequestOutput) -> Sequence[RequestOutput]:
        """Persist an output of prompt `i`, and return it split into one output for each token.

        So events depend only on the tokens, and not on how fast the client has read them.
        """
        ...

    def note_shown(self, i: int, output: RequestOutput) -> None:
        """Note that the events of this output come next."""
        ...


class Driver(Generic[A]):
    """Take one parsed request through the engine to the client.

    It owns the parser chains of all choices, and closes the engine's streams however the request ends.  Only the handler's task uses it.
    """

    def __init__(
        self,
        service: Service,
        context: RequestContext,
        parsed: ParsedRequest,
        adapter: A,
        cache_block_size: int,
    ) -> None:
        self.adapter = adapter
        self.parsed = parsed
        self._service = service
        self._context = context
        self._counter = UsageCounter(
            len(parsed.prompts),
            shows_cached=parsed.shows_cached,
            cache_block_size=cache_block_size,
        )
        # Parsers by choice, created at the first output of the choice.
        self._chains: dict[int, ParserChain] = {}
        self._has_begun = False
        # Set before the start, for a durable answer.
        self.keeper: OutputKeeper | None = None
        # Awaited before the generation starts.
        self.on_start: Callable[[], Awaitable[None]] | None = None
        # The difference between the seeds of consecutive prompts.
        self.seed_step = 0
        # For a resumed answer: the indices of prompt and choice of each generation.
        self._resumed: list[tuple[int, int]] | None = None
        # Records the request for `trouper replay`; None without `--record`, and for a beam search.
        self._recording: RequestRecording | None = None
        if service.recorder is not None and parsed.beams is None:
            self._recording = service.recorder.begin(parsed.prompts, parsed.params, parsed.options)

    async def answer(self, on_complete: Callable[[], None] | None = None) -> None:
        """Send the reply.  `on_complete` is called when the reply is complete, before its last part is sent.

        If the client disconnects, the handler's task is cancelled, which aborts the requests in the engine.
        """
        if self.parsed.is_stream:
            await self._begin()
            await self._send_stream(on_complete)
        else:
            reply = await self.complete()
            if on_complete is not None:
                on_complete()
            form = self._context.header(REQUEST_HEADER)
            if form is not None:
                stats = self._service.engine.statistics().scheduler
                self._context.own_headers += load_report(form, stats)
            if isinstance(reply, str):
                await self._context.send_body(reply.encode(), TEXT)
            else:
                await self._context.send_json(reply)

    async def complete(self) -> object:
        """Return the complete reply without sending it.

        Parsing yields to other tasks between outputs, so a reply with many choices does not block the event loop.
        """
        await self._begin()
        outputs = await self._final_outputs()
        with self._recorded():
            for i, output in enumerate(outputs):
                for update in await self._updates(i, output):
                    self.adapter.add(update)
                if i % ITEMS_PER_TURN == ITEMS_PER_TURN - 1:
                    await anyio.lowlevel.checkpoint()
        return self.adapter.reply(self._counter.usage)

    async def _begin(self) -> None:
        if self.on_start is not None:
            await self.on_start()

    async def _final_outputs(self) -> list[RequestOutput]:
        service, context, parsed = self._service, self._context, self.parsed
        if parsed.beams is not None:
            return await beam_outputs(service, context, parsed, self._make())
        if self.keeper is None:
            return await final_outputs(service, context, self._generations(), parsed.places)
        parts = list(self.keeper.known)

        async def take(i: int, output: RequestOutput) -> None:  # noqa: ASYNC124  # a consumer is async
            parts.append((i, output))

        await self._read_kept(self.keeper, take, anyio.lowlevel.checkpoint)
        return joined(parts)

    async def _send_stream(self, on_complete: Callable[[], None] | None) -> None:
        context, keeper = self._context, self.keeper
        with self._recorded():
            if keeper is None:
                await self._send_generated()
            else:
                for i, output in keeper.known:
                    await self._send_output(i, output)
                await self._read_kept(keeper, self._send_output, context.start_events)
        events = self.adapter.end(self._counter.usage)
        if on_complete is not None:
            on_complete()
        for event in events:
            await context.send_event(event.content, event.name)
        await context.end_events(self.adapter.STREAM_END)

    @contextmanager
    def _recorded(self) -> Generator[None]:
        """Submit the record of the request at the end of the block, even if its client has disconnected."""
        try:
            yield
        finally:
            if self._recording is not None:
                self._recording.end()

    async def _send_generated(self) -> None:
        context, parsed = self._context, self.parsed
        generations = self._generations()
        async with open_generations(
            self._service, context, generations, parsed.places, context.start_events
        ) as opened:
            if len(opened) == 1:
                async for output in opened[0]:
                    await self._send_output(0, output)
            else:
                await read_each(opened, self._send_output)

    async def _read_kept(
        self, keeper: OutputKeeper, consume: Consume, begin: Callable[[], Awaitable[None]]
    ) -> None:
        """Generate the tokens that are not recorded yet, and pass on each token after persisting it."""
        if keeper.is_whole:
            return
        parsed = self.parsed
        is_resumed = bool(keeper.known)
        generations = self._rest(keeper) if is_resumed else self._generations()
        places = parsed.places
        if self._resumed is not None:
            places = [places[i] for i, _ in self._resumed]

        async def take(number: int, output: RequestOutput) -> None:
            i = number
            if self._resumed is not None:
                i, output.outputs[0].index = self._resumed[number]
            for each in await keeper.keep(i, output):
                await consume(i, each)

        async with open_generations(
            self._service, self._context, generations, places, begin
        ) as opened:
            if len(opened) == 1:
                async for output in opened[0]:
                    await take(0, output)
            else:
                await read_each(opened, take)

    async def _send_output(self, i: int, output: RequestOutput) -> None:
        updates = await self._updates(i, output)
        usage = self._counter.usage if self.parsed.shows_usage else None
        first: list[StreamEvent] = []
        if not self._has_begun:
            self._has_begun = True
            first += self.adapter.begin(output, usage)
        events: list[StreamEvent] = []
        for update in updates:
            events += self.adapter.render(update, usage)
        if not self._context.has_started:
            await self._context.start_events()
        for event in first:
            await self._context.send_event(event.content, event.name)
        if self.keeper is not None:
            self.keeper.note_shown(i, output)
        for event in events:
            await self._context.send_event(event.content, event.name)

    async def _prompt_text(self, i: int, output: RequestOutput) -> str:
        """Return the text of prompt `i` if this is the first output of one of its choices, else an empty string."""
        first = i * self.parsed.params.n
        is_new = any(first + each.index not in self._chains for each in output.outputs)
        return await self._service.prompt_text(output) if is_new else ""

    async def _updates(self, i: int, output: RequestOutput) -> list[ChoiceUpdate]:
        """Return one update for each choice in an output of prompt `i`."""
        # A durable answer is recorded in the journal instead: an earlier process may have generated parts of it.
        if self._recording is not None and self.keeper is None:
            self._recording.note(i, output)
        prompt_text = await self._prompt_text(i, output) if self.parsed.shows_prompt else ""
        if self.parsed.is_prompt_only:
            for completion in output.outputs:
                completion.text, completion.token_ids, completion.logprobs = "", [], []
        self._counter.add(i, output)
        first = i * self.parsed.params.n
        return [
            await self._update(first + completion.index, completion, output, prompt_text)
            for completion in output.outputs
        ]

    async def _update(
        self, index: int, completion: CompletionOutput, output: RequestOutput, prompt_text: str
    ) -> ChoiceUpdate:
        chain = self._chains.get(index)
        is_first = chain is None
        if chain is None:
            chain = self._chains[index] = self.parsed.make_parsers(output)
        stop_reason = completion.stop_reason
        parts = await _parsed_in_turns(chain, completion.text, _end_of(completion), stop_reason)
        if completion.finish_reason is not None and chain.stop is not None:
            completion.finish_reason, completion.stop_reason = "stop", chain.stop
        num_reasoning = chain.count_reasoning(completion.token_ids)
        if num_reasoning is not None:
            self._counter.num_reasoning = (self._counter.num_reasoning or 0) + num_reasoning
        if completion.finish_reason is not None and (num_calls := chain.num_calls):
            self._service.note_tool_calls(num_calls)
        prompt_text = prompt_text if is_first else ""
        text, reasoning = texts_of(parts)
        return ChoiceUpdate(
            index, is_first, parts, text, reasoning, completion, output, prompt_text
        )

    def _generations(self) -> "Iterator[Generation[RequestOutput]]":
        """Make one engine request for each prompt.

        Raises:
            HTTPError: the limits leave too little room for this request.
        """
        make, parsed, recording = self._make(), self.parsed, self._recording
        generations = (
            make(prompt, self._params_of(i), str(i), True)
            for i, prompt in enumerate(parsed.prompts)
        )
        return generations if recording is None else recording.listed(generations)

    def _params_of(self, i: int, index: int = 0, n: int | None = None) -> SamplingParams:
        """Return the parameters of prompt `i`, or with `n` those of its choice `index` only."""
        params, step = self.parsed.params, i * self.seed_step + index
        if not step and n is None:
            return params
        changed = params.clone()
        changed.n = params.n if n is None else n
        # Choice i of the engine has the seed of the first one plus i.
        changed.seed = None if params.seed is None else params.seed + step
        return changed

    def _rest(self, keeper: OutputKeeper) -> "list[Generation[RequestOutput]]":
        """Make one engine request for each unfinished choice of a resumed answer, which continues after its recorded tokens.

        Raises:
            HTTPError: the limits leave too little room for this request.
        """
        make, n = self._make(), self.parsed.params.n
        self._resumed = []
        generations: list[Generation[RequestOutput]] = []
        for choice, token_ids in keeper.open_choices().items():
            i, index = divmod(choice, n)
            self._resumed.append((i, index))
            params = self._params_of(i, index, 1)
            name = f"{i}-{index}"
            generations.append(make(self.parsed.prompts[i], params, name, True, token_ids))
        return generations

    def _make(self) -> "MakeResumed":
        """Return the function that makes engine requests, with ids that no client can choose.

        Raises:
            HTTPError: the limits leave too little room for this request.
        """
        service, context, parsed = self._service, self._context, self.parsed
        params, num_prompts = parsed.params, len(parsed.prompts)
        given, engine = parsed.options, service.engine
        trace_headers = service.trace_parent(context)
        priority = service.size(context, num_prompts, params.n, params.max_tokens, given.priority)
        placement = read_placement(context, given.data_parallel_rank, given.session_id)
        options = msgspec.structs.replace(
            given,
            priority=priority,
            trace_headers=trace_headers,
            key=context.tenant,
            cache_scope=context.cache_scope,
            # An adapter unloaded in the meantime stays unloaded.
            loads_adapter=False,
            **placement._asdict(),
        )
        # Only a beam search continues prompts that are already rendered.
        rendered = options if parsed.beams is None else options.without_tokenization()

        def make(
            prompt: Any,
            params: SamplingParams,
            name: str,
            is_raw: bool,
            resumed: tuple[int, ...] = (),
        ) -> "Generation[RequestOutput]":
            chosen = options if is_raw else rendered
            if resumed:
                chosen = msgspec.structs.replace(chosen, resumed_token_ids=resumed)
            return engine.generate(prompt, params, f"{context.id}-{name}", chosen)

        return make


def _end_of(completion: CompletionOutput) -> End:
    reason = completion.finish_reason
    return None if reason is None else "whole" if reason == "stop" else "cut"


async def _parsed_in_turns(
    chain: ParserChain, text: str, end: End, stop_reason: int | str | None
) -> Sequence[Part]:
    """Parse a text.  Long texts are parsed in slices, between which other tasks run."""
    if len(text) <= AT_ONCE or chain.is_empty:
        return chain.feed(text, end, stop_reason)
    parts: list[Part] = []
    for start in range(0, len(text), AT_ONCE):
        stop = start + AT_ONCE
        is_last = stop >= len(text)
        parts += chain.feed(text[start:stop], end if is_last else None, stop_reason)
        await anyio.lowlevel.checkpoint()
    return parts


def _served_model(service: Service, name: str | None) -> ServedModel:
    """Raises TrouperNotFoundError."""
    config = service.config
    return ServedModel(
        service.settings,
        service.check_model(name),
        config.model.default_sampling,
        config.max_model_len,
        service.token_text,
        service.token_bytes,
        service.answers,
        config.structured_outputs.enable_in_reasoning,
        config.block_size if config.scheduler.enable_prefix_caching else 0,
    )
