"""Hold the state that all handlers of a server share: the engine, the limits, and the open requests.

The service exists before the engine: listeners open first, so that health checks and load balancers get an answer while the
model is loading.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec

from trouper.actors.observability.metrics import LIMITS
from trouper.actors.output.slot import ExpectedToken
from trouper.actors.rendering.prompts.prompts import template_text
from trouper.config.engine_config import EngineConfig
from trouper.config.model import ModelFiles
from trouper.errors import TrouperNotFoundError
from trouper.frontends.dialects.core import AnswerFormat
from trouper.frontends.python.parsing import format_of
from trouper.frontends.server.admission.gate import (
    BYTES_PER_TOKEN,
    AdmissionGate,
    AdmissionTicket,
    PromisedPlace,
)
from trouper.frontends.server.admission.overload import (
    Ladder,
    Level,
    QueueDelay,
    StepClock,
    memory_used,
)
from trouper.frontends.server.durable.journal import Journal
from trouper.frontends.server.durable.recording import RequestRecorder
from trouper.frontends.server.http.body import BodyMemory
from trouper.frontends.server.http.context import RequestContext, Route
from trouper.frontends.server.http.decoding import UnknownFields
from trouper.frontends.server.http.headers import trace_headers
from trouper.frontends.server.service.background import BackgroundTasks
from trouper.frontends.server.service.metrics import ServerMetrics
from trouper.frontends.server.service.response_store import ResponseStore
from trouper.frontends.server.shared.errors import HTTPError, aborted, clean, logger, unavailable
from trouper.frontends.server.shared.settings import ServerSettings
from trouper.lora import LoRARequest
from trouper.outputs import RequestOutput

if TYPE_CHECKING:
    from trouper.actors.engine.engine import Engine
    from trouper.actors.engine.generation import Generation
    from trouper.actors.rendering.tokenizer import Tokenizer

# The default limit of open sequences as a multiple of max_num_seqs: for each running one, three may be queued.
PLACES = 4
MAX_ECHO = 200
MAX_SHOWN_NAME = 100  # characters of a model's name in an error
MAX_SHOWN_NAMES = 3  # names
# By task of a pooling model: a verb for errors, and the path to use instead.
POOLING_ROUTES = {
    "embed": ("makes embeddings", "/v1/embeddings"),
    "classify": ("classifies", "/classify"),
}
# The least number of requests to queue inside the engine, so that it can fill a free slot at once.
MIN_SPARE_SLOTS = 2
# The default budget for all request bodies, as a multiple of max_body.
BODIES = 8
# How long the result of a successful round trip is reused, in seconds.
PROOF_S = 1.0
# Timeout of a round trip in seconds.
PROBE_S = 5.0


UNMEETABLE = "deadline_unmeetable"


def untagged(name: str) -> str:
    """Return a model's name without the tag `:latest`, which Ollama's clients append to names without a tag.

    The tag has no meaning here, because a name always denotes one model.
    """
    return name.removesuffix(":latest")


class Service:
    """Hold the state of one served model: starting until `open`, then open, and draining after `drain`.

    A server with several models has a service for each.  They share the metrics, the memory for bodies, the threads, the stored responses
    and the background tasks.  Only the server's event loop changes a service.

    Args:
        front: the first service of a server with several models, which owns the shared parts.
        plan: the configuration of the engine, if it is known before the engine is open.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        front: "Service | None" = None,
        plan: EngineConfig | None = None,
    ) -> None:
        self.settings = settings
        self.front = self if front is None else front
        # All services of the server; used only in the front.
        self._services: list[Service] = []
        # The table of the server's models, if it has several.  `residency_of` returns it with its type.
        self.models: object | None = None
        self._plan = plan
        self._is_draining = False
        # Whether a successor accepts at the same addresses, while this server finishes its open requests.
        self.is_leaving = False
        self.died = anyio.Event()
        self.steps = StepClock()
        if front is None:
            self.metrics = ServerMetrics()
            self.gate = AdmissionGate(self._note_rejection)
            self.unknown = UnknownFields()
            self.bodies = BodyMemory(
                settings.max_body,
                settings.max_body_memory or BODIES * settings.max_body,
                self._refuse_body,
            )
            # For large bodies and for tokenising.
            self.threads = anyio.CapacityLimiter(2)
            # Chats of `/tokenize` have a thread of their own, because rendering a template may take long.
            self.chat_threads = anyio.CapacityLimiter(1)
            self.responses = ResponseStore(settings.responses_store_bytes)
            self.background = BackgroundTasks()
        else:
            self.metrics, self.unknown, self.bodies = front.metrics, front.unknown, front.bodies
            self.threads, self.chat_threads = front.threads, front.chat_threads
            self.responses, self.background = front.responses, front.background
            # The usage of a key counts in the queues of all models.
            self.gate = AdmissionGate(self._note_rejection, front.gate.admission.counters)
        self.front._services.append(self)
        # The journal of durable answers; None without `--journal`.
        self._journal: Journal | None = None
        # Records requests for `trouper replay`; None without `--record`.
        self.recorder: RequestRecorder | None = None
        self._ladder = Ladder()
        # The time of the last round trip.
        self._proved_at = -math.inf
        self.answers = AnswerFormat()  # of the model's tool calls and reasoning
        self._engine: Engine | None = None
        # The largest adapter id assigned so far.
        self._last_adapter = 0
        # Sizes and types for Ollama's clients, cached at the first request.
        self.model_files: ModelFiles | None = None
        # The source of the page's frames.  Its module is imported when the page is first opened.
        self.feed: object | None = None
        # Contexts by the engine's request id, oldest first.
        self._open: dict[str, RequestContext] = {}

    def __repr__(self) -> str:
        state = "starting" if self._engine is None else "draining" if self.is_draining else "open"
        return f"<Service {state} {self.gate!r}>"

    @property
    def journal(self) -> Journal | None:
        return self._journal

    @journal.setter
    def journal(self, journal: Journal | None) -> None:
        self._journal = self.metrics.journal = journal

    def open(self, engine: "Engine") -> None:
        """Accept requests from now on, within limits derived from the engine's configuration and KV cache.

        Before this call, each request is answered with 503.
        """
        config, info = engine.config, engine.info
        room = info.num_kv_tokens(config.max_model_len) * config.data_parallel_size
        self.set_limits(config, room)
        self.gate.num_prefill_tokens = lambda: engine.num_prefill_tokens
        self.metrics.prefix = config.metrics_prefix
        self.answers = self._answer_format(engine)
        self._engine = engine
        self.died = anyio.Event()
        self._proved_at = -math.inf

    def close(self) -> None:
        """Forget a stopped engine.  Only a server with several models continues after that."""
        self._engine = None
        self.gate.num_prefill_tokens = int

    def set_limits(self, config: EngineConfig, room: int = 0) -> None:
        """Set the limits of admission.

        Args:
            room: the size of the KV cache in tokens, or 0 if it is unknown or the model has none.
        """
        num_seqs = config.scheduler.max_num_seqs * config.data_parallel_size
        limits = (self.settings.max_requests or PLACES * num_seqs, config.max_num_queued_reqs)
        admission = self.gate.admission
        admission.max_sequences = min(limit for limit in limits if limit is not None)
        if admission.max_sequences == config.max_num_queued_reqs:
            self.gate.full_reason = "max_num_queued_reqs"
        admission.max_started = num_seqs + max(MIN_SPARE_SLOTS, num_seqs // 4)
        # The default queue holds as many tokens as the KV cache; a pooling model has no cache, so its slots count.
        room = room or num_seqs * config.max_model_len
        self.gate.min_waiting_tokens = self.settings.max_waiting_tokens or room
        self.gate.is_adaptive = self.settings.max_waiting_tokens is None
        self.gate.max_prefill_tokens = config.max_num_queued_tokens
        self.gate.delay = QueueDelay(self.settings.max_queue_delay_s)

    def _answer_format(self, engine: "Engine") -> AnswerFormat:
        if engine.tokenizer is None:
            return AnswerFormat()
        found = format_of(
            engine.tokenizer,
            template_text(engine.config.chat_template),
            tool_call_parser=self.settings.tool_call_parser,
            reasoning_parser=self.settings.reasoning_parser,
            more=self.settings.dialects,
        )
        marks = engine.config.reasoning
        found = found if marks is None else msgspec.structs.replace(found, reasoning=marks)
        tools = None if found.tools is None else found.tools.name
        logger.info("tool calls: %s; reasoning: %s", tools, found.reasoning)
        return found

    def note_tool_calls(self, num_calls: Mapping[str, int]) -> None:
        """Count the tool calls of a finished choice by their outcome.

        The metric shows operators whether the chosen dialect fits the model.
        """
        dialect = "none" if self.answers.tools is None else self.answers.tools.name
        for outcome, num in num_calls.items():
            self.metrics.note_tool_calls(dialect, outcome, num)

    def drain(self) -> None:
        """Refuse new requests from now on, and fail the readiness check.

        Open requests continue until they finish or the grace period ends.
        """
        self.front._is_draining = True

    @property
    def is_draining(self) -> bool:
        return self.front._is_draining

    @property
    def is_ending(self) -> bool:
        """Whether this process is shutting down or has passed its listeners to a successor."""
        return self.is_draining or self.front.is_leaving

    @property
    def services(self) -> "list[Service]":
        """All services of the server, including this one.  The first is the front."""
        return self.front._services

    @property
    def is_starting(self) -> bool:
        return self._engine is None

    @property
    def is_device_lost(self) -> bool:
        """Whether the worker process of at least one replica has died and is being restarted.

        Other replicas continue to serve meanwhile.  False while the model is loading.
        """
        if self._engine is None:
            return False
        return any(part.is_device_lost for part in self._engine.statistics().replicas)

    @property
    def is_stalled(self) -> bool:
        """Whether streams pause, because a worker is being restarted or the model sleeps to make room for another one."""
        is_asleep = self.front.models is not None and self._engine is not None
        return self.is_device_lost or (is_asleep and self.engine.lifecycle.is_sleeping)

    @property
    def engine(self) -> "Engine":
        """The engine, for handlers.  Raises HTTPError (503) while the model is not loaded."""
        if self._engine is None:
            if self.front.models is not None:
                name = clean(self.model_names[0], MAX_SHOWN_NAME)
                text = f"the model {name} is not loaded; load it with POST /models/load"
                raise unavailable("model_not_loaded", text)
            raise unavailable("starting", "the server is still loading the model; try again later")
        return self._engine

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration, or the planned one before the engine is open."""
        if self._engine is None and self._plan is not None:
            return self._plan
        return self.engine.config

    @property
    def tokenizer(self) -> "Tokenizer | None":
        """The engine's tokenizer, or None without one or without an open engine."""
        return None if self._engine is None else self._engine.tokenizer

    @property
    def adapters(self) -> Sequence[LoRARequest]:
        """The adapters that requests can select.  Before the engine is open, these are the configured ones."""
        return (
            self.settings.lora_modules if self._engine is None else self._engine.adapters.requests
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        if self.settings.served_model_names:
            return self.settings.served_model_names
        config = self.config
        return config.served_names or (config.model.name,)

    def close_gate(self) -> None:
        """Refuse all queued requests with status 503, because the server is shutting down."""
        self.gate.close(unavailable("draining", "the server is shutting down"))

    def check_room(self, context: RequestContext) -> None:
        """Raise the HTTPError that `enter` would raise, before the body is read.

        The estimate uses Content-Length, so a refused body need not be read.
        """
        self.gate.check(context.tenant, self.counted_bytes(context.content_length, 1))

    def enter(self, context: RequestContext) -> AdmissionTicket:
        """Reserve a place for a request whose body was read.  Raises HTTPError (429 or 503) if the server is full."""
        num_bytes = self.counted_bytes(context.num_body_bytes, 1)
        self._note_throughput()
        return self.gate.enter(context.tenant, num_bytes)

    def promise(self, context: RequestContext) -> PromisedPlace:
        """Reserve a place for a resumed answer of an earlier process, before all new requests."""
        num_bytes = self.counted_bytes(context.num_body_bytes, 1)
        self._note_throughput()
        return self.gate.promise(context.tenant, num_bytes)

    def counted_bytes(self, num_bytes: int, num_prompts: int) -> int:
        """Return the bytes of a body that count against the limits: per prompt, at most those of the model's context length."""
        return min(num_bytes, num_prompts * self.config.max_model_len * BYTES_PER_TOKEN)

    def look(self, lag_s: float) -> None:
        """Check the engine, and adapt admission to the load.  The monitor calls this four times a second.

        `lag_s` is how late the event loop has resumed the monitor, in seconds.
        """
        if self.is_draining:
            return
        num_open = sum(service._look_at_engine() for service in self.services)
        if not num_open:
            return
        self.metrics.last_gaps_s.append(lag_s)
        level = self._ladder.look(memory_used(), lag_s)
        if level != self.gate.level:
            for service in self.services:
                if service._engine is not None:
                    service._engine.events.note("overload", level.name.lower())
            logger.warning("overload level: %s → %s", self.gate.level.name, level.name)
        for service in self.services:
            service.gate.level = level
        self.metrics.level = level
        if level is Level.ABORT:
            self._give_up_one()

    def _look_at_engine(self) -> bool:
        """Note the progress of the engine, and start waiting requests.  Returns whether the engine is open and alive."""
        if self._engine is None:
            return False
        if self._engine.dead_error is not None:
            self.died.set()
            return False
        self.steps.age_s(self._engine.statistics().scheduler, anyio.current_time())
        self._note_throughput()
        self.gate.let_in()
        self.gate.look(is_paused=self._engine.lifecycle.is_sleeping)
        return True

    @property
    def num_requests(self) -> int:
        """The number of admitted requests of all models."""
        return sum(service.gate.admission.num_requests for service in self.services)

    def check_admits(self) -> None:
        """Raise HTTPError (503) if all requests were refused for longer than the setting `max_refusing_s`.

        So a load balancer can prefer other servers, although this one is alive.
        """
        refusing_s = self.gate.refusing_s()
        if refusing_s > self.settings.max_refusing_s:
            text = f"the server is overloaded and has refused all requests for {refusing_s:.0f} s"
            raise unavailable("overloaded", text)

    async def prove(self) -> None:
        """Check the engine by a round trip through scheduler and executor, unless the last one was less than `PROOF_S` seconds ago.

        Raises:
            HTTPError: the engine does not answer within `PROBE_S` seconds.
        """
        is_proof_fresh = anyio.current_time() - self._proved_at < PROOF_S
        if is_proof_fresh and any(each.is_available for each in self.engine.statistics().replicas):
            return
        with anyio.move_on_after(PROBE_S):
            await self.engine.controls.probe()
            self._proved_at = anyio.current_time()
            return
        raise unavailable("no_progress", f"the engine has not answered for {PROBE_S:g} s")

    def check_alive(self) -> None:
        """Raise HTTPError (503) while the model is loading, and after the engine failed.

        The first call after a failure also starts the shutdown of the program.
        """
        if self.engine.dead_error is not None:
            self.died.set()
            raise unavailable("engine_failed", "the engine has failed, and the server is stopping")

    def check_open(self) -> None:
        """Raise HTTPError or RetryableRequestError if requests are not accepted now, and EngineDeadError if the engine has failed."""
        self.engine.check_alive()
        self.check_serving()
        refuses = self.engine.lifecycle.refuses
        if refuses is not None:
            raise refuses.to_exception()

    def check_serving(self) -> None:
        """Raise HTTPError (503) after `drain`."""
        if self.is_draining:
            raise unavailable("draining", "the server is shutting down")

    def check_model(self, name: str | None) -> str:
        """Return the model's name for the response: the requested name, or the server's default name without one.

        Raises:
            TrouperNotFoundError: neither a model nor an adapter has this name.
        """
        if not name:
            return self.model_names[0]
        is_known = name in self.model_names or untagged(name) in self.model_names
        if not is_known and self.adapter(name) is None:
            raise TrouperNotFoundError(self._unknown_model(name))
        return name

    def _unknown_model(self, name: str) -> str:
        """Return the message for an unknown model, with the first few known names."""
        adapters = (adapter.lora_name for adapter in self.adapters)
        names = [*self.model_names, *adapters]
        shown = ", ".join(f"`{clean(each, MAX_SHOWN_NAME)}`" for each in names[:MAX_SHOWN_NAMES])
        rest = f" and {len(names) - MAX_SHOWN_NAMES} more (GET /v1/models)"
        more = rest if len(names) > MAX_SHOWN_NAMES else ""
        return f"The model `{clean(name, MAX_SHOWN_NAME)}` does not exist. This server has {shown}{more}."

    def check_kind(self, route: Route) -> None:
        """Raise HTTPError (400) if the route generates text and the model is a pooling model.

        The error names the route that fits the model's task.
        """
        spec = self.config.pooler
        if spec is None or route.pools or route.choose is not None:
            return
        does, ask = POOLING_ROUTES.get(spec.task, ("pools", "/pooling"))
        name = clean(self.model_names[0], MAX_SHOWN_NAME)
        text = f"{route.path}: the model {name!r} {does} and does not generate text; use {ask}"
        raise HTTPError(400, "not_supported", text, param="model")

    def adapter(self, name: str | None) -> LoRARequest | None:
        """Return the loaded adapter of this name, or None if there is none.

        Names with Ollama's tag `:latest` are accepted.
        """
        if name is None:
            return None
        names = name, untagged(name)
        return next((adapter for adapter in self.adapters if adapter.lora_name in names), None)

    def next_adapter_number(self) -> int:
        """Return an unused id for a new adapter.  Ids of unloaded adapters are never reused."""
        numbers = [adapter.lora_int_id for adapter in self.engine.adapters.requests]
        self._last_adapter = max(self._last_adapter, *numbers, 0) + 1
        return self._last_adapter

    def size(
        self,
        context: RequestContext,
        num_prompts: int,
        n: int,
        max_tokens: int | None,
        priority: int,
    ) -> int:
        """Count the request with its true size against the limits.  Returns its priority in the engine's order (larger first).

        Raises:
            HTTPError: the limits leave too little room for this request.
        """
        if self.settings.priority_order == "vllm":
            # ~ reverses the order without overflow, unlike the negative of the smallest int64.
            priority = ~priority
        if context.ticket is not None:
            num_bytes = self.counted_bytes(context.num_body_bytes, num_prompts)
            context.ticket.size(num_bytes, num_prompts, n, max_tokens, priority)
        return priority

    def trace_parent(self, context: RequestContext) -> dict[str, str] | None:
        """Return the request's trace headers, so that the engine's spans join the caller's trace, or None if tracing is off."""
        if self.config.otlp_traces_endpoint is None:
            return None
        return trace_headers(context.headers)

    async def prompt_text(self, output: RequestOutput) -> str:
        """Return the text of a prompt.  A prompt given as token ids is decoded with its special tokens.

        Decoding happens in a thread, because prompts can be long.
        """
        tokenizer = self.engine.tokenizer
        if output.prompt is not None or tokenizer is None:
            return output.prompt or ""
        return await anyio.to_thread.run_sync(
            tokenizer.decode, output.prompt_token_ids, False, limiter=self.threads
        )

    def token_text(self, token_id: int) -> str:
        tokenizer = self.engine.tokenizer
        return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        tokenizer = self.engine.tokenizer
        return b"" if tokenizer is None else tokenizer.token_bytes(token_id)

    def note(self, generation: "Generation[Any]", context: RequestContext) -> None:
        self._open[generation.request_id] = context

    def forget(self, generation: "Generation[Any]") -> None:
        self._open.pop(generation.request_id, None)

    def open_requests(self) -> Mapping[str, RequestContext]:
        """Return the contexts of open requests by the engine's request id, the oldest first."""
        return self._open

    def abort(self, request_ids: Iterable[str] | None) -> int:
        """Abort the requests with these client-visible ids, or all of them.

        Returns the number of aborted engine requests, including those still queued for admission.
        """
        wanted = None if request_ids is None else set(request_ids)
        found = {
            id: context
            for id, context in self._open.items()
            if wanted is None or context.request_id in wanted
        }
        for context in found.values():
            context.is_aborted = True
        tickets = {context.ticket for context in found.values() if context.ticket is not None}
        self.gate.close(aborted(), tickets)
        if self._engine is not None:
            self._engine.abort(found)
        return len(found)

    def _give_up_one(self) -> None:
        """Free memory: refuse all queued requests, or abort the newest running request if none is queued."""
        refusal = unavailable("overloaded", "the server is overloaded, try again later")
        if sum(service.gate.close(refusal) for service in self.services):
            return
        for engine in [service._engine for service in self.services if service._engine is not None]:
            slots = [
                slot for slot in engine.requests.slots if not slot.is_aborted and not slot.is_over
            ]
            if slots:
                engine.abort(slots[-1].request_id)
                return

    def _refuse_body(self) -> HTTPError:
        refusal = self.gate.refuse(
            "body_memory_full",
            "the request bodies being read use too much memory (--max-body-memory); try again later",
        )
        refusal.headers = ((b"connection", b"close"),)
        return refusal

    async def predict_first_token(
        self, context: RequestContext, generation: "Generation[Any]"
    ) -> ExpectedToken | None:
        """Wait for the engine's prediction of the first token, and announce it in the header `Server-Timing`.

        Returns None if no prediction is wanted or possible.

        Raises:
            HTTPError: the first token cannot arrive before the client's deadline.
        """
        is_wanted = context.has_deadline or not self.settings.disable_server_timing
        if self.config.pooler is not None or not is_wanted:
            return None
        expected = await generation.expected()
        if expected is None:
            return None
        left_s = context.timeout_s - context.age_s
        if context.has_deadline and expected.error is not None:
            earliest_s = expected.seconds / (1 + expected.error)
            if earliest_s > left_s:
                self._note_rejection(UNMEETABLE)
                raise _unmeetable(expected, left_s)
        if self.settings.disable_server_timing:
            return None
        word = "at least" if expected.is_least else "expected"
        timing = f'first-token;dur={1000 * expected.seconds:.0f};desc="{word}"'
        context.own_headers = (*context.own_headers, (b"server-timing", timing.encode()))
        return expected

    def _note_rejection(self, reason: str) -> None:
        self.metrics.note_rejection(reason)
        engine = self._engine
        if engine is None:
            return
        engine.events.note("refusal", reason)
        if engine.metrics is not None and reason in LIMITS:
            engine.metrics.note_rejection(reason)

    def _note_throughput(self) -> None:
        engine = self._engine
        if engine is None:
            return
        # A sleeping engine computes nothing, which must not lower its throughput.
        is_busy = self.gate.admission.num_started > 0 and not engine.lifecycle.is_sleeping
        self.gate.throughput.note(engine.num_tokens, anyio.current_time(), is_busy=is_busy)


def _unmeetable(expected: ExpectedToken, left_s: float) -> HTTPError:
    text = (
        f"the first token is expected in {expected.seconds:.1f} s, and {max(0.0, left_s):.1f} s are left; "
        "allow more time, or try again later"
    )
    refusal = HTTPError(503, UNMEETABLE, text, param="X-Request-Timeout-Ms")
    refusal.retry_after_s = max(1.0, expected.seconds - left_s)
    return refusal
