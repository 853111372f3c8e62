"""The scheduler actor with hand-held channel ends: what it does in the turn of who asks."""

import anyio
import pytest

from trouper.actors.blocks import Blocks
from trouper.actors.channel import open_channel
from trouper.actors.messages import Admit, PoolDone, RequestId, StepPlan
from trouper.actors.policy import Policy
from trouper.actors.pooling_policy import PoolingPolicy
from trouper.actors.scheduler import Scheduler
from trouper.config import SchedulerConfig
from trouper.params import SamplingParams

from .test_pooling_policy import admit, ids

pytestmark = pytest.mark.anyio
CONFIG = SchedulerConfig(max_num_scheduled_tokens=100, max_steps_in_flight=2)


class Stage:
    def __init__(self, policy):
        self.to_scheduler, inbox = open_channel(10)
        to_executor, self.plans = open_channel(10)
        to_reader, self.news = open_channel(10)
        self.actor = Scheduler(inbox, to_executor, to_reader, policy)

    async def __aenter__(self):
        self._tasks = await anyio.create_task_group().__aenter__()
        await self._tasks.start(self.actor.run)
        await anyio.wait_all_tasks_blocked()
        return self

    async def __aexit__(self, *error):
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(*error)
        for end in (self.to_scheduler, self.plans, self.news):
            end.close()

    def planned(self):
        found = []
        while self.plans.statistics().current_buffer_used:
            found.append(self.plans.receive_nowait())
        return found


async def test_the_first_text_is_planned_in_its_senders_turn_and_those_behind_it_together():
    async with Stage(PoolingPolicy(CONFIG)) as stage:
        for id in (1, 2, 3):
            stage.to_scheduler.send_nowait(admit(id, 4))
        (first,) = stage.planned()
        assert ids(first) == [1]
        await anyio.wait_all_tasks_blocked()
        (second,) = stage.planned()
        assert ids(second) == [2, 3]


async def test_an_answer_is_told_and_the_next_text_planned_in_the_devices_turn():
    async with Stage(PoolingPolicy(CONFIG)) as stage:
        stage.to_scheduler.send_nowait(admit(1, 4))
        stage.planned()
        stage.to_scheduler.send_nowait(PoolDone(1, ("result",)))
        assert [r.array for r in stage.news.receive_nowait().requests] == ["result"]
        stage.to_scheduler.send_nowait(admit(2, 4))
        assert [ids(plan) for plan in stage.planned()] == [[2]]


async def test_a_prompt_waits_for_those_of_its_turn():
    async with Stage(Policy(CONFIG, Blocks(9, 4, True))) as stage:
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
        assert len(plan.rows) == 2
