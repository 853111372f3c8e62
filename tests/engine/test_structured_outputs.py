"""Structured outputs through a whole engine, on the bundled model at temperature 1: what finishes matches."""

import json
import re

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trouper import LLM, SamplingParams, StructuredOutputsParams
from trouper.errors import GenerationError, GrammarError

SMALL = {"max_model_len": 512, "max_num_seqs": 16, "dtype": "float32"}
names = st.sampled_from(["a", "b", "name", "size", "x y", "é"])
scalars = st.one_of(
    st.sampled_from(
        [
            {"type": "integer"}, {"type": "boolean"}, {"type": "null"}, {"type": "number"},
            {"type": "string", "maxLength": 8}, {"type": "integer", "minimum": -3, "maximum": 12},
            {"type": "string", "pattern": "^[a-f]{2,4}$"}, {"const": 7}, {"type": ["integer", "null"]},
            {"type": "string", "format": "date"}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        ]
    ),
    st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(["x", "yes", 1, None, 2.5]), min_size=1, max_size=3)),
)  # fmt: skip


def _object(properties, is_open):
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties)[:2],
        "additionalProperties": is_open,
    }


schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(names, inner, max_size=3), st.booleans()),
        st.builds(lambda items, n: {"type": "array", "items": items, "minItems": n, "maxItems": 3}, inner, st.integers(0, 2)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL, num_gpu_blocks_override=512) as llm:
        yield llm


def ask(llm, prompts, *params):
    return [out.outputs for out in llm.generate(prompts, list(params), use_tqdm=False)]


def wanted(seed=0, max_tokens=64, options=(), **kinds):
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        structured_outputs=StructuredOutputsParams(**kinds),
        **dict(options),
    )


def check_schemas(llm, drawn):
    outputs = ask(
        llm, ["data:"] * len(drawn), *(wanted(seed=i, json=s) for i, s in enumerate(drawn))
    )
    num_finished = 0
    for schema, (output,) in zip(drawn, outputs, strict=True):
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            num_finished += 1
            value = json.loads(output.text)
            assert jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(value), (
                schema,
                output.text,
            )
    return num_finished


QUICK = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@settings(QUICK, max_examples=5)
@given(st.lists(schemas, min_size=10, max_size=10))
def test_whatever_finishes_validates_against_its_schema(llm, drawn):
    check_schemas(llm, drawn)


@pytest.mark.slow
@settings(QUICK, max_examples=30)
@given(st.lists(schemas, min_size=10, max_size=10))
def test_hundreds_of_schemas(llm, drawn):
    check_schemas(llm, drawn)


@pytest.mark.parametrize(
    "regex", ["[0-9]{3}-[a-f]{2,5}", "(yes|no), (red|blue)", r"\d{1,3}(\.\d{1,3}){3}", "é+ü?"]
)
def test_whatever_finishes_matches_its_expression_whole(llm, regex):
    outputs = ask(llm, ["x"] * 8, *(wanted(seed=i, regex=regex) for i in range(8)))
    finished = [o.text for (o,) in outputs if o.finish_reason == "stop"]
    assert finished
    assert all(re.fullmatch(regex, text) for text in finished)


def test_choice_is_one_of_texts_whatever_penalties(llm):
    options = {"min_tokens": 30, "ignore_eos": True, "repetition_penalty": 1.3}
    params = [
        wanted(seed=i, choice=["yes", 'no"\n', "maybe so"], options=options) for i in range(9)
    ]
    outputs = ask(llm, ["x"] * 9, *params)
    assert {o.text for (o,) in outputs} <= {"yes", 'no"\n', "maybe so"}
    assert {o.finish_reason for (o,) in outputs} == {"stop"}


def test_completions_of_one_prompt_have_a_matcher_each(llm):
    (outputs,) = ask(llm, ["x"], wanted(regex="[a-z]{4}[0-9]{4}", options={"n": 5}))
    assert len({o.text for o in outputs}) == 5
    assert all(re.fullmatch("[a-z]{4}[0-9]{4}", o.text) for o in outputs)


