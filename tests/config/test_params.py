"""SamplingParams: defaults, ranges, and errors that name the parameter.  Also the outputs' merging."""

import warnings

import numpy as np
import pytest

from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.outputs import CompletionOutput, RequestError, RequestOutput
from trouper.params import (
    MAX_STRING_CHARS,
    MAX_STRINGS,
    MAX_STRINGS_CHARS,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)

NAN, INF = float("nan"), float("inf")
DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "stream_interval": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "skip_reading_prefix_cache": False,
    "extra_args": None,
    "repetition_detection": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
}
LATER = {  # accepted at their defaults only
    "flat_logprobs": False,
    "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None,
    "trace_decode_token_ids": None,
    "routed_experts_prompt_start": 0,
    "watermarking": None,
}
LEGAL = {
    "n": [1, 16_384],
    "presence_penalty": [-2, 2.0],
    "frequency_penalty": [-2.0, 2],
    "repetition_penalty": [0.001, 50.0],
    "temperature": [0, 1e-6, 0.01, 2],
    "top_p": [1e-9, 1],
    "top_k": [-1, 0, 1, 2**63 - 1],
    "min_p": [0, 1],
    "seed": [-(2**63), 0, 2**63 - 1],
    "stop": [["a", "b"], []],
    "stop_token_ids": [[1, 2], []],
    "max_tokens": [1, 10**9, None],
    "min_tokens": [0, 16],
    "logprobs": [-1, 0, 20],
    "prompt_logprobs": [-1, 0, 20],
    "logprob_token_ids": [[1], list(range(128))],
    "stream_interval": [1, None],
    "logit_bias": [{1: 2.0}, {}],
    "allowed_token_ids": [[0], None],
    "bad_words": [["x y"]],
    "extra_args": [{"a": 1}],
    "repetition_detection": [RepetitionDetectionParams(8, 2, 3), RepetitionDetectionParams(), None],
    "structured_outputs": [StructuredOutputsParams(regex="a"), None],
    "thinking_token_budget": [0, 5, None],
}
ILLEGAL = {
    "n": [0, 16_385, 1.0, True, "1", None],
    "presence_penalty": [-2.1, 2.1, NAN, "0"],
    "frequency_penalty": [-2.1, 2.1, INF, True],
    "repetition_penalty": [0, -1, NAN, INF],
    "temperature": [-0.1, 2.1, NAN, INF, "hot", None],
    "top_p": [0, -0.1, 1.1, NAN],
    "top_k": [-2, 2**63, 1.5, None],
    "min_p": [-0.1, 1.1, NAN],
    "seed": [2**63, -(2**63) - 1, 1.0, "1"],
    "stop": ["", ["a", ""], [1], 5],
    "stop_token_ids": [["1"], [True], [[1]], 5],
    "ignore_eos": ["no", 1],
    "max_tokens": [0, -1, 1.0, True],
    "min_tokens": [-1, 17, None],
    "logprobs": [-2, "all"],
    "prompt_logprobs": [-2, 1.5],
    "logprob_token_ids": [list(range(129)), ["a"]],
    "detokenize": ["no"],
    "skip_special_tokens": [None],
    "spaces_between_special_tokens": [0],
    "include_stop_str_in_output": ["yes"],
    "output_kind": ["delta", 3],
    "stream_interval": [0, 1.5],
    "logit_bias": [
        {"x": 1.0},
        {"1_0": 1.0},
        {"+5": 1.0},
        {"05": 1.0},
        {1.5: 1.0},
        {1: NAN},
        {1: "1"},
        {1: True},
        [1],
    ],
    "allowed_token_ids": [[], [1.0], 3],
    "bad_words": [[""], [3], "word"],
    "skip_reading_prefix_cache": ["maybe"],
    "extra_args": [[1]],
    "repetition_detection": [{"min_count": 2}],
    "structured_outputs": [{"regex": "a"}],
    "thinking_token_budget": [-2, 1.5, "3"],
}


def cases(table):
    return [(name, value) for name, values in table.items() for value in values]


def test_parameters_have_names():
    # The order of the fields says nothing, so a value without a name would set any of them.
    with pytest.raises(TypeError):
        SamplingParams(1, 0.5)


def test_every_field_has_its_default():
    params = SamplingParams()
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    assert fields == DEFAULTS | LATER


