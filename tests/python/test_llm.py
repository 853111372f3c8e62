"""`LLM`: the offline face, on the bundled model."""

import inspect

import pytest

from trouper import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    LoRARequest,
    RequestOutput,
    SamplingParams,
)
from trouper.errors import (
    EngineDeadError,
    EnginePausedError,
    TrouperValidationError,
    UnsupportedFeatureError,
)

SMALL = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 64,
    "dtype": "float32",
}
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as llm:
        yield llm


@pytest.fixture(autouse=True)
def assert_idle(llm):
    yield
    after = llm.llm_engine.statistics()
    assert after.num_open_requests == after.num_tracked == after.scheduler.num_running == 0
    assert after.scheduler.num_blocks_free == after.scheduler.num_blocks_total


def greedy(max_tokens=6, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_results_are_in_the_order_of_the_prompts(llm):
    prompts = ["import os", "def f(", "class A:", "x = "]
    lengths = [24, 3, 12, 6]
    outputs = llm.generate(prompts, [greedy(n, ignore_eos=True) for n in lengths], use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert all(output.finished for output in outputs)


def test_one_prompt_may_be_text_ids_or_dict(llm):
    ids = llm.generate("def f(", greedy(), use_tqdm=False)[0].prompt_token_ids
    seen = {
        texts(llm.generate(prompt, greedy(), use_tqdm=False))[0]
        for prompt in ("def f(", ids, {"prompt": "def f("}, {"prompt_token_ids": ids})
    }
    assert len(seen) == 1


def test_params_and_use_tqdm_may_be_positional(llm):
    assert len(llm.generate("def f(", greedy(3), False)[0].outputs[0].token_ids) == 3


def test_none_takes_the_models_defaults(llm):
    assert llm.get_default_sampling_params() == SamplingParams(**llm.model_config.default_sampling)
    assert llm.generate("def f(", use_tqdm=False)[0].finished


def test_unequal_lengths_name_both_and_add_nothing(llm):
    for options in (
        {"sampling_params": [greedy()]},
        {"sampling_params": greedy(), "priority": [1, 2, 3]},
        {"sampling_params": greedy(), "lora_request": [None]},
    ):
        with pytest.raises(TrouperValidationError, match=r"\d entries for 2 prompts"):
            llm.generate(["a", "b"], use_tqdm=False, **options)


def test_no_prompt_is_an_error(llm):
    with pytest.raises(TrouperValidationError, match="at least one prompt"):
        llm.generate([], greedy(), use_tqdm=False)


def test_bad_prompt_ends_call_but_not_llm(llm):
    with pytest.raises(TrouperValidationError, match="empty"):
        llm.generate(["good", "", "good"], greedy(50), use_tqdm=False)
    assert llm.generate("good", greedy(), use_tqdm=False)[0].finished


def test_callers_parameters_are_not_touched(llm):
    params = greedy()
    before = params.clone()
    llm.generate("def f(", params, use_tqdm=False)
    assert params == before


def test_a_progress_bar_may_be_brought_along(llm):
    made = []

    class Bar:
        def __init__(self, **options):
            made.append(options)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, n):
            made.append(n)

    llm.generate(["a", "b"], greedy(), use_tqdm=Bar)
    assert made.count(1) == 4  # two rendered, two finished


def test_chat_renders_template_and_equals_rendered_prompt(llm):
    output = llm.chat(CHAT, greedy(), use_tqdm=False)[0]
    template = llm.get_tokenizer().apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    assert output.prompt == template
    two = llm.chat([CHAT, CHAT], greedy(), use_tqdm=False)
    assert texts(two) == [output.outputs[0].text] * 2


def test_chat_and_enqueue_chat_have_the_same_parameters():
    names = list(inspect.signature(LLM.chat).parameters)
    assert list(inspect.signature(LLM.enqueue_chat).parameters) == names


@pytest.mark.parametrize("method", ["chat", "enqueue_chat"])
def test_chat_requests_are_added_with_every_argument(llm, monkeypatch, method):
    asked = []
    generate = type(llm.thread.engine).generate
    monkeypatch.setattr(
        type(llm.thread.engine), "generate",
        lambda self, *args, **how: asked.append(how) or generate(self, *args, **how),
    )  # fmt: skip
    options = {"mm_processor_kwargs": {"do_pan_and_scan": True}, "priority": 3, "use_tqdm": False}
    getattr(llm, method)(CHAT, greedy(), **options)
    llm.wait_for_completion(use_tqdm=False)
    assert asked[0]["mm_processor_kwargs"] == {"do_pan_and_scan": True}
    assert asked[0]["priority"] == 3


def test_mm_processor_kwargs_without_multimodal_data_have_no_effect(llm):
    outputs = llm.chat(CHAT, greedy(), use_tqdm=False, mm_processor_kwargs={"num_crops": 4})
    assert texts(outputs) == texts(llm.chat(CHAT, greedy(), use_tqdm=False))


def test_the_prequeue_sequence_runs_everything_at_once(llm):
    llm.sleep(level=0, mode="abort")
    try:
        ids = llm.enqueue(["a", "b"], greedy(), use_tqdm=False)
        ids += llm.enqueue_chat(CHAT, greedy(), use_tqdm=False)
        assert llm.llm_engine.statistics().scheduler.num_running == 0
        with pytest.raises(EnginePausedError):
            llm.wait_for_completion(use_tqdm=False)
        with pytest.raises(EnginePausedError):
            llm.generate("c", greedy(), use_tqdm=False)
    finally:
        assert llm.wake_up(tags=["scheduling"])
    outputs = llm.wait_for_completion(output_type=RequestOutput, use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_bad_prompt_in_enqueue_aborts_that_call_only(llm):
    with llm.paused():
        ids = llm.enqueue(["a"], greedy(), use_tqdm=False)
        with pytest.raises(TrouperValidationError):
            llm.enqueue(["b", "", "c"], greedy(), use_tqdm=False)
        assert llm.llm_engine.statistics().num_open_requests == 1
    assert [o.request_id for o in llm.wait_for_completion(use_tqdm=False)] == ids


def test_the_wrong_output_type_loses_nothing(llm):
    llm.enqueue(["a", "b"], greedy(), use_tqdm=False)
    with pytest.raises(TypeError, match="RequestOutput"):
        llm.wait_for_completion(output_type=dict, use_tqdm=False)
    assert len(llm.wait_for_completion(use_tqdm=False)) == 2


def test_exception_in_paused_block_leaves_engine_awake(llm):
    with pytest.raises(KeyError), llm.paused():
        assert llm.is_sleeping()
        raise KeyError
    assert not llm.is_sleeping()


def test_seeds_give_same_tokens_alone_and_in_crowd(llm):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12)
    alone = llm.generate("def f(", params, use_tqdm=False)[0].outputs[0].token_ids
    crowd = ["import os", "def f(", "class A", "x = 1", "return"]
    others = SamplingParams(temperature=1.0, seed=5, max_tokens=12)
    outputs = llm.generate(crowd, [others, params, others, others, others], use_tqdm=False)
    assert outputs[1].outputs[0].token_ids == alone


def test_beam_search_finds_at_least_what_greedy_finds(llm):
    greedy_output = llm.generate("def f(", greedy(5, logprobs=1), use_tqdm=False)[0].outputs[0]
    best = llm.beam_search("def f(", BeamSearchParams(beam_width=3, max_tokens=5))[0].sequences
    assert len(best) == 3
    assert best[0].cum_logprob >= greedy_output.cumulative_logprob - 1e-4
    assert [b.cum_logprob for b in best] == sorted((b.cum_logprob for b in best), reverse=True)
    one = llm.beam_search("def f(", BeamSearchParams(beam_width=1, max_tokens=5))[0].sequences[0]
    assert one.text == greedy_output.text


def test_beams_wider_than_the_logprobs_limit_are_refused(llm):
    with pytest.raises(TrouperValidationError, match="beam_width"):
        llm.beam_search("x", BeamSearchParams(beam_width=11, max_tokens=2))


def test_an_adapter_is_refused_where_none_can_be(llm):
    with pytest.raises(TrouperValidationError, match="enable_lora"):
        llm.generate("x", greedy(), use_tqdm=False, lora_request=LoRARequest("a", 1, "/nowhere"))
    with pytest.raises(TypeError, match="LoRARequest"):
        llm.generate("x", greedy(), use_tqdm=False, lora_request=object())


def test_what_is_not_there_yet_says_so(llm):
    with pytest.raises(UnsupportedFeatureError, match="'video' is not supported"):
        llm.generate({"prompt": "x", "multi_modal_data": {"video": 1}}, greedy(), use_tqdm=False)


def test_a_model_of_text_refuses_images(llm):
    with pytest.raises(TrouperValidationError, match="trouper-demo takes no images"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": 1}}, greedy(), use_tqdm=False)


def test_a_closed_llm_says_so():
    llm = LLM.from_engine_args(EngineArgs(**SMALL))
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("x", greedy(), use_tqdm=False)
