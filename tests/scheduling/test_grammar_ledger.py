"""Grammars that are compiled beside the steps: which one next, what is kept, and which sequences wait."""

import pytest

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.requests import (
    Admit,
    Grammar,
    GrammarReady,
    GrammarRules,
    RequestId,
    RequestOptions,
)
from trouper.actors.messages.steps import DeviceLost
from trouper.actors.scheduling.state.grammar_ledger import GROWTH_BYTES, GrammarLedger
from trouper.params import SamplingParams

from .test_policy import Desk

MIB = 2**20


def a_grammar(source, num_bytes=0):
    rules = GrammarRules(
        source=source, eos_token_ids=(99,), ignore_eos=False, num_tokens=100, reasoning=None, num_bytes=num_bytes
    )  # fmt: skip
    return Grammar(rules, lambda: None, str)


def admit(source, num_mib=1, key="", id=0, **params):
    """A request whose grammar takes so many MiB with its growth."""
    grammar = a_grammar(source, num_mib * MIB - GROWTH_BYTES) if source else None
    return Admit(
        id=RequestId(id), prompt_token_ids=(1, 2, 3), params=SamplingParams(**params), eos_token_id=99, stop_token_ids=(),
        arrival_time=float(id), grammar=grammar, options=RequestOptions(key=key),
    )  # fmt: skip


def order_of(ledger, *args):
    order = ledger.next_order(*args)
    return order and order.grammar.rules.source


def prepare(ledger):
    """Prepare the next one; returns it and what was released for it."""
    order = ledger.next_order()
    if order is None:
        return None
    ledger.note(GrammarReady(order.grammar.key))
    return order.grammar.rules.source, len(order.released)


def test_one_is_prepared_at_time_smallest_first():
    ledger = GrammarLedger()
    for source, size in (("b", 9), ("a", 2), ("c", 30)):
        ledger.use(admit(source, size))
    assert [order_of(ledger), order_of(ledger)] == ["a", None]
    ledger.note(GrammarReady(a_grammar("a").key))
    assert ledger.is_ready(admit("a"))
    assert [prepare(ledger) for _ in range(3)] == [("b", 0), ("c", 0), None]


def test_grammar_is_shared_and_kept():
    ledger = GrammarLedger()
    for _ in range(2):
        ledger.use(admit("a"))
    assert [prepare(ledger), prepare(ledger)] == [("a", 0), None]
    for _ in range(2):
        ledger.leave(admit("a"))
    ledger.use(admit("a"))
    assert ledger.is_ready(admit("a"))
    assert prepare(ledger) is None


def test_request_that_leaves_early_is_not_prepared_for():
    ledger = GrammarLedger()
    ledger.use(admit("a"))
    ledger.leave(admit("a"))
    assert ledger.next_order() is None
    assert ledger.num_bytes == 0


def test_only_unused_grammars_are_evicted():
    ledger = GrammarLedger(10 * MIB)
    for source in "abc":
        ledger.use(admit(source, 3))
        assert prepare(ledger) == (source, 0)
    for source in "ba":
        ledger.leave(admit(source))
    ledger.use(admit("d", 4))
    assert prepare(ledger) == ("d", 1)
    assert ledger.num_bytes == 10 * MIB
    ledger.use(admit("e", 4))
    assert prepare(ledger) is None
    ledger.leave(admit("c"))
    assert prepare(ledger) == ("e", 2)
    assert ledger.num_bytes == 8 * MIB


def test_small_grammars_pass_a_large_one():
    ledger = GrammarLedger(10 * MIB)
    ledger.use(admit("a", 6))
    prepare(ledger)
    for source, size in (("large", 20), ("b", 3)):
        ledger.use(admit(source, size))
    assert [prepare(ledger), prepare(ledger)] == [("b", 0), None]
    for source in "ab":
        ledger.leave(admit(source))
    assert prepare(ledger) == ("large", 2)


def test_a_key_has_half_of_the_room():
    ledger = GrammarLedger(10 * MIB)
    for number in range(4):
        ledger.use(admit(f"a{number}", 2, "one"))
    ledger.use(admit("b", 2, "two"))
    found = [prepare(ledger) for _ in range(4)]
    assert found == [("a0", 0), ("a1", 0), ("b", 0), None]


def test_deadly_grammar_is_retried_then_condemned():
    ledger = GrammarLedger()
    for source, size in (("a", 2), ("b", 1)):
        ledger.use(admit(source, size))
    prepare(ledger)
    key = a_grammar("a").key
    assert order_of(ledger) == "a"
    assert ledger.forget(is_their_doing=True) is None
    assert ledger.needs_silence
    assert ledger.next_order(is_silent=False).grammar.rules.source == "b"
    ledger.note(GrammarReady(a_grammar("b").key))
    assert ledger.next_order(is_silent=False) is None
    assert order_of(ledger) == "a"
    assert ledger.needs_silence
    assert ledger.forget(is_their_doing=False) is None
    assert order_of(ledger) == "a"
    assert ledger.forget(is_their_doing=True) == key


