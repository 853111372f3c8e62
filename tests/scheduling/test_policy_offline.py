"""Offline engines plan in the order of arrival: drawn workloads, plan for plan, against a second formulation.

`Reference` has the rules of continuous batching in lists and integers: running sequences take tokens in the order in which they started,
then waiting ones start, and whoever needs a block that is not free takes it from the worst.  It shares no code with the policy.
"""

import random

import pytest

from .test_policy import Desk

MAX_EVICTIONS = 8


class Row:
    """A sequence of the reference."""

    def __init__(self, id, priority, num_prompt, num_output, capacity):
        self.id, self.priority = id, priority
        self.num_tokens, self.limit = num_prompt, min(num_prompt + num_output, capacity + 1)
        self.num_sampling = self.num_computed = self.num_blocks = self.num_evictions = 0
        self.has_run = False


class Reference:
    def __init__(self, num_blocks, block_size, *, num_tokens, num_rows, num_plans, **rules):
        self.num_free = self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_tokens, self.num_rows, self.num_plans, self.rules = num_tokens, num_rows, num_plans, rules  # fmt: skip
        self.rows, self.running, self.waiting, self.plans = {}, [], [], []

    def admit(self, id, priority, num_prompt, num_output):
        capacity = self.num_blocks * self.block_size
        self.rows[id] = Row(id, priority, num_prompt, num_output, capacity)
        self.waiting.append(self.rows[id])

    def turn(self, row):
        """Smaller is served first."""
        if self.rules["policy"] == "fcfs":
            return (not row.has_run, row.id)
        return (-row.priority, row.id)

    def abort(self, id):
        row = self.rows.pop(id, None)
        if row in self.running:
            self.release(row)
        if row in self.waiting:
            self.waiting.remove(row)

    def release(self, row):
        self.running.remove(row)
        self.num_free += row.num_blocks
        row.num_blocks = row.num_computed = 0

    def take_blocks(self, row, num_tokens, plan):
        """Make room for a running row; return whether it still runs."""
        while (missing := -(-num_tokens // self.block_size) - row.num_blocks) > self.num_free:
            victim = self.running[-1]
            if self.rules["policy"] != "fcfs":
                may_be = [r for r in self.running if r.num_evictions < MAX_EVICTIONS]
                victim = max(may_be or self.running, key=lambda r: (-r.priority, r.id))
            plan.pop(victim.id, None)
            victim.num_evictions += 1
            self.release(victim)
            if not victim.num_sampling:
                self.waiting.append(victim)
            if victim is row:
                return False
        self.num_free -= max(missing, 0)
        row.num_blocks += max(missing, 0)
        return True

    def plan(self):
        """Return (id, start, count, whether it samples) of each entry, or None."""
        if len(self.plans) >= self.num_plans:
            return None
        plan, most, num_evictions = {}, self.longest_part(), self.num_evictions
        self.go_on(plan, most)
        if num_evictions == self.num_evictions:
            self.start(plan, most)
        entries = []
        for id, (start, count) in plan.items():
            row = self.rows[id]
            samples = start + count == row.num_tokens + row.num_sampling
            row.num_computed, row.num_sampling = start + count, row.num_sampling + samples
            entries.append((id, start, count, samples))
        if not entries:
            return None
        self.plans.append(entries)
        return entries

    @property
    def num_evictions(self):
        return sum(row.num_evictions for row in self.rows.values())

    def longest_part(self):
        threshold, num_competing = self.rules["threshold"], len(self.running) + len(self.waiting)
        if not threshold or num_competing <= 1:
            return self.num_tokens
        share = self.num_tokens // num_competing if self.rules["adaptive"] else 0
        return max(threshold, share)

    def go_on(self, plan, most):
        """Plan for the rows that run."""
        for row in list(self.running):
            known, left = row.num_tokens + row.num_sampling, self.num_tokens - self.spent(plan)
            if left <= 0:
                break
            if row not in self.running or known >= row.limit:
                continue
            count = min(known - row.num_computed, left, most)
            if self.take_blocks(row, row.num_computed + count, plan):
                plan[row.id] = (row.num_computed, count)
            elif self.rules["policy"] == "fcfs":
                break

    @staticmethod
    def spent(plan):
        return sum(count for _, count in plan.values())

    def start(self, plan, most):
        while self.waiting and len(self.running) < self.num_rows:
            row, left = min(self.waiting, key=self.turn), self.num_tokens - self.spent(plan)
            count = min(row.num_tokens, most)
            is_whole = not self.rules["chunks"] and left < count <= self.num_tokens
            if left <= 0 or is_whole:
                break
            count = min(count, left)
            wanted = -(-(row.num_tokens if self.rules["reserves"] else count) // self.block_size)
            spare = (
                self.num_blocks >> (MAX_EVICTIONS - row.num_evictions) if row.num_evictions else 0
            )
            if wanted + (spare if self.running else 0) > self.num_free:
                break
            self.waiting.remove(row)
            self.running.append(row)
            row.has_run = True
            self.take_blocks(row, count, plan)
            plan[row.id] = (0, count)

    def answer(self):
        for id, _, _, samples in self.plans.pop(0):
            row = self.rows.get(id)
            if row is None or not samples:
                continue
            row.num_sampling -= 1
            row.num_tokens += 1
            if row.num_tokens >= row.limit:
                self.abort(id)
            elif row not in self.running and not row.num_sampling and row not in self.waiting:
                self.waiting.append(row)


def play(seed):
    """Play one drawn workload, comparing each plan; return the number of plans and of preemptions."""
    dice = random.Random(seed)
    block_size, num_blocks = dice.choice((1, 4, 16)), dice.choice((12, 40, 1000))
    rules = {
        "policy": dice.choice(("priority", "fcfs")), "chunks": dice.random() < 0.8,
        "threshold": dice.choice((0, 0, 8)), "adaptive": dice.random() < 0.5,
        "reserves": dice.random() < 0.7,
    }  # fmt: skip
    sizes = {"num_tokens": dice.choice((16, 32, 128)), "num_rows": dice.choice((1, 3, 8))}
    num_plans, longest = dice.choice((1, 2)), num_blocks * block_size // 2
    reference = Reference(num_blocks, block_size, num_plans=num_plans, **sizes, **rules)
    desk = Desk(
        num_blocks, block_size, False, policy=rules["policy"], enable_chunked_prefill=rules["chunks"],
        long_prefill_token_threshold=rules["threshold"], max_num_seqs=sizes["num_rows"],
        long_prefill_token_threshold_adaptive=rules["adaptive"], max_steps_in_flight=num_plans,
        reserve_full_isl=rules["reserves"], max_num_scheduled_tokens=sizes["num_tokens"],
    )  # fmt: skip
    num_admitted, num_made = 0, 0
    while num_admitted < 12 or reference.plans or reference.rows:
        if num_admitted < 12 and (dice.random() < 0.4 or not reference.plans):
            priority, num_prompt = dice.choice((0, 0, 1, 5)), dice.randint(1, min(longest, 90))
            num_output = dice.randint(1, 20)
            desk.admit(
                num_admitted, range(num_prompt), None, priority=priority, max_tokens=num_output
            )
            reference.admit(num_admitted, priority, num_prompt, num_output)
            num_admitted += 1
        elif dice.random() < 0.03:
            id = dice.randrange(num_admitted)
            desk.policy.abort(id)
            reference.abort(id)
        elif reference.plans:
            desk.land()
            reference.answer()
        while True:
            plan, wanted = desk.plan(), reference.plan()
            assert wanted == (plan and entries(desk, plan)), (seed, num_made)
            if plan is None:
                break
            num_made += 1
    return num_made, desk.policy.statistics().num_preemptions


def entries(desk, plan):
    columns = (
        plan.num_computed_tokens,
        plan.num_scheduled_tokens,
        map(bool, plan.num_sampled_tokens),
    )
    return list(zip(desk.owners(plan), *columns, strict=True))


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_plans_are_those_of_the_reference(first):
    found = [play(seed) for seed in range(first, first + 100)]
    assert sum(num_plans for num_plans, _ in found) > 3000
    assert sum(num_preemptions for _, num_preemptions in found) > 100


@pytest.mark.slow
def test_plans_are_those_of_reference_in_many_workloads():
    for seed in range(1000, 3000):
        play(seed)
