"""The fluid a second time: exact fractions, one event after the other, and nothing of the policy's code.

The oracle sees what is admitted and what is planned.  It computes when a fluid that shares each planned prompt token equally among the
keys, and each key's part among its prompts, has finished each prompt.  The policy must have planned the prompt's end by then, with one
exception.  A new prompt slows the other prompts of its key, but none of another key, so prompts of two keys can change places in the
fluid.  If the policy has computed prompt A before prompt B of another key, and new prompts of A's key then move the end of A behind that
of B, then B or one of the new prompts may be late, by at most the tokens of A that were computed ahead of the fluid.  No order in which a
short prompt passes a long one of another key can prevent this, because nobody knows which prompts will come.
"""

from math import gcd, lcm
from typing import Any

GRAIN = 256  # tokens that a prompt counts as at least


class FluidJob:
    """A prompt: what the fluid, and what the plans have still to compute of it."""

    def __init__(self, rank: int, key: str, num_tokens: int, unit: int) -> None:
        self.rank, self.key = rank, key
        self.rest = max(num_tokens, GRAIN) * unit
        self.num_left = num_tokens
        # The number of the plan with which the fluid finished it.
        self.finished_by: int | None = None
        # Whether a prompt of its key entered after this one had passed one of another key.
        self.is_slowed = False
        # Tokens that only the fluid computes, because a prompt counts as at least a grain.
        self.num_padding = max(0, GRAIN - num_tokens)
        # The prompts of other keys that had tokens to compute when a part of this one was planned.
        self.passed: set[FluidJob] = set()

    def ahead(self, unit: int) -> int:
        """Return how many tokens of it are planned and not in the fluid, in parts of a token."""
        return max(0, self.rest - (self.num_left + self.num_padding) * unit)


class FluidOracle:
    """Watches one policy whose requests all find room, end by themselves and have their whole prompt to compute.

    Rests are whole numbers of a part of a token.  The part becomes smaller when a share is not whole: exact, and faster than fractions.
    """

    def __init__(self, policy: Any) -> None:
        self.jobs: dict[int, FluidJob] = {}
        self.num_plans = 0
        # Parts in a token.
        self._unit = 1
        # Requests that were late, with the tokens owed, although not so many were computed ahead.
        self.late: list[tuple[int, int]] = []
        # Requests that were late by at most what was computed ahead.
        self.num_excused = 0
        self._slots: dict[int, int] = {}
        self._admit, self._plan = policy.admit, policy.plan
        policy.admit, policy.plan = self.admit, self.plan

    def admit(self, message: Any) -> None:
        options = message.options
        for job in self.jobs.values():
            job.is_slowed |= job.key == options.key and bool(job.passed)
        self.jobs[message.id] = FluidJob(
            -options.priority, options.key, len(message.prompt_token_ids), self._unit
        )
        self._admit(message)

    def plan(self) -> Any:
        plan = self._plan()
        if plan is not None:
            self._slots.update((new.request_slot, new.sequence) for new in plan.new_sequences)
            owners = [self._slots[slot] for slot in plan.request_slots]
            self.note(dict(zip(owners, plan.num_scheduled_tokens, strict=True)))
        return plan

    def note(self, counts: dict[int, int]) -> None:
        """Note how many tokens a plan has of each sequence."""
        self.num_plans += 1
        num_tokens = 0
        open_jobs = [job for job in self.jobs.values() if job.num_left]
        for id, count in counts.items():
            job = self.jobs.get(id)
            if job is not None and job.num_left:
                job.num_left -= count
                num_tokens += count
                job.passed.update(other for other in open_jobs if other.key != job.key)
        self._flow(num_tokens)
        for id, job in self.jobs.items():
            if job.finished_by == self.num_plans and job.num_left:
                self._judge(id)
        if not any(job.num_left for job in self.jobs.values()):
            self.jobs.clear()
            self._unit = 1

    @property
    def overdue(self) -> list[int]:
        """The requests that the fluid has finished and no plan has."""
        return [id for id, job in self.jobs.items() if job.rest == 0 and job.num_left]

    def _judge(self, id: int) -> None:
        """Judge a prompt that the fluid has finished with this plan, and no plan has.

        What the plans owe to the prompts that the fluid has finished must have been computed ahead, of slowed prompts that passed one of
        these.
        """
        done = {job for job in self.jobs.values() if not job.rest}
        owed = sum(job.num_left for job in done)
        passing = [job for job in self.jobs.values() if job.is_slowed and job.passed & done]
        if owed * self._unit > sum(job.ahead(self._unit) for job in passing):
            self.late.append((id, owed))
        else:
            self.num_excused += 1

    def _flow(self, num_tokens: int) -> None:
        left = num_tokens * self._unit
        while left > 0:
            flowing = [job for job in self.jobs.values() if job.rest]
            if not flowing:
                break
            rank = min(job.rank for job in flowing)
            keys: dict[str, list[FluidJob]] = {}
            for job in flowing:
                if job.rank == rank:
                    keys.setdefault(job.key, []).append(job)
            left *= self._divide(lcm(*(len(keys) * len(jobs) for jobs in keys.values())))
            # What each key computes until the first prompt of any is finished, or the tokens are spent.
            part = min(len(jobs) * min(job.rest for job in jobs) for jobs in keys.values())
            part = min(part, left // len(keys))
            for jobs in keys.values():
                each = part // len(jobs)
                for job in jobs:
                    job.rest -= each
                    if not job.rest:
                        job.finished_by = self.num_plans
            left -= part * len(keys)
        shared = gcd(self._unit, *(job.rest for job in self.jobs.values()))
        self._unit //= shared
        for job in self.jobs.values():
            job.rest //= shared

    def _divide(self, number: int) -> int:
        """Make parts smaller, so that all rests and their sums divide by a number; return by how much."""
        self._unit *= number
        for job in self.jobs.values():
            job.rest *= number
        return number
