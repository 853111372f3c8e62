"""What counts as a difference between two answers."""

import re
from pathlib import Path

import pytest

from .accepted import ACCEPTED
from .cases import CASES
from .compare import differences
from .http import Answer, read_events

REPLY = {
    "object": "text_completion",
    "choices": [{"index": 0, "text": "a", "token_ids": None}],
    "usage": {"prompt_tokens": 3},
}


def changed(**fields):
    return {**REPLY, "choices": [{**REPLY["choices"][0], **fields}]}


def found(reference, subject, offenders=(), status=200):
    answers = (Answer(status, reference), Answer(status, subject))
    return [str(difference) for difference in differences(*answers, offenders)]


def test_texts_may_differ():
    assert found(REPLY, changed(text="b")) == []


@pytest.mark.parametrize(
    ("subject", "difference"),
    [
        (changed(token_ids=[1]), "$.choices[].token_ids: null -> array"),
        (changed(text=None), "$.choices[].text: string -> null"),
        (changed(index=1), "$.choices[].index: 0 -> 1"),
        (changed(more=1), "$.choices[].more: absent -> number"),
        ({**REPLY, "usage": {"prompt_tokens": 4}}, "$.usage.prompt_tokens: 3 -> 4"),
        ({**REPLY, "usage": None}, "$.usage: object -> null"),
        ({**REPLY, "choices": 2 * REPLY["choices"]}, "$.choices: array of 1 -> array of 2"),
    ],
)
def test_keys_types_and_counts_may_not(subject, difference):
    assert found(REPLY, subject) == [difference]


def test_key_that_only_some_entries_have_is_seen():
    both = {"choices": [{"a": 1}, {"a": 1}]}
    one = {"choices": [{"a": 1}, {}]}
    assert found(both, one) == ["$.choices[].a: number -> absent or number"]


def test_the_keys_of_logprobs_are_data():
    def logprobs(**tops):
        return {"logprobs": {"top_logprobs": [tops]}}

    assert found(logprobs(a=-1.0), logprobs(b=-2.0)) == []
    assert found(logprobs(a=-1.0), logprobs()) == [
        "$.logprobs.top_logprobs[]: object of 1 -> object of 0"
    ]


def test_a_message_must_name_what_the_reference_names():
    def error(message, kind="BadRequestError"):
        return {"error": {"message": message, "type": kind}}

    assert found(error("bad token 99"), error("no token: 99"), ["99"], 400) == []
    assert found(error("bad token 99"), error("a token of 990"), ["99"], 400) == [
        "names: 99 -> a token of 990"
    ]
    assert found(error("bad"), error("bad", "Other"), status=400) == [
        "$.error.type: BadRequestError -> Other"
    ]


def test_a_status_says_it_all():
    answers = (Answer(200, REPLY), Answer(404, {"error": {"message": "no route"}}))
    assert [str(each) for each in differences(*answers)] == ["status: 200 -> 404 no route"]


def test_chunks_of_stream_are_compared_by_their_kind():
    def stream(*choices):
        return Answer(200, events=[{"choices": [choice]} for choice in choices] + ["[DONE]"])

    text, last = {"text": "a", "finish_reason": None}, {"text": "a", "finish_reason": "stop"}
    assert differences(stream(text, text, last), stream(text, last)) == []
    more = {**last, "stop_reason": None}
    assert [str(each) for each in differences(stream(text, last), stream(text, more))] == [
        "last chunk.choices[].stop_reason: absent -> null"
    ]
    assert [str(each) for each in differences(stream(text, last), stream(last))] == [
        "text chunk: there -> none"
    ]


def test_events_are_read_as_they_come():
    assert read_events('data: {"a": 1}\n\n: comment\n\ndata: [DONE]\n\n') == [{"a": 1}, "[DONE]"]


def test_cases_have_names_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("row", ACCEPTED)
def test_accepted_difference_is_of_real_case_and_in_docs(row):
    assert any(re.fullmatch(row.cases, case.name) for case in CASES)
    page = Path(__file__).parents[2] / "docs" / "coming-from-vllm.md"
    assert f"| {row.reason} |" in page.read_text()
