"""Text that spells a special token stays text, in every kind of grammar."""

import json

import pytest

from trouper import LLM, SamplingParams, StructuredOutputsParams
from trouper.actors.rendering.grammar.grammars import compiler_rules, with_token_ids
from trouper.errors import GrammarError

END = "<|im_end|>"  # of the bundled model, where it ends an answer
RULES = {
    "added_tokens": [
        {"id": 5, "content": "<s>", "special": True},
        {"id": 1, "content": "  ", "special": False},
        {"id": 6, "content": "<think>", "special": False},
    ],
    "post_processor": {"type": "TemplateProcessing"},
}


@pytest.fixture(scope="module")
def llm():
    options = {"max_model_len": 256, "max_num_seqs": 16, "dtype": "float32"}
    with LLM(**options, num_gpu_blocks_override=64) as llm:
        yield llm


def ask(llm, n=3, **kinds):
    wanted = StructuredOutputsParams(**kinds)
    params = SamplingParams(n=n, seed=1, max_tokens=80, structured_outputs=wanted)
    (found,) = llm.generate(["x"], params, use_tqdm=False)
    return {output.text for output in found.outputs}


KEYED = {"type": "object", "properties": {END: {"const": 1}}, "required": [END], "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "texts"),
    [
        ({"json": {"const": f"{END}!"}}, {f'"{END}!"'}),
        ({"json": {"enum": [END]}}, {f'"{END}"'}),
        ({"choice": [f"a{END}"]}, {f"a{END}"}),
        ({"regex": r"<\|im_end\|><\|im_start\|>"}, {f"{END}<|im_start|>"}),
        ({"grammar": f'start: "{END}" "b" // {END}'}, {f"{END}b"}),
        ({"grammar": f'root ::= "{END}" "b"'}, {f"{END}b"}),
        ({"json": KEYED, "structured": True}, {1}),
    ],
)
def test_fixed_text_that_spells_special_token_is_text(llm, kinds, texts):
    if kinds.pop("structured", False):
        assert {json.loads(text)[END] for text in ask(llm, **kinds)} == texts
    else:
        assert ask(llm, **kinds) == texts


def test_a_grammar_in_lark_may_name_a_token(llm):
    assert ask(llm, grammar=f'start: "a" ({END} "b")?') <= {"a", "ab"}
    with pytest.raises(GrammarError):
        ask(llm, grammar='start: "a" <|no_such|>')


@pytest.mark.parametrize(
    "vocab", [{"<s>": 5, "  ": 1, "a": 2}, [["a", 0.0], ["  ", -1.0], ["<s>", 0.0]]]
)
def test_added_tokens_keep_ids_and_unreachable_names(vocab):
    found = json.loads(
        compiler_rules(json.dumps({**RULES, "model": {"vocab": vocab, "unk_token": "<s>"}}))
    )
    names = {token["id"]: token["content"] for token in found["added_tokens"]}
    assert names.keys() == {5, 6}  # the run of blanks is text
    assert all("\U0010ffff" in name for name in names.values())
    assert all(token["special"] for token in found["added_tokens"])
    kept = (
        list(found["model"]["vocab"])
        if isinstance(vocab, dict)
        else [p for p, _ in found["model"]["vocab"]]
    )
    assert len(kept) == 3
    assert "<s>" not in kept
    assert names[5] in kept
    assert found["model"]["unk_token"] == names[5]


@pytest.mark.parametrize(
    ("lark", "expected"),
    [
        ("start: <s> x", "start: <[5]> x"), ('start: "<s>" /<s>/ <s>', 'start: "<s>" /<s>/ <[5]>'),
        ('start: "\\"<s>"', 'start: "\\"<s>"'), ("start: a // <s>\n<s>", "start: a // <s>\n<[5]>"),
        ("start: <t> <[3]>", "start: <t> <[3]>"),
    ],
)  # fmt: skip
def test_names_of_tokens_become_ids_outside_of_texts(lark, expected):
    assert with_token_ids(lark, {"<s>": 5}) == expected
