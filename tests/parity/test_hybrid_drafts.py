"""Drafts of models with recurrent states: the bits of an engine without drafts, whatever is accepted, rejected or interrupted."""

import json
import shutil

import pytest

from trouper import LLM
from trouper.actors.executor.runners.cpu.draft_model import DraftModel
from trouper.actors.scheduling.state.state_snapshots import StateSnapshots
from trouper.config.model import DEMO_MODEL
from trouper.inputs import TokensPrompt

from .test_architectures import RECURRENT, tiny_model
from .test_speculation import PARAMS, PROMPTS, needs_grammars, run, structured

SLOW = ("qwen3-5", "granite-4-h")
CASES = ("lfm2", *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW))
BASE = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 16, "max_num_seqs": 2}
SUFFIX = {"method": "suffix"}
NAMES = ("seeded", "logprobs", "stop", "several")


def write_hybrid(case, folder):
    """Write a tiny model with the demo model's tokenizer. `case` is a name in `RECURRENT`, or a family and its fields."""
    name, fields = RECURRENT[case] if isinstance(case, str) else case
    vocab_size = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    tiny_model(name, fields | {"vocab_size": vocab_size}, folder)
    for file in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module", params=CASES)
def hybrid(request, tmp_path_factory):
    """The folder of a tiny hybrid, and its answers without drafts."""
    folder = str(write_hybrid(request.param, tmp_path_factory.mktemp(request.param)))
    with LLM(folder, **BASE) as llm:
        return folder, run(llm, (*NAMES, "penalties"))


def check(llm, wanted, names):
    """The second time, drafts come from the first answers and are right."""
    for _ in range(2):
        assert run(llm, names) == {name: wanted[name] for name in names}
    stats = llm.llm_engine.statistics().scheduler
    assert 100 < stats.num_accepted_tokens < stats.num_draft_tokens
    return stats


def test_drafts_change_no_bit_of_a_hybrid(hybrid):
    folder, wanted = hybrid
    with LLM(folder, **BASE, speculative_config=SUFFIX) as llm:
        check(llm, wanted, NAMES)


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 96, "num_gpu_blocks_override": 7, "block_size": 16},  # preemptions
        pytest.param({"max_num_batched_tokens": 8, "enforce_eager": True}, marks=pytest.mark.slow),
    ],
    ids=["preempted", "eager"],
)
def test_schedule_of_hybrid_does_not_matter(options, hybrid):
    folder, wanted = hybrid
    with LLM(folder, **BASE | options, speculative_config=SUFFIX) as llm:
        stats = check(llm, wanted, ("seeded", "penalties"))
    assert (stats.num_preemptions > 0) == ("max_model_len" in options)


@needs_grammars
@pytest.mark.slow
def test_drafts_of_grammar_move_hybrid_states(hybrid):
    edits = ({}, {"temperature": 0})
    with LLM(hybrid[0], **BASE) as llm:
        wanted = structured(llm, ("schema", "list"), edits)
    with LLM(hybrid[0], **BASE, speculative_config=SUFFIX) as llm:
        assert structured(llm, ("schema", "list"), edits) == wanted
        assert llm.llm_engine.statistics().scheduler.num_accepted_tokens > 20


@pytest.mark.slow
def test_draft_model_changes_no_bit_of_a_hybrid(hybrid, monkeypatch):
    monkeypatch.setattr(DraftModel, "cost", 0.0)
    folder, wanted = hybrid
    drafting = {"method": "draft_model", "model": str(DEMO_MODEL), "num_speculative_tokens": 4}
    with LLM(folder, **BASE, speculative_config=drafting) as llm:
        assert run(llm, ("seeded",)) == {"seeded": wanted["seeded"]}
        assert llm.llm_engine.statistics().scheduler.num_draft_tokens > 0


def test_snapshots_among_drafts_are_prefixes(hybrid, monkeypatch):
    """Snapshots of a drafted answer serve a second request that continues it."""
    monkeypatch.setitem(StateSnapshots.__init__.__kwdefaults__, "interval", 16)
    small = BASE | {"block_size": 16, "num_gpu_blocks_override": 60}
    params = PARAMS["greedy"]
    with LLM(hybrid[0], **small, enable_prefix_caching=False) as llm:
        (first,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
        longer = [*first.prompt_token_ids, *first.outputs[0].token_ids, 5]
        prompt = TokensPrompt(prompt_token_ids=longer)
        (wanted,) = llm.generate(prompt, params, use_tqdm=False)
    with LLM(hybrid[0], **small, speculative_config=SUFFIX) as llm:
        for _ in range(2):
            assert llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs == first.outputs
        (found,) = llm.generate(prompt, params, use_tqdm=False)
        accepted = llm.llm_engine.statistics().scheduler.num_accepted_tokens
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert found.num_cached_tokens >= (len(longer) - 1) // 16 * 16 - 16
    assert accepted > 20
