"""Load, wake, put to sleep and stop the engines of a server with several models, as the policy decides.

One task owns all transitions and runs one at a time.  Requests wait in `use` until their model is awake, and pin it in memory until they
end, so a model with open requests is never stopped.  A request cancelled while it waits leaves no state behind.
"""

import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import TYPE_CHECKING, cast

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup, TaskStatus

from trouper.actors.executor.devices.supervision import WorkerKilledError
from trouper.actors.observability.metrics import Metrics
from trouper.actors.observability.replica_metrics import Distribution
from trouper.config.engine_config import EngineConfig
from trouper.errors import TrouperError
from trouper.frontends.server.models.policy import (
    ASLEEP,
    AWAKE,
    COLD,
    DOZING,
    FAILED,
    ModelRecord,
    ModelState,
    ResidencyLimits,
    decide,
    draining,
    next_look,
    unfit,
    used_bytes,
)
from trouper.frontends.server.models.sizes import corrected, resident_bytes, size
from trouper.frontends.server.models.table import HostedModel, ModelTable, refusal
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import HTTPError, unavailable

if TYPE_CHECKING:
    from trouper.actors.executor.workers.launching import Peer
    from trouper.frontends.python.async_engine import AsyncLLMEngine

logger = logging.getLogger("trouper.server")
# The pause after a failed load in seconds, which doubles with each further failure from the first value to the second.
FIRST_PAUSE_S, LAST_PAUSE_S = 5.0, 300.0
# The pause in seconds before a failed transition of a live engine is retried: its worker may be restarting.
RETRY_S = 0.25
# After this many consecutive failures, about a minute, such an engine is stopped.
MAX_RETRIES = 240
# The half-life, in seconds, of a request's weight in the choice of models to evict.
WORK_S = 60.0
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
MAX_CAUSE = 300


