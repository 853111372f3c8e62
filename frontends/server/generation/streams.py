"""Open the generations of one request, as streams or as rounds of a beam search, and pass their outputs to one consumer.

A request with several prompts has several generations.  They run concurrently, but the consumer is called with one output at a time, so
adapters need no locks.

In each round of a beam search, every beam of every prompt is a request to the engine for one token.  The prefix cache keeps the
beams' common prefixes, so a round costs about one step.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from trouper.actors.runtime.event_loop import ITEMS_PER_TURN
from trouper.errors import prompt_named
from trouper.frontends.python.beam_search import BeamSearch, BeamSearchOutput, SearchLimits
from trouper.frontends.server.generation.adapter import ParsedRequest
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import aborted
from trouper.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from trouper.params import SamplingParams

if TYPE_CHECKING:
    from trouper.actors.engine.generation import Generation
    from trouper.frontends.server.admission.gate import EngineWork

# If the first token is expected after at least this many seconds, the headers are sent before it, so that the client can read the
# prediction.
LONG_WAIT_S = 1.0
T = TypeVar("T", bound=RequestOutput | PoolingRequestOutput[Any])
Consume = Callable[[int, RequestOutput], Awaitable[None]]


@asynccontextmanager
async def open_generations(
    service: "Service",
    context: "RequestContext",
    generations: "Iterable[Generation[RequestOutput]]",
    places: Sequence[str],
    begin: Callable[[], Awaitable[None]],
) -> "AsyncGenerator[list[Generation[RequestOutput]]]":
    """Yield the generations after their admission; if there are several, only after all prompts are rendered.

    Every exit aborts the unfinished ones.

    Args:
        places: the client's names of the prompts, for errors.
        begin: sends the headers early if the engine predicts a long wait for the first output of a single generation.

    Raises:
        HTTPError: the first token cannot arrive before the client's deadline.
        Exception: one of several prompts is invalid.
    """
    # The error of a single prompt comes with the first read.
    naming = prompt_named(places[0]) if len(places) == 1 else nullcontext()
    with naming, _listed(service) as opened:
        await _open(service, context, generations, opened)
        if len(opened) > 1:
            await _wait_rendered(opened, places)
        else:
            expected = await service.predict_first_token(context, opened[0])
            if expected is not None and expected.seconds >= LONG_WAIT_S:
                await begin()
        yield opened


async def final_outputs(
    service: "Service",
    context: "RequestContext",
    generations: "Iterable[Generation[T]]",
    places: Sequence[str],
    whole: "EngineWork | None" = None,
) -> list[T]:
    """Return the last output of each generation, in order.  With FINAL_ONLY this is the complete output.

    `whole` is the complete work of the request if these generations are only one round of it, as in a beam search.
    """
    found: dict[int, T] = {}

    with _listed(service) as opened:
        await _open(service, context, generations, opened, whole)
        # So a bad last prompt fails before the others are computed.
        if len(opened) > 1:
            await _wait_rendered(opened, places)
        elif opened:
            await service.predict_first_token(context, opened[0])
        for i, generation in enumerate(opened):
            with prompt_named(places[i]):
                # A ready output needs no turn of the event loop.
                while (output := generation.next_nowait()) is not None:
                    found[i] = output
                async for output in generation:
                    found[i] = output
            if len(found) % ITEMS_PER_TURN == 0:
                await anyio.lowlevel.checkpoint()
    return [found[i] for i in range(len(found))]


async def _open(
    service: "Service",
    context: "RequestContext",
    generations: "Iterable[Generation[T]]",
    opened: "list[Generation[T]]",
    whole: "EngineWork | None" = None,
) -> None:
    """Append all generations to `opened`, wait for admission, and open them.

    Raises:
        HTTPError: the request was aborted or evicted in the meantime.
    """
    for generation in generations:
        opened.append(generation)
        service.note(generation, context)
        if len(opened) % ITEMS_PER_TURN == 0:
            await anyio.lowlevel.checkpoint()
    ticket = context.ticket
    if ticket is not None:
        await ticket.wait_turn()
    for i, generation in enumerate(opened, 1):
        await generation.prepare()
        if context.is_aborted:
            raise aborted()
        generation.open()
        if i % ITEMS_PER_TURN == 0:
            await anyio.lowlevel.checkpoint()
    # Only now, because an unopened generation counts as finished.
    if ticket is not None:
        ticket.generations = opened if whole is None else [whole]


async def _wait_rendered(
    generations: "Sequence[Generation[RequestOutput]]", places: Sequence[str]
) -> None:
    """Wait until every prompt is rendered, so that a bad one fails the request at once."""
    for i, generation in enumerate(generations):
        with prompt_named(places[i]):
            await generation.submit()
        if i % ITEMS_PER_TURN == ITEMS_PER_TURN - 1:
            await anyio.lowlevel.checkpoint()


async def read_each(generations: "Sequence[Generation[RequestOutput]]", consume: Consume) -> None:
    """Call `consume(i, output)` for each output of generation i, one call at a time.

    Raises:
        Exception: the first failure of a generation, possibly inside exception groups.  It stops the reading of all others.
    """
    error: Exception | None = None
    # Capacity 0, because reply slots merge new outputs while the consumer is busy.
    send, receive = anyio.create_memory_object_stream[tuple[int, RequestOutput]](0)

    async def put(i: int, output: RequestOutput) -> None:
        await send.send((i, output))

    with send, receive:
        async with anyio.create_task_group() as readers:
            for i, generation in enumerate(generations, 1):
                readers.start_soon(_read, generation, i - 1, put)
                if i % ITEMS_PER_TURN == 0:
                    await anyio.lowlevel.checkpoint()
            num_open = len(generations)
            try:
                while num_open:
                    i, output = await receive.receive()
                    num_open -= output.finished
                    await consume(i, output)
            except Exception as raised:
                error = raised
                readers.cancel_scope.cancel()
    if error is not None:
        raise error


async def _read(generation: "Generation[RequestOutput]", i: int, consume: Consume) -> None:
    async for output in generation:
        await consume(i, output)


@contextmanager
def _listed(service: "Service") -> "Generator[list[Any]]":
    """Yield an empty list for generations.  After the block they are closed and removed from the service's open requests."""
    opened: list[Generation[Any]] = []
    try:
        yield opened
    finally:
        for generation in opened:
            service.forget(generation)
            generation.close()


