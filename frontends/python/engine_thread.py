"""Run an engine on an event loop in a thread of its own, so that blocking code can use it.

`LLM` and `LLMEngine` have no event loop. `EngineThread` starts one (trio) with the engine on it and runs calls there
through a portal; `BlockingControls` offers the engine's controls to both classes. The engine must also end if the
program forgets to close it, forks, or exits, so those cases are handled here and nowhere else.
"""

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    contextmanager,
)
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import anyio
import trio
from anyio.from_thread import BlockingPortal

from trouper.config.args import EngineArgs
from trouper.config.engine_config import ConfigView, ModelView
from trouper.config.model import ModelConfig
from trouper.errors import EngineDeadError, EngineForkedError, TrouperError, TrouperValidationError
from trouper.frontends.python.async_engine import AsyncLLMEngine
from trouper.frontends.python.controls import AsyncControls

if TYPE_CHECKING:
    from collections.abc import Generator

    from trouper.actors.engine.generation import Generation


T = TypeVar("T")
# The names of an engine's own threads (its loop's and its device's) begin with this.
THREADS = "trouper"


class EngineThread:
    """A running engine and the thread of its event loop: the constructor starts both, `close` ends both.

    Raises:
        RuntimeError: the caller runs inside trio, and waiting would block its loop.
    """

    def __init__(self, engine_args: EngineArgs, *, is_stepped: bool) -> None:
        refuse_trio()
        # Open requests by id; `close` closes them.
        self.generations: dict[str, Generation[Any]] = {}
        # A forked child has this object but none of its threads.
        self._process_id = os.getpid()
        self._owner = threading.get_ident()
        with ExitStack() as stack:
            self._portal = stack.enter_context(PortalThread(THREADS))
            self.engine = stack.enter_context(
                self._portal.wrap_async_context_manager(
                    AsyncLLMEngine(engine_args, offline=True, is_stepped=is_stepped)
                )
            )
            self._exit_stack = stack.pop_all()
        # The threads are daemons, which freeze when the interpreter exits, so the engine must end before that.
        self._at_exit = weakref.WeakMethod(self.close)
        atexit.register(_close_at_exit, self._at_exit)
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<EngineThread {'closed' if self._is_closed else repr(self.engine)}>"

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function, async or not, on the engine's event loop and wait for its result.

        Ctrl-C or another exception in the waiting thread cancels the call.

        Raises:
            EngineDeadError: the engine was closed, perhaps by another thread during the call.
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
        """Enter an async context manager on the engine's loop for the duration of a block in this thread.

        The manager is entered and left in one task of the loop, as cancel scopes require.
        """
        self.check_open()
        with self._portal.wrap_async_context_manager(manager) as value:
            yield value

    def check_open(self) -> None:
        """Raise EngineDeadError if the engine is closed, or EngineForkedError in a forked child process.

        Every blocking method calls it first, because waiting on a loop without a thread would never end.
        """
        if os.getpid() != self._process_id:
            raise EngineForkedError(
                "the engine runs in the parent process; create a new engine after fork()"
            )
        if self._is_closed:
            raise EngineDeadError("the engine is closed")

    def find(self, request_ids: Iterable[str]) -> "list[Generation[Any]]":
        """Return open requests by id.  Raises EngineDeadError if closing the engine has removed them.

        Raises KeyError for an unknown id.  The requests belong to the engine's loop, so only functions run there may
        use them.
        """
        with self._ending_as_closed():
            return [self.generations[id] for id in request_ids]

    @contextmanager
    def _ending_as_closed(self) -> "Generator[None]":
        """Turn any error of the block into EngineDeadError if another thread has closed the engine."""
        try:
            yield
        except TrouperError:
            raise
        except Exception as error:
            if self._is_closed:
                raise EngineDeadError("the engine was closed during the call") from error
            raise

    def forget(self, request_ids: Iterable[str]) -> None:
        """Close these requests in any state; unknown ids are ignored.

        An interrupted call uses it, so that its requests do not continue to compute without a reader.
        """
        found = [self.generations.pop(id, None) for id in request_ids]
        generations = [generation for generation in found if generation is not None]
        if generations and not self._is_closed:
            self.call(_close_all, generations)

    def close(self) -> None:
        """Stop the engine and wait until its memory, threads and tasks are released; further calls do nothing.

        In one of the engine's own threads, or inside trio, it returns without waiting, because the engine needs
        that thread to end.
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
            # The garbage collector may run in one of the engine's threads, which must not wait for themselves.
            waits = threading.get_ident() == self._owner
            try:
                warnings.warn(
                    f"not closed before deletion: {self!r}", ResourceWarning, 2, source=self
                )
            finally:
                self._close(waits=waits)


def refuse_trio() -> None:
    """Raise RuntimeError if the caller runs inside trio, because a blocking call would stop its event loop.

    Inside asyncio blocking calls are allowed, because notebooks run in its loop and use them on purpose.
    """
    if trio.lowlevel.in_trio_run():
        raise RuntimeError(
            "this call would block trio's event loop: use AsyncLLMEngine, or a thread (trio.to_thread.run_sync)"
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


class PortalThread:
    """A thread with an event loop; entering starts it and returns a portal to it, leaving stops it.

    anyio's `start_blocking_portal` does the same as a generator. A forked child would finish that generator when it
    is garbage-collected, and wait forever for a thread that exists only in the parent; a class has no such code.
    """

    def __init__(self, name: str) -> None:
        self._portal: Future[BlockingPortal] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __repr__(self) -> str:
        return f"<PortalThread {'running' if self._thread.is_alive() else 'not running'}>"

    def __enter__(self) -> BlockingPortal:
        self._thread.start()
        return self._portal.result()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        portal = self._portal.result()
        try:
            portal.call(portal.stop, error is not None)
        except RuntimeError:
            # The loop has already stopped.
            pass
        self._thread.join()

    def _run(self) -> None:
        try:
            anyio.run(self._serve, backend="trio")
        # This is the top of a thread, so the error goes to `__enter__`, which waits for the portal.
        except BaseException as error:  # noqa: ASYNC103
            if not self._portal.done():
                self._portal.set_exception(error)

    async def _serve(self) -> None:
        async with BlockingPortal() as portal:
            self._portal.set_result(portal)
            await portal.sleep_until_stopped()


P = ParamSpec("P")


def blocking(
    method: Callable[Concatenate[Any, P], Awaitable[T]],
) -> Callable[Concatenate["BlockingControls", P], T]:
    """Wrap an async method of `AsyncLLMEngine` as a blocking method with the same signature.

    The call runs on the engine's loop while the caller's thread waits, and raises the method's own errors.
    """

    @wraps(method)
    def wait(self: "BlockingControls", *args: P.args, **kwargs: P.kwargs) -> T:
        return self.thread.call(method, self.thread.engine, *args, **kwargs)

    return wait


class BlockingControls:
    """The methods of `AsyncControls` as blocking methods; base of `LLM` and `LLMEngine`.

    Each call crosses to the engine's thread and waits there, so different threads may use one engine.
    """

    thread: EngineThread

    sleep = blocking(AsyncControls.sleep)
    wake_up = blocking(AsyncControls.wake_up)
    is_sleeping = blocking(AsyncControls.is_sleeping)
    pause_generation = blocking(AsyncControls.pause_generation)
    resume_generation = blocking(AsyncControls.resume_generation)
    is_paused = blocking(AsyncControls.is_paused)
    reset_prefix_cache = blocking(AsyncControls.reset_prefix_cache)
    reset_mm_cache = blocking(AsyncControls.reset_mm_cache)
    add_lora = blocking(AsyncControls.add_lora)
    remove_lora = blocking(AsyncControls.remove_lora)
    pin_lora = blocking(AsyncControls.pin_lora)
    list_loras = blocking(AsyncControls.list_loras)
    start_profile = blocking(AsyncControls.start_profile)
    stop_profile = blocking(AsyncControls.stop_profile)
    get_metrics = blocking(AsyncControls.get_metrics)

    def paused(self, mode: str = "keep", clear_cache: bool = False) -> AbstractContextManager[None]:
        """Pause the engine during the block; every exit restores its earlier state."""
        return self.thread.entered(self.thread.engine.paused(mode, clear_cache=clear_cache))

    @property
    def model_config(self) -> ModelConfig:
        return self.thread.engine.model_config

    def get_model_config(self) -> ModelView:
        """Return the model's facts under vLLM's names, with the maximum length and dtype that the engine uses."""
        return self.thread.engine.get_model_config()

    @property
    def vllm_config(self) -> ConfigView:
        """The configuration under vLLM's names, for scripts written for vLLM."""
        return self.thread.engine.vllm_config

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer as an object of transformers.

        Raises:

            TrouperValidationError: the engine was created with `skip_tokenizer_init`.
            UnsupportedFeatureError: the extra `transformers` is not installed.
        """
        self.thread.check_open()
        tokenizer = self.thread.engine.tokenizer
        if tokenizer is None:
            raise TrouperValidationError(
                "the engine has no tokenizer, because skip_tokenizer_init is set",
                parameter="tokenizer",
            )
        return tokenizer.hf_tokenizer()

    def close(self) -> None:
        """Stop the engine and wait until its memory, threads and tasks are released; further calls do nothing.

        In one of the engine's own threads, or inside trio, it returns without waiting, because the engine needs
        that thread to end.
        """
        self.thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
