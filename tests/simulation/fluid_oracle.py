"""The fluid a second time: exact fractions, one event after the other, and nothing of the policy's code.

The oracle sees what is admitted and what is planned.  It computes when a fluid that shares each planned prompt token equally among the
keys, and each key's part among its prompts, has finished each prompt; the policy must have planned the prompt's end by then.
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
        self.finished_by: int | None = None  # the number of the plan


class FluidOracle:
    """Watches one policy whose requests all find room, end by themselves and have their whole prompt to compute.

    Rests are whole numbers of a part of a token.  The part becomes smaller when a share is not whole: exact, and faster than fractions.
    """

    def __init__(self, policy: Any) -> None:
        self.jobs: dict[int, FluidJob] = {}
        self.num_plans = 0
        self._unit = 1  # parts in a token
        self.late: list[
            tuple[int, int]
        ] = []  # request, and plans by which its last prompt token was late
        self._slots: dict[int, int] = {}
        self._admit, self._plan = policy.admit, policy.plan
        policy.admit, policy.plan = self.admit, self.plan

    def admit(self, message: Any) -> None:
        self.jobs[message.id] = FluidJob(
            -message.options.priority,
            message.options.key,
            len(message.prompt_token_ids),
            self._unit,
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
        num_tokens, done = 0, []
        for id, count in counts.items():
            job = self.jobs.get(id)
            if job is not None and job.num_left:
                job.num_left -= count
                num_tokens += count
                if not job.num_left:
                    done.append(job)
                    self._judge(id, job)
        self._flow(num_tokens)
        if not any(job.num_left for job in self.jobs.values()):
            self.jobs.clear()
            self._unit = 1

    @property
    def overdue(self) -> list[int]:
        """The requests that the fluid has finished and no plan has."""
        return [id for id, job in self.jobs.items() if job.rest == 0 and job.num_left]

    def _judge(self, id: int, job: FluidJob) -> None:
        if job.finished_by is not None:
            self.late.append((id, self.num_plans - job.finished_by))

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