@pytest.mark.parametrize("name", LATER)
def test_what_is_not_implemented_is_accepted_at_its_default_only(name):
    SamplingParams(**{name: LATER[name]})
    with pytest.raises(UnsupportedFeatureError, match=name):
        SamplingParams(**{name: 7})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count"),
        ({"min_count": 1.5}, "min_count"),
    ],
)
def test_repetition_detection_has_ranges(given, name):
    with pytest.raises(TrouperValidationError, match=rf"parameter={name}\b"):
        RepetitionDetectionParams(**given)


def test_every_field_has_illegal_values_in_this_table():
    assert ILLEGAL.keys() == DEFAULTS.keys()


@pytest.mark.parametrize(("name", "value"), cases(LEGAL))
def test_the_edges_of_a_range_are_legal(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), cases(ILLEGAL))
def test_an_illegal_value_names_its_parameter(name, value):
    with pytest.raises(TrouperValidationError, match=rf"parameter={name}\b") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "name", "kept"),
    [
        ({"stop": "end"}, "stop", ["end"]),
        ({"stop": ("a", "b")}, "stop", ["a", "b"]),
        ({"stop_token_ids": [3, 1, 3]}, "stop_token_ids", [3, 1]),
        ({"bad_words": ["b", "a", "b"]}, "bad_words", ["b", "a"]),
        ({"seed": -1}, "seed", None),
        ({"logprobs": True}, "logprobs", 1),
        ({"prompt_logprobs": True}, "prompt_logprobs", 1),
        ({"logit_bias": {"7": 1000, 8: -1000}}, "logit_bias", {7: 100.0, 8: -100.0}),
        ({"prompt_logprobs": 0}, "skip_reading_prefix_cache", True),
        ({"prompt_logprobs": 0, "skip_reading_prefix_cache": False}, "skip_reading_prefix_cache", False),
        ({"output_kind": 1}, "output_kind", RequestOutputKind.DELTA),
        ({"thinking_token_budget": -1}, "thinking_token_budget", None),
    ],
)  # fmt: skip
def test_values_are_normalised(given, name, kept):
    assert getattr(SamplingParams(**given), name) == kept


def test_temperature_too_small_is_raised_with_warning():
    with pytest.warns(UserWarning, match=r"temperature 0.001 is raised to 0.01"):
        assert SamplingParams(temperature=0.001).temperature == 0.01


def test_greedy_ignores_the_filters_and_allows_one_completion():
    params = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.5)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    with pytest.raises(TrouperValidationError, match=r"n must be 1 \(parameter=n, value=2\)"):
        SamplingParams(temperature=0, n=2)


def test_min_tokens_may_not_exceed_max_tokens():
    SamplingParams(min_tokens=20, max_tokens=None)
    with pytest.raises(TrouperValidationError, match=r"≤ max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_stop_strings_need_text():
    with pytest.raises(TrouperValidationError, match="stop strings need detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_logprob_token_ids_fix_the_number_of_logprobs():
    SamplingParams(logprobs=2, logprob_token_ids=[4, 5])
    with pytest.raises(TrouperValidationError, match="must equal the 2 logprob_token_ids"):
        SamplingParams(logprobs=3, logprob_token_ids=[4, 5])


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"temperature": 0, "seed": 3}, SamplingType.GREEDY),
        ({"temperature": 1e-6}, SamplingType.GREEDY),
        ({"seed": 3}, SamplingType.RANDOM_SEED),
        ({}, SamplingType.RANDOM),
    ],
)
def test_sampling_type(given, kind):
    assert SamplingParams(**given).sampling_type is kind


def test_from_optional_takes_none_as_the_default():
    params = SamplingParams.from_optional(n=None, temperature=None, top_k=4, logit_bias={"3": 1})
    assert params == SamplingParams(top_k=4, logit_bias={3: 1.0})


def test_a_clone_is_independent():
    params = SamplingParams(stop=["a"], logit_bias={1: 1.0}, extra_args={"deep": [1]}, logprobs=2)
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    clone.logit_bias[2] = 2.0
    clone.extra_args["deep"].append(2)
    assert (params.stop, params.logit_bias) == (["a"], {1: 1.0})
    assert params.extra_args == {"deep": [1]}


def test_clone_of_raised_temperature_does_not_warn_again():
    with pytest.warns(UserWarning, match="is raised"):
        params = SamplingParams(temperature=0.001)
    with warnings.catch_warnings(action="error"):
        assert params.clone() == params


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"stop_token_ids": [10]}, "stop_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"logprob_token_ids": [10]}, "logprob_token_ids"),
        ({"logit_bias": {10: 1.0}}, "logit_bias"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
    ],
)
def test_what_depends_on_the_model_is_verified_later(given, name):
    with pytest.raises(TrouperValidationError, match=rf"parameter={name}\b"):
        SamplingParams(**given).verify(vocab_size=10, max_logprobs=5)


