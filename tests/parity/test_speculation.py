"""Drafts change nothing: tokens, logprobs and reasons are those of an engine without them.  fp32, on the bundled model."""

import json
from importlib.util import find_spec

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from trouper import LLM, EngineArgs, LLMEngine, SamplingParams
from trouper.actors.executor.runners.cpu import draft_model
from trouper.actors.executor.runners.cpu.draft_model import DraftModel
from trouper.actors.executor.sampling.drafter import Drafter
from trouper.actors.executor.sampling.matching import RUNS
from trouper.config.model import DEMO_MODEL
from trouper.config.resolve import resolve
from trouper.kernels.reference.sampling import NOT_FINITE
from trouper.structured_outputs import StructuredOutputsParams

PROMPTS = [
    "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n\n\ndef add(",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1, 2,",
    "class Stack:\n    def push(self, item):",
    "# nothing that repeats\n",
]
LONG = {"max_tokens": 40, "ignore_eos": True}
PARAMS = {
    "greedy": SamplingParams(temperature=0, **LONG),
    "seeded": SamplingParams(temperature=0.8, seed=1, **LONG),
    "top": SamplingParams(temperature=1.1, top_p=0.9, top_k=40, min_p=0.02, seed=2, **LONG),
    "penalties": SamplingParams(
        temperature=0.7, seed=3, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.2, **LONG,
    ),
    "bias": SamplingParams(temperature=0, logit_bias={5: 2.0, 9: -1.0}, bad_words=["self"], **LONG),
    "logprobs": SamplingParams(temperature=0, logprobs=3, prompt_logprobs=1, **LONG),
    "stop": SamplingParams(temperature=0, stop=["return", ", "], max_tokens=40),
    "least": SamplingParams(temperature=0.9, seed=4, min_tokens=20, max_tokens=40),
    "several": SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20),
    "repetition": SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
}  # fmt: skip
BASE = {
    "dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 32, "max_num_seqs": 4,
}  # fmt: skip


def run(llm, names=tuple(PARAMS)):
    found = {}
    for name in names:
        outputs = llm.generate(PROMPTS, PARAMS[name], use_tqdm=False)
        found[name] = [
            [(c.token_ids, c.text, c.logprobs, c.finish_reason, c.stop_reason) for c in o.outputs]
            + [o.prompt_logprobs]
            for o in outputs
        ]
    return found


@pytest.fixture(scope="module")
def plain():
    with LLM(**BASE) as llm:
        return run(llm)


SCHEMA = {
    "type": "object",
    "properties": {"identifier": {"type": "integer"}, "description": {"enum": ["short", "long"]}},
    "required": ["identifier", "description"],
}
STRUCTURED = {
    "schema": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "regex": StructuredOutputsParams(regex="(red|blue), or nothing at all (but [0-9]+ of them)"),
    "choice": StructuredOutputsParams(choice=["a long answer", "a longer answer"]),
    "list": StructuredOutputsParams(json={"type": "array", "items": SCHEMA, "minItems": 2}),
}
EDITS = (
    {}, {"temperature": 0}, {"top_k": 20}, {"repetition_penalty": 1.2},
    {"min_tokens": 4, "frequency_penalty": 0.3}, {"ignore_eos": True, "stop": ["long"]},
)  # fmt: skip


def structured(llm, kinds=tuple(STRUCTURED), edits=EDITS):
    """Draw outputs that match a grammar, plainly and with edits of the logits."""
    found = {}
    for name in kinds:
        for i, options in enumerate(edits):
            given = {"temperature": 0.8, "seed": 1, "max_tokens": 50, "logprobs": 2, **options}
            params = SamplingParams(**given, structured_outputs=STRUCTURED[name])
            found[name, i] = [
                (o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].finish_reason)
                for o in llm.generate(PROMPTS[:2], params, use_tqdm=False)
            ]
    return found


@pytest.fixture(scope="module")
def plainly_structured():
    with LLM(**BASE) as llm:
        return structured(llm), llm.llm_engine.statistics().scheduler.num_steps


needs_grammars = pytest.mark.skipif(not find_spec("llguidance"), reason="extra grammar")


@needs_grammars
@pytest.mark.parametrize(
    ("method", "most_steps"),
    [("suffix", 0.6), ("ngram", 0.7), pytest.param("draft_model", 0.7, marks=pytest.mark.slow)],
)
def test_inside_a_grammar_drafts_change_nothing(method, most_steps, plainly_structured):
    wanted, num_steps = plainly_structured
    own = {"model": str(DEMO_MODEL)} if method == "draft_model" else {}
    with LLM(**BASE, speculative_config={"method": method, **own}) as llm:
        assert structured(llm) == wanted
        stats = llm.llm_engine.statistics().scheduler
    assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens > 50
    assert stats.num_steps < most_steps * num_steps


