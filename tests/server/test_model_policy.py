"""The policy of several models, one decision at a time."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.frontends.server.models.policy import (
    ASLEEP,
    AWAKE,
    COLD,
    DOZING,
    ModelMemory,
    ModelRecord,
    ModelState,
    ResidencyLimits,
    Transition,
    decide,
    draining,
    next_look,
    unfit,
    used_bytes,
)

SMALL = ModelMemory(process=1, weights=4, kv=2)
NUMBERS = st.integers(0, 3)


def record(name="a", state=COLD, **fields):
    return ModelRecord(name, fields.pop("memory", SMALL), state, **fields)


@st.composite
def records(draw):
    found = []
    for name in "abcd"[: draw(st.integers(1, 4))]:
        state = draw(st.sampled_from(list(ModelState)))
        is_loaded = state in (AWAKE, DOZING, ASLEEP)
        found.append(
            record(
                name,
                state,
                memory=ModelMemory(draw(NUMBERS) + 1, draw(st.integers(1, 9)), draw(NUMBERS)),
                is_pinned=draw(st.booleans()),
                is_held=is_loaded and draw(st.booleans()),
                is_leaving=draw(st.booleans()),
                num_waiting=draw(NUMBERS),
                num_open=draw(NUMBERS) if is_loaded else 0,
                wants_since=draw(st.floats(0, 10)),
                woken_at=draw(st.floats(0, 10)),
                idle_since=draw(st.floats(0, 10)),
                keep_alive_s=draw(st.sampled_from((0.0, 3.0, math.inf))),
                work=draw(st.floats(0, 10)),
            )
        )
    return found


@settings(max_examples=100)
@given(records(), st.integers(0, 20), st.floats(0, 20))
def test_decision_keeps_the_laws(found, spare, now):
    limits = ResidencyLimits(budget=used_bytes(found) + spare)
    transition = decide(found, limits, now)
    assert next_look(found, limits, now) > now
    if transition is None:
        return
    (chosen,) = (each for each in found if each.name == transition.name)
    assert used_bytes(found, transition) <= limits.budget
    assert not chosen.is_held or chosen.is_leaving
    if transition.to is AWAKE:
        assert chosen.wants
    else:
        assert not chosen.is_pinned or chosen.is_leaving
        assert transition.to is not COLD or chosen.num_open == 0
        is_in_turn = chosen.state is AWAKE and now < chosen.woken_at + limits.turn_s
        assert not (chosen.has_work and is_in_turn)


def test_first_in_line_gets_the_room():
    """A small model that would fit does not pass a large one, which would then wait for ever."""
    large = record("large", memory=ModelMemory(1, 8, 2), num_waiting=1, wants_since=1.0)
    small = record("small", num_waiting=1, wants_since=2.0)
    busy = record("busy", AWAKE, num_open=1, woken_at=0.0)
    found, limits = [small, large, busy], ResidencyLimits(budget=14, turn_s=5.0)
    assert decide(found, limits, now=3.0) is None
    assert next_look(found, limits, now=3.0) == 5.0
    assert decide(found, limits, now=5.0) == Transition("busy", DOZING)


def test_unreachable_model_is_passed_over():
    """Frozen requests keep a process, so they end first, and new ones wait."""
    large = record("large", memory=ModelMemory(1, 9, 0), num_waiting=1, wants_since=1.0)
    frozen = record("frozen", ASLEEP, num_open=1, wants_since=2.0)
    limits = ResidencyLimits(budget=10)
    assert decide([large, frozen], limits, now=9.0) == Transition("frozen", AWAKE)
    assert draining([large, frozen], limits, now=5.0) == set()
    assert draining([large, frozen], limits, now=9.0) == {"frozen"}
    frozen.num_open = 0
    assert draining([large, frozen], limits, now=9.0) == set()


def test_model_beside_pinned_ones_is_unfit():
    large, pinned = record("large", memory=ModelMemory(1, 9, 0)), record(is_pinned=True)
    assert unfit([large, pinned], 16) == [(large, 7)]
    assert unfit([large, pinned], 17) == []


def test_idle_model_rests_level_by_level():
    idle, limits = record(state=AWAKE, keep_alive_s=10.0), ResidencyLimits(budget=9)
    for due_s, state in ((10, DOZING), (20, ASLEEP), (60, COLD)):
        assert next_look([idle], limits, now=due_s - 1) == due_s
        assert decide([idle], limits, now=due_s) == Transition("a", state)
        idle.state = state


def test_leaving_model_goes_although_pinned():
    pinned = record(state=AWAKE, is_pinned=True, keep_alive_s=0.0)
    assert decide([pinned], ResidencyLimits(9), now=1e9) is None
    pinned.is_leaving = True
    assert decide([pinned], ResidencyLimits(9), now=0.0) == Transition("a", DOZING)


def test_places_limit_models_with_weights():
    first, second = record("a", AWAKE), record("b", num_waiting=1, wants_since=0.0)
    limits = ResidencyLimits(budget=99, max_loaded=1)
    assert decide([first, second], limits, now=1.0) == Transition("a", DOZING)
    first.state = ASLEEP
    assert decide([first, second], limits, now=1.0) == Transition("b", AWAKE)
