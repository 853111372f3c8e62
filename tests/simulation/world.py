"""One whole engine under observation."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import anyio
import msgspec
import trio

from trouper.actors.engine.wiring import Engine, open_engine
from trouper.actors.messages.requests import (
    Admit,
    Grammar,
    GrammarRules,
    Render,
    RequestId,
    RequestOptions,
    SequenceId,
    Vocabulary,
)
from trouper.actors.messages.steps import StepDone, StepPlan
from trouper.actors.rendering.prompts.prompts import Prompts
from trouper.actors.scheduling.policy import Policy
from trouper.config.engine_config import EngineConfig, SchedulerConfig
from trouper.config.model import ModelConfig
from trouper.errors import EngineDeadError

from . import oracles
from .clients import Broken, Case, Story, abort_later, operate, play
from .ports import (
    DeviceCrashError,
    InjectedError,
    SimThreads,
    TracedRun,
    Trouble,
    WatchedDevice,
)
from .scenario import EOS, STEP_S, VOCAB_SIZE, Scenario, layout_of
from .scheduling import CancelAtStep
from .simulated_device import ENTRY_BYTES
from .simulated_tier import SimulatedTier


class World(TracedRun):
    """Everything that one run knows; of an engine that generates."""

    oracles: Any = oracles
    renderer: Any = Prompts
    death_cause: type[Exception] = DeviceCrashError
    deadline_s = 120.0  # virtual: no scenario has 10 % of that to do
    settle_s = 5.0  # what is in flight comes home, or crashes
    closing_s = 1.0  # a step under way, and a device that wakes up

    def __init__(
        self,
        scenario: Any,
        victim: CancelAtStep | None = None,
        trace: Callable[..., None] | None = None,
    ) -> None:
        super().__init__(scenario.seed, trace)
        self.scenario = scenario
        self._victim = victim
        self._everything = trio.CancelScope()
        self.cases = [self.make_case(*numbered) for numbered in enumerate(scenario.clients)]
        self.owners: dict[SequenceId, tuple[int, int]] = {}
        self.trouble = Trouble(self._dice("device"), scenario, self.owners)
        self.device: Any = self.make_device()
        self.rendering: set[RequestId] = set()
        self.threads: Any = self.make_threads()
        self.engine: Engine = None  # type: ignore[assignment]  # set when it is open
        self.policy: Any = None  # likewise
        self.seeds: dict[int, int] = {}  # request -> the seed of its first sequence
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.duplicates: set[str] = set()
        self.refused: set[str] = set()
        self.is_frozen = False
        self.is_closing = False
        self._cancelled_at = float("inf")
        self.broken: Exception | None = None
        self.num_steps = 0
        self.slots: dict[int, tuple[int, ...]] = {}  # of the entries of each step in flight
        self.ends: dict[int, int] = {}  # request slot -> how far the plans for it have come
        self.placed: dict[int, int] = {}  # request slot -> the step that gave it away
        self._by_task: dict[Any, Case] = {}

    # What another kind of engine has otherwise

    def make_case(self, index: int, client: Any) -> Any:
        return Case(index, client)

    def make_device(self) -> Any:
        scenario = self.scenario
        device = WatchedDevice(
            scenario.num_blocks * len(scenario.windows) + 1,
            scenario.block_size,
            VOCAB_SIZE,
            scenario.steps_in_flight,
            self.trouble,
            num_slots=scenario.max_num_seqs,
            num_snapshots=scenario.num_snapshots,
            layout=layout_of(scenario),
            tier=self.make_tier(),
        )
        device.record = self.record
        return device

    def make_tier(self) -> SimulatedTier | None:
        scenario = self.scenario
        if scenario.disk is None:
            return None
        return SimulatedTier(self._dice("disk"), scenario.disk, ENTRY_BYTES * scenario.block_size)

    def make_threads(self) -> SimThreads:
        scenario = self.scenario
        return SimThreads(
            self._dice("threads"), scenario.num_renderers, scenario.weather.thread_delay_s
        )

    def make_config(self) -> EngineConfig:
        tier = getattr(self.device, "tier", None)
        return msgspec.structs.replace(config_of(self.scenario), tier=tier and tier.config)

    def owner(self, id: int) -> int:
        return self.owners[SequenceId(id)][0]

    def case_of(self, id: int) -> Any:
        owner = self.owners.get(SequenceId(id))
        return None if owner is None else self.cases[owner[0]]

    # What clients report

    def begin(self, case: Story, task: trio.lowlevel.Task, scope: anyio.CancelScope) -> None:
        self._by_task[task] = case
        if self._victim is not None and self._victim.client == case.index:
            self._victim.watch(task, scope.cancel)

    def took(self, case: Any, output: Any) -> None:
        now = anyio.current_time()
        since = case.reads_since
        news = case.take(output)
        self.record("took", case.index, case.told, output.finished)
        assert since is not None
        self.oracles.check_delay(self, case, since, news, now)

    def end(self, case: Story) -> None:
        case.is_over = True
        self.record("end", case.index, case.ends, type(case.error).__name__)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Nothing may be planned in here."""
        self.is_frozen = True
        try:
            yield
        finally:
            self.is_frozen = False

    # What the engine does

    def watch(self, engine: Engine) -> None:
        """Look over the shoulder of those who open, abort, admit and plan."""
        self.engine = engine
        policy = self.policy = (
            engine._parts.scheduler.policy
        )  # to be watched, and read by the oracles
        engine.requests.open_request = partial(self._open, engine.requests.open_request)  # type: ignore[method-assign]
        engine.requests.abort = partial(self._abort, engine.requests.abort)  # type: ignore[method-assign]
        policy.admit = partial(self._admit, policy.admit)  # type: ignore[method-assign]
        policy.plan = partial(self._plan, policy.plan)  # type: ignore[method-assign]
        policy.apply = partial(self._apply, policy.apply)  # type: ignore[method-assign]
        self.teach(policy)

    def teach(self, policy: Any) -> None:
        """Have the policy believe in steps of some length: it has seen others before."""
        scenario = self.scenario
        if isinstance(policy, Policy) and policy.turns is not None and scenario.misjudged:
            times = policy.turns.times
            mine = scenario.coefficients or (STEP_S / 2, STEP_S / 2, STEP_S / 8, 0.0, 0.0, 0.0)
            times.coefficients = tuple(scenario.misjudged * each for each in mine)
            times.is_known = True

    def _open(
        self,
        right: Callable[..., Any],
        request_id: str,
        params: Any,
        render: Callable[..., Any],
        options: RequestOptions,
    ) -> tuple[RequestId, Any]:
        if any(request.request_id == request_id for request in self.engine.requests.snapshot()):
            self.duplicates.add(request_id)
        if self.engine.lifecycle.refuses is not None:
            self.refused.add(request_id)
        case = self._by_task[trio.lowlevel.current_task()]

        def noted(*, id: RequestId, slot: Any, **rest: Any) -> Any:
            """Note the request before any actor knows it."""
            case.id, case.slot = id, slot
            self.rendering.add(id)
            for index in range(case.client.wish.n):
                self.owners[SequenceId(id + index)] = (case.index, 0)
            return render(id=id, slot=slot, **rest)

        return right(request_id, params, noted, options)

    def _abort(self, right: Callable[..., Any], request_ids: str | Iterable[str]) -> None:
        names = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        for case in self.cases:
            if case.is_open and case.client.request_id in names:
                case.was_aborted = case.was_aborted or case.is_unfinished
        right(request_ids)

    def _admit(self, right: Callable[..., Any], message: Admit) -> None:
        self.rendering.discard(message.id)
        num_prompt = len(message.prompt_token_ids)
        self.prompts[message.id] = message.prompt_token_ids
        for index in range(message.params.n):
            self.owners[SequenceId(message.id + index)] = (self.owner(message.id), num_prompt)
        case = self.cases[self.owner(message.id)]
        options = msgspec.structs.replace(message.options, key=case.client.wish.key)
        right(msgspec.structs.replace(message, options=options))

    def _plan(self, right: Callable[..., Any]) -> StepPlan | None:
        before = set(self.policy.table.running.ids)
        plan = right()
        if plan is not None:
            self._note(plan, before)
        return plan

    def _apply(self, right: Callable[[Any], None], done: Any) -> None:
        right(done)
        if isinstance(done, StepDone):
            for slot, run in zip(self.slots.pop(done.step), done.token_ids, strict=True):
                if self.placed[slot] <= done.step:  # it is the same sequence's still
                    self.ends[slot] += max(0, len(run) - 1)  # of drafts that were right

    def _note(self, plan: StepPlan, before: set[int]) -> None:
        self.num_steps += 1
        self.record(
            "plan",
            plan.request_slots,
            plan.num_computed_tokens,
            plan.num_scheduled_tokens,
            plan.new_blocks,
            plan.copies,
        )
        for new in plan.new_sequences:
            first = self.case_of(new.sequence)
            if first is not None and first.id == new.sequence:
                seed = self.seeds.setdefault(first.id, new.sampling.seed)
                oracles.require(seed == new.sampling.seed, "another seed", first)
        try:
            oracles.check_plan(self, plan, before)
        except Broken as error:
            self.give_up(error)

    def at_rest(self) -> None:
        """Called between two moments; must not raise there."""
        if self.engine is None or self.broken is not None or self.is_closing:
            return
        if self.trouble.has_crashed or self.engine.dead_error is not None:
            return  # a death is judged when it is over
        try:
            self.oracles.at_rest(self)
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """An oracle is violated: what follows shows nothing more."""
        self.broken = self.broken or error
        self._everything.cancel()

    # The whole story

    async def run(self) -> None:
        tier = getattr(self.device, "tier", None)
        with nullcontext() if tier is None else tier.patched():
            await self._run()

    async def _run(self) -> None:
        num_tasks = trio.lowlevel.current_statistics().tasks_living
        if self._victim is not None and self._victim.client is None:
            self._victim.watch(None, self._cancel_everything)
        with anyio.move_on_after(self.deadline_s) as deadline, self._everything:
            try:
                async with anyio.create_task_group() as audience:
                    with self._failing_renders():
                        await self._perform(audience)
            except* EngineDeadError as group:
                self.check_death(group.exceptions[0])
        if self.broken is not None:
            raise self.broken
        oracles.require(not deadline.cancelled_caught, "no task can go on", self.cases)
        late_s = anyio.current_time() - self._cancelled_at
        oracles.require(late_s < self.closing_s, "cancelled, and still here after", late_s)
        await trio.lowlevel.checkpoint()
        statistics = trio.lowlevel.current_statistics()
        oracles.require(self.device.is_closed or self.engine is None, "the device is open")
        oracles.require(statistics.tasks_living == num_tasks, "tasks are left", statistics)
        for case in self.cases:
            self.oracles.check_case(self, case)
            self.oracles.check_faults(self, case)

    @property
    def was_cancelled(self) -> bool:
        return self._cancelled_at < float("inf")

    def _cancel_everything(self) -> None:
        self.is_closing = True
        self._cancelled_at = anyio.current_time()
        self._everything.cancel()

    def check_death(self, error: BaseException) -> None:
        if self.is_closing and error.__cause__ is None:
            return
        oracles.require(
            self.trouble.has_crashed and isinstance(error.__cause__, self.death_cause),
            "the engine died", repr(error.__cause__ or error),
        )  # fmt: skip

    async def _perform(self, audience: Any) -> None:
        scenario = self.scenario
        async with open_engine(self.make_config(), self.device, self.threads) as engine:
            self.watch(engine)
            if scenario.closes_at_s is None:
                async with anyio.create_task_group() as inside:
                    inside.start_soon(operate, self, engine, scenario.operations, name="operator")
                    self._start(inside, engine)
                await anyio.sleep(self.settle_s)
                if engine.dead_error is None:
                    self.oracles.check_idle(self)
            else:
                self._start(audience, engine)
                await anyio.sleep(scenario.closes_at_s)
                self.is_closing = True

    @contextmanager
    def _failing_renders(self) -> Iterator[None]:
        """Rendering raises for the clients that the weather names."""
        right, ill = self.renderer.render, self.scenario.weather.render_errors

        def render(prompts: Any, message: Render) -> Any:
            if self.owner(message.id) in ill:
                raise InjectedError("a renderer")
            rendered = right(prompts, message)
            number = getattr(self.cases[self.owner(message.id)].client.wish, "grammar", None)
            if number is None:
                return rendered
            admit = msgspec.structs.replace(rendered.admit, grammar=a_grammar(number))
            return msgspec.structs.replace(rendered, admit=admit)

        with patch.object(self.renderer, "render", render):
            yield

    def _start(self, group: Any, engine: Engine) -> None:
        for case in self.cases:
            group.start_soon(play, self, engine, case, name=f"client {case.index}")
            if case.client.aborted_at_s is not None:
                group.start_soon(abort_later, engine, case)