@needs_grammars
@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 96, "num_gpu_blocks_override": 7, "block_size": 16},  # preemptions
        {"max_num_batched_tokens": 8, "enforce_eager": True},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_inside_a_grammar_the_schedule_does_not_matter(options, plainly_structured):
    edits = (EDITS[0], EDITS[1])
    with LLM(**{**BASE, **options}, speculative_config={"method": "suffix"}) as llm:
        found = structured(llm, ("schema", "list"), edits)
        stats = llm.llm_engine.statistics().scheduler
    assert found == {each: plainly_structured[0][each] for each in found}
    assert stats.num_accepted_tokens > 0
    assert (stats.num_preemptions > 0) == ("max_model_len" in options)


@needs_grammars
def test_sequence_aborted_among_its_drafts_leaves_others_alone(plainly_structured):
    given = {"temperature": 0.8, "seed": 1, "max_tokens": 50, "logprobs": 2}
    params = SamplingParams(**given, structured_outputs=STRUCTURED["list"])
    args = EngineArgs(**BASE, speculative_config={"method": "suffix"})
    with LLMEngine.from_engine_args(args) as engine:
        for i, prompt in enumerate(PROMPTS[1::-1]):  # the second is aborted
            engine.add_request(str(i), prompt, params)
        found, num_tokens = None, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                (own,) = output.outputs
                if output.request_id == "0" and not output.finished:
                    num_tokens = len(own.token_ids)
                    if num_tokens > 20:
                        engine.abort_request(["0"])
                if output.finished and output.request_id == "1":
                    found = own.token_ids, own.logprobs, own.finish_reason
    assert num_tokens > 20
    assert found == plainly_structured[0]["list", 0][0]


@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        {"method": "suffix", "num_speculative_tokens": 5},
    ],
    ids=lambda config: config["method"],
)
def test_every_sampling_parameter_gives_what_it_gives_without(speculation, plain):
    with LLM(**BASE, speculative_config=speculation) as llm:
        assert run(llm) == plain
        stats = llm.llm_engine.statistics().scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 96, "num_gpu_blocks_override": 7, "block_size": 16},  # preemptions
        {"max_num_batched_tokens": 8},
        {"enforce_eager": True},
        {"enable_prefix_caching": False},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_the_schedule_does_not_matter(options, plain):
    with LLM(**{**BASE, **options}, speculative_config={"method": "suffix"}) as llm:
        found = run(llm, ("seeded", "penalties"))
        stats = llm.llm_engine.statistics().scheduler
    assert found == {name: plain[name] for name in found}
    assert stats.num_accepted_tokens > 0
    assert (stats.num_preemptions > 0) == ("max_model_len" in options)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A model of the same vocabulary that knows nothing."""
    torch.manual_seed(0)
    vocab_size = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("untrained")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def costs_nothing(monkeypatch):
    """A draft model that is the model would pause: each draft costs a step."""
    monkeypatch.setattr(DraftModel, "cost", 0.0)


def drafting(model):
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": 4}


def test_draft_model_that_costs_step_for_each_token_pauses(plain):
    with LLM(**BASE, speculative_config=drafting(DEMO_MODEL)) as llm:
        assert run(llm, ("greedy",)) == {"greedy": plain["greedy"]}
        stats = llm.llm_engine.statistics().scheduler
    assert 0 < stats.num_draft_tokens == stats.num_drafts <= len(PROMPTS) * RUNS


@pytest.mark.usefixtures("costs_nothing")
def test_draft_model_that_is_model_foresees_every_token(plain):
    with LLM(**BASE, speculative_config=drafting(DEMO_MODEL)) as llm:
        names = ("greedy", "seeded", "top", "stop", "several")
        assert run(llm, names) == {name: plain[name] for name in names}
        stats = llm.llm_engine.statistics().scheduler
    # the noise is the same, so sampled tokens are foreseen as well
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 300


@pytest.mark.slow
@pytest.mark.usefixtures("costs_nothing")
def test_draft_model_changes_nothing_whatever_is_asked_for(plain):
    with LLM(**BASE, speculative_config=drafting(DEMO_MODEL)) as llm:
        assert run(llm) == plain
        assert llm.llm_engine.statistics().scheduler.num_accepted_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 96, "num_gpu_blocks_override": 7, "block_size": 16},  # preemptions
        {"max_num_batched_tokens": 8, "enforce_eager": True},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_a_draft_model_that_knows_nothing_changes_nothing(options, plain, untrained):
    with LLM(**{**BASE, **options}, speculative_config=drafting(untrained)) as llm:
        found = run(llm, ("penalties",))
        stats = llm.llm_engine.statistics().scheduler
    assert found == {name: plain[name] for name in found}
    assert stats.num_draft_tokens > 10 * stats.num_accepted_tokens


def test_draft_model_of_a_gguf_file_is_not_rounded_again():
    """The name of the file has no suffix, as those in Ollama's store."""
    config = resolve(EngineArgs(quantization="int8"))
    for is_gguf, wanted in ((False, "int8"), (True, None)):
        model = msgspec.structs.replace(config.model, path="sha256-0", is_gguf=is_gguf)
        draft = DraftModel(config, model, None, None)
        assert draft._config.quantization == wanted


