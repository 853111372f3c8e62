"""The record of a plan that the workers of a device have not answered."""

from typing import Self

import msgspec

from trouper.actors.messages.plans import PoolPlan, StepPlan


class SubmittedPlan(msgspec.Struct, frozen=True):
    """A plan that was sent, and its size."""

    step: int
    num_tokens: int
    num_requests: int
    submitted_s: float

    @classmethod
    def of(cls, plan: StepPlan | PoolPlan, now: float) -> Self:
        """Note a plan that is sent now."""
        if isinstance(plan, StepPlan):
            num_tokens, num_requests = sum(plan.num_scheduled_tokens), len(plan.request_slots)
        else:
            num_tokens = sum(len(entry.token_ids) for entry in plan.entries)
            num_requests = len(plan.entries)
        return cls(plan.step, num_tokens, num_requests, now)
