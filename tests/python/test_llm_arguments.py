"""What the faces accept, convert and refuse."""

import inspect

import numpy as np
import pytest

from trouper import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

SMALL = {
    "max_model_len": 256,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 32,
    "dtype": "float32",
}
CHAT = [{"role": "user", "content": "hello"}]
IDS = [40, 41, 42, 43]


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as llm:
        yield llm


def greedy(max_tokens=3, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


@pytest.mark.parametrize("wrong", [{"n": 1}, {}, 5, [{}]])
def test_sampling_params_of_another_type_are_refused(llm, wrong):
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
        llm.generate("a", wrong, use_tqdm=False)
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
        llm.chat(CHAT, wrong, use_tqdm=False)


@pytest.mark.parametrize("wrong", [None, 5, {"a"}, (p for p in "ab"), b"ab", object()])
def test_what_is_neither_prompt_nor_list_is_refused(llm, wrong):
    for call in (llm.generate, llm.enqueue):
        with pytest.raises(TrouperValidationError, match="parameter=prompts"):
            call(wrong, greedy(), use_tqdm=False)


@pytest.mark.parametrize("wrong", [None, "hello", 5])
def test_what_is_not_a_conversation_is_refused(llm, wrong):
    with pytest.raises(TrouperValidationError, match="parameter=messages"):
        llm.chat(wrong, greedy(), use_tqdm=False)


@pytest.mark.parametrize(
    "prompts",
    [
        IDS,
        tuple(IDS),
        np.array(IDS),
        np.array([IDS], dtype=np.int32),
        list(np.array(IDS)),
        [np.array(IDS)],
        [list(np.array(IDS, dtype=np.uint16))],
        {"prompt_token_ids": np.array(IDS)},
    ],
)
def test_token_ids_may_be_numpys(llm, prompts):
    (output,) = llm.generate(prompts, greedy(), use_tqdm=False)
    assert output.prompt_token_ids == IDS
    assert all(type(token) is int for token in output.prompt_token_ids)


def test_numbers_that_are_no_ids_are_refused(llm):
    for wrong in ([1.5], np.array([1.5]), [True], [[True]]):
        with pytest.raises(TrouperValidationError):
            llm.generate(wrong, greedy(), use_tqdm=False)


def test_tokenization_options_are_checked(llm):
    for wrong, name in (
        ({"add_special_tokens": "x"}, "add_special_tokens"),
        (5, "tokenization_kwargs"),
    ):
        with pytest.raises(TrouperValidationError, match=f"parameter={name}"):
            llm.generate("a", greedy(), use_tqdm=False, tokenization_kwargs=wrong)


def test_the_content_format_is_strings(llm):
    for accepted in ("auto", "string"):
        llm.chat(CHAT, greedy(), use_tqdm=False, chat_template_content_format=accepted)
    with pytest.raises(UnsupportedFeatureError, match="chat_template_content_format='openai'"):
        llm.chat(CHAT, greedy(), use_tqdm=False, chat_template_content_format="openai")
    with pytest.raises(TrouperValidationError, match="chat_template_content_format"):
        llm.chat(CHAT, greedy(), use_tqdm=False, chat_template_content_format="x")


def test_generate_takes_mm_processor_kwargs(llm):
    assert llm.generate("a", greedy(), use_tqdm=False, mm_processor_kwargs={"x": 1})[0].finished


@pytest.mark.parametrize("name", ["collective_rpc", "apply_model", "release_kv_cache_memory"])
def test_methods_without_a_meaning_here_say_so(llm, name):
    with pytest.raises(UnsupportedFeatureError, match=name):
        getattr(llm, name)("x", timeout=1)


def test_an_llm_may_be_paused(llm):
    llm.pause_generation(mode="keep")
    assert llm.is_paused()
    llm.resume_generation()
    assert not llm.is_paused()
    assert llm.reset_mm_cache() is None
    assert llm.llm_engine.reset_mm_cache() is None
    assert llm.llm_engine.reset_encoder_cache() is None


def test_sleeping_without_reload_is_refused(llm):
    for face in (llm, llm.llm_engine):
        with pytest.raises(UnsupportedFeatureError, match="reload"):
            face.sleep(2, reload=False)
    assert not llm.is_sleeping()


@pytest.mark.parametrize("name", ["delay_iterations", "max_iterations", "profiler_kwargs"])
def test_profiles_begin_at_once(llm, name):
    for face in (llm, llm.llm_engine):
        with pytest.raises(TrouperValidationError, match="torch_profiler_dir"):
            face.start_profile(**{name: None})
        with pytest.raises(UnsupportedFeatureError, match=name):
            face.start_profile(**{name: 1})


def test_both_engines_add_requests_with_the_same_arguments():
    names = list(inspect.signature(LLMEngine.add_request).parameters)
    assert list(inspect.signature(AsyncLLMEngine.add_request).parameters) == names


@pytest.mark.anyio
async def test_request_may_be_added_before_it_is_read():
    async with AsyncLLMEngine(EngineArgs(**SMALL)) as engine:
        async with await engine.add_request("a", np.array(IDS), greedy()) as stream:
            assert engine.statistics().num_open_requests == 1
            outputs = [output async for output in stream]
        assert outputs[-1].finished
        assert outputs[-1].request_id == "a"
        with pytest.raises(TrouperValidationError):
            await engine.add_request("b", "", greedy())
        assert engine.statistics().num_open_requests == 0
        await engine.reset_mm_cache()
        await engine.reset_encoder_cache()
        engine.generate("a", prompt_text=None, data_parallel_rank=None, session_id=None)
        with pytest.raises(UnsupportedFeatureError, match="prompt_text"):
            engine.generate("a", prompt_text="a")
        for name in ("data_parallel_rank", "session_id"):
            with pytest.raises(TrouperValidationError, match=name):
                engine.generate("a", **{name: 7})
        with pytest.raises(TypeError, match="SamplingParams"):
            engine.generate("a", {})


@pytest.mark.anyio
@pytest.mark.parametrize(("timeout_s", "reason"), [(20, "length"), (0, "abort"), (None, "abort")])
async def test_closing_may_wait_for_what_is_open(timeout_s, reason):
    engine = AsyncLLMEngine(EngineArgs(**SMALL))
    await engine.start()
    stream = await engine.add_request("a", IDS, greedy(100, ignore_eos=True))
    await engine.close(timeout_s)
    await engine.close(timeout_s)
    async with stream:
        outputs = [output async for output in stream]
    assert outputs[-1].outputs[0].finish_reason == reason
    assert engine.is_stopped
