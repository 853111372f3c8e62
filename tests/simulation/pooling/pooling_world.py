"""A whole engine that pools, under observation."""

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec
import numpy as np

from tests.simulation.clients import Broken, Story
from tests.simulation.ports import SimThreads, Watched
from tests.simulation.scenario import Scenario
from tests.simulation.simulated_encoder import SimulatedEncoder
from tests.simulation.world import STEP_S, World, config_of
from trouper.actors.engine.generation import Generation
from trouper.actors.engine.wiring import Engine
from trouper.actors.messages.requests import Render, RequestOptions, SequenceId
from trouper.actors.messages.steps import PoolDone, PoolPlan, StepFailed
from trouper.actors.rendering.prompts.pooling import PoolingPrompts
from trouper.actors.scheduling.pooling_policy import PoolingPolicy
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.config.engine_config import EngineConfig
from trouper.outputs import PoolingRequestOutput
from trouper.pooling import LateInteractionParams, PoolingParams

from . import pooling_oracles
from .pooling_scenario import PoolingScenario


class PoolingCase(Story):
    """A text that is pooled."""

    def __init__(self, index: int, client: Any) -> None:
        super().__init__(index, client)
        self.array: Any = None
        self.ended_s = float("inf")  # virtual

    @property
    def ends(self) -> str | None:
        return "done" if self.array is not None else "aborted" if self.is_finished else None

    @property
    def is_unfinished(self) -> bool:
        return self.slot._output is None and self.slot._error is None

    @property
    def told(self) -> Any:
        return None if self.array is None else (self.array.shape, self.array.sum().item())

    def ask(self, engine: Engine) -> Generation[Any]:
        wish = self.client.wish
        late = None
        if wish.mode is not None:
            late = LateInteractionParams(
                mode=wish.mode, query_key=wish.query_key, query_uses=wish.query_uses
            )
        params = PoolingParams(
            task=wish.task,
            dimensions=wish.dimensions,
            use_activation=wish.use_activation,
            late_interaction_params=late,
        )
        prompt: Any = wish.prompt
        if wish.type_ids is not None:
            prompt = {"prompt_token_ids": prompt, "token_type_ids": wish.type_ids}
        return engine.encode(
            prompt,
            params,
            self.client.request_id,
            RequestOptions(
                priority=wish.priority,
                arrival_time=anyio.current_time(),
                truncate_prompt_tokens=wish.truncate,
                truncation_side="left" if wish.keeps_end else None,
            ),
        )

    def take(self, output: PoolingRequestOutput[Any]) -> list[tuple[int, int]]:
        if self.is_finished or not output.finished:
            raise Broken(f"{self}: not one output, at the end")
        if output.request_id != self.client.request_id:
            raise Broken(f"{self}: the output of {output.request_id}")
        self.is_finished = True
        self.ended_s = anyio.current_time()
        self.prompt = tuple(output.prompt_token_ids)
        if output.error is None:
            self.array = np.array(output.outputs.array)
        return []


class PoolingThreads(SimThreads):
    """Knows which of its calls render."""

    num_rendering = 0

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        first: Any = args[0] if args else None
        first = first[0] if isinstance(first, Sequence) and first else first
        is_rendering = isinstance(first, Render)
        self.num_rendering += is_rendering
        try:
            return await super().run(function, *args)
        finally:
            self.num_rendering -= is_rendering


class WatchedEncoder(Watched, SimulatedEncoder):
    """Notes when each result was ready."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, lambda plan: self.groups[plan.step])
        self.groups: dict[int, tuple[SequenceId, ...]] = {}  # whose a step's columns are
        self.ready: dict[SequenceId, float] = {}

    def _run(self, plan: PoolPlan) -> PoolDone | StepFailed:
        answer = super()._run(plan)
        if isinstance(answer, PoolDone):
            now = anyio.current_time()
            self.ready.update(dict.fromkeys(self.groups[plan.step], now))
        self.record(type(answer).__name__, answer.step)
        return answer


class PoolingWorld(World):
    oracles = pooling_oracles
    renderer = PoolingPrompts

    def teach(self, policy: Any) -> None:
        scenario = self.scenario
        if isinstance(policy, PoolingPolicy) and policy.time is not None and scenario.misjudged:
            times, fixed_s = policy.time.times, scenario.misjudged * STEP_S
            times.coefficients = fixed_s / 2, fixed_s / 2, fixed_s / 8, 0.0, 0.0, 0.0
            times.is_known = True

    def make_case(self, index: int, client: Any) -> PoolingCase:
        return PoolingCase(index, client)

    def make_device(self) -> WatchedEncoder:
        return WatchedEncoder(self.scenario.size, self.scenario.steps_in_flight, self.trouble)

    def make_threads(self) -> PoolingThreads:
        """Those of the renderers, large prompts' too, of the pooler and of its lane."""
        limit, delay_s = self.scenario.num_renderers + 3, self.scenario.weather.thread_delay_s
        return PoolingThreads(self._dice("threads"), limit, delay_s)

    def make_config(self) -> EngineConfig:
        shared = set(Scenario.__struct_fields__) & set(PoolingScenario.__struct_fields__)
        shared -= {"clients"}
        same = {name: getattr(self.scenario, name) for name in shared}
        return msgspec.structs.replace(
            config_of(Scenario(clients=(), **same)),
            pooler=PoolerSpec(
                tasks=("embed", "token_embed"),
                task="embed",
                engine_task="token_embed",
                seq_pooling_type="MEAN",
                tok_pooling_type="ALL",
                embedding_size=self.scenario.size,
                normalizes=True,
                use_activation=True,
                activation="identity",
                is_matryoshka=True,
            ),
        )

    def _plan(self, right: Callable[..., Any]) -> PoolPlan | None:
        policy = self.policy
        before = pooling_oracles.Line(policy)
        plan = right()
        if plan is not None:
            self.num_steps += 1
            ids = tuple(SequenceId(admit.id) for admit in policy.in_flight[-1].group)
            self.device.groups[plan.step] = ids
            self.record("plan", plan.step, plan.epoch, ids)
            try:
                pooling_oracles.check_plan(self, plan, before)
            except Broken as error:
                self.give_up(error)
        return plan