@pytest.mark.usefixtures("costs_nothing")
def test_draft_model_catches_up_in_chunks_that_step_bounds(monkeypatch):
    """Nine sequences have no drafts; when eight have ended, it has missed what the last one has said."""
    room, passes, right = 5, [], DraftModel._draw

    def draw(self, plan, work):
        counts = dict(zip(plan.request_slots, plan.num_scheduled_tokens, strict=True))
        passes.append(sum(max(0, count - counts[slot]) for slot, _, count, _ in work))
        return right(self, plan, work)

    monkeypatch.setattr(draft_model, "CATCH_UP", room)
    monkeypatch.setattr(DraftModel, "_draw", draw)
    base = {**BASE, "max_num_seqs": 9, "num_gpu_blocks_override": 32}
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=70 if i == 0 else 20, ignore_eos=True)
        for i in range(9)
    ]
    prompts = [f"{PROMPTS[2]} {i}" for i in range(9)]
    found = []
    for speculation in (None, drafting(DEMO_MODEL)):
        with LLM(**base, speculative_config=speculation) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            stats = llm.llm_engine.statistics().scheduler
    assert found[0] == found[1]
    missed = [num for num in passes if num > 1]  # one is the last draft of a run that was right
    assert max(missed) == room
    assert sum(missed) >= 18  # of the last sequence alone
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20  # it misses nothing then


@pytest.mark.usefixtures("costs_nothing")
def test_row_that_fails_behind_right_draft_is_computed_again(monkeypatch, plain):
    """Such a row keeps the tokens before it; here its failure does not come again, so the answer is the one without."""
    counts, failed, draw, verify = [], [], DraftModel._draw, Drafter.verify

    def noting(self, plan, work):
        counts.extend(count for _, _, count, _ in work)
        return draw(self, plan, work)

    def failing(self, plan, sampled, prompt_logprobs):
        if not failed:
            failed.append(sampled.token_ids[1])
            sampled.token_ids[1] = NOT_FINITE
        return verify(self, plan, sampled, prompt_logprobs)

    monkeypatch.setattr(DraftModel, "_draw", noting)
    monkeypatch.setattr(Drafter, "verify", failing)
    with LLM(**BASE, speculative_config=drafting(DEMO_MODEL)) as llm:
        (output,) = llm.generate(PROMPTS[0], PARAMS["greedy"], use_tqdm=False)
        stats = llm.llm_engine.statistics().scheduler
    assert output.outputs[0].token_ids == plain["greedy"][0][0][0]
    assert failed
    assert min(counts) == 1
    assert stats.num_accepted_tokens > 20


@pytest.mark.usefixtures("costs_nothing")
def test_drafts_go_on_after_sleep(plain):
    with LLM(**BASE, speculative_config=drafting(DEMO_MODEL)) as llm:
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert run(llm, ("greedy",)) == {"greedy": plain["greedy"]}
        stats = llm.llm_engine.statistics().scheduler
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


def test_steps_with_drafts_are_recorded_again_after_prompt_and_sleep(plain):
    with LLM(**{**BASE, "max_num_seqs": 1}, speculative_config={"method": "suffix"}) as llm:
        for _ in range(2):
            (output,) = llm.generate(PROMPTS[0], PARAMS["logprobs"], use_tqdm=False)
            (own,), (wanted, _) = output.outputs, plain["logprobs"][0]
            assert (own.token_ids, own.text, own.logprobs) == wanted[:3]
            llm.sleep()
            llm.wake_up()


def test_repeated_answer_under_same_salt_is_drafted(plain):
    prompt = PROMPTS[3]
    base = {**BASE, "max_num_seqs": 1}
    with LLM(**base, speculative_config={"method": "suffix"}) as llm:
        counts, outputs = [], []
        for salt in ("a", "a", "b", "b"):
            before = llm.llm_engine.statistics().scheduler.num_steps
            request = {"prompt": prompt, "cache_salt": salt}
            outputs.append(llm.generate(request, PARAMS["seeded"], use_tqdm=False)[0].outputs[0])
            counts.append(llm.llm_engine.statistics().scheduler.num_steps - before)
    assert all(output.token_ids == plain["seeded"][3][0][0] for output in outputs)
    assert counts[0] == counts[2] > 2 * counts[1]
    assert counts[1] == counts[3]
