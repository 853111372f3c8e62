"""Outputs of one or several generations, handed to one consumer."""

from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from trouper.errors import prompt_named
from trouper.frontends.python.cooperative import YieldingIterator
from trouper.outputs import PoolingRequestOutput, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Generator

    from trouper.actors.engine.generation import Generation
    from trouper.frontends.server.admission.gate import EngineWork
    from trouper.frontends.server.http.context import RequestContext
    from trouper.frontends.server.service.service import Service

# A stream's head is sent before its first token where that takes as long, so the client knows when it will come.
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
    """Call `consume(i, output)` for each output of generation i; one call at a time.

    Leaving, in whatever way, aborts the generations that have not ended.  `places` are the client's names of the
    prompts.  `begin` is called before the first output, if that is expected to take long.

    Raises:
        HTTPError: the first token cannot come before the client's deadline.
        Exception: the first failure among them, perhaps in groups; the others are aborted.
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
    """Return the last output of each generation, in order; under FINAL_ONLY it is the whole of it.

    `whole` is the work that these generations are a round of, which may take several.
    """
    found: dict[int, T] = {}

    with _listed(service) as opened:
        await _open(service, context, generations, opened, whole)
        if len(opened) > 1:  # a bad last prompt is found before the others run
            await _wait_rendered(opened, places)
        elif opened:
            await service.foretell(context, opened[0])
        async for i, generation in YieldingIterator(enumerate(opened)):
            with prompt_named(places[i]):
                while (
                    output := generation.next_nowait()
                ) is not None:  # outputs that are ready need no turn of the event loop
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
    """Open all generations, once the request is admitted, and append them to `opened`.

    Raises:
        HTTPError: the request has been aborted meanwhile.
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
    if ticket is not None:  # not before: an unopened generation counts as over
        ticket.generations = opened if whole is None else [whole]


async def _wait_rendered(
    generations: "Sequence[Generation[RequestOutput]]", places: Sequence[str]
) -> None:
    """Wait until each prompt is known to be good."""
    async for generation, place in YieldingIterator(zip(generations, places, strict=True)):
        with prompt_named(place):
            await generation.submit()


async def _interleaved(
    generations: "Sequence[Generation[RequestOutput]]", consume: Consume
) -> None:
    error: Exception | None = None
    # Nothing is buffered: outputs that the consumer does not take yet are merged in the reply slots.
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
    """Lend a list whose generations are closed, and taken out of the service's table, after the block."""
    opened: list[Generation[Any]] = []
    try:
        yield opened
    finally:
        for generation in opened:
            service.forget(generation)
            generation.close()