def test_max_logprobs_of_minus_one_allows_whole_vocabulary():
    SamplingParams(logprobs=-1, prompt_logprobs=10).verify(vocab_size=10, max_logprobs=-1)


def output(*, text, finished=False, error=None):
    completion = CompletionOutput(0, text, [len(text)], finish_reason="stop" if finished else None)
    return RequestOutput("id", "p", [1], None, [completion], finished, error=error)


def test_deltas_add_up():
    total = output(text="ab")
    total.add(output(text="cde", finished=True), aggregate=True)
    assert (total.outputs[0].text, total.outputs[0].token_ids) == ("abcde", [2, 3])
    assert total.finished
    assert total.outputs[0].finish_reason == "stop"


def test_cumulative_outputs_replace():
    total = output(text="ab")
    total.add(output(text="abcde"), aggregate=False)
    assert (total.outputs[0].text, total.finished) == ("abcde", False)


def test_a_late_error_is_kept():
    total = output(text="ab")
    total.add(output(text="", finished=True, error=RequestError("aborted", "gone")), aggregate=True)
    assert total.error == RequestError("aborted", "gone")


def test_numbers_of_numpy_become_pythons():
    params = SamplingParams(
        n=np.int64(2),
        max_tokens=np.int32(3),
        temperature=np.float32(0.5),
        top_p=np.float64(0.5),
        min_p=1,
        seed=np.uint8(7),
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=[np.int64(3)],
        logit_bias={np.int64(4): np.float32(0.5)},
    )
    for name in ("n", "max_tokens", "seed", "min_p"):
        assert type(getattr(params, name)) is int
    for name in ("temperature", "top_p"):
        assert type(getattr(params, name)) is float
    assert (params.n, params.max_tokens, params.seed, params.temperature) == (2, 3, 7, 0.5)
    assert params.stop_token_ids == [1, 2]
    assert [type(token) for token in params.stop_token_ids] == [int, int]
    assert params.allowed_token_ids == [3]
    assert params.logit_bias == {4: 0.5}
    for wrong in (np.bool_(True), np.float32("nan"), np.array([1, 2]), "1"):
        with pytest.raises(TrouperValidationError, match="parameter=temperature"):
            SamplingParams(temperature=wrong)
    with pytest.raises(TrouperValidationError, match="parameter=max_tokens"):
        SamplingParams(max_tokens=np.float32(2))


class Unseen(list):
    """A list that fails when its items are looked at."""

    def __iter__(self):
        raise AssertionError("looked at before it was counted")


@pytest.mark.parametrize(("name", "limit"), MAX_STRINGS.items())
def test_list_of_strings_is_counted_before_it_is_looked_at(name, limit):
    with pytest.raises(
        TrouperValidationError, match=f"must have at most {limit} strings"
    ) as caught:
        SamplingParams(**{name: Unseen(["x"] * (limit + 1))})
    assert (caught.value.parameter, caught.value.value) == (name, limit + 1)


@pytest.mark.parametrize("name", MAX_STRINGS)
def test_each_string_of_a_list_has_a_length(name):
    longest = "x" * MAX_STRING_CHARS
    assert getattr(SamplingParams(**{name: [longest]}), name) == [longest]
    with pytest.raises(TrouperValidationError, match=f"{MAX_STRING_CHARS} characters") as caught:
        SamplingParams(**{name: ["ok", longest + "x"]})
    assert caught.value.parameter == name
    assert len(str(caught.value)) < 300


def test_all_strings_of_list_have_length_together():
    fitting = [f"{i:0256}" for i in range(MAX_STRINGS_CHARS // 256)]
    assert SamplingParams(bad_words=fitting).bad_words == fitting
    with pytest.raises(TrouperValidationError, match="characters in total") as caught:
        SamplingParams(bad_words=[*fitting, "x"])
    assert (caught.value.parameter, caught.value.value) == ("bad_words", MAX_STRINGS_CHARS + 1)


@pytest.mark.parametrize(
    "params", [{"temperature": 10**400}, {"logit_bias": {1: -(10**400)}}], ids=list
)
def test_integer_that_no_float_holds_is_not_finite(params):
    with pytest.raises(TrouperValidationError, match="finite"):
        SamplingParams(**params)
