"""Provide the caller's handle of one request: an async iterator of outputs.  Closing it aborts the request.

Every request is owned by its iterator, so no request continues to use the device after its caller has gone.

Laws:
1. The request is not submitted before the first `__anext__` or `__aenter__`.
2. Closing is synchronous, idempotent, and legal in a cancelled task.
3. A finished, failed or cancelled `__anext__` closes the iterator.  So `async for` to the end needs no further call, and a caller that
   may leave early uses `async with`.
4. When an open iterator is garbage-collected, its request is aborted with a ResourceWarning.
"""

import warnings
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import anyio
import anyio.lowlevel

from trouper.actors.messages.requests import (
    NO_OPTIONS,
    LoadedAdapter,
    Render,
    RequestId,
    RequestOptions,
)
from trouper.actors.output.slot import ExpectedToken, Slot
from trouper.lora import LoRARequest
from trouper.outputs import PoolingRequestOutput, RequestOutput
from trouper.params import SamplingParams
from trouper.pooling import PoolingParams

Params = SamplingParams | PoolingParams
Output = TypeVar("Output", bound=RequestOutput | PoolingRequestOutput[Any])


class MakeRender(Protocol):
    """Create the message to the renderer when the request is opened, because its reply slot exists only from then on."""

    def __call__(
        self,
        *,
        id: RequestId,
        params: Any,
        slot: Slot[Any],
        options: RequestOptions,
        arrival_time: float,
        adapter: LoadedAdapter | None,
    ) -> Render: ...


class RequestDesk(Protocol):
    """The methods of the engine that `Generation` uses to open and close requests.

    As a protocol it keeps `Generation` independent of the engine, so tests can use a small substitute.
    """

    def open_request(
        self,
        request_id: str,
        params: Params,
        render: MakeRender,
        options: RequestOptions,
    ) -> tuple[RequestId, Slot[Any]]: ...

    async def load_adapter(
        self, lora_request: LoRARequest, *, waits: bool, loads_new: bool
    ) -> object:
        """Load the adapter of a request, unless it is already loaded.

        `waits` allows waiting for a free slot, and `loads_new` allows loading an adapter that no request has used
        yet.
        """
        ...

    def close_request(self, id: RequestId, slot: Slot[Any], *, is_finished: bool) -> None: ...

    def drop_request(self, id: RequestId, slot: Slot[Any]) -> None:
        """Close the request of a garbage-collected iterator soon.

        Thread-safe, because garbage collection may run in any thread.
        """
        ...