# Makes an engine request from a prompt, its parameters, its name within the request, and whether the prompt is the client's own, so that
# the options of tokenization apply.
Make = Callable[[Any, SamplingParams, str, bool], "Generation[RequestOutput]"]


class SearchWork:
    """Represent all beam searches of one request as one unit of work for admission.

    The engine sees new requests in every round, but the request must hold its place in the gate during the whole search.
    """

    def __init__(self, searches: Sequence[BeamSearch]) -> None:
        self._searches = searches

    @property
    def is_over(self) -> bool:
        return all(search.is_over for search in self._searches)

    @property
    def num_tokens(self) -> tuple[int, int]:
        """The tokens of the prompts, counted once because later rounds find them in the prefix cache, and the tokens of all rounds."""
        counts = [search.num_tokens for search in self._searches]
        return sum(prompt for prompt, _ in counts), sum(output for _, output in counts)


async def beam_outputs(
    service: Service, context: RequestContext, parsed: ParsedRequest, make: Make
) -> list[RequestOutput]:
    """Return one output for each prompt; its completions are the best beams.

    Every exit aborts the running round.

    Raises:
        Exception: the first failure of a request in a round.
    """
    assert parsed.beams is not None
    params, num_logprobs = parsed.beams
    limits = SearchLimits.of(service.config, service.engine.tokenizer)
    searches = [
        BeamSearch(prompt, params, limits, num_logprobs=num_logprobs) for prompt in parsed.prompts
    ]
    work = SearchWork(searches)
    number = 0
    while not work.is_over:
        running = [i for i, search in enumerate(searches) if not search.is_over]
        asked = [(i, prompt) for i in running for prompt in searches[i].prompts]
        generations = (
            make(prompt, searches[i].step, f"{number}-{j}", number == 0)
            for j, (i, prompt) in enumerate(asked)
        )
        places = [parsed.places[i] for i, _ in asked]
        outputs = iter(await final_outputs(service, context, generations, places, work))
        for i in running:
            search = searches[i]
            search.take([next(outputs) for _ in search.prompts])
        number += 1
    decode = _decoder(service)
    found = await anyio.to_thread.run_sync(
        lambda: [search.best(decode) for search in searches], limiter=service.threads
    )
    return [_output(context, *each) for each in zip(searches, found, strict=True)]


def _decoder(service: Service) -> Callable[[list[int], bool], str]:
    tokenizer = service.engine.tokenizer
    return tokenizer.decode if tokenizer is not None else lambda _ids, _skips: ""


def _output(context: RequestContext, search: BeamSearch, found: BeamSearchOutput) -> RequestOutput:
    """Convert the best beams of a prompt to completions."""
    num_prompt = len(search.prompt_token_ids)
    completions = [
        CompletionOutput(
            index,
            beam.text or "",
            beam.tokens[num_prompt:],
            cumulative_logprob=beam.cum_logprob,
            logprobs=beam.logprobs,
            finish_reason=beam.finish_reason,
            stop_reason=beam.stop_reason,
        )
        for index, beam in enumerate(found.sequences)
    ]
    return RequestOutput(
        context.id,
        search.prompt_text,
        search.prompt_token_ids,
        None,
        completions,
        finished=True,
    )