def a_grammar(number: int) -> Grammar:
    """One that allows everything, and must be prepared all the same."""
    rules = GrammarRules(
        source=f"grammar {number}", eos_token_ids=(), ignore_eos=False, num_tokens=VOCAB_SIZE, reasoning=None,
        num_bytes=2 ** (20 + 3 * number),
    )  # fmt: skip
    return Grammar(rules, lambda: None, str, Vocabulary("", VOCAB_SIZE, (), ()))


def config_of(scenario: Scenario) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            path="",
            name="simulated",
            architecture="Simulated",
            hf_config={"type_vocab_size": 2},
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=scenario.max_model_len,
            dtype="float32",
            eos_token_ids=(EOS,),
            default_sampling={},
        ),
        tokenizer="simulated" if scenario.has_tokenizer else None,
        dtype="float32",
        load_format="auto",
        seed=0,
        max_model_len=scenario.max_model_len,
        max_logprobs=VOCAB_SIZE,
        renderer_num_workers=scenario.num_renderers,
        block_size=scenario.block_size,
        num_blocks=scenario.num_blocks,
        kv_cache_bytes=0,
        stream_interval=scenario.stream_interval,
        chat_template=None,
        shutdown_timeout_s=0.0,
        log_stats=scenario.log_stats,
        max_num_queued_reqs=scenario.max_queued,
        max_num_queued_tokens=None,
        scheduler=SchedulerConfig(
            max_model_len=scenario.max_model_len,
            max_num_seqs=scenario.max_num_seqs,
            max_num_active_seqs=scenario.max_num_seqs,
            max_num_scheduled_tokens=scenario.token_budget,
            enable_chunked_prefill=scenario.chunked,
            long_prefill_token_threshold=scenario.long_prefill_threshold,
            long_prefill_token_threshold_adaptive=scenario.is_adaptive,
            policy=scenario.policy,
            max_step_ms=scenario.max_step_ms,
            reserve_full_isl=scenario.reserve_full_isl,
            watermark=scenario.watermark,
            enable_prefix_caching=scenario.prefix_caching,
            max_steps_in_flight=scenario.steps_in_flight,
            num_speculative_tokens=scenario.num_drafts,
        ),
    )