class Residency:
    """Own the states of all models of a server, and perform their transitions.

    Args:
        report: called with one line about each transition and failure.
    """

    def __init__(
        self,
        table: ModelTable,
        limits: ResidencyLimits,
        report: Callable[[str], None],
        make_engine: "Callable[..., AsyncLLMEngine] | None" = None,
    ) -> None:
        self._make_engine = make_engine or _make_engine
        self.table = table
        self.limits = limits
        # Whether requests load cold models.
        self.loads_by_request = True
        # Reads `--models-dir` again, and returns the names of added and of removed models.
        self.reload: Callable[[], Awaitable[tuple[list[str], list[str]]]] | None = None
        self.num_transitions: dict[tuple[str, str], int] = {}
        self.transition_s = Distribution(SECONDS)
        self.wait_s = Distribution(SECONDS)
        # Set, and replaced, whenever a model's state or the table changes.
        self.changed = anyio.Event()
        # The number of clients of `GET /models/events`.
        self.num_watchers = 0
        self._report = report
        self._news: anyio.Event | None = None
        self._pids: dict[str, dict[int, int]] = {}
        self._is_closing = False
        self._group: TaskGroup | None = None

    def __repr__(self) -> str:
        used = used_bytes(self.table.records)
        return f"<Residency {size(used)} of {size(self.limits.budget)}>"

    # Requests

    async def use(
        self, model: HostedModel, act: Callable[[], Awaitable[None]], *, needs_awake: bool = True
    ) -> None:
        """Wait until the model is awake, or with `needs_awake=False` loaded, and keep it in memory while `act` runs.

        Raises:
            HTTPError: the model cannot be loaded (503 or 507).
        """
        await self._wait(model, needs_awake=needs_awake)
        # As in Ollama, each request resets the keep-alive time to the default, and its handler may change it.
        model.record.keep_alive_s = model.options.keep_alive_s
        with self.opened(model):
            await act()

    async def _wait(self, model: HostedModel, *, needs_awake: bool) -> None:
        record, begun = model.record, anyio.current_time()
        if model.is_ready(needs_awake=needs_awake):
            return
        record.num_waiting += 1
        self._note_wish(model)
        try:
            while not model.is_ready(needs_awake=needs_awake):
                self.check(model)
                await model.changed.wait()
            self.wait_s.observe(anyio.current_time() - begun)
        finally:
            record.num_waiting -= 1
            self._note_end(model)

    @contextlib.contextmanager
    def opened(self, model: HostedModel) -> Generator[None]:
        """Protect a loaded model's engine from being stopped during the block."""
        record = model.record
        record.num_open += 1
        now = anyio.current_time()
        record.work = record.work * 0.5 ** ((now - max(record.woken_at, 0.0)) / WORK_S) + 1
        try:
            yield
        finally:
            record.num_open -= 1
            self._note_end(model)

    def check(self, model: HostedModel) -> None:
        """Raise HTTPError if requests for this model would fail even after waiting for it."""
        record, now = model.record, anyio.current_time()
        if self._is_closing:
            raise unavailable("draining", "the server is shutting down")
        if model.plan.config is None:
            raise refusal(model, now)
        if record.state is FAILED and now < record.retry_at:
            raise refusal(model, now)
        for each, pinned in unfit(self.table.records, self.limits.budget):
            if each is not record:
                continue
            need = record.memory.bytes_in(AWAKE)
            text = f"the model {model.name} needs {size(need)} of memory"
            text += f" in addition to {size(pinned)} of pinned models" if pinned else ""
            raise HTTPError(
                507,
                "model_too_large",
                f"{text}, but the budget is {size(self.limits.budget)} (--memory-budget)",
                param="model",
            )

    def _note_wish(self, model: HostedModel) -> None:
        _note_wants(model.record)
        self._tell()

    def _note_end(self, model: HostedModel) -> None:
        record = model.record
        if not record.has_work:
            record.idle_since, record.wants_since = anyio.current_time(), math.inf
        self._tell()

    @property
    def is_closing(self) -> bool:
        """Whether the server is shutting down, so that requests no longer wait for a model."""
        return self._is_closing

    def keep(self, model: HostedModel, keep_alive_s: float | None) -> None:
        """Set how long the model stays awake after its last request, in seconds.  None restores the model's default."""
        default_s = model.options.keep_alive_s
        model.record.keep_alive_s = default_s if keep_alive_s is None else keep_alive_s
        self._tell()

    def hold(self, model: HostedModel, is_held: bool) -> None:
        """Exempt the model from the policy because an administrator has paused it, or end the exemption."""
        model.is_paused = model.record.is_held = is_held
        self.note_table()
        self._tell()

    def close(self) -> None:
        """Refuse all requests that are waiting for a model, because the server is shutting down."""
        self._is_closing = True
        for model in self.table:
            self._notify(model)

    def note_deaths(self) -> None:
        """Close the engines that have died.  Their models are loaded again after a pause."""
        for model in self.table:
            service = model.service
            if not service.is_starting and service.engine.dead_error is not None:
                service.died.set()

    def engine_metrics(self) -> list[Metrics]:
        """Return the metrics of all engines, including the last values of stopped ones."""
        return [model.metrics for model in self.table if model.metrics is not None]

    # Administrators

    async def load(self, model: HostedModel) -> float:
        """Load or wake a model, and return the time that this took in seconds.

        Raises:
            HTTPError: the model cannot be loaded (503 or 507).
        """
        begun, record = anyio.current_time(), model.record
        record.is_leaving, record.keep_alive_s = False, model.options.keep_alive_s
        if record.state is FAILED and model.plan.config is not None:
            record.state = COLD
        self._tell()
        await self._wait(model, needs_awake=True)
        return anyio.current_time() - begun

    def load_later(self, model: HostedModel) -> None:
        """Start to load or wake a model without waiting for it.  Raises HTTPError if that would fail."""
        self.check(model)
        assert self._group is not None
        self._group.start_soon(self._load_alone, model, name="load")

    async def _load_alone(self, model: HostedModel) -> None:
        try:
            await self.load(model)
        except HTTPError as error:
            logger.info("the model %s was not loaded: %s", model.name, error)

    def begin_unload(self, model: HostedModel, *, aborts: bool, is_forced: bool) -> None:
        """Start to unload a model, after its requests have ended or, with `aborts`, were aborted.

        Raises:
            HTTPError: the model is pinned and `is_forced` is false (409).
        """
        record = model.record
        if record.is_pinned and not is_forced:
            text = f"the model {model.name} is pinned; set force to unload it anyway"
            raise HTTPError(409, "model_pinned", text, param="model")
        if record.state in (COLD, FAILED) and model.moves_to is None:
            return
        self.hold(model, False)
        record.is_leaving = True
        if aborts:
            model.service.abort(None)
        self._tell()

    async def wait_for(self, model: HostedModel, state: ModelState) -> None:
        """Wait until a model reaches a state or fails."""
        while model.record.state not in (state, FAILED):
            await model.changed.wait()

    def note_table(self) -> None:
        """Wake the watchers of the table, because a model was added, removed or changed."""
        self.changed.set()
        self.changed = anyio.Event()

    def _notify(self, model: HostedModel) -> None:
        model.notify()
        self.note_table()

    # The task

    def _tell(self) -> None:
        """Wake the task to decide again."""
        if self._news is not None:
            self._news.set()

    async def carry_out(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Perform transitions until cancelled, then close all engines.

        Each engine has a task of its own, because it must be closed in the task that opened it.
        """
        async with anyio.create_task_group() as self._group:
            task_status.started()
            while True:
                self._news = news = anyio.Event()
                now = anyio.current_time()
                self._end_pauses(now)
                self._drain(now)
                transition = decide(self.table.records, self.limits, now)
                if transition is not None:
                    await self._move(self.table.models[transition.name], transition.to)
                    continue
                look_s = next_look(self.table.records, self.limits, now) - now
                with anyio.move_on_after(look_s):
                    await news.wait()

    def _end_pauses(self, now: float) -> None:
        for model in self.table:
            record = model.record
            if record.state is FAILED and now >= record.retry_at and model.plan.config is not None:
                record.state = COLD
                _note_wants(record)
                self._notify(model)

    def _drain(self, now: float) -> None:
        """Hold back or admit new requests of each model, as the policy decides."""
        names = draining(self.table.records, self.limits, now)
        for model in self.table:
            was_draining, model.is_draining = model.is_draining, model.name in names
            if was_draining and not model.is_draining:
                self._notify(model)

    async def _move(self, model: HostedModel, to: ModelState) -> None:
        """Perform one transition.  A failure affects only this model."""
        record, begun, before = model.record, anyio.current_time(), model.record.state
        model.moves_to = to
        self._notify(model)
        failure: str | None = None
        try:
            if to is AWAKE and before is COLD:
                failure = await self._load(model)
            elif to is AWAKE:
                await model.service.engine.controls.wake(None)
            elif to is COLD:
                await self._stop(model)
            else:
                await model.service.engine.controls.sleep(1 if to is DOZING else 2, "keep")
        except Exception as error:
            failure = cause_of(error)
        finally:
            model.moves_to = None
        if failure is not None:
            await self._note_failure(model, before, failure)
            return
        if record.state is before:
            self._note_done(model, to, anyio.current_time() - begun)
            await self._correct(model)
        self._notify(model)

    def _note_done(self, model: HostedModel, to: ModelState, seconds: float) -> None:
        record, now = model.record, anyio.current_time()
        before, record.state = record.state, to
        record.is_leaving &= to is not COLD
        model.num_failures, model.error, model.last_change_s = 0, None, seconds
        if to is AWAKE:
            record.woken_at, record.wants_since = now, math.inf
        elif record.wants:
            record.wants_since = now
        key = model.name, to.value
        self.num_transitions[key] = self.num_transitions.get(key, 0) + 1
        self.transition_s.observe(seconds)
        used = used_bytes(self.table.records)
        self._report(
            f"{model.name}: {before.value} → {to.value} in {seconds:.2f} s; "
            f"all models use {size(used)} of {size(self.limits.budget)}"
        )

    async def _note_failure(self, model: HostedModel, before: ModelState, failure: str) -> None:
        """Handle a failed transition: retry soon if the engine is alive or its worker was killed, else pause the model.

        A live engine can fail a transition because its worker died and is being restarted.
        """
        record, service = model.record, model.service
        model.num_failures += 1
        is_killed, model.was_killed = model.was_killed, False
        if is_killed and model.num_failures <= service.config.max_worker_restarts:
            # The model is still cold, so the policy loads it again.
            logger.warning(
                "loading %s again, because its worker was killed: %s", model.name, failure
            )
            self._notify(model)
            return
        is_alive = not service.is_starting and service.engine.dead_error is None
        if is_alive and before is not COLD and model.num_failures <= MAX_RETRIES:
            record.state, record.is_held = place_of(service), True
            logger.warning(
                "could not change the state of %s, trying again in %g s: %s",
                model.name,
                RETRY_S,
                failure,
            )
            self._notify(model)
            assert self._group is not None
            self._group.start_soon(self._release_later, model, name="retry")
            return
        if is_alive:
            await self._stop(model)
        self._fail(model, failure)

    async def _release_later(self, model: HostedModel) -> None:
        """Return a model to the policy after a pause, during which the policy can move other models."""
        await anyio.sleep(RETRY_S)
        model.record.is_held = model.is_paused
        _note_wants(model.record)
        self._tell()

    def _fail(self, model: HostedModel, failure: str) -> None:
        record = model.record
        pause_s = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(max(0, model.num_failures - 1), 10))
        record.state, record.retry_at = FAILED, anyio.current_time() + pause_s
        record.is_leaving = model.is_paused = record.is_held = False
        model.error = failure
        self._report(
            f"{model.name} has failed and can be loaded again in {pause_s:.0f} s: {failure}"
        )
        self._notify(model)
        self._tell()

    async def _load(self, model: HostedModel) -> str | None:
        """Start a model's engine.  Returns None, or why the engine could not start."""
        assert self._group is not None
        model.stop = anyio.Event()
        return await self._group.start(self._keep_open, model, name=f"engine {model.name}")

    async def _keep_open(
        self, model: HostedModel, *, task_status: TaskStatus[str | None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Run a model's engine until it is stopped or dies.  Reports None when it is open, or the reason if it cannot start."""
        service, config = model.service, model.plan.config
        assert config is not None
        is_open, failure = False, None
        try:
            async with self._make_engine(config, launcher=self._launcher(model, config)) as engine:
                for adapter in model.options.adapters:
                    await engine.engine.adapters.load_named(adapter)
                service.open(engine.engine)
                model.metrics = engine.engine.metrics
                is_open = True
                task_status.started(None)
                died = service.died
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_end_with, died, tasks.cancel_scope)
                    await model.stop.wait()
                    tasks.cancel_scope.cancel()
                if engine.engine.dead_error is not None:
                    failure = cause_of(engine.engine.dead_error)
        except Exception as error:
            failure = cause_of(error)
            model.was_killed = isinstance(error, WorkerKilledError)
        finally:
            service.close()
            self._pids.pop(model.name, None)
        if not is_open:
            task_status.started(failure)
        elif not model.stop.is_set():
            model.num_failures += 1
            self._fail(model, failure or "the engine has ended")
        else:
            model.stop = anyio.Event()
            self._notify(model)

    async def _stop(self, model: HostedModel) -> None:
        """Stop a model's engine and wait until its worker processes have ended."""
        model.stop.set()
        while not model.service.is_starting:
            await model.changed.wait()
        model.is_paused = model.record.is_held = False

    def _launcher(self, model: HostedModel, config: EngineConfig) -> "Callable[..., Peer]":
        from trouper.actors.executor.workers.launching import launch

        pids = self._pids[model.name] = {}

        def start(rank: int, *, files: Sequence[int] = ()) -> "Peer":
            peer = launch(rank, files=files)
            pids[rank] = peer.pid
            return peer

        return start

    async def _correct(self, model: HostedModel) -> None:
        """Measure the memory of the model's idle processes, and raise the estimate if they use more."""
        record, pids = model.record, self._pids.get(model.name)
        is_fresh = record.num_open == 0 or record.state is not AWAKE
        if not pids or not is_fresh or record.state is COLD:
            return
        seen = await anyio.to_thread.run_sync(
            resident_bytes, tuple(pids.values()), limiter=model.service.threads
        )
        if seen is None:
            return
        after = corrected(record.memory, seen, has_weights=record.state is not ASLEEP)
        if after != record.memory:
            before, record.memory = record.bytes, after
            logger.info(
                "%s uses %s of memory, more than the estimated %s",
                model.name,
                size(record.bytes),
                size(before),
            )


def residency_of(service: Service) -> Residency | None:
    """Return the residency of the server's models, or None on a server for a single model."""
    return cast("Residency | None", service.front.models)


def _make_engine(config: EngineConfig, launcher: "Callable[..., Peer]") -> "AsyncLLMEngine":
    # Imported here, because it imports torch, and a server should listen before that.
    from trouper.frontends.python.async_engine import AsyncLLMEngine

    return AsyncLLMEngine(config, launcher=launcher)


async def _end_with(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _note_wants(record: ModelRecord) -> None:
    if record.wants:
        record.wants_since = min(record.wants_since, anyio.current_time())


def place_of(service: Service) -> ModelState:
    """Return the state of an open engine: awake, dozing or asleep."""
    lifecycle = service.engine.lifecycle
    if not lifecycle.is_sleeping:
        return AWAKE
    if lifecycle.resident:
        return DOZING
    return ASLEEP if lifecycle.level == 2 else DOZING


def cause_of(error: BaseException) -> str:
    """Return a one-line description of an exception, of at most `MAX_CAUSE` characters."""
    text = str(error) if isinstance(error, TrouperError | OSError | ValueError) else repr(error)
    return " ".join(text.split())[:MAX_CAUSE]
