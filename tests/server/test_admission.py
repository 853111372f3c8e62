"""Who is let in, who is next, who has to go: against a model that recomputes everything each time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from trouper.frontends.server.admission.fair_queue import OUTPUT_WEIGHT, FairQueue, Full, Phase

TENANTS = st.sampled_from("abc")
TOKENS = st.integers(0, 60)


class House(RuleBasedStateMachine):
    """The model is `people`, whose sums are taken anew, and the paper's counters."""

    @initialize(sequences=st.integers(1, 8), tokens=st.integers(1, 100), started=st.integers(1, 4))
    def build(self, sequences, tokens, started):
        self.house = FairQueue()
        self.house.max_sequences = sequences
        self.house.max_waiting_tokens = tokens
        self.house.max_started = started
        self.people = []
        self.counters = {}
        self.last = None

    @rule(tenant=TENANTS, tokens=TOKENS)
    def enter(self, tenant, tokens):
        legal = self.may_come_in(self.people, tenant, 1, tokens, 0)
        try:
            entry, gone = self.house.enter(tenant, tokens)
        except Full as full:
            assert legal is None
            self.check_share(full, self.people, tenant, 1, tokens)
        else:
            self.note_gone(legal, gone)
            self.people.append(entry)

    @precondition(lambda self: self.of(Phase.ENTERED))
    @rule(data=st.data(), sequences=st.integers(1, 6), tokens=TOKENS, priority=st.integers(-1, 1))
    def resize(self, data, sequences, tokens, priority):
        entry = data.draw(st.sampled_from(self.of(Phase.ENTERED)))
        before = entry.num_sequences, entry.num_tokens
        others = [other for other in self.people if other is not entry]
        legal = self.may_come_in(others, entry.tenant, sequences, tokens, priority)
        try:
            gone = self.house.resize(entry, sequences, tokens, priority)
        except Full as full:
            assert legal is None
            assert (entry.num_sequences, entry.num_tokens) == before
            self.check_share(full, others, entry.tenant, sequences, tokens)
        else:
            self.note_gone(legal, gone)
            assert (entry.num_sequences, entry.num_tokens) == (sequences, tokens)

    @precondition(lambda self: self.of(Phase.ENTERED))
    @rule(data=st.data())
    def wait(self, data):
        entry = data.draw(st.sampled_from(self.of(Phase.ENTERED)))
        queued = {other.tenant for other in self.of(Phase.WAITING)}
        if entry.tenant not in queued:
            floors = [self.counters[tenant] for tenant in queued]
            floor = min(floors, default=self.counters.get(self.last, 0))
            self.counters[entry.tenant] = max(self.counters.get(entry.tenant, 0), floor)
        self.house.wait(entry)

    @rule()
    def start(self):
        expected = []
        waiting = self.of(Phase.WAITING)
        num_started = sum(entry.num_sequences for entry in self.of(Phase.STARTED))
        while waiting and num_started < self.house.max_started:
            highest = max(entry.priority for entry in waiting)
            heads = [entry for entry in waiting if entry.priority == highest]
            head = min(heads, key=lambda entry: (self.counters[entry.tenant], entry.number))
            waiting.remove(head)
            self.counters[head.tenant] += head.num_tokens
            self.last = head.tenant
            num_started += head.num_sequences
            expected.append(head)
        assert self.house.next_starts() == expected

    @precondition(lambda self: self.people)
    @rule(data=st.data(), prompt=TOKENS, output=TOKENS)
    def leave(self, data, prompt, output):
        entry = data.draw(st.sampled_from(self.people))
        if entry.phase is Phase.STARTED:
            self.counters[entry.tenant] += prompt + OUTPUT_WEIGHT * output - entry.num_tokens
        for _ in range(2):
            self.house.leave(entry, prompt, output)
        self.people.remove(entry)

    @invariant()
    def sums_are_sums(self):
        if not hasattr(self, "house"):
            return
        waiting = [entry for entry in self.people if entry.phase is not Phase.STARTED]
        started = self.of(Phase.STARTED)
        assert self.house.num_requests == len(self.people)
        assert self.house.num_sequences == sum(entry.num_sequences for entry in self.people)
        assert self.house.num_started == sum(entry.num_sequences for entry in started)
        assert self.house.num_tokens == sum(entry.num_tokens for entry in self.people)
        assert self.house.num_waiting_tokens == sum(entry.num_tokens for entry in waiting)
        assert sorted(entry.number for entry in self.house.waiting()) == sorted(
            entry.number for entry in self.of(Phase.WAITING)
        )

    def of(self, phase):
        return [entry for entry in self.people if entry.phase is phase]

    def share(self, people, tenant, sequences=0, tokens=0):
        mine = [entry for entry in people if entry.tenant == tenant]
        sequences += sum(entry.num_sequences for entry in mine)
        tokens += sum(entry.num_tokens for entry in mine if entry.phase is not Phase.STARTED)
        return max(sequences / self.house.max_sequences, tokens / self.house.max_waiting_tokens)

    def fits(self, people, sequences, tokens):
        held = sum(entry.num_sequences for entry in people)
        waiting = sum(entry.num_tokens for entry in people if entry.phase is not Phase.STARTED)
        return (not held or held + sequences <= self.house.max_sequences) and (
            not waiting or waiting + tokens <= self.house.max_waiting_tokens
        )

    def may_come_in(self, people, tenant, sequences, tokens, priority):
        """None, or everybody who may be shown out for it: nobody when there is room."""
        people = list(people)
        if self.fits(people, sequences, tokens):
            return []
        guest = self.share(people, tenant, sequences, tokens)
        legal = []
        for other in {entry.tenant for entry in people} - {tenant}:
            queue = [e for e in people if e.tenant == other and e.phase is Phase.WAITING]
            for last in sorted(queue, key=lambda entry: (entry.priority, -entry.number)):
                rest = [entry for entry in people if entry is not last]
                if last.priority > priority or self.share(rest, other) < guest:
                    break
                people = rest
                legal.append(last)
        return legal if self.fits(people, sequences, tokens) else None

    def note_gone(self, legal, gone):
        assert legal is not None, "the house was full"
        assert bool(gone) == bool(legal)
        assert set(gone) <= set(legal)
        assert all(entry.phase is Phase.GONE for entry in gone)
        self.people = [entry for entry in self.people if entry not in gone]

    def check_share(self, full, people, tenant, sequences, tokens):
        others = {entry.tenant for entry in people} - {tenant}
        is_over = self.share(people, tenant, sequences, tokens) > 1 / (len(others) + 1)
        assert full.is_over_share == (bool(others) and is_over)