def free(seed):
    return SamplingParams(max_tokens=40, seed=seed, ignore_eos=True)


def test_neighbours_do_not_notice(llm):
    alone = ask(llm, ["one", "two"], free(1), free(2))
    beside = ask(
        llm, ["one", "x", "two", "y"],
        free(1), wanted(json_object=True), free(2), wanted(regex="[0-9]{40}"),
    )  # fmt: skip
    assert [o.token_ids for (o,) in alone] == [beside[i][0].token_ids for i in (0, 2)]


def test_logprobs_are_of_model_and_token_of_grammar(llm):
    ((output,),) = ask(llm, ["x"], wanted(regex="[0-9]{3}", options={"logprobs": 1}))
    assert [next(iter(entry)) for entry in output.logprobs] == list(output.token_ids)


def test_same_tokens_when_preempted_and_with_any_chunks(llm):
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 60}
    params = [wanted(seed=i, max_tokens=80, json=schema) for i in range(6)]
    expected = [o.token_ids for (o,) in ask(llm, ["numbers: "] * 6, *params)]
    options = {**SMALL, "block_size": 16, "num_gpu_blocks_override": 12, "max_model_len": 128}
    with LLM(**options, max_num_batched_tokens=19, enable_prefix_caching=False) as crowded:
        found = [o.token_ids for (o,) in ask(crowded, ["numbers: "] * 6, *params)]
        assert crowded.llm_engine.statistics().scheduler.num_preemptions > 0
    assert found == expected


def test_what_request_allows_and_its_grammar_forbids_ends_it_alone(llm):
    with pytest.raises(GenerationError, match="no token satisfies all constraints"):
        ask(llm, ["x"], wanted(regex="[0-9]+", options={"allowed_token_ids": [0]}))


def test_grammar_that_takes_too_many_steps_ends_its_own_request(llm):
    with pytest.raises(GenerationError, match="more steps than the limit"):
        ask(llm, ["x"], wanted(grammar='start: ("a"{1000}){1000}'))
    ((output,),) = ask(llm, ["x"], wanted(regex="[0-9]{2}"))
    assert re.fullmatch("[0-9]{2}", output.text)


def test_one_of_thousands_of_texts_is_chosen(llm):
    texts = [f"{number:05}" for number in range(5_000)]
    ((output,),) = ask(llm, ["x"], wanted(choice=texts))
    assert output.text in texts


def test_a_bad_grammar_is_its_own_requests_error(llm):
    with pytest.raises(GrammarError):
        ask(llm, ["x"], wanted(regex="("))
    ((output,),) = ask(llm, ["x"], wanted(regex="[0-9]{2}"))
    assert re.fullmatch("[0-9]{2}", output.text)


def test_metrics_count_grammars_and_their_work():
    with LLM(**SMALL, num_gpu_blocks_override=64, disable_log_stats=False) as counted:

        def value(name, **labels):
            (found,) = (
                metric
                for metric in counted.get_metrics()
                if metric.name == f"trouper:grammar_{name}"
                and labels.items() <= metric.labels.items()
            )
            return getattr(found, "value", None) or getattr(found, "count", 0)

        for i in range(3):  # one by one: several that meet would each compile it
            ask(counted, ["x"], wanted(seed=i, regex="[0-9]{4}"))
        with pytest.raises(GrammarError):
            ask(counted, ["x"], wanted(json={"not": {}}))
        with pytest.raises(GenerationError):
            ask(counted, ["x"], wanted(regex="[0-9]+", options={"allowed_token_ids": [0]}))
        assert (value("cache_queries"), value("cache_hits"), value("compile_seconds")) == (5, 2, 2)
        assert value("refusals", reason="invalid_schema") == 1
        assert value("failures", reason="no_valid_token") == 1
        assert value("tokens") >= 3 * 3
        assert 0 < value("redrawn_tokens") <= value("tokens")
        assert value("mask_seconds") >= 3
