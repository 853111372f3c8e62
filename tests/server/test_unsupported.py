"""Fields that are known and not built are refused by name; those that ask for nothing are allowed."""

import pytest

from trouper.frontends.server import unsupported
from trouper.frontends.server.errors import describe
from trouper.frontends.server.openai.requests import ChatRequest, CompletionRequest

NEVER_IGNORED = {
    "grammar", "json_schema", "best_of", "early_stopping", "logits_processors",
}  # fmt: skip


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_what_would_change_the_answer_is_in_the_table_and_no_field_of_the_request(kind):
    assert kind.UNSUPPORTED.keys() >= NEVER_IGNORED
    assert not kind.UNSUPPORTED.keys() & set(kind.__struct_encode_fields__)


@pytest.mark.parametrize("name", sorted(unsupported.CHAT))
def test_a_refusal_is_a_400_that_names_the_field_and_what_to_use(name):
    with pytest.raises(unsupported.UnsupportedFeatureError) as raised:
        unsupported.check_supported({"model": "x", name: {"a": 1}}, unsupported.CHAT)
    problem = describe(raised.value)
    assert (problem.status, problem.code, problem.param) == (400, "not_supported", name)
    assert problem.message == f"{name} is not supported: {unsupported.CHAT[name]}"


def test_the_first_field_in_the_body_is_named():
    with pytest.raises(unsupported.UnsupportedFeatureError) as raised:
        unsupported.check_supported({"grammar": "x", "audio": {"a": 1}}, unsupported.CHAT)
    assert raised.value.parameter == "grammar"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("grammar", "best_of") for value in (None, False, "", [], {})),
        ("best_of", 1), ("modalities", ["text"]), ("function_call", "none"),
        ("early_stopping", False), ("thinking_token_budget", -1),
    ],
)  # fmt: skip
def test_a_value_that_asks_for_nothing_is_allowed(name, value):
    unsupported.check_supported({name: value}, unsupported.CHAT)


def test_texts_that_are_not_to_be_padded_are_not():
    unsupported.check_supported({"padding": "do_not_pad"}, unsupported.POOLING)