def test_admission_is_its_model():
    run_state_machine_as_test(
        House, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )


def house(sequences=100, tokens=10_000, started=4):
    admission = FairQueue()
    admission.max_sequences, admission.max_waiting_tokens = sequences, tokens
    admission.max_started = started
    return admission


def queue(admission, tenant, tokens=10, priority=0):
    entry, _ = admission.enter(tenant, tokens)
    admission.resize(entry, 1, tokens, priority)
    admission.wait(entry)
    return entry


@settings(max_examples=100, deadline=None)
@given(
    costs=st.fixed_dictionaries({t: st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=5) for t in "ab"}),
    order=st.randoms(use_true_random=False),
)  # fmt: skip
def test_two_busy_tenants_are_served_equally(costs, order):
    admission, started = house(), []
    served, num_asked = dict.fromkeys("ab", 0), dict.fromkeys("ab", 0)
    most = 4 * max(p + OUTPUT_WEIGHT * o for list in costs.values() for p, o in list)
    for _ in range(200):
        for tenant in "ab":
            while sum(entry.tenant == tenant for entry in admission.waiting()) < 3:
                prompt, output = costs[tenant][num_asked[tenant] % len(costs[tenant])]
                num_asked[tenant] += 1
                queue(admission, tenant, prompt + output).cost = prompt, output
        started += admission.next_starts()
        done = started.pop(order.randrange(len(started)))
        prompt, output = done.cost
        served[done.tenant] += prompt + OUTPUT_WEIGHT * output
        admission.leave(done, prompt, output)
        assert abs(served["a"] - served["b"]) <= 2 * most


def test_tenant_that_floods_does_not_delay_first_of_another():
    admission = house()
    for _ in range(50):
        queue(admission, "a")
    started = admission.next_starts()
    other = queue(admission, "b")
    admission.leave(started[0], 10, 10)
    assert admission.next_starts() == [other]


def test_priority_comes_before_fairness():
    admission = house(started=1)
    queue(admission, "a", 1000)
    admission.next_starts()
    low, high = queue(admission, "b"), queue(admission, "a", priority=1)
    admission.max_started = 3
    assert admission.next_starts() == [high, low]


def test_full_house_shows_largest_tenants_youngest_out():
    admission = house(sequences=4, started=0)
    first, *_, last = [queue(admission, "a") for _ in range(4)]
    _, gone = admission.enter("b", 10)
    assert gone == [last]
    with pytest.raises(Full) as raised:
        admission.enter("a", 10)
    assert raised.value.is_over_share
    assert len(admission.enter("b", 10)[1]) == 1
    with pytest.raises(Full) as raised:
        admission.enter("b", 10)  # it has its half
    assert raised.value.is_over_share
    assert first.phase is Phase.WAITING


def test_tenant_alone_has_no_share_to_exceed():
    admission = house(sequences=1)
    queue(admission, "a")
    with pytest.raises(Full) as raised:
        admission.enter("a", 10)
    assert not raised.value.is_over_share


def test_who_was_away_has_saved_nothing_up():
    admission = house(started=1)
    for _ in range(20):
        queue(admission, "a", 100)
        (entry,) = admission.next_starts()
        admission.leave(entry, 100, 0)
    waiting = {tenant: [queue(admission, tenant, 100) for _ in range(4)] for tenant in "ab"}
    turns = []
    for _ in range(8):
        (entry,) = admission.next_starts()
        turns.append(entry.tenant)
        admission.leave(entry, 100, 0)
    assert sorted(turns[:4]) == ["a", "a", "b", "b"]
    assert waiting["b"][0].phase is Phase.GONE


def test_the_largest_request_comes_in_alone():
    admission = house(sequences=2, tokens=10)
    entry, _ = admission.enter("a", 0)
    assert admission.resize(entry, 5, 1000, 0) == []
    with pytest.raises(Full):
        admission.enter("a", 0)