class Generation(Generic[Output]):
    """Iterate with `async for output in generation`, optionally inside `async with generation as stream`.

    A pooling request has one output.
    """

    def __init__(
        self,
        desk: RequestDesk,
        request_id: str,
        params: Params,
        render: MakeRender,
        options: RequestOptions = NO_OPTIONS,
    ) -> None:
        self.request_id = request_id
        self._desk = desk
        self._params = params
        self._render = render
        self._options = options
        # The engine's number of the request, once it was opened.
        self.engine_id: RequestId | None = None
        self._opened: tuple[RequestId, Slot[Output]] | None = None
        self._num_tokens = (0, 0)
        self._is_finished = False
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open" if self._opened else "new"
        return f"<Generation {self.request_id!r} {state}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        if self._is_closed:
            # Yield to other tasks, unless waiting for the previous output has done so.
            if not self._is_finished:
                await anyio.lowlevel.checkpoint()
            raise StopAsyncIteration
        await self.prepare()
        slot = self.open()
        try:
            output = await slot.read()
        except anyio.ClosedResourceError:
            raise StopAsyncIteration from None  # another task closed the stream
        except BaseException:
            self.close()
            raise
        return self._checked(output) if output.finished or output.error else output

    def next_nowait(self) -> Output | None:
        """Return the result of `__anext__`, or None if it would wait or the iteration has ended.

        A stream can thus send everything available at once before it waits again.
        """
        output = self.take_nowait()
        return None if output is None else self._checked(output)

    def take_nowait(self) -> Output | None:
        """Return the output available now, or None.  For a loop that steps the engine manually.

        Instead of raising, a failed request returns an output with `finish_reason="error"`.
        """
        if self._opened is None:
            return None
        try:
            output = self._opened[1].read_nowait()
        except BaseException:
            self.close()
            raise
        if output is not None:
            self._note(output)
        return output

    def _checked(self, output: Output) -> Output:
        self._note(output)
        if output.error is not None and output.error.code != "aborted":
            # One failed completion ends the request, even if other completions could continue.
            self.close()
            raise output.error.to_exception(self.request_id)
        return output

    @property
    def num_unfinished(self) -> int:
        """Count the completions whose last output the caller has not received.  Returns 0 before the request is opened."""
        return 0 if self._opened is None else self._opened[1].num_unread

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Return the numbers of prompt tokens, and of tokens generated so far by all completions, read or not."""
        return self._num_tokens if self._opened is None else self._opened[1].num_tokens

    @property
    def is_over(self) -> bool:
        """Whether the engine has finished the request, although unread results may remain.

        A finished request no longer counts against the engine's limits, even if the client reads slowly.
        """
        return self._opened is None or self._opened[1].is_over

    async def prepare(self, *, waits: bool = True) -> None:
        """Load the adapter of the request, so that it can be opened.  Returns at once if the request has none.

        Args:
            waits: if other requests use all adapter slots, wait until one is free.

        Raises:
            AdaptersInUseError: no slot is free, and `waits` is False or none will become free.
            Exception: the error of loading.  The request is closed then.
        """
        options = self._options
        if options.lora_request is None or self._opened is not None or self._is_closed:
            return
        try:
            await self._desk.load_adapter(
                options.lora_request, waits=waits, loads_new=options.loads_adapter
            )
        except BaseException:
            self.close()
            raise

    async def submit(self, *, waits: bool = True) -> None:
        """Open the request, and wait until its prompt has been accepted.

        Args:
            waits: see `prepare`.

        Raises:
            Exception: the error of rendering.  The request has ended then.
        """
        await self.prepare(waits=waits)
        slot = self.open()
        try:
            await slot.wait_rendered()
        except BaseException:
            self.close()
            raise

    async def expected(self) -> ExpectedToken | None:
        """Wait for the predicted time of the first token.

        Returns None if an output or the end of the request comes first.  The time is predicted once, when the
        scheduler admits the request.
        """
        await self.prepare()
        return await self.open().wait_expected()

    async def __aenter__(self) -> Self:
        await anyio.lowlevel.checkpoint()
        await self.prepare()
        self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def aclose(self) -> None:
        self.close()

    def open(self) -> Slot[Output]:
        """Submit the request now, unless it is already submitted.

        Raises:
            RuntimeError: the request is closed.

        Iterating submits it automatically.  Callers use this method to fix the order of several requests.
        """
        if self._is_closed:
            raise RuntimeError(f"{self!r} cannot be opened again")
        if self._opened is None:
            self._opened = self._desk.open_request(
                self.request_id, self._params, self._render, self._options
            )
            self.engine_id = self._opened[0]
        return self._opened[1]

    def close(self) -> None:
        self._is_closed = True
        if self._opened is not None:
            (id, slot), self._opened = self._opened, None
            self._num_tokens = slot.num_tokens
            self._desk.close_request(id, slot, is_finished=self._is_finished)

    def _note(self, output: Output) -> None:
        if output.finished:
            self._is_finished = True
            self.close()

    def __del__(self) -> None:
        if self._opened is not None:
            # Before the warning, because a warning filter may raise an exception.
            self._desk.drop_request(*self._opened)
            warnings.warn(f"dropped while open: {self!r}", ResourceWarning, 2, source=self)
