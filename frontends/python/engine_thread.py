"""`EngineThread`: an engine on an event loop in a thread of its own, and the way there for blocking code."""

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    contextmanager,
)
from typing import TYPE_CHECKING, Any, TypeVar

import trio
from anyio.from_thread import BlockingPortal

from trouper.config.args import EngineArgs
from trouper.errors import EngineDeadError, EngineForkedError, TrouperError
from trouper.frontends.python.async_engine import AsyncLLMEngine
from trouper.frontends.python.portal_thread import PortalThread

if TYPE_CHECKING:
    from collections.abc import Generator

    from trouper.actors.engine.generation import Generation

T = TypeVar("T")
THREADS = "trouper"  # begins the names of an engine's own threads: the portal's and the device's


class EngineThread:
    """A running engine and its thread: the constructor starts both, `close` ends both.

    Raises:
        RuntimeError: inside trio, whose loop this would block: use `AsyncLLMEngine`, or a thread.
    """

    def __init__(self, engine_args: EngineArgs, *, is_stepped: bool) -> None:
        refuse_trio()
        self.generations: dict[str, Generation[Any]] = {}  # open, by request id; closed at the end
        self._process_id = os.getpid()  # a forked child has none of the threads
        self._owner = threading.get_ident()  # never one of the engine's own threads
        with ExitStack() as stack:
            self._portal = stack.enter_context(PortalThread(THREADS))
            self.engine = stack.enter_context(
                self._portal.wrap_async_context_manager(
                    AsyncLLMEngine(engine_args, offline=True, is_stepped=is_stepped)
                )
            )
            self._exit_stack = stack.pop_all()
        # Interpreter exit: the threads are daemons, so the engine must end before they are frozen.
        self._at_exit = weakref.WeakMethod(self.close)
        atexit.register(_close_at_exit, self._at_exit)
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<EngineThread {'closed' if self._is_closed else repr(self.engine)}>"

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function, async or not, beside the actors and wait for its result.

        Ctrl-C and any other exception here cancels it there.

        Raises:
            EngineDeadError: the engine is closed, or another thread closed it meanwhile.
        """
        self.check_open()
        refuse_trio()
        with self._ending_as_closed():
            future = self._portal.start_task_soon(_run, function, args, kwargs)
            try:
                return future.result()
            except BaseException:
                future.cancel()
                raise

    @contextmanager
    def entered(self, manager: AbstractAsyncContextManager[T]) -> "Generator[T]":
        """Enter `manager` in the engine's thread for the length of a block in this one."""
        self.check_open()
        with self._portal.wrap_async_context_manager(manager) as value:
            yield value

    def check_open(self) -> None:
        """Raise EngineDeadError once the engine is closed, EngineForkedError in a forked child."""
        if os.getpid() != self._process_id:
            raise EngineForkedError(
                "the engine runs in the process that this one was forked from: make one after forking"
            )
        if self._is_closed:
            raise EngineDeadError("the engine is closed")

    def find(self, request_ids: Iterable[str]) -> "list[Generation[Any]]":
        """Return open requests.  Raises EngineDeadError when they are gone because the engine was closed."""
        with self._ending_as_closed():
            return [self.generations[id] for id in request_ids]

    @contextmanager
    def _ending_as_closed(self) -> "Generator[None]":
        """Raise EngineDeadError for whatever went wrong because the engine was closed meanwhile."""
        try:
            yield
        except TrouperError:
            raise
        except Exception as error:
            if self._is_closed:
                raise EngineDeadError("the engine was closed meanwhile") from error
            raise

    def forget(self, request_ids: Iterable[str]) -> None:
        """Close these requests, whatever state they are in; unknown ids are ignored."""
        found = [self.generations.pop(id, None) for id in request_ids]
        generations = [generation for generation in found if generation is not None]
        if generations and not self._is_closed:
            self.call(_close_all, generations)

    def close(self) -> None:
        """End the engine; memory, threads and tasks are gone when this returns.  Idempotent.

        Called by one of the engine's own threads, or inside trio, it only begins the end, for which that
        thread must be free.
        """
        self._close(waits=not threading.current_thread().name.startswith(THREADS))

    def _close(self, *, waits: bool) -> None:
        if getattr(self, "_is_closed", True):
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        if os.getpid() != self._process_id:
            self.generations.clear()
            return
        generations = list(self.generations.values())
        self.generations.clear()
        arguments = self._portal, generations, self._exit_stack
        if waits and not trio.lowlevel.in_trio_run():
            _end(*arguments)
        else:
            threading.Thread(target=_end, args=arguments, name="closing", daemon=True).start()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and os.getpid() == self._process_id:
            # The garbage collector calls from any thread, and only the owner is certain not to be one of the engine's.
            waits = threading.get_ident() == self._owner
            try:
                warnings.warn(f"dropped without close(): {self!r}", ResourceWarning, 2, source=self)
            finally:
                self._close(waits=waits)


def refuse_trio() -> None:
    """Raises RuntimeError inside trio."""
    if trio.lowlevel.in_trio_run():
        raise RuntimeError(
            "this would block trio: use AsyncLLMEngine, or a thread (trio.to_thread.run_sync)"
        )


def _end(
    portal: BlockingPortal,
    generations: "list[Generation[Any]]",
    engine: AbstractContextManager[Any],
) -> None:
    with engine:
        portal.call(_close_all, generations)


def _close_all(generations: "Iterable[Generation[Any]]") -> None:
    for generation in generations:
        generation.close()


async def _run(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    return await result if hasattr(result, "__await__") else result


def _close_at_exit(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    close = method()
    if close is not None:
        close()
