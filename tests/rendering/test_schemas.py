"""Schemas as pydantic and zod write them compile, and what comes out matches the schema that was given."""

import json
import re
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Network
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import jsonschema_rs
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter

from trouper import LLM, SamplingParams, StructuredOutputsParams
from trouper.actors.rendering.grammar.grammars import Grammars
from trouper.actors.rendering.grammar.schemas import flattened, rewritten
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.model import DEMO_MODEL
from trouper.errors import GrammarError


class Colour(Enum):
    RED = "red"
    ONE = 1


def limited(kind, **limits):
    return pydantic.create_model("Limited", v=(kind, Field(**limits)))


PYDANTIC = [
    Path, pydantic.FilePath, pydantic.DirectoryPath, pydantic.SecretStr, bytes, pydantic.Base64Str, pydantic.IPvAnyAddress,
    pydantic.IPvAnyNetwork, pydantic.IPvAnyInterface, IPv4Address, IPv6Address, IPv6Network, IPv4Interface, datetime, date, time,
    timedelta, pydantic.PastDate, Decimal, UUID, pydantic.AnyUrl, pydantic.PostgresDsn, pydantic.Json, re.Pattern, Colour,
    Literal["a", 1, None, True], str | None, int | str | None, dict[str, int], dict[int, str], dict[Literal["a", "b"], int],
    dict[Colour, int], dict[UUID, int], dict[date, str], tuple[int, str], tuple[int, ...], pydantic.FiniteFloat,
    pydantic.PositiveFloat, bool, Any, pydantic.ByteSize, dict[pydantic.constr(pattern="^x"), int],
    dict[pydantic.constr(min_length=2, max_length=5), int], limited(Decimal, max_digits=6, decimal_places=2),
    limited(Decimal, max_digits=5), limited(Decimal, decimal_places=2), limited(Decimal, ge=0, le=10),
    limited(int, ge=-(2**63), le=2**63 - 1), limited(int, ge=0, le=2**64 - 1), limited(float, ge=-1.7976931348623157e308, le=1.7976931348623157e308),
    limited(float, gt=0, lt=1), limited(int, multiple_of=5), limited(str, min_length=1, max_length=8, pattern="^[a-z]+$"),
]  # fmt: skip
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
OBJECT = {"type": "object"}
ZOD = {
    "record": {**OBJECT, "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    "record of an enum": {**OBJECT, "propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": {"type": "number"}, "required": ["a", "b"]},
    "record of a pattern": {**OBJECT, "propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "integer"}},
    "record of a constant": {**OBJECT, "propertyNames": {"const": "k"}, "additionalProperties": {"type": "integer"}},
    "int": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
    "int64": {"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807},
    "uint64": {"type": "integer", "minimum": 0, "maximum": 18446744073709551615},
    "float32": {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    "float64": {"type": "number", "exclusiveMinimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
    "email": {"type": "string", "format": "email", "pattern": EMAIL},
    "base64": {"type": "string", "format": "base64", "contentEncoding": "base64", "pattern": "^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$"},
    "e164": {"type": "string", "format": "e164", "pattern": r"^\+[1-9]\d{6,14}$"},
    "cuid": {"type": "string", "format": "cuid", "pattern": r"^[cC][^\s-]{8,}$"},
    "password": {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d).{8,12}$"},
    "idle": {**OBJECT, "properties": {"a": {"type": "array", "items": {}, "uniqueItems": False}}, "dependentRequired": {}, "unevaluatedProperties": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def grammars():
    return Grammars(Tokenizer.load(DEMO_MODEL), 4096, (0, 2))


def compile_with(grammars, **kinds):
    wanted = StructuredOutputsParams(**kinds)
    return grammars.compile(SamplingParams(structured_outputs=wanted))


@pytest.mark.parametrize("kind", PYDANTIC, ids=str)
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_the_types_of_pydantic_compile(grammars, kind, mode):
    schema = TypeAdapter(kind).json_schema(mode=mode)
    definitions = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
    whole = {**OBJECT, "properties": {"v": schema}, "required": ["v"], **definitions}
    assert compile_with(grammars, json=whole)


@pytest.mark.parametrize("name", ZOD)
def test_the_schemas_of_zod_compile(grammars, name):
    assert compile_with(grammars, json=ZOD[name])
    assert compile_with(grammars, grammar=f"start: %json {json.dumps(ZOD[name])}")


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}}, {"type": "array", "uniqueItems": True}, {"type": "string", "pattern": "^(?!admin).+$"},
        {**OBJECT, "propertyNames": {"not": {"const": "x"}}}, {**OBJECT, "propertyNames": {"pattern": "a", "maxLength": 3}},
        {"type": "array", "contains": {}}, {**OBJECT, "dependentRequired": {"a": ["b"]}},
    ],
)  # fmt: skip
def test_what_cannot_be_said_in_other_words_is_refused(grammars, schema):
    with pytest.raises(GrammarError) as caught:
        compile_with(grammars, json=schema)
    assert caught.value.code == "invalid_schema"


def test_data_and_names_of_caller_are_not_keywords():
    names = {
        "format": {"type": "string"},
        "propertyNames": {},
        "pattern": {"const": {"format": "x"}},
    }
    schema = {
        **OBJECT,
        "properties": names,
        "examples": [{"format": "x"}],
        "enum": [{"format": "x"}],
    }
    assert rewritten(schema) == schema


HEAD = r"^(?!^[-+.]*$)[+-]?0*"
DECIMALS = [  # pydantic's patterns: without limits, with places, with digits, with both
    HEAD + r"\d*\.?\d*$",
    HEAD + r"\d*\.?\d{0,2}0*$",
    HEAD + r"(?:\d{0,4}|(?=[\d.]{1,5}0*$)\d*\.\d*0*$)",
    HEAD + r"(?:\d{0,2}|(?=[\d.]{1,5}0*$)\d{0,2}\.\d{0,2}0*$)",
    HEAD + r"(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,2}0*$)",
]


@pytest.mark.parametrize("theirs", DECIMALS)
@settings(max_examples=200)
@given(text=st.text(st.sampled_from("+-.00123"), max_size=9))
def test_decimals_match_as_pydantic_has_them(theirs, text):
    ours = rewritten({"type": "string", "pattern": theirs})["pattern"]
    assert "(?!" not in ours
    assert "(?=" not in ours
    is_theirs = re.search(theirs, text) is not None
    is_ours = re.search(ours, text) is not None
    assert is_theirs or not is_ours
    if "(?:" not in theirs:  # else theirs matches the beginning of longer texts
        assert is_ours == is_theirs
    elif is_theirs and re.fullmatch(theirs.replace("|", "$|"), text):
        assert is_ours


@pytest.mark.parametrize("theirs", DECIMALS)
def test_decimals_compile(grammars, theirs):
    assert compile_with(grammars, json={"type": "string", "pattern": theirs})


@given(st.text(st.sampled_from("a.'+-_@Zb0"), max_size=12))
def test_addresses_match_as_zod_has_them(text):
    ours = rewritten({"pattern": EMAIL})["pattern"]
    assert (re.search(ours, text) is None) == (re.search(EMAIL, text) is None)


@given(
    st.integers(0, 3), st.integers(0, 2), st.integers(0, 3), st.integers(0, 2), st.integers(0, 30)
)
def test_counts_of_counts_are_one_count(least, more, outer, further, length):
    pattern = f"(x{{{least},{least + more}}}){{{outer},{outer + further}}}"
    text = "x" * length
    assert (re.fullmatch(flattened(pattern), text) is None) == (re.fullmatch(pattern, text) is None)


def test_bounds_are_dropped_or_narrowed_and_never_widened():
    for name, schema in ZOD.items():
        ours = rewritten(schema)
        for bound, value in schema.items():
            if bound in ("minimum", "exclusiveMinimum") and bound in ours:
                assert ours[bound] >= value, name
            if bound == "maximum" and bound in ours:
                assert ours[bound] <= value, name
    assert "maximum" not in rewritten(ZOD["float64"])
    assert rewritten({"type": "integer", "minimum": 2**63}) == {"type": "integer", "minimum": 2**63}


# Through an engine: every whole answer matches the schema as it was given


@pytest.fixture(scope="module")
def llm():
    options = {"max_model_len": 256, "max_num_seqs": 32, "dtype": "float32"}
    with LLM(**options, num_gpu_blocks_override=256) as llm:
        yield llm


DECLARED = [
    {**OBJECT, "properties": {"a1": {"type": "integer"}, "b": {"const": 1}}, "patternProperties": {"^a1$": {"maximum": 9}}, "additionalProperties": False},
    {**OBJECT, "properties": {"a": {"type": "boolean"}, "b": {"type": "integer"}}, "patternProperties": {"^[ab]$": {}}, "additionalProperties": False},
    {**OBJECT, "properties": {"a": {"type": "integer"}}, "patternProperties": {"^(a|b)$": {"type": "integer"}}, "additionalProperties": False},
]  # fmt: skip
GIVEN = [*(ZOD[name] for name in ("record of an enum", "record of a pattern", "record of a constant", "int64", "password", "idle")), *DECLARED]  # fmt: skip


@pytest.mark.parametrize("schema", GIVEN, ids=lambda schema: json.dumps(schema)[:60])
def test_whole_answers_match_schema_as_it_was_given(llm, schema):
    wanted = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    params = SamplingParams(n=16, seed=5, max_tokens=60, structured_outputs=wanted)
    (found,) = llm.generate(["{"], params, use_tqdm=False)
    whole = [json.loads(o.text) for o in found.outputs if o.finish_reason == "stop"]
    assert whole
    validator = jsonschema_rs.validator_for(schema)
    assert all(map(validator.is_valid, whole)), whole


def test_counts_of_counts_run_to_their_end(llm):
    wanted = StructuredOutputsParams(regex="((x{1,20}){1,20}){1,20}y")
    params = SamplingParams(n=4, seed=1, max_tokens=200, logit_bias={90: 20.0}, structured_outputs=wanted)  # fmt: skip
    (found,) = llm.generate(["x"], params, use_tqdm=False)
    assert all(o.finish_reason == "length" and set(o.text) == {"x"} for o in found.outputs)
