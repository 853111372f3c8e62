"""The scheduler actor with hand-held channel ends: what it plans and passes on."""

from contextlib import asynccontextmanager

import anyio
import pytest

from trouper.actors.messages.requests import Admit, RequestId
from trouper.actors.messages.steps import PoolDone, StepPlan
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.pooling_policy import PoolingPolicy
from trouper.actors.scheduling.scheduler import Scheduler
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.config.engine_config import SchedulerConfig
from trouper.params import SamplingParams

from .test_pooling_policy import admit, ids

pytestmark = pytest.mark.anyio
CONFIG = SchedulerConfig(max_num_scheduled_tokens=100, max_steps_in_flight=2)


class Stage:
    """A scheduler between the ends that this test holds."""

    def __init__(self, to_scheduler, plans, news):
        self.to_scheduler, self._plans, self.news = to_scheduler, plans, news

    def planned(self):
        found = []
        while self._plans.statistics().current_buffer_used:
            found.append(self._plans.receive_nowait())
        return found


@asynccontextmanager
async def open_stage(policy):
    to_scheduler, inbox = anyio.create_memory_object_stream(10)
    to_executor, plans = anyio.create_memory_object_stream(10)
    to_reader, news = anyio.create_memory_object_stream(10)
    with to_scheduler, plans, news:
        async with anyio.create_task_group() as tasks:
            await tasks.start(Scheduler(inbox, [to_executor], to_reader, policy).run)
            await anyio.wait_all_tasks_blocked()
            yield Stage(to_scheduler, plans, news)
            tasks.cancel_scope.cancel()


async def test_texts_that_come_together_are_planned_together():
    async with open_stage(PoolingPolicy(CONFIG)) as stage:
        for id in (1, 2, 3):
            stage.to_scheduler.send_nowait(admit(id, 3))
        assert stage.planned() == []
        await anyio.wait_all_tasks_blocked()
        assert [ids(plan) for plan in stage.planned()] == [[1, 2, 3]]


async def test_result_and_text_that_come_together_are_passed_on_together():
    async with open_stage(PoolingPolicy(CONFIG)) as stage:
        stage.to_scheduler.send_nowait(admit(1, 4))
        await anyio.wait_all_tasks_blocked()
        stage.planned()
        stage.to_scheduler.send_nowait(PoolDone(1, ("result",)))
        stage.to_scheduler.send_nowait(admit(2, 4))
        await anyio.wait_all_tasks_blocked()
        assert [r.array for r in stage.news.receive_nowait().requests] == ["result"]
        assert [ids(plan) for plan in stage.planned()] == [[2]]


async def test_prompts_that_come_together_are_planned_together():
    async with open_stage(Policy(CONFIG, KVBlocks(9, 4, True))) as stage:
        for id in (1, 2):
            stage.to_scheduler.send_nowait(
                Admit(
                    id=RequestId(id), prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=4),
                    eos_token_id=None, stop_token_ids=(),
                )
            )  # fmt: skip
        assert stage.planned() == []
        await anyio.wait_all_tasks_blocked()
        plan = stage.planned()[0]
        assert isinstance(plan, StepPlan)
        assert len(plan.request_slots) == 2