def test_suspect_that_can_be_prepared_is_none_any_more():
    ledger = GrammarLedger()
    ledger.use(admit("a"))
    ledger.next_order()
    ledger.forget(is_their_doing=True)
    assert prepare(ledger) == ("a", 0)
    assert not ledger.needs_silence
    ledger.forget(is_their_doing=True)
    assert order_of(ledger) == "a"
    assert not ledger.needs_silence


# In a policy


class Class(Desk):
    """A desk whose device prepares grammars when it is told to."""

    def ask(self, id, source, num_mib=1, **params):
        params.setdefault("max_tokens", 2)
        self.policy.admit(admit(source, num_mib, "", id, **params))

    def prepare(self, error=None):
        order = self.policy.next_grammar()
        self.policy.note_grammar(GrammarReady(order.grammar.key, error))
        return order.grammar.rules.source


def test_sequences_pass_one_without_ready_grammar():
    desk = Class()
    desk.ask(0, "a")
    desk.ask(1, None)
    assert desk.owners(desk.plan()) == [1]
    assert desk.policy.statistics().num_waiting == 1
    desk.land()
    assert desk.prepare() == "a"
    plan = desk.plan()
    assert desk.owners(plan) == [1, 0]
    assert plan.new_sequences[0].grammar.rules.source == "a"


def test_no_step_waits_for_grammar_being_prepared():
    desk = Class()
    desk.ask(0, None, max_tokens=50)
    desk.ask(1, "dear")
    assert desk.policy.next_grammar().grammar.rules.source == "dear"
    for _ in range(50):
        assert desk.owners(desk.plan()) == [0]
        desk.land()
    assert desk.policy.statistics().num_waiting == 1


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_waiting_grammars_block_nothing_behind(policy):
    desk = Class(policy=policy)
    for id in range(200):
        desk.ask(id, f"a{id}")
    desk.ask(200, None)
    assert desk.owners(desk.plan()) == [200]


def test_request_aborted_while_its_grammar_is_prepared_is_gone():
    desk = Class()
    desk.ask(0, "a", n=2)
    assert desk.plan() is None
    order = desk.policy.next_grammar()
    desk.policy.abort(RequestId(0))
    desk.policy.note_grammar(GrammarReady(order.grammar.key))
    assert desk.plan() is None
    desk.take()
    assert len(desk.policy.table.grammars._sources) == 1  # kept for the next
    desk.assert_idle()


def test_failed_grammar_ends_only_its_requests():
    desk = Class()
    for id, source in ((0, "a"), (1, "a"), (2, "b")):
        desk.ask(id, source)
    assert desk.plan() is None
    desk.prepare("MemoryError: no")
    assert {entry.id: str(entry.error) for entry in desk.take()} == dict.fromkeys(
        (0, 1), "execution_error: the grammar: MemoryError: no"
    )
    assert desk.prepare() == "b"
    assert desk.owners(desk.plan()) == [2]


def test_grammars_are_prepared_again_after_loss():
    desk = Class()
    desk.ask(0, "a", max_tokens=3)
    desk.plan()
    desk.prepare()
    desk.step()
    desk.policy.lose_device(DeviceLost("killed", None, True))
    assert desk.policy.next_grammar() is None
    desk.policy.return_device()
    assert desk.plan() is None
    desk.prepare()
    assert desk.owners(desk.plan()) == [0]


def test_suspects_wait_for_their_grammars():
    desk = Class()
    for id in range(2):
        desk.ask(id, f"a{id}", max_tokens=9)
        desk.plan()
        desk.prepare()
    while desk.flights:
        desk.land()
    step = desk.plan().step
    desk.flights.clear()
    desk.ask(2, "other")
    desk.policy.lose_device(DeviceLost("died", step))
    desk.policy.return_device()
    assert desk.plan() is None
    assert [desk.prepare(), desk.prepare()] == ["a0", "a1"]
    assert desk.policy.next_grammar() is None
    while desk.policy.is_searching:
        if desk.plan() is not None:
            desk.land()
    assert desk.prepare() == "other"


def test_one_that_waits_for_its_grammar_has_not_started():
    desk = Class()
    desk.ask(0, "a")
    desk.plan()
    assert desk.policy.num_started == 0
    desk.policy.set_pause(Pause.NO_NEW_REQUESTS)
    desk.prepare()
    assert desk.plan() is None
    desk.policy.set_pause(Pause.NONE)
    assert desk.owners(desk.plan()) == [0]


def test_nothing_runs_while_a_suspect_is_prepared():
    desk = Class()
    for id, source in ((0, None), (1, "a")):
        desk.ask(id, source, max_tokens=9)
    desk.plan()
    assert desk.policy.next_grammar() is not None
    step = desk.flights[0].step
    desk.flights.clear()
    desk.policy.lose_device(DeviceLost("died", step))
    desk.policy.return_device()
    while desk.policy.is_searching:
        if desk.plan() is not None:
            desk.land()
    assert desk.plan() is None
    assert desk.policy.next_grammar() is not None
    assert desk.plan() is None
    assert desk.policy.lose_device(DeviceLost("died", None)) == 2
    desk.take()
    assert [(e.id, str(e.error)) for e in desk.news if e.error] == [(1, "poisoned_request: died")]
