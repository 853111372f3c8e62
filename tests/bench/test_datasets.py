"""Requests by seed; a ShareGPT file is data, whatever it holds."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.bench.datasets import (
    SampleRequest,
    check_fit,
    edit_requests,
    prefix_repetition_requests,
    random_requests,
    schema_requests,
    sharegpt_requests,
)
from trouper.errors import TrouperValidationError

VOCABULARY = range(100, 200)


@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 40), st.floats(0, 0.99), st.integers())
def test_random_requests_have_lengths_that_were_asked_for(num, num_in, num_out, ratio, seed):
    def made():
        return random_requests(
            num, num_in, num_out, VOCABULARY, random.Random(seed), range_ratio=ratio, prefix_len=3
        )

    requests = made()
    assert requests == made()
    assert len(requests) == num
    assert len({request.prompt_token_ids[:3] for request in requests}) <= 1
    for request in requests:
        assert set(request.prompt_token_ids) <= set(VOCABULARY)
        for length, middle in (
            (len(request.prompt_token_ids) - 3, num_in),
            (request.output_len, num_out),
        ):
            assert max(1, middle - int(middle * ratio)) <= length <= middle + int(middle * ratio)


@pytest.mark.parametrize("ratio", [-0.1, 1.0])
def test_range_ratio_outside_of_its_range_is_named(ratio):
    with pytest.raises(TrouperValidationError, match="random_range_ratio"):
        random_requests(1, 1, 1, VOCABULARY, random.Random(0), range_ratio=ratio)


def test_every_prefix_begins_equally_many_prompts():
    requests = prefix_repetition_requests(12, 8, 4, 3, 5, VOCABULARY, random.Random(0))
    prefixes = [request.prompt_token_ids[:8] for request in requests]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert {(len(request.prompt_token_ids), request.output_len) for request in requests} == {
        (12, 5)
    }
    with pytest.raises(TrouperValidationError, match="2 prompts cannot share 3 prefixes"):
        prefix_repetition_requests(2, 8, 4, 3, 5, VOCABULARY, random.Random(0))


def conversation(*texts):
    return {"id": "x", "conversations": [{"from": "human", "value": text} for text in texts]}


def write(tmp_path, content):
    path = tmp_path / "sharegpt.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def sampled(path, num=2, **options):
    return sharegpt_requests(path, num, lambda text: text.encode(), random.Random(0), **options)


def test_first_question_and_length_of_its_answer_are_taken(tmp_path):
    unusable = [
        conversation("only a question"),
        conversation("hi", "too short a question"),
        conversation("too short an answer", "ok"),
        conversation("x" * 1025, "too long a question"),
        conversation("x" * 1000, "y" * 1049),
        {"conversations": []},
        {},
    ]
    path = write(tmp_path, [conversation("question", "answer", "more"), *unusable])
    expected = SampleRequest(tuple(b"question"), 6, "question")
    assert sampled(path) == [expected, expected]
    assert sampled(path, oversample=False) == [expected]
    assert sampled(path, num=1, output_len=3)[0].output_len == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a ShareGPT file"),
        ("[", "not a ShareGPT file"),
        ('{"a": 1}', "not a ShareGPT file"),
        ('[{"conversations": [{"value": 3}]}]', "not a ShareGPT file"),
        ("[]", "no conversation of usable length"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, content, message):
    with pytest.raises(TrouperValidationError, match=message):
        sampled(write(tmp_path, content))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TrouperValidationError, match=r"No such file.*dataset_path"):
        sampled(str(tmp_path / "none.json"))


def test_what_model_cannot_hold_is_told_before_run():
    requests = [SampleRequest((1, 2), 2), SampleRequest((1, 2, 3), 2)]
    check_fit(requests, 5)
    with pytest.raises(TrouperValidationError, match=r"prompt 2 \(3 tokens\) and its output \(2\)"):
        check_fit(requests, 4)


def test_edits_ask_for_functions_of_library_again_and_are_greedy():
    encode = str.encode
    made = [
        edit_requests(5, encode, random.Random(3), input_len=2000, output_len=9) for _ in range(2)
    ]
    assert made[0] == made[1]
    for request in made[0]:
        assert request.text.encode() == bytes(request.prompt_token_ids)
        source = request.text.split("```python\n")[1].removesuffix("```\n\n")
        name = source.removeprefix("def ").split("(")[0]
        assert request.text.endswith(f"def {name}_all(")
        assert len(source) <= 2000 + 100
        assert (request.temperature, request.output_len) == (0.0, 9)


def test_records_are_asked_for_by_schema_and_are_greedy():
    made = [schema_requests(5, str.encode, random.Random(3), output_len=90) for _ in range(2)]
    assert made[0] == made[1]
    assert len({request.text for request in made[0]}) == 5
    for request in made[0]:
        assert request.text.encode() == bytes(request.prompt_token_ids)
        assert len(request.schema["required"]) == 8
        assert (request.temperature, request.output_len) == (0.0, 90)
