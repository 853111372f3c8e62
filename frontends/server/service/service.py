"""The state that all handlers share: the engine once it is loaded, the limits, and the open requests."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec

from trouper.actors.observability.metrics import LIMITS
from trouper.actors.rendering.prompts.prompts import template_text
from trouper.actors.replies.slot import ExpectedToken
from trouper.config.resolve import EngineConfig
from trouper.errors import TrouperNotFoundError
from trouper.frontends.dialects.answer_format import AnswerFormat
from trouper.frontends.python.parsing import format_of
from trouper.frontends.server.admission.gate import BYTES_PER_TOKEN, AdmissionGate, AdmissionTicket
from trouper.frontends.server.admission.overload import Ladder, Level, memory_used
from trouper.frontends.server.admission.throughput import QueueDelay, StepClock
from trouper.frontends.server.http.body import BodyMemory
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.http.decoding import UnknownFields
from trouper.frontends.server.http.headers import trace_headers
from trouper.frontends.server.http.route import Route
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

PLACES = 4  # × max_num_seqs sequences may be open: one runs, three wait
MAX_ECHO = 200
MAX_SHOWN_NAME = 100  # characters of a model's name in an error
MAX_SHOWN_NAMES = 3  # names, so that the whole fits an error's text
# What a pooling model does by default, and the path for it.
POOLING_ROUTES = {
    "embed": ("makes embeddings", "/v1/embeddings"),
    "classify": ("classifies", "/classify"),
}
MIN_SPARE_SLOTS = 2  # in the engine's own queue, so that a slot is taken again at once
BODIES = 8  # × max_body: the budget of all bodies under way
PROOF_S = 1.0  # how long a round trip proves that the next would succeed
PROBE_S = 5.0  # how long it may take


UNMEETABLE = "deadline_unmeetable"


def untagged(name: str) -> str:
    """Return a model's name without the tag that clients of Ollama put behind one that has none."""
    return name.removesuffix(":latest")


