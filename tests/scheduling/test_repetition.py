"""The repetition detector against the definition, and in the sequence that it ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engines import simulated_engine
from trouper.actors.scheduling.state.sequence import is_repeating
from trouper.params import RepetitionDetectionParams, SamplingParams


def is_repeating_by_definition(tokens, rule):
    return any(
        len(tokens) >= size * rule.min_count
        and tokens[len(tokens) - size * rule.min_count :] == tokens[-size:] * rule.min_count
        for size in range(max(1, rule.min_pattern_size), rule.max_pattern_size + 1)
    )


@st.composite
def rules(draw):
    largest = draw(st.integers(0, 6))
    smallest = draw(st.integers(0, largest))
    return RepetitionDetectionParams(largest, smallest, draw(st.integers(2, 4)))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), rules())
def test_it_is_the_definition_for_random_tokens(tokens, rule):
    assert is_repeating(tokens, rule) == is_repeating_by_definition(tokens, rule)


@given(
    st.lists(st.integers(0, 2), max_size=5),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(0, 5),
    rules(),
)
def test_it_is_the_definition_for_repeated_patterns(head, pattern, count, cut, rule):
    tokens = (head + pattern * count)[: -cut or None] or pattern
    assert is_repeating(tokens, rule) == is_repeating_by_definition(tokens, rule)


@pytest.mark.parametrize(
    ("tokens", "rule", "expected"),
    [
        ([1, 2, 1, 2, 1, 2], (2, 2, 3), True),
        ([1, 2, 1, 2, 1, 2], (2, 2, 4), False),
        ([1, 2, 1, 2, 1, 2], (1, 1, 2), False),
        ([9, 1, 1, 1], (4, 0, 3), True),
        ([1, 1, 1, 9], (4, 0, 3), False),
        ([1, 1, 1, 1], (2, 2, 2), True),  # a pattern may itself be one token, repeated
        ([1], (4, 1, 2), False),
        ([1, 1, 1], (0, 0, 0), False),
    ],
)
def test_cases(tokens, rule, expected):
    assert is_repeating(tokens, RepetitionDetectionParams(*rule)) is expected


async def run(engine, **params):
    params = SamplingParams(temperature=0, allowed_token_ids=[5], max_tokens=10, **params)
    return [o async for o in engine.generate([1, 2, 3], params, "a")][-1].outputs[0]


@pytest.mark.trio
async def test_a_repeating_output_ends_with_its_reason(autojump_clock):
    rule = RepetitionDetectionParams(max_pattern_size=2, min_count=4)
    async with simulated_engine() as engine:
        found = await run(engine, repetition_detection=rule)
        assert (found.finish_reason, found.stop_reason) == ("repetition", "repetition_detected")
        assert found.token_ids == [5] * 4


@pytest.mark.trio
async def test_min_tokens_come_first_and_length_goes_before(autojump_clock):
    rule = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
    async with simulated_engine() as engine:
        assert len((await run(engine, repetition_detection=rule, min_tokens=7)).token_ids) == 7
        found = await run(engine, repetition_detection=rule, min_tokens=10)
        assert (found.finish_reason, found.stop_reason) == ("length", None)
