"""The last events of an engine: bounded, in order, and without repetition."""

from trouper.actors.observability.observer import MAX_EVENTS, MERGE_S, RecentEvents


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_equal_refusals_of_a_second_are_one_event():
    clock = Clock()
    log = RecentEvents(clock)
    for reason in ("overloaded", "rate_limited", "overloaded"):
        log.note("refusal", reason)
    assert [(e.detail, e.count) for e in log.since(0)] == [("overloaded", 2), ("rate_limited", 1)]
    clock.now += MERGE_S
    log.note("refusal", "overloaded")
    assert [(e.detail, e.count) for e in log.since(0)][2:] == [("overloaded", 1)]


def test_a_reader_gets_what_is_new_or_changed():
    log = RecentEvents(Clock())
    log.note("preemption", count=3)
    log.note("loss", "signal", step=7, sequences=2)
    seen = log.revision
    assert log.since(seen) == []
    log.note("preemption", count=2)
    (changed,) = log.since(seen)
    assert (changed.id, changed.count) == (log.since(0)[0].id, 5)


def test_losses_are_never_merged():
    log = RecentEvents(Clock())
    log.note("loss", "signal", step=1)
    log.note("loss", "signal", step=2)
    assert [event.step for event in log.since(0)] == [1, 2]


def test_the_log_is_bounded_and_forgets_the_oldest():
    log = RecentEvents(Clock())
    for step in range(MAX_EVENTS + 5):
        log.note("loss", step=step)
    events = log.since(0)
    assert [events[0].step, len(events)] == [5, MAX_EVENTS]
