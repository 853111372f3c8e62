"""A queue that stands is cut, a burst is not: on virtual time, through the real gate."""

import math

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.frontends.server.admission.fair_queue import FairQueue
from trouper.frontends.server.admission.gate import BYTES_PER_TOKEN, AdmissionGate
from trouper.frontends.server.admission.overload import INTERVAL_S, QueueDelay
from trouper.frontends.server.shared.errors import HTTPError

PACE = 1000  # tokens a second
COST = 500  # tokens of a request
LOOK_S = 0.25
LOOKS = st.lists(st.tuples(st.floats(0.01, 0.6), st.floats(0, 4)), max_size=40)


@given(LOOKS)
def test_queue_stands_after_interval_of_long_waits(looks):
    delay, now, seen = QueueDelay(2.0), 0.0, []
    for step, wait_s in looks:
        now += step
        delay.look(wait_s, now)
        seen.append((now, wait_s))
        short = max((i for i, (_, wait) in enumerate(seen) if wait <= 2.0), default=-1)
        long = seen[short + 1 :]
        assert delay.stands == (bool(long) and now - long[0][0] >= INTERVAL_S)


PEOPLE = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=12)


@given(PEOPLE, st.integers(0, 200))
def test_trimming_takes_youngest_of_largest_until_it_fits(people, limit):
    house = FairQueue()
    house.max_sequences = house.max_waiting_tokens = 1000
    entries = [house.enter(tenant, num_tokens)[0] for tenant, num_tokens in people]
    for entry in entries:
        house.wait(entry)
    left = list(entries)
    for victim in house.trim(limit):
        assert sum(entry.num_tokens for entry in left) > limit
        sizes = {e.tenant: 0 for e in left}
        for entry in left:
            sizes[entry.tenant] += entry.num_tokens  # more than their number of sequences
        assert sizes[victim.tenant] == max(sizes.values())
        assert victim is [e for e in left if e.tenant == victim.tenant][-1]
        left.remove(victim)
    assert sorted(house.waiting(), key=entries.index) == left
    assert len(left) == 1 or sum(entry.num_tokens for entry in left) <= limit


class Shop:
    """One is served at a time, each for half a second; room for thousands to wait."""

    def __init__(self, target_s):
        self.gate = AdmissionGate(lambda reason: None)
        self.gate.admission.max_sequences, self.gate.admission.max_started = 10_000, 1
        self.gate.min_waiting_tokens = 10**9
        self.gate.delay = QueueDelay(target_s)
        self.waits, self.num_refused, self.num_tokens = [], 0, 0

    async def ask(self):
        came = anyio.current_time()
        try:
            with self.gate.enter("", COST * BYTES_PER_TOKEN) as ticket:
                await ticket.wait_turn()
                self.waits.append(anyio.current_time() - came)
                await anyio.sleep(COST / PACE)
                self.num_tokens += COST
        except HTTPError:
            self.num_refused += 1

    async def look_after(self):
        while True:
            is_busy = self.gate.admission.num_started > 0
            self.gate.throughput.note(self.num_tokens, anyio.current_time(), is_busy=is_busy)
            self.gate.look()
            await anyio.sleep(LOOK_S)

    async def run(self, factor, seconds):
        """Clients come at `factor` times the pace, and then those inside are served."""
        async with anyio.create_task_group() as all_tasks:
            all_tasks.start_soon(self.look_after)
            async with anyio.create_task_group() as clients:
                for _ in range(int(seconds * factor * PACE / COST)):
                    clients.start_soon(self.ask)
                    await anyio.sleep(COST / PACE / factor)
            all_tasks.cancel_scope.cancel()


@pytest.mark.trio
@pytest.mark.parametrize("factor", [2, 5, 10])
async def test_under_overload_those_who_are_served_are_served_in_time(autojump_clock, factor):
    shop = Shop(target_s=5.0)
    await shop.run(factor, seconds=60)
    in_time = [wait for wait in shop.waits if wait <= 10.0]
    assert len(in_time) >= 0.95 * len(shop.waits)
    assert len(in_time) >= 0.95 * 60 * PACE / COST  # goodput: the server was never without work
    assert len(shop.waits) + shop.num_refused == int(60 * factor * PACE / COST)


@pytest.mark.trio
async def test_without_a_target_everybody_waits_for_his_turn(autojump_clock):
    shop = Shop(target_s=math.inf)
    await shop.run(5, seconds=60)
    assert shop.num_refused == 0
    assert max(shop.waits) > 200


@pytest.mark.trio
async def test_burst_done_in_time_is_left_alone(autojump_clock):
    shop = Shop(target_s=5.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shop.look_after)
        async with anyio.create_task_group() as clients:
            for _ in range(11):
                clients.start_soon(shop.ask)
        tasks.cancel_scope.cancel()
    assert (len(shop.waits), shop.num_refused) == (11, 0)


@pytest.mark.trio
async def test_a_pause_is_no_wait(autojump_clock):
    shop = Shop(target_s=2.0)
    shop.gate.admission.max_started = 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shop.ask)
        for seconds, is_paused, stands in ((50, True, False), (1.9, False, False), (1, False, False), (1, False, True)):  # fmt: skip
            await anyio.sleep(seconds)
            shop.gate.look(is_paused=is_paused)
            assert shop.gate.delay.stands == stands
        tasks.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_queue_that_stands_never_raises_the_limit():
    shop = Shop(target_s=50.0)
    shop.gate.min_waiting_tokens, shop.gate.is_adaptive, shop.gate.delay.stands = 100, False, True
    shop.gate.throughput.note(0, 0.0, is_busy=True)
    shop.gate.throughput.note(1000, 1.0, is_busy=True)
    with shop.gate.enter("", 0):
        assert shop.gate.admission.max_waiting_tokens == 100
