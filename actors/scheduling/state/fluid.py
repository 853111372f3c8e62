"""The fluid order of prompts, which decides what is computed next.  Pure.

Imagine a fluid that computes all prompts at once: each planned prompt token is shared equally among the keys with prompts, and each
key's part equally among its prompts.  The prompt that the fluid would finish first is computed first.  So short prompts pass long
ones, a flood of short ones starves no long one, and a key with a hundred prompts gets the part of one key.

Law: among requests of one priority, of which none lacks blocks, is preempted or ends early, and whose lengths are known, the last
prompt token of each is planned no later than in the plan with which the fluid finishes it.  There is one exception among several keys:
new prompts slow the other prompts of their key.  If this moves prompt A behind prompt B of another key, and A was computed first, then
B or a new prompt may be late, by at most the tokens of A that were computed ahead of the fluid.
"""

from bisect import insort
from collections.abc import Iterator
from heapq import merge

import msgspec

from trouper.actors.messages.requests import SequenceId
from trouper.actors.scheduling.state.sequence import Order

# The least size of a prompt in tokens.  Shorter prompts are equals and keep their order of arrival: otherwise newcomers of 60 tokens
# would pass prompts of 240 under overload.
GRAIN = 256
# Fewer tokens than this are a rounding error.
NOTHING = 2.0**-20


class Job(msgspec.Struct, eq=False):
    """The prompt tokens that a sequence had to compute when it entered.

    It remains until its last token is planned, even if the fluid has finished it earlier.
    """

    id: SequenceId
    key: str
    order: Order
    # Not planned yet.
    num_tokens: int
    # Tokens in the fluid.
    size: float
    # The meter of its key at which the fluid finishes it.
    mark: float = 0.0
    num_planned: int = 0
    # Whether the fluid has finished it.
    is_finished: bool = False


class _Key:
    """The jobs of one key, and a meter: the tokens that each job has received since the meter was zero."""

    __slots__ = ("jobs", "meter")

    def __init__(self) -> None:
        self.meter = 0.0
        # Sorted by mark, then by order.
        self.jobs: list[Job] = []

    @property
    def until_next(self) -> float:
        """Tokens that the key must compute until the fluid finishes its next job.

        All jobs of a key progress at the same rate, so the one with the least remaining work is first.
        """
        return (self.jobs[0].mark - self.meter) * len(self.jobs)

    def needs(self) -> Iterator[tuple[float, Order, Job]]:
        """Yield the jobs in order, each with the tokens that the key must compute until the fluid finishes it."""
        before, num_jobs = 0.0, len(self.jobs)
        for i, job in enumerate(self.jobs):
            rest = job.mark - self.meter
            yield before + rest * (num_jobs - i), job.order, job
            before += rest


class _Level:
    """The fluid of one priority."""

    __slots__ = ("keys", "overdue")

    def __init__(self) -> None:
        self.keys: dict[str, _Key] = {}
        # Jobs that the fluid has finished and the engine has not, in the order of the fluid.  A dict allows removal in O(1).
        self.overdue: dict[SequenceId, Job] = {}

    def insert(self, job: Job) -> None:
        key = self.keys.setdefault(job.key, _Key())
        job.mark = key.meter + job.size
        insort(key.jobs, job, key=_by_mark)

    def remove(self, job: Job) -> None:
        """Remove a job that the fluid has not finished.

        The key of the job is removed with its last job, so the other keys share the fluid.
        """
        key = self.keys[job.key]
        key.jobs.remove(job)
        if not key.jobs:
            del self.keys[job.key]

    def resize(self, job: Job, size: float) -> None:
        """Change the size of a job.  It is finished if it has already received this many tokens."""
        got = job.size - (job.mark - self.keys[job.key].meter)
        job.size = size
        self.remove(job)
        if size - got > NOTHING:
            key = self.keys.setdefault(job.key, _Key())
            job.mark = key.meter + size - got
            insort(key.jobs, job, key=_by_mark)
        else:
            self._finish([job])

    def ahead_of(self, key: str, size: float) -> Iterator[Job]:
        """Yield the unfinished jobs that the fluid would finish before a new one of this size.

        They are the work that a new job must expect in front of it.
        """
        mine = self.keys.get(key)
        rests = [] if mine is None else [job.mark - mine.meter for job in mine.jobs]
        need = size + sum(min(rest, size) for rest in rests)
        for name, other in self.keys.items():
            for its_need, _, job in other.needs():
                if (job.mark - other.meter > size) if name == key else (its_need > need):
                    break
                if job.num_tokens:
                    yield job

    def advance(self, num_tokens: float) -> float:
        """Compute this many tokens.  Returns the tokens left over when all jobs are finished.

        Each key gets the same share, and each job of a key the same share of that.
        """
        keys = self.keys
        while num_tokens > NOTHING and keys:
            share = min(num_tokens / len(keys), min(key.until_next for key in keys.values()))
            num_tokens -= share * len(keys)
            finished: list[Job] = []
            for name, key in list(keys.items()):
                key.meter += share / len(key.jobs)
                num_done = 0
                while num_done < len(key.jobs) and key.jobs[num_done].mark - key.meter <= NOTHING:
                    num_done += 1
                finished += key.jobs[:num_done]
                del key.jobs[:num_done]
                if not key.jobs:
                    del keys[name]
            self._finish(finished)
        return num_tokens

    def _finish(self, jobs: list[Job]) -> None:
        for job in sorted(jobs, key=_by_order):
            job.is_finished = True
            if job.num_tokens:
                self.overdue[job.id] = job


