"""Incremental text and stop strings: the cases of spec section 9.2, and a brute-force model."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.output.stops import TextState


def state(texts, stop=(), **options):
    """A state whose token i has the text texts[i]."""
    return TextState(lambda token: texts[token], stop, **options)


def push_all(texts, stop=(), cuts=(), **options):
    """Push tokens 0, 1, … in steps that end at `cuts`; answer (whole text, tokens kept, stop)."""
    sequence = state(texts, stop, **options)
    text, kept = "", 0
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(texts)}), len(texts)]
    for begin, end in pairwise(edges):
        news = sequence.push(range(begin, end), is_last=end == len(texts))
        text += news.text
        kept += news.num_tokens
        if news.stop is not None:
            return text, kept, news.stop
    return text, kept, None


def model(texts, stop, include, min_tokens):
    """The same by brute force: look at every prefix of the whole text, character by character."""
    whole = "".join(texts)
    floor = len("".join(texts[:min_tokens]))
    for end in range(floor + 1, len(whole) + 1):
        for candidate in stop:
            begin = end - len(candidate)
            if begin >= floor and whole[begin:end] == candidate:
                kept = next(i for i in range(len(texts) + 1) if len("".join(texts[:i])) >= end)
                return whole[: end if include else begin], kept, candidate
    return whole, len(texts), None


@pytest.mark.parametrize(
    ("stop", "include", "text", "reason"),
    [
        (["abc", "bc"], False, "x", "abc"),
        (["bc", "abc"], False, "xa", "bc"),
        (["abc", "bc"], True, "xabc", "abc"),
    ],
)
def test_two_that_complete_together_are_decided_by_list(stop, include, text, reason):
    assert push_all(["xabc"], stop, include_stop=include) == (text, 1, reason)


@pytest.mark.parametrize(
    "texts", [["hello world"], ["hel", "lo", " wor", "ld"], list("hello world")]
)
@pytest.mark.parametrize(("include", "text"), [(False, "hel"), (True, "hello")])
def test_the_match_that_completes_first_wins(texts, include, text):
    assert push_all(texts, ["world", "lo"], include_stop=include)[::2] == (text, "lo")


def test_what_may_be_head_of_match_is_held_back():
    sequence = state(["abEN"], ["END"])
    assert sequence.push([0]).text == "ab"


def test_nothing_is_held_back_when_stop_strings_are_included():
    assert state(["abEN"], ["END"], include_stop=True).push([0]).text == "abEN"


def test_what_is_held_back_comes_out_at_end():
    sequence = state(["abEN"], ["END"])
    assert sequence.push([0]).text + sequence.push([], is_last=True).text == "abEN"


def test_a_match_may_be_split_over_steps():
    assert push_all(["one\n", "\ntwo"], ["\n\n"], cuts=[1]) == ("one", 2, "\n\n")


def test_tokens_behind_match_are_dropped_and_those_of_match_stay():
    assert push_all(["a", "EN", "D", "b", "c"], ["END"]) == ("a", 3, "END")


def test_text_of_stop_token_is_left_out_but_token_counts():
    news = state(["a", "</s>"]).push([0, 1], is_last=True, ends_with_stop_token=True)
    assert (news.text, news.num_tokens) == ("a", 2)


def test_text_of_stop_token_stays_when_stops_are_included():
    sequence = state(["a", "</s>"], include_stop=True)
    assert sequence.push([0, 1], is_last=True, ends_with_stop_token=True).text == "a</s>"


def test_a_stop_string_before_the_stop_token_wins():
    sequence = state(["aEND", "</s>"], ["END"])
    news = sequence.push([0, 1], is_last=True, ends_with_stop_token=True)
    assert (news.text, news.num_tokens, news.stop) == ("a", 1, "END")


def test_stop_strings_rest_until_more_than_min_tokens_exist():
    texts = ["x", "x", "x", "x"]
    assert push_all(texts, ["x"], min_tokens=2) == ("xx", 3, "x")


def test_no_match_begins_in_text_of_first_min_tokens():
    assert push_all(["a", "E", "ND", "END"], ["END"], min_tokens=2) == ("aEND", 4, "END")


def test_without_stop_strings_everything_comes_at_once():
    assert state(["abc"]).push([0]).text == "abc"


def test_tail_stays_short_however_long_text_grows():
    sequence = state(["some text "], ["never"])
    for _ in range(1000):
        sequence.push([0])
    assert len(sequence._tail) <= 2 * len("never")


letters = st.text("ab", max_size=4)


@given(
    texts=st.lists(letters, max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 12)),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_chunking_does_not_change_results(texts, stop, cuts, include, min_tokens):
    got = push_all(texts, stop, cuts, include_stop=include, min_tokens=min_tokens)
    assert got == model(texts, stop, include, min_tokens)


@given(texts=st.lists(letters, min_size=1, max_size=12), stop=st.text("ab", min_size=1, max_size=4))
def test_shown_text_is_never_taken_back(texts, stop):
    final = model(texts, [stop], include=False, min_tokens=0)[0]
    sequence = state(texts, [stop])
    shown = ""
    for token in range(len(texts)):
        news = sequence.push([token])
        shown += news.text
        assert final.startswith(shown)
        if news.stop:
            break