class Service:
    """The state of one server: starting until `open`, draining after `drain`."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = ServerMetrics()
        self.gate = AdmissionGate(self._note_rejection)
        self.is_draining = False
        self.died = anyio.Event()  # a task has met the engine's death
        self.unknown = UnknownFields()
        self.steps = StepClock()
        self.bodies = BodyMemory(
            settings.max_body,
            settings.max_body_memory or BODIES * settings.max_body,
            self._refuse_body,
        )
        self.threads = anyio.CapacityLimiter(2)  # large bodies, tokenising
        self.chat_threads = anyio.CapacityLimiter(
            1
        )  # chats to be tokenised: templates may take long
        self.responses = ResponseStore(settings.responses_store_bytes)
        self.background = BackgroundTasks()
        self._ladder = Ladder()
        self._proved_at = -math.inf  # the last round trip
        self.answers = AnswerFormat()  # of the model's tool calls and reasoning
        self._engine: Engine | None = None
        self._last_adapter = 0  # number that one has been loaded with
        self._open: dict[str, RequestContext] = {}  # by the engine's id, the oldest first

    def __repr__(self) -> str:
        state = "starting" if self._engine is None else "draining" if self.is_draining else "open"
        return f"<Service {state} {self.gate!r}>"

    def open(self, engine: "Engine") -> None:
        """Take requests from now on."""
        config, info = engine.config, engine.info
        num_seqs = config.scheduler.max_num_seqs * config.data_parallel_size
        limits = (self.settings.max_requests or PLACES * num_seqs, config.max_num_queued_reqs)
        admission = self.gate.admission
        admission.max_sequences = min(limit for limit in limits if limit is not None)
        if admission.max_sequences == config.max_num_queued_reqs:
            self.gate.full_reason = "max_num_queued_reqs"
        admission.max_started = num_seqs + max(MIN_SPARE_SLOTS, num_seqs // 4)
        # as many as the cache holds; a model that pools has none, and what fills its slots may wait
        room = (info.num_blocks - 1) * info.block_size * config.data_parallel_size
        room = room or num_seqs * config.max_model_len
        self.gate.min_waiting_tokens = self.settings.max_waiting_tokens or room
        self.gate.is_adaptive = self.settings.max_waiting_tokens is None
        self.gate.max_prefill_tokens = config.max_num_queued_tokens
        self.gate.num_prefill_tokens = lambda: engine.num_prefill_tokens
        self.gate.delay = QueueDelay(self.settings.max_queue_delay_s)
        self.metrics.prefix = config.metrics_prefix
        self.answers = self._answer_format(engine)
        self._engine = engine

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
        """Count the tool calls of a choice that has ended, by their outcome."""
        dialect = "none" if self.answers.tools is None else self.answers.tools.name
        for outcome, num in num_calls.items():
            self.metrics.note_tool_calls(dialect, outcome, num)

    def drain(self) -> None:
        """Refuse new requests from now on; readiness says so."""
        self.is_draining = True

    @property
    def is_starting(self) -> bool:
        return self._engine is None

    @property
    def is_device_lost(self) -> bool:
        """Whether the model's process has died and is being started again."""
        if self._engine is None:
            return False
        return any(part.is_device_lost for part in self._engine.statistics().replicas)

    @property
    def engine(self) -> "Engine":
        """The engine.  Raises HTTPError while it is loading."""
        if self._engine is None:
            raise unavailable("starting", "the model is being loaded")
        return self._engine

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    @property
    def model_names(self) -> tuple[str, ...]:
        config = self.config
        return self.settings.served_model_names or config.served_names or (config.model.name,)

    def close_gate(self) -> None:
        """Refuse the requests that wait now."""
        self.gate.close(unavailable("draining", "the server is shutting down"))

    def check_room(self, context: RequestContext) -> None:
        """Raise the HTTPError that `enter` would raise, before the body is read."""
        self.gate.check(context.tenant, self.counted_bytes(context.content_length, 1))

    def enter(self, context: RequestContext) -> AdmissionTicket:
        """Reserve a place for a request whose body has come.  Raises HTTPError when all places are taken."""
        num_bytes = self.counted_bytes(context.num_body_bytes, 1)
        ticket = self.gate.enter(context.tenant, num_bytes)
        self._note_throughput()
        return ticket

    def counted_bytes(self, num_bytes: int, num_prompts: int) -> int:
        """Bound the bytes of a body that count: no prompt takes more than the model's length, in whatever form it comes."""
        return min(num_bytes, num_prompts * self.config.max_model_len * BYTES_PER_TOKEN)

    def look(self, lag_s: float) -> None:
        """Look after the engine and the load; called four times a second."""
        if self._engine is None or self.is_draining:  # it is not there yet, or being closed
            return
        if self._engine.dead_error is not None:
            self.died.set()
            return
        self.steps.age_s(self._engine.statistics().scheduler, anyio.current_time())
        self._note_throughput()
        self.gate.let_in()
        self.gate.look(is_paused=self.engine.lifecycle.is_sleeping)
        level = self._ladder.look(memory_used(), lag_s)
        if level != self.gate.level:
            logger.warning("overload: %s after %s", level.name, self.gate.level.name)
        self.gate.level = self.metrics.level = level
        if level is Level.ABORT:
            self._give_up_one()

    def check_admits(self) -> None:
        """Raises HTTPError when requests have come for some seconds and all of them were refused."""
        refusing_s = self.gate.refusing_s()
        if refusing_s > self.settings.max_refusing_s:
            text = f"no request has been admitted for {refusing_s:.0f} s"
            raise unavailable("overloaded", text)

    async def prove(self) -> None:
        """Make a round trip through scheduler and executor, unless one was made just before and no device was lost since.

        Raises:
            HTTPError: the engine does not answer.
        """
        is_proof_fresh = anyio.current_time() - self._proved_at < PROOF_S
        if is_proof_fresh and any(each.is_available for each in self.engine.statistics().replicas):
            return
        with anyio.move_on_after(PROBE_S):
            await self.engine.controls.probe()
            self._proved_at = anyio.current_time()
            return
        raise unavailable("no_progress", "the engine does not answer")

    def check_alive(self) -> None:
        """Raises HTTPError while starting, and when the engine has failed: health in a status."""
        if self.engine.dead_error is not None:
            self.died.set()
            raise unavailable("engine_failed", "the engine has failed")

    def check_open(self) -> None:
        """Raises HTTPError unless requests are taken now, EngineDeadError when they never will be."""
        self.engine.check_alive()
        if self.is_draining:
            raise unavailable("draining", "the server is shutting down")
        refuses = self.engine.lifecycle.refuses
        if refuses is not None:
            raise refuses.to_exception()

    def check_model(self, name: str | None) -> str:
        """Return the model's name for the response.  Raises TrouperNotFoundError."""
        if name is None:
            return self.model_names[0]
        is_known = name in self.model_names or untagged(name) in self.model_names
        if not is_known and self.adapter(name) is None:
            raise TrouperNotFoundError(self._unknown_model(name))
        return name

    def _unknown_model(self, name: str) -> str:
        """Say which models there are, as many as an error has room for."""
        adapters = (adapter.lora_name for adapter in self.engine.adapters.requests)
        names = [*self.model_names, *adapters]
        shown = ", ".join(f"`{clean(each, MAX_SHOWN_NAME)}`" for each in names[:MAX_SHOWN_NAMES])
        rest = f" and {len(names) - MAX_SHOWN_NAMES} more (GET /v1/models)"
        more = rest if len(names) > MAX_SHOWN_NAMES else ""
        return f"The model `{clean(name, MAX_SHOWN_NAME)}` does not exist. This server has {shown}{more}."

    def check_kind(self, route: Route) -> None:
        """Refuse a route that generates where the model pools.  Raises HTTPError."""
        spec = self.config.pooler
        if spec is None or route.pools or route.choose is not None:
            return
        does, ask = POOLING_ROUTES.get(spec.task, ("pools", "/pooling"))
        name = clean(self.model_names[0], MAX_SHOWN_NAME)
        text = f"{route.path}: the model {name!r} {does} and does not generate text; ask {ask}"
        raise HTTPError(400, "not_supported", text, param="model")

    def adapter(self, name: str | None) -> LoRARequest | None:
        """Return the adapter of this name that requests may use, if there is one."""
        found = self.engine.adapters.requests
        names = () if name is None else (name, untagged(name))
        return next((adapter for adapter in found if adapter.lora_name in names), None)

    def next_adapter_number(self) -> int:
        """Return a number that no adapter has."""
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
        """Count what a request asks for against the limits; return the priority that the engine gets.

        Raises:
            HTTPError: there is no place for so much.
        """
        if self.settings.priority_order == "vllm":
            priority = ~priority  # turns the order round, and no int64 falls out
        if context.ticket is not None:
            num_bytes = self.counted_bytes(context.num_body_bytes, num_prompts)
            context.ticket.size(num_bytes, num_prompts, n, max_tokens, priority)
        return priority

    def trace_parent(self, context: RequestContext) -> dict[str, str] | None:
        """Return the headers that name the caller's span, where requests are traced."""
        if self.config.otlp_traces_endpoint is None:
            return None
        return trace_headers(context.headers)

    async def prompt_text(self, output: RequestOutput) -> str:
        """Return the text of a prompt; of one that came as token ids, special tokens are shown, too."""
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

    def abort(self, request_ids: Iterable[str] | None) -> int:
        """Abort the requests with these client-visible ids, or all of them.

        Returns how many engine requests were aborted, including those that are still waiting for admission.
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
        self.engine.abort(found)
        return len(found)

    def _give_up_one(self) -> None:
        """Abort the newest request: those that wait for admission are newer than those of the engine."""
        if self.gate.close(unavailable("overloaded", "the server is overloaded, try again later")):
            return
        engine = self.engine
        slots = [slot for slot in engine.requests.slots if not (slot.is_aborted or slot.is_over)]
        if slots:
            engine.abort(slots[-1].request_id)

    def _refuse_body(self) -> HTTPError:
        refusal = self.gate.refuse("body_memory_full", "too many bytes of requests are under way")
        refusal.headers = ((b"connection", b"close"),)
        return refusal

    async def foretell(
        self, context: RequestContext, generation: "Generation[Any]"
    ) -> ExpectedToken | None:
        """Wait until the engine has foretold the first token of a request, and put that into the head of the answer.

        Raises:
            HTTPError: it cannot come before the deadline that the client has set.
        """
        has_deadline = context.header(b"x-request-timeout-ms") is not None
        is_wanted = has_deadline or not self.settings.disable_server_timing
        if self.config.pooler is not None or not is_wanted:
            return None
        expected = await generation.expected()
        if expected is None:
            return None
        left_s = context.timeout_s - context.age_s
        if has_deadline and expected.error is not None:
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
        engine = self.engine
        if engine.metrics is not None and reason in LIMITS:
            engine.metrics.note_rejection(reason)

    def _note_throughput(self) -> None:
        is_asleep = self.engine.lifecycle.is_sleeping  # a pause is not slowness
        is_busy = self.gate.admission.num_started > 0 and not is_asleep
        self.gate.throughput.note(self.engine.num_tokens, anyio.current_time(), is_busy=is_busy)


def _unmeetable(expected: ExpectedToken, left_s: float) -> HTTPError:
    text = (
        f"the first token is expected in {expected.seconds:.1f} s, and {max(0.0, left_s):.1f} s are left; "
        "allow more time, or try again later"
    )
    refusal = HTTPError(503, UNMEETABLE, text, param="X-Request-Timeout-Ms")
    refusal.retry_after_s = max(1.0, expected.seconds - left_s)
    return refusal
