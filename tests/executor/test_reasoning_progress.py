"""Where an output is in its reasoning, token by token: what is forced, and what is the grammar's."""

import pytest

from trouper.actors.executor.sampling.reasoning import ReasoningProgress
from trouper.actors.messages.requests import ReasoningRules

TEXTS = ["<think>", "</think>", "a", "b", "</th", "ink>", "\n", "<th"]
START, END, A, B, END_1, END_2, NEWLINE, START_1 = range(8)


def follow(tokens, *, budget=None, begins_inside=True, has_grammar=False, split=False):
    thinking = ReasoningRules(
        start="<think>",
        end="</think>",
        start_ids=(START_1, END_2) if split else (START,),
        end_ids=(END_1, END_2) if split else (END,),
        begins_inside=begins_inside,
        budget=budget,
    )
    progress = ReasoningProgress(thinking, TEXTS.__getitem__, has_grammar=has_grammar)
    forced = [progress.forced]
    is_free = []
    for token in tokens:
        is_free.append(progress.take(token))
        forced.append(progress.forced)
    return progress, forced, is_free


@pytest.mark.parametrize("budget", range(4))
def test_the_end_is_forced_behind_the_budget(budget):
    progress, forced, is_free = follow([A] * budget + [END, A], budget=budget)
    assert forced == [None] * budget + [END, None, None]
    assert is_free == [False] * (budget + 1) + [True]
    assert progress.is_over


def test_end_of_several_tokens_is_forced_one_by_one():
    _, forced, is_free = follow([A, END_1, END_2, A], budget=1, split=True)
    assert forced == [None, END_1, END_2, None, None]
    assert is_free == [False, False, False, True]


def test_end_that_model_writes_itself_leaves_nothing_to_force():
    for end in ([END], [END_1, END_2]):
        progress, forced, _ = follow([A, *end, B, B, B], budget=4)
        assert set(forced) == {None}
        assert progress.is_over


@pytest.mark.parametrize("opening", [[START], [NEWLINE, START], [START_1, END_2]])
def test_reasoning_may_be_opened_by_the_model(opening):
    progress, forced, _ = follow([*opening, A], begins_inside=False, budget=1)
    assert progress.is_inside
    assert forced == [None] * (len(opening) + 1) + [END]


def test_answer_without_reasoning_is_free_from_its_first_token():
    _, forced, is_free = follow([A, START, B], begins_inside=False, budget=0, has_grammar=True)
    assert set(forced) == {None}
    assert is_free == [True] * 3


def test_beside_grammar_rest_of_opening_is_forced():
    progress, forced, is_free = follow([START_1], begins_inside=False, has_grammar=True, split=True)
    assert forced == [None, END_2]
    assert is_free == [False]
    assert progress.opening is None