def _by_mark(job: Job) -> tuple[float, Order]:
    return job.mark, job.order


def _by_order(job: Job) -> Order:
    return job.order


class Fluid:
    """Keep the prompts to compute, and the progress of the fluid.

    The fluid is an imagined fair server; the engine computes prompts in the order in which the fluid would finish
    them.
    """

    def __init__(self) -> None:
        # Jobs that are not planned to their end.
        self.open: dict[SequenceId, Job] = {}
        # By the first part of an `Order`, its priority.  The smaller comes first.
        self._levels: dict[int, _Level] = {}

    def __repr__(self) -> str:
        return f"<Fluid {len(self.open)} open, {self.num_overdue_tokens} tokens overdue>"

    @property
    def num_overdue_tokens(self) -> int:
        """Tokens of jobs that the fluid has finished and the engine has not: 0 by the law, unless blocks are missing."""
        overdue = (level.overdue.values() for level in self._levels.values())
        return sum(job.num_tokens for jobs in overdue for job in jobs)

    def enter(self, id: SequenceId, key: str, order: Order, num_tokens: int, size: int) -> None:
        """Add the tokens that a sequence must compute.

        Replaces its earlier job. `num_tokens` are still to be planned, and `size` is the length of the job in the
        fluid.
        """
        self.leave(id)
        job = self.open[id] = Job(id, key, order, num_tokens, float(size))
        self._levels.setdefault(order[0], _Level()).insert(job)

    def leave(self, id: SequenceId) -> None:
        """Remove the unplanned tokens of a sequence.  Planned tokens stay, because they are computed.

        Used when a sequence ends, is preempted or is moved to another replica.
        """
        job = self.open.pop(id, None)
        if job is None:
            return
        level = self._levels[job.order[0]]
        job.num_tokens = 0
        if job.is_finished:
            del level.overdue[id]
        else:
            level.resize(job, float(job.num_planned))

    def correct(self, id: SequenceId, num_tokens: int) -> None:
        """Correct the number of tokens that a sequence has still to compute.

        A preemption, a cache hit or an output may have changed it.
        """
        job = self.open[id]
        if num_tokens == job.num_tokens:
            return
        job.num_tokens = num_tokens
        size = float(max(job.num_planned + num_tokens, GRAIN))
        if not job.is_finished and size != job.size:
            self._levels[job.order[0]].resize(job, size)

    def plan(self, counts: dict[SequenceId, int]) -> None:
        """Note the tokens of open jobs in a plan, and advance the fluid by the same number.

        Both then have done the same amount of work, which keeps their order comparable.
        """
        for id, count in counts.items():
            job = self.open[id]
            job.num_planned += count
            job.num_tokens -= count
            if job.num_tokens <= 0:
                job.num_tokens = 0
                del self.open[id]
                self._levels[job.order[0]].overdue.pop(id, None)
        num_tokens = float(sum(counts.values()))
        for rank in sorted(self._levels):
            num_tokens = self._levels[rank].advance(num_tokens)
            if num_tokens <= NOTHING:
                break
        # A busy period ends.
        if not self.open:
            self._levels.clear()

    def ahead_of(self, key: str, order: Order, size: float) -> Iterator[Job]:
        """Yield the open jobs that would precede a job that entered now, in any order.

        Their total size gives the expected time to the first token of the new one.
        """
        for rank in sorted(self._levels):
            level = self._levels[rank]
            if rank > order[0]:
                break
            yield from level.overdue.values()
            if rank < order[0]:
                jobs = (job for name in level.keys.values() for job in name.jobs)
                yield from (job for job in jobs if job.num_tokens)
            else:
                yield from level.ahead_of(key, size)

    def order(self) -> Iterator[Job]:
        """Yield the open jobs in order.  The fluid must not change during the iteration.

        Higher priorities come first, then jobs that the fluid has already finished, then the others by their end in
        the fluid.
        """
        for rank in sorted(self._levels):
            level = self._levels[rank]
            yield from level.overdue.values()
            for _, _, job in merge(*(key.needs() for key in level.keys.values()), key=_by_need):
                if job.num_tokens:
                    yield job


def _by_need(entry: tuple[float, Order, Job]) -> tuple[float, Order]:
    return entry[0], entry[1]
