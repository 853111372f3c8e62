"""Open the generations of one request, and hand their outputs to one consumer.

A request with several prompts has several generations.  They run at the same time, but the consumer sees one output after the
other, so adapters need no locks.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel

from trouper.actors.runtime.event_loop import ITEMS_PER_TURN
from trouper.errors import prompt_named
from trouper.frontends.server.shared.errors import aborted
from trouper.outputs import PoolingRequestOutput, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Generator

    from trouper.actors.engine.generation import Generation
    from trouper.frontends.server.admission.gate import EngineWork
    from trouper.frontends.server.http.context import RequestContext
    from trouper.frontends.server.service.service import Service

# With an expected wait of at least this many seconds, a stream's head is sent before its first token, so that the client
# reads in a header when the token is expected.
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
    """Yield the generations once they are admitted; if there are several, only after all prompts are rendered.

    Every exit aborts the unfinished ones.  `places` are the client's names of the prompts, for errors.  `begin` is called
    first if the engine predicts a long wait for the only first output.

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
    """Return the last output of each generation, in order; with FINAL_ONLY it is the complete output.

    `whole` is the work to which these generations belong, if it takes several rounds, like a beam search.
    """
    found: dict[int, T] = {}

    with _listed(service) as opened:
        await _open(service, context, generations, opened, whole)
        # A bad last prompt is found before the others run.
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
    """Wait until every prompt is rendered, which finds bad ones."""
    for i, generation in enumerate(generations):
        with prompt_named(places[i]):
            await generation.submit()
        if i % ITEMS_PER_TURN == ITEMS_PER_TURN - 1:
            await anyio.lowlevel.checkpoint()


async def read_each(generations: "Sequence[Generation[RequestOutput]]", consume: Consume) -> None:
    """Call `consume(i, output)` for each output of generation i, one call at a time.

    Raises:
        Exception: the first failure of a generation, possibly inside exception groups; the others are not read on.
    """
    error: Exception | None = None
    # Capacity 0: while the consumer is busy, the reply slots merge new outputs.
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
    """Yield a list of generations.  After the block they are closed and removed from the service's table."""
    opened: list[Generation[Any]] = []
    try:
        yield opened
    finally:
        for generation in opened:
            service.forget(generation)
            generation.close()
