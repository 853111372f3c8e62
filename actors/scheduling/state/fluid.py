"""Order prompts by fair queueing: the prompt that an ideal fair server would finish first is computed first.  Pure.

The ideal server, the *fluid*, computes all prompts at once: it shares each planned prompt token equally among the clients with prompts,
and each client's share equally among its prompts.  (A `key` names a client.)  So short prompts overtake long ones, a flood of short
prompts does not starve a long one, and a client with a hundred prompts gets no more than a client with one.

Law: the last token of a prompt is planned no later than in the plan with which the fluid finishes the prompt.  This holds among requests
of one priority with known lengths, if none lacks blocks, is preempted or ends early.  There is one exception with several keys:
new prompts slow the other prompts of their key.  If this moves prompt A behind prompt B of another key, and A was computed first, then
B or a new prompt may be late, by at most the tokens of A that were computed ahead of the fluid.
"""

from bisect import insort
from collections.abc import Iterator
from heapq import merge

import msgspec

from trouper.actors.messages.requests import SequenceId
from trouper.actors.scheduling.state.sequence import Order

# Minimum size of a prompt in the fluid.  Shorter prompts count as equal and keep their order of arrival.  Otherwise, under overload,
# new prompts of 60 tokens would keep overtaking prompts of 240.
GRAIN = 256
# Fewer tokens than this are a rounding error.
NOTHING = 2.0**-20


class Job(msgspec.Struct, eq=False):
    """The prompt tokens that a sequence has to compute.

    A job is open until its last token is planned, even if the fluid has finished it earlier.
    """

    id: SequenceId
    key: str
    order: Order
    # Tokens still to be planned.
    num_tokens: int
    # Length in the fluid, in tokens.
    size: float
    # The reading of its key's meter at which the fluid finishes it.
    mark: float = 0.0
    num_planned: int = 0
    # Whether the fluid has finished it.
    is_finished: bool = False


class _Key:
    """The unfinished jobs of one client, and a meter: the tokens that the fluid has given to each job since the meter was zero."""

    __slots__ = ("jobs", "meter")

    def __init__(self) -> None:
        self.meter = 0.0
        # Sorted by mark, then by order.
        self.jobs: list[Job] = []

    @property
    def until_next(self) -> float:
        """Tokens that the key must receive until the fluid finishes its next job.

        All jobs of a key progress at the same rate, so the one with the least remaining work is first.
        """
        return (self.jobs[0].mark - self.meter) * len(self.jobs)

    def needs(self) -> Iterator[tuple[float, Order, Job]]:
        """Yield the jobs in order, each with the tokens that the key must receive until the fluid finishes it."""
        before, num_jobs = 0.0, len(self.jobs)
        for i, job in enumerate(self.jobs):
            rest = job.mark - self.meter
            yield before + rest * (num_jobs - i), job.order, job
            before += rest


class _Level:
    """The fluid of one priority: the clients with unfinished jobs, and the overdue jobs."""

    __slots__ = ("keys", "overdue")

    def __init__(self) -> None:
        self.keys: dict[str, _Key] = {}
        # Jobs that the fluid has finished before the engine, in the fluid's order.  A dict allows removal in O(1).
        self.overdue: dict[SequenceId, Job] = {}

    def insert(self, job: Job) -> None:
        key = self.keys.setdefault(job.key, _Key())
        job.mark = key.meter + job.size
        insort(key.jobs, job, key=_by_mark)

    def remove(self, job: Job) -> None:
        """Remove a job that the fluid has not finished.

        A key without jobs is removed too, so that the other keys share the fluid.
        """
        key = self.keys[job.key]
        key.jobs.remove(job)
        if not key.jobs:
            del self.keys[job.key]

    def resize(self, job: Job, size: float) -> None:
        """Change the size of a job.  The job is finished if the fluid has already given it this many tokens."""
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

        A new job must wait for about their remaining tokens.
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
        """Give this many tokens to the jobs.  Returns the tokens left over when all jobs are finished.

        Each key gets the same share, and divides it equally among its jobs.
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
        # Jobs with tokens still to be planned.
        self.open: dict[SequenceId, Job] = {}
        # Maps a priority, the first part of an `Order`, to its fluid.  Smaller numbers come first.
        self._levels: dict[int, _Level] = {}

    def __repr__(self) -> str:
        return f"<Fluid {len(self.open)} open, {self.num_overdue_tokens} tokens overdue>"

    @property
    def num_overdue_tokens(self) -> int:
        """Unplanned tokens of jobs that the fluid has finished: 0 by the law, unless prompts lack KV blocks."""
        overdue = (level.overdue.values() for level in self._levels.values())
        return sum(job.num_tokens for jobs in overdue for job in jobs)

    def enter(self, id: SequenceId, key: str, order: Order, num_tokens: int, size: int) -> None:
        """Add a job with the tokens that a sequence must compute.  It replaces the sequence's earlier job.

        Args:
            num_tokens: tokens still to be planned.
            size: the length of the job in the fluid.
        """
        self.leave(id)
        job = self.open[id] = Job(id, key, order, num_tokens, float(size))
        self._levels.setdefault(order[0], _Level()).insert(job)

    def leave(self, id: SequenceId) -> None:
        """Remove the unplanned tokens of a sequence that ends, is preempted or moves to another replica.

        Its planned tokens stay in the fluid, because the device computes them.
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
        """Correct the number of unplanned tokens of a sequence, after a preemption, a cache hit or an output."""
        job = self.open[id]
        if num_tokens == job.num_tokens:
            return
        job.num_tokens = num_tokens
        size = float(max(job.num_planned + num_tokens, GRAIN))
        if not job.is_finished and size != job.size:
            self._levels[job.order[0]].resize(job, size)

    def plan(self, counts: dict[SequenceId, int]) -> None:
        """Record the tokens that a plan computes for open jobs, and advance the fluid by their total.

        The engine and the fluid then have done the same amount of work.  The law compares them on this basis.
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
        # A busy period has ended: start the meters at zero again.
        if not self.open:
            self._levels.clear()

    def ahead_of(self, key: str, order: Order, size: float) -> Iterator[Job]:
        """Yield, in no particular order, the open jobs that would precede a job of this size that entered now.

        Their unplanned tokens give the expected time to first token of the new job.
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
        """Yield the open jobs in the order in which to compute them.  The fluid must not change during the iteration.

        They are sorted by priority.  Within a priority, overdue jobs come first, then the others by the time at which
        the fluid finishes them.
        """
        for rank in sorted(self._levels):
            level = self._levels[rank]
            yield from level.overdue.values()
            for _, _, job in merge(*(key.needs() for key in level.keys.values()), key=_by_need):
                if job.num_tokens:
                    yield job


def _by_need(entry: tuple[float, Order, Job]) -> tuple[float, Order]:
    return entry[0], entry[1]
