"""Budgets of reasoning through a whole engine: the end is forced at its token, and a grammar begins behind it."""

import re

import pytest

from trouper import LLM, SamplingParams, StructuredOutputsParams
from trouper.errors import TrouperValidationError

START, END = "<think>", "</think>"
SMALL = {
    "max_model_len": 256, "max_num_seqs": 8, "dtype": "float32",
    "reasoning_config": {"reasoning_start_str": START, "reasoning_end_str": END},
}  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL, num_gpu_blocks_override=256) as llm:
        yield llm


def ask(llm, prompts, *params):
    return [out.outputs[0] for out in llm.generate(prompts, list(params), use_tqdm=False)]


def budgeted(budget, seed=0, **options):
    options = {"max_tokens": 40, "ignore_eos": True, **options}
    return SamplingParams(thinking_token_budget=budget, seed=seed, **options)


def test_the_end_comes_behind_so_many_tokens(llm):
    end = llm.get_tokenizer().encode(END, add_special_tokens=False)
    outputs = ask(llm, [f"x {START}\n"] * 6, *(budgeted(i, seed=i) for i in range(6)))
    for budget, output in enumerate(outputs):
        assert list(output.token_ids[budget : budget + len(end)]) == end


def test_without_reasoning_a_budget_changes_nothing(llm):
    (free,) = ask(llm, ["x"], budgeted(None))
    (found,) = ask(llm, ["x"], budgeted(0))
    assert found.token_ids == free.token_ids
    (closed,) = ask(llm, [f"{START}{END}"], budgeted(0))
    assert END not in closed.text


def test_a_grammar_begins_behind_the_reasoning(llm):
    digits = StructuredOutputsParams(regex="[0-9]{3}")
    params = [budgeted(5, seed=i, structured_outputs=digits, ignore_eos=False) for i in range(4)]
    for output in ask(llm, [START] * 4, *params):
        assert output.finish_reason == "stop"
        assert re.fullmatch(r"(?s).+</think>[0-9]{3}", output.text)


def test_grammar_holds_from_first_token_where_model_does_not_reason(llm):
    digits = StructuredOutputsParams(regex="[0-9]{3}")
    for output in ask(llm, ["x"] * 4, *(budgeted(5, seed=i, structured_outputs=digits) for i in range(4))):  # fmt: skip
        assert re.fullmatch(r"(?s)[0-9]{3}|<think>.*</think>[0-9]{3}", output.text)


def test_same_tokens_when_preempted_and_in_any_chunks(llm):
    digits = StructuredOutputsParams(regex="[0-9]{60}")
    params = [
        budgeted(20 + i, seed=i, max_tokens=80, structured_outputs=digits if i % 2 else None)
        for i in range(6)
    ]
    prompts = ["numbers: " + START] * 6
    expected = [output.token_ids for output in ask(llm, prompts, *params)]
    options = {**SMALL, "block_size": 16, "num_gpu_blocks_override": 12, "max_model_len": 128}
    with LLM(**options, max_num_batched_tokens=19, enable_prefix_caching=False) as crowded:
        found = [output.token_ids for output in ask(crowded, prompts, *params)]
        assert crowded.llm_engine.statistics().scheduler.num_preemptions > 0
    assert found == expected


def test_a_budget_needs_to_know_the_marks():
    with LLM(max_model_len=64, max_num_seqs=1, num_gpu_blocks_override=16) as llm:
        with pytest.raises(TrouperValidationError, match="reasoning_config"):
            ask(llm, ["x"], budgeted(3))


@pytest.mark.parametrize(
    "config", [{}, {"reasoning_start_str": "<a>"}, {"reasoning_start_str": "", "reasoning_end_str": "b"}]
)  # fmt: skip
def test_marks_that_are_not_whole_are_refused(config):
    with pytest.raises(TrouperValidationError, match="reasoning_config"):
        LLM(reasoning_config=config)


def test_drafts_change_neither_reasoning_nor_what_comes_behind_it(llm):
    digits = StructuredOutputsParams(regex="([0-9]{3},){4}")
    params = [
        budgeted(12, seed=i, structured_outputs=grammar, ignore_eos=False)
        for i, grammar in enumerate((digits, None, digits, None))
    ]
    prompts = [f"def f(x):\n    return x\n\ndef f({START}"] * 4
    wanted = [(out.token_ids, out.finish_reason) for out in ask(llm, prompts, *params)]
    with LLM(
        **SMALL, num_gpu_blocks_override=256, speculative_config={"method": "suffix"}
    ) as other:
        assert [
            (out.token_ids, out.finish_reason) for out in ask(other, prompts, *params)
        ] == wanted
        assert other.llm_engine.statistics().scheduler.num_accepted_tokens > 0
