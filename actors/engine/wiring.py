"""Open the channels between the actors and start them.  No other module does this, so the structure of an engine is on one page.

The task group of the actors is inside the caller's block.  When an actor raises, the group ends, and every waiting call raises
`EngineDeadError` with that exception as its cause.  The caller's block is not cancelled: it gets the error from its next call, or at
its end.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from trouper.actors.engine.engine import Engine, EngineParts, EngineStatistics
from trouper.actors.executor.device import Device, DeviceInfo, Executor
from trouper.actors.messages.controls import (
    DetokenizerInbox,
    ExecutorInbox,
    ObserverInbox,
    PoolerInbox,
    RendererInbox,
    SchedulerInbox,
)
from trouper.actors.messages.outputs import RequestEnded, SchedulerStats
from trouper.actors.messages.requests import MAX_OPEN_REQUESTS
from trouper.actors.observability.metrics import Metrics
from trouper.actors.observability.observer import Observer, RecentEvents
from trouper.actors.output.detokenizer import Detokenizer
from trouper.actors.output.pooler import Pooler
from trouper.actors.rendering.media.downloads import Downloads
from trouper.actors.rendering.media.items import MediaPreprocessor
from trouper.actors.rendering.prompts.prompts import Prompts
from trouper.actors.rendering.prompts.two_towers import prompts_of
from trouper.actors.rendering.renderer import Fetcher, Renderer
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.actors.runtime.event_loop import EventLoop, Reporter, Threads, WorkerThreads
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.pooling_policy import PoolingPolicy, SharedPooling
from trouper.actors.scheduling.replicas import Replicas
from trouper.actors.scheduling.scheduler import Scheduler
from trouper.actors.scheduling.scheduling_policy import SchedulingPolicy
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.actors.scheduling.state.sequence_table import Shared
from trouper.actors.scheduling.state.state_snapshots import StateSnapshots
from trouper.actors.scheduling.state.tier import MAX_ORDERS, Tier
from trouper.config.context import context_line, fitted, states_line, with_state_rows
from trouper.config.engine_config import EngineConfig
from trouper.errors import UnsupportedFeatureError
from trouper.extras import install_hint

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

logger = logging.getLogger(__name__)

__all__ = ["Engine", "EngineStatistics", "open_engine"]

MAX_FACTS = 2048
MAX_POOLED_STEPS = 64
# Renderers for grammars on trial.  With two, one slow grammar does not delay the next, and at most two processors are busy.
NUM_TRYING = 2
CLOSE_GRACE_S = 10  # for the final outputs of aborted requests
TRACES_GRACE_S = 30  # for the last spans, when their collector does not answer

NoteEnded = Callable[[RequestEnded], None]
AnyPolicy = SchedulingPolicy[Any] | Replicas[Any, Any]


@asynccontextmanager
async def open_engine(
    config: EngineConfig,
    device: Device | Sequence[Device],
    threads: Threads | None = None,
    *,
    is_stepped: bool = False,
    span_processor: "SpanProcessor | None" = None,
) -> AsyncGenerator[Engine]:
    """Run the actors for the length of the block.

    Leaving the block waits up to `shutdown_timeout_s` for open requests (not after an error), aborts the remaining ones, and
    ends the actors, the device last.  With `is_stepped`, only `Controls.step` makes plans.
    `device` is one device, or one for each of `data_parallel_size` replicas.
    `span_processor` receives the spans instead of the endpoint `otlp_traces_endpoint`.

    Raises:
        TrouperValidationError: the model, its tokenizer or the memory sizes do not fit.
        UnsupportedFeatureError: tracing is enabled, but its packages are not installed.
        EngineDeadError: an actor failed, and the block did not end with an error of its own.
    """
    threads = threads or WorkerThreads(config.render_timeout_s)
    if is_stepped:
        single = msgspec.structs.replace(config.scheduler, max_steps_in_flight=1)
        config = msgspec.structs.replace(config, scheduler=single)
    devices = tuple(device) if isinstance(device, Sequence) else (device,)
    engine: Engine | None = None
    body_error: BaseException | None = None
    async with (
        _tracing(config, threads, span_processor) as note_ended,
        anyio.create_task_group() as supervisor,
    ):
        try:
            engine = opened = await supervisor.start(
                _run_actors, config, devices, threads, is_stepped, note_ended, name="engine"
            )
            yield opened
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            # Raised outside of the task group, which would wrap it in an exception group.
            body_error = error
        finally:
            if engine is not None:
                timeout_s = 0.0 if body_error else config.shutdown_timeout_s
                with anyio.move_on_after(timeout_s + CLOSE_GRACE_S, shield=True):
                    await engine.shut_down(timeout_s)
        supervisor.cancel_scope.cancel()
    if body_error is not None:
        raise body_error
    if engine is not None:
        engine.raise_death()


async def _run_actors(
    config: EngineConfig,
    devices: Sequence[Device],
    threads: Threads,
    is_stepped: bool,
    note_ended: NoteEnded | None,
    *,
    task_status: TaskStatus[Engine],
) -> None:
    """Open the channels, start the actors, and end with them."""
    credits = config.scheduler.max_steps_in_flight
    # One Render for each open request.
    to_renderer, renderer_inbox = anyio.create_memory_object_stream[RendererInbox](
        MAX_OPEN_REQUESTS
    )
    to_large_renderer, large_renderer_inbox = anyio.create_memory_object_stream[RendererInbox](
        MAX_OPEN_REQUESTS
    )
    to_media_renderer, media_renderer_inbox = anyio.create_memory_object_stream[RendererInbox](
        MAX_OPEN_REQUESTS
    )
    to_fetcher, fetcher_inbox = anyio.create_memory_object_stream[RendererInbox](MAX_OPEN_REQUESTS)
    # One Render for each open request, on its way from the three above.
    to_trying_renderer, trying_renderer_inbox = anyio.create_memory_object_stream[RendererInbox](
        MAX_OPEN_REQUESTS
    )
    # One Admit and one Abort for each open request, and the same for a request that replaced it before the
    # scheduler ran.  The rest is room for an answer and a Stop for each step in flight, and for one lifecycle
    # call, because lifecycle calls wait for each other.
    to_scheduler, scheduler_inbox = anyio.create_memory_object_stream[SchedulerInbox](
        5 * MAX_OPEN_REQUESTS
    )
    to_executors: list[MemoryObjectSendStream[ExecutorInbox]] = []
    executor_inboxes: list[MemoryObjectReceiveStream[ExecutorInbox]] = []
    # One Track for each open request.  The scheduler waits when the detokenizer is this far behind.
    to_detokenizer, detokenizer_inbox = anyio.create_memory_object_stream[DetokenizerInbox](
        2 * MAX_OPEN_REQUESTS
    )
    # The scheduler waits when the pooler is this many steps behind.
    to_pooler, pooler_inbox = anyio.create_memory_object_stream[PoolerInbox](MAX_POOLED_STEPS)
    # Facts are dropped when the observer is several seconds of steps behind.
    to_observer, observer_inbox = anyio.create_memory_object_stream[ObserverInbox](MAX_FACTS)
    engine: Engine | None = None
    with (
        ExitStack() as ends,
        to_renderer, renderer_inbox, to_large_renderer, large_renderer_inbox,
        to_trying_renderer, trying_renderer_inbox, to_scheduler, scheduler_inbox,
        to_detokenizer, detokenizer_inbox, to_pooler, pooler_inbox, to_observer, observer_inbox,
    ):  # fmt: skip
        # CPython limits a `with` statement to about twenty blocks.
        ends.enter_context(to_media_renderer)
        ends.enter_context(media_renderer_inbox)
        ends.enter_context(to_fetcher)
        ends.enter_context(fetcher_inbox)
        # The inbox of an executor must have room for the plans in flight, a grammar to prepare and the orders to the tier; for the
        # same from before a loss of the device, if a call delays them; and for one call each from the lifecycle, for an adapter,
        # from a probe and from the scheduler.
        for _ in devices:
            to_executor, executor_inbox = anyio.create_memory_object_stream[ExecutorInbox](
                2 * (credits + 1 + MAX_ORDERS) + 4
            )
            to_executors.append(ends.enter_context(to_executor))
            executor_inboxes.append(ends.enter_context(executor_inbox))
        try:
            async with anyio.create_task_group() as tasks:
                executors = _make_executors(executor_inboxes, to_scheduler, devices)
                config, info, tokenizer, images = await _load(config, executors, threads, tasks)
                policy = _make_policy(config, info)
                events = RecentEvents()
                observer = _make_observer(
                    config, info, observer_inbox, _replica_statistics(policy), note_ended, images, events
                )  # fmt: skip
                if observer is not None:
                    await tasks.start(observer.run, name="observer")
                reporter = partial(_make_reporter, to_observer, is_on=observer is not None)

                detokenizer: Detokenizer | None = None
                pooler: Pooler | None = None
                if config.pooler is None:
                    detokenizer = Detokenizer(
                        detokenizer_inbox, to_scheduler.clone(), tokenizer, reporter()
                    )
                    await tasks.start(detokenizer.run, name="detokenizer")
                    prompts = Prompts.for_engine(config, tokenizer, images)
                    render_quickly, num_trying = prompts.render_quickly, NUM_TRYING
                else:
                    pooler = Pooler(pooler_inbox, config.pooler, threads)
                    await tasks.start(pooler.run, name="pooler")
                    kind = prompts_of(config.pooler)
                    prompts = kind.for_engine(config, tokenizer, images)
                    render_quickly, num_trying = prompts.render, 0
                scheduler = Scheduler[Any](
                    scheduler_inbox,
                    [sender.clone() for sender in to_executors],
                    (to_detokenizer if config.pooler is None else to_pooler).clone(),
                    policy,
                    reporter=reporter(),
                    is_stepped=is_stepped,
                )
                await tasks.start(scheduler.run, name="scheduler")
                # More renderers than workers: large prompts, prompts with images and grammars on trial have their own
                # renderers, so they delay only each other.
                quick = [
                    large_renderer_inbox,
                    media_renderer_inbox,
                    *[renderer_inbox] * config.renderer_num_workers,
                ]
                lanes = [(lane, render_quickly, to_trying_renderer) for lane in quick]
                trying = [(trying_renderer_inbox, prompts.render, None)] * num_trying
                renderers: list[Renderer] = []
                for number, (lane, render, trials) in enumerate([*lanes, *trying]):
                    renderer = Renderer(
                        lane.clone(),
                        to_scheduler.clone(),
                        to_detokenizer.clone(),
                        render,
                        threads,
                        reporter(),
                        trials and trials.clone(),
                    )
                    await tasks.start(renderer.run, name=f"renderer {number}")
                    renderers.append(renderer)
                downloads = await _start_fetcher(config, fetcher_inbox, to_media_renderer, tasks)
                inboxes: dict[str, MemoryObjectSendStream[Any]] = {
                    "renderer": to_renderer, "large renderer": to_large_renderer,
                    "media renderer": to_media_renderer, "fetcher": to_fetcher,
                    "trying renderer": to_trying_renderer,
                    "scheduler": to_scheduler,
                    **{f"executor {i}": sender for i, sender in enumerate(to_executors)},
                    "detokenizer": to_detokenizer, "pooler": to_pooler, "observer": to_observer,
                }  # fmt: skip
                parts = EngineParts(
                    info, tokenizer, None if config.pooler else prompts, to_renderer, to_large_renderer, to_media_renderer, to_fetcher, downloads, to_trying_renderer, to_scheduler, to_executors,
                    to_observer, inboxes, tuple(renderers), scheduler, executors, detokenizer, pooler,
                    observer, events, EventLoop(), threads,
                )  # fmt: skip
                engine = Engine(config, parts)
                task_status.started(engine)
        except BaseExceptionGroup as group:
            errors, rest = group.split(Exception)
            if errors is not None:
                cause = _first_leaf(errors)
                if engine is None:
                    raise cause from cause.__cause__
                engine.die(cause)
            if rest is not None:
                raise rest from None
        finally:
            if engine is not None:
                engine.hang_up()


async def _start_fetcher(
    config: EngineConfig,
    inbox: MemoryObjectReceiveStream[RendererInbox],
    to_media_renderer: MemoryObjectSendStream[RendererInbox],
    tasks: TaskGroup,
) -> Downloads | None:
    """Start the actor that downloads images, if the operator allows any host."""
    if config.media is None or not config.media.sources.domains:
        return None
    downloads = Downloads(config.media)
    fetcher = Fetcher(inbox.clone(), to_media_renderer.clone(), downloads)
    await tasks.start(fetcher.run, name="fetcher")
    return downloads


def _make_executors(
    inboxes: Sequence[MemoryObjectReceiveStream[ExecutorInbox]],
    to_scheduler: MemoryObjectSendStream[SchedulerInbox],
    devices: Sequence[Device],
) -> list[Executor]:
    """Make one executor for each device.  With several devices, each executor labels its messages with its replica."""
    numbers = range(len(devices)) if len(devices) > 1 else (None,)
    return [
        Executor(inbox, to_scheduler.clone(), device, number)
        for number, device, inbox in zip(numbers, devices, inboxes, strict=True)
    ]


def _make_policy(config: EngineConfig, info: DeviceInfo) -> AnyPolicy:
    num_replicas, scheduler = config.data_parallel_size, config.scheduler
    step_tokens = scheduler.max_num_scheduled_tokens
    if config.pooler is not None:
        pooling = SharedPooling()
        poolers = [PoolingPolicy(scheduler, pooling) for _ in range(num_replicas)]
        return poolers[0] if num_replicas == 1 else Replicas(poolers, step_tokens)
    shared, caches = Shared(), scheduler.enable_prefix_caching
    policies: list[Policy] = []
    for _ in range(num_replicas):
        blocks = KVBlocks(info.num_blocks, info.block_size, caches, info.kv_layout)
        states = _make_states(info, has_cache=caches)
        tier = None if config.tier is None else Tier(blocks, states)
        policies.append(Policy(scheduler, blocks, shared, states, tier))
    return policies[0] if num_replicas == 1 else Replicas(policies, step_tokens, info.block_size)


def _make_states(info: DeviceInfo, *, has_cache: bool) -> StateSnapshots | None:
    if not info.state_bytes:
        return None
    sizes = info.num_state_rows, info.num_snapshots, info.block_size
    return StateSnapshots(*sizes, has_cache=has_cache)


def _replica_statistics(
    policy: AnyPolicy,
) -> Callable[[], tuple[SchedulerStats, ...]]:
    if isinstance(policy, Replicas):
        return policy.replica_statistics
    return lambda: (policy.statistics(),)


def _make_reporter(to_observer: MemoryObjectSendStream[ObserverInbox], *, is_on: bool) -> Reporter:
    return Reporter(to_observer.clone() if is_on else None)


def cache_labels(config: EngineConfig, info: DeviceInfo) -> dict[str, str]:
    """Return the configuration of the KV cache under the names that vLLM's dashboards read.

    All values are strings, because they become labels of a metric with the constant value 1.
    """
    num_blocks = info.num_blocks - 1  # all but the null block
    num_tokens = info.num_kv_tokens(config.max_model_len)
    facts: dict[str, object] = {
        "block_size": info.block_size,
        "cache_dtype": "auto",
        "enable_prefix_caching": config.scheduler.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "is_attention_free": False,
        "kv_cache_max_concurrency": round(num_tokens / config.max_model_len, 2),
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "kv_cache_size_tokens": num_tokens,
        "num_cpu_blocks": None,
        "num_gpu_blocks": num_blocks,
        "num_gpu_blocks_override": config.num_blocks,
        "prefix_caching_hash_algo": "sha256",
    }
    return {name: str(value) for name, value in facts.items()}


def _make_observer(
    config: EngineConfig,
    info: DeviceInfo,
    inbox: MemoryObjectReceiveStream[ObserverInbox],
    statistics: Callable[[], tuple[SchedulerStats, ...]],
    note_ended: NoteEnded | None,
    images: MediaPreprocessor | None,
    events: RecentEvents,
) -> Observer | None:
    """Create the observer.  Returns None if both statistics and traces are disabled."""
    metrics: Metrics | None = None
    if config.log_stats:
        cache_config = cache_labels(config, info)
        name, prefix = config.shown_name, config.metrics_prefix
        num_workers = config.workers_per_replica if config.device_worker == "process" else 0
        metrics = Metrics(
            name,
            config.max_model_len,
            prefix,
            cache_config,
            num_workers,
            config.data_parallel_size,
        )
        if images is not None:
            metrics.read_images(lambda: images.counts)
    elif note_ended is None:
        return None
    return Observer(inbox, metrics, statistics, config.log_stats_interval_s, note_ended, events)


@asynccontextmanager
async def _tracing(
    config: EngineConfig, threads: Threads, processor: "SpanProcessor | None"
) -> AsyncGenerator[NoteEnded | None]:
    """Open the tracer, and yield its function that exports an ended request as a span.  Yields None without an endpoint."""
    if config.otlp_traces_endpoint is None:
        yield None
        return
    try:
        from trouper.actors.observability.tracing import Tracer, otlp_processor

        processor = processor or otlp_processor(config.otlp_traces_endpoint)
    except ImportError as error:
        raise UnsupportedFeatureError(
            f"otlp_traces_endpoint needs OpenTelemetry ({error}): {install_hint('tracing')}"
        ) from None
    tracer = Tracer(config.shown_name, processor)
    try:
        yield tracer.note
    finally:
        with anyio.move_on_after(TRACES_GRACE_S, shield=True):
            await threads.run(tracer.close)


async def _load(
    config: EngineConfig, executors: Sequence[Executor], threads: Threads, tasks: TaskGroup
) -> tuple[EngineConfig, DeviceInfo, Tokenizer | None, MediaPreprocessor | None]:
    """Load all devices concurrently, and meanwhile the tokenizer and the image processor.

    Returns:
        The configuration in use, with a context length that fits into the memory of every device, and what was loaded.
    """
    tokenizer: Tokenizer | None = None
    images: MediaPreprocessor | None = None

    async def load_tokenizer(folder: str) -> None:
        nonlocal tokenizer, images
        tokenizer = await threads.run(Tokenizer.load, folder)
        if config.media is not None:
            images = await threads.run(MediaPreprocessor, config.media, tokenizer)
            if config.media.in_process:
                await threads.run(images.warm)

    infos: list[DeviceInfo] = []

    async def load_device(executor: Executor, name: str) -> None:
        infos.append(await tasks.start(executor.run, name=name))

    async with anyio.create_task_group() as loading:
        if config.tokenizer is not None:
            loading.start_soon(load_tokenizer, config.tokenizer)
        for replica, executor in enumerate(executors[1:], 1):
            loading.start_soon(load_device, executor, f"executor {replica}")
        await load_device(executors[0], "executor")
    if images is not None and config.media is not None and not config.media.in_process:
        # Not while the device imports transformers, because importing it in two threads at once may fail.
        await threads.run(images.warm)
    # A request may move to any replica, so the replica with the fewest blocks limits the context.
    info = min(infos, key=lambda info: info.num_blocks)
    # All but the null block.
    config = fitted(config, info.kv_layout.num_tokens(info.num_blocks - 1), info.longest)
    if (line := context_line(config, info.longest)) is not None:
        logger.warning(line)
    if (line := states_line(config, info.num_state_rows, info.state_bytes)) is not None:
        logger.warning(line)
    config = with_state_rows(config, info.num_state_rows)
    return config, info, tokenizer, images


def _first_leaf(group: BaseExceptionGroup[Exception]) -> Exception:
    """Return the first error of a group.  Later errors are usually its consequences."""
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
