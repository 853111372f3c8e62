"""Hand the outputs of the generations of one request to one consumer.

A request with several prompts has several generations.  They run at the same time, but the consumer sees one output after the
other, so adapters need no locks.
"""

from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from trouper.actors.runtime.event_loop import YieldingIterator
from trouper.errors import prompt_named
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


async def each_output(
    service: "Service",
    context: "RequestContext",
    generations: "Iterable[Generation[RequestOutput]]",
    places: Sequence[str],
    consume: Consume,
    begin: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Call `consume(i, output)` for each output of generation i, one call at a time.

    Every exit aborts the unfinished generations.  `places` are the client's names of the prompts, for errors.  `begin` is
    called before the first output if the engine predicts a long wait for it.

    Raises:
        HTTPError: the first token cannot arrive before the client's deadline.
        Exception: the first failure of a generation, possibly inside exception groups; the others are aborted.
    """
    with _listed(service) as opened:
        await _open(service, context, generations, opened)
        await _wait_rendered(opened, places)
        if len(opened) == 1:
            expected = await service.foretell(context, opened[0])
            if begin is not None and expected is not None and expected.seconds >= LONG_WAIT_S:
                await begin()
            await _read(opened[0], 0, consume)
        else:
            await _interleaved(opened, consume)


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
            await service.foretell(context, opened[0])
        async for i, generation in YieldingIterator(enumerate(opened)):
            with prompt_named(places[i]):
                while (
                    output := generation.next_nowait()
                ) is not None:  # a ready output needs no turn of the event loop
                    found[i] = output
                async for output in generation:
                    found[i] = output
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
    async for generation in YieldingIterator(generations):
        opened.append(generation)
        service.note(generation, context)
    ticket = context.ticket
    if ticket is not None:
        await ticket.wait_turn()
    async for generation in YieldingIterator(opened):
        await generation.prepare()
        context.check_wanted()
        generation.open()
    # Only now, because an unopened generation counts as finished.
    if ticket is not None:
        ticket.generations = opened if whole is None else [whole]


async def _wait_rendered(
    generations: "Sequence[Generation[RequestOutput]]", places: Sequence[str]
) -> None:
    """Wait until every prompt is rendered, which finds bad ones."""
    async for generation, place in YieldingIterator(zip(generations, places, strict=True)):
        with prompt_named(place):
            await generation.submit()


async def _interleaved(
    generations: "Sequence[Generation[RequestOutput]]", consume: Consume
) -> None:
    error: Exception | None = None
    # Capacity 0: while the consumer is busy, the reply slots merge new outputs.
    send, receive = anyio.create_memory_object_stream[tuple[int, RequestOutput]](0)

    async def put(i: int, output: RequestOutput) -> None:
        await send.send((i, output))

    with send, receive:
        async with anyio.create_task_group() as readers:
            async for i, generation in YieldingIterator(enumerate(generations)):
                readers.start_soon(_read, generation, i, put)
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
