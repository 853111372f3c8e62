"""Models that hear give the logprobs of transformers, whatever is chunked, cached, preempted or beside a recording."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.audio import FAMILIES, RATE, HearingModel, saved, tone
from trouper import LLM, SamplingParams
from trouper.actors.rendering.media.audio import AudioProcessor
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import MediaError, TrouperValidationError, UnsupportedFeatureError

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 64, "block_size": 16,
    "media_processor": "thread",
}  # fmt: skip
A, B = tone(1), tone(2, 0.55)


def recording(given: Any) -> dict[str, Any]:
    return {"type": "audio", "audio": given}


def chat(*parts: Any) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return [{"role": "user", "content": content}]


CHATS = {
    "no recording": (chat("Say it."), []),
    "in the middle": (chat("Hear: ", recording(A), " What?"), [A]),
    "two": (chat(recording(A), " and ", recording(B), "?"), [A, B]),
    "the same twice": (chat(recording(B), " and ", recording(B), "?"), [B, B]),
}


def params(**given: Any) -> SamplingParams:
    fields = {"max_tokens": 5, "temperature": 0, "logprobs": 0, "prompt_logprobs": 0}
    return SamplingParams(ignore_eos=True, **fields | given)


def check(model: HearingModel, output: Any, recordings: list[np.ndarray]) -> None:
    """Compare the logprobs of prompt and output with those of the whole model."""
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    expected = model.logprobs(ids, recordings)
    scored = [*(output.prompt_logprobs or ()), *output.outputs[0].logprobs][-len(ids) + 1 :]
    mine = [at[t].logprob for at, t in zip(scored, ids[-len(scored) :], strict=True)]
    places = torch.arange(len(ids) - len(scored) - 1, len(ids) - 1)
    wanted = expected[places, torch.tensor(ids[-len(scored) :])]
    assert torch.allclose(torch.tensor(mine), wanted, atol=1e-4)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made: dict[str, HearingModel] = {}

    def model(kind: str) -> HearingModel:
        if kind not in made:
            made[kind] = HearingModel(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return model


@pytest.fixture(scope="module")
def llm(models):
    with LLM(model=str(models("qwen3_asr").folder), **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("kind", FAMILIES)
def test_conversations_agree_cold_warm_and_chunked(models, kind):
    model = models(kind)
    chats = [messages for messages, _ in CHATS.values()]
    with LLM(model=str(model.folder), **OPTIONS, max_num_batched_tokens=24) as llm:
        cold = llm.chat(chats, params(), use_tqdm=False)
        warm = llm.chat(chats, params(prompt_logprobs=None), use_tqdm=False)
    for (_, recordings), first, second in zip(CHATS.values(), cold, warm, strict=True):
        check(model, first, recordings)
        check(model, second, recordings)
    assert all(output.num_cached_tokens for output in warm[1:])
    assert cold[0].audio_seconds is None
    assert cold[2].audio_seconds == pytest.approx(1.25)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("seconds", [0.03, 0.2, 0.999, 1.0, 1.31, 2.5])
def test_spectrograms_are_those_of_the_library(models, kind, seconds):
    model = models(kind)
    media = resolve(EngineArgs(model=str(model.folder))).media
    assert media is not None
    samples = tone(3, seconds)
    if kind == "qwen2_audio" and seconds > 1:
        samples = samples[:RATE]
    found, _ = AudioProcessor(media, "#").hear(saved(samples, subtype="FLOAT"), {}, 99)
    inputs = model.inputs(samples)
    for array in found.arrays:
        mine = np.frombuffer(array.data, array.dtype).reshape(array.shape)
        assert mine == pytest.approx(inputs[array.name].numpy(), abs=2e-4)


def test_preempted_requests_hear_again(models):
    model = models("qwen3_asr")
    few = {**OPTIONS, "num_gpu_blocks_override": 9, "max_model_len": 128}
    with LLM(model=str(model.folder), **few) as llm:
        chats = [chat(recording(tone(seed)), "What?") for seed in range(3)]
        outputs = llm.chat(chats, params(max_tokens=40), use_tqdm=False)
    for seed, output in enumerate(outputs):
        check(model, output, [tone(seed)])


def test_each_form_of_a_recording_is_the_same(llm):
    ints = (A * 32767).astype(np.int16)
    exact = ints / 32768
    forms = [
        exact.astype(np.float32), exact, ints, (ints, RATE), {"array": exact, "sampling_rate": RATE},
        np.stack([exact, exact]), np.stack([exact, exact], 1), torch.tensor(exact), saved(ints), saved(ints, "FLAC"),
    ]  # fmt: skip
    outputs = llm.chat([chat(recording(x), "?") for x in forms], params(), use_tqdm=False)
    first = [
        at[t].logprob
        for at, t in zip(
            outputs[0].outputs[0].logprobs, outputs[0].outputs[0].token_ids, strict=True
        )
    ]
    for output in outputs[1:]:
        assert output.prompt_token_ids == outputs[0].prompt_token_ids
        made = output.outputs[0]
        assert [
            at[t].logprob for at, t in zip(made.logprobs, made.token_ids, strict=True)
        ] == pytest.approx(first, abs=1e-4)


def test_a_file_written_to_a_pipe_is_whole(llm):
    """Read a file whose encoder could not go back to write the length."""
    flac, wav = bytearray(saved(A, "FLAC")), bytearray(saved(A))
    # The last 36 bits of the number of samples, then the length of the chunk of samples.
    flac[21] &= 0xF0
    flac[22:26] = bytes(4)
    wav[40:44] = b"\xff" * 4
    outputs = llm.chat([chat(recording(bytes(x))) for x in (flac, wav)], params(), use_tqdm=False)
    assert [o.audio_seconds for o in outputs] == [pytest.approx(0.7)] * 2


def test_other_rates_are_resampled(llm):
    high, low = tone(4, rate=48_000), tone(4)
    outputs = llm.chat(
        [chat(recording((high, 48_000))), chat(recording(low))], params(), use_tqdm=False
    )
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
    assert outputs[0].audio_seconds == pytest.approx(outputs[1].audio_seconds)


@pytest.mark.parametrize("kind", FAMILIES)
def test_another_recording_changes_the_reference(models, kind):
    model = models(kind)
    ids = [*b"a", *[model.row_id] * len(model.rows(A)), *b"b"]
    first, second = (model.logprobs(ids, [samples])[-1] for samples in (A, tone(9, 0.7)))
    assert (first - second).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (b"no audio", "cannot be read as audio"),
        (np.zeros((3, 40, 40)), "samples are floats"),
        (np.array([np.nan], np.float32), "not finite"),
        ((A, 16_000.5), "not an integer"),
        ((A, 10), "samples per second"),
        (np.zeros((100, 9)), "9 channels"),
        ({"array": A}, "array and sampling_rate"),
        ((np.zeros(601_000, np.float32), 1000), "601 s"),
        (np.full((8000, 2), 3e38, np.float32), "not finite"),
        ((np.tile([3e38, 3e38, -3e38, -3e38], 2000), 8000), "not finite"),
        ((A[:1], 192_000), "too short"),
        (saved(A)[:9000], "incomplete"),
        (saved(A, endian="BIG")[:9000], "incomplete"),
        (saved(A, "OGG")[:4000], "incomplete: it ends in the middle of an OGG page"),
        (saved(A, "MP3") * 2, "another recording after the first"),
        ("a.wav", "audio_url"),
    ],
)
def test_wrong_recordings_are_refused_by_name(llm, given, words):
    with pytest.raises(TrouperValidationError, match=words) as caught:
        llm.generate(
            {"prompt": "<|audio_pad|>", "multi_modal_data": {"audio": [given]}},
            params(),
            use_tqdm=False,
        )
    assert caught.value.parameter == "multi_modal_data.audio[0]"


def test_too_long_for_the_model_is_refused(models):
    with LLM(model=str(models("qwen2_audio").folder), **OPTIONS) as llm:
        with pytest.raises(MediaError, match=r"has 1\.5 s \(maximum 1 s for this model\)"):
            llm.chat(chat(recording(tone(1, 1.5))), params(), use_tqdm=False)
        with pytest.raises(MediaError, match="too short"):
            llm.chat(chat(recording(tone(1, 0.005))), params(), use_tqdm=False)


@pytest.mark.parametrize("modality", ["image", "video"])
def test_other_modalities_are_refused_by_name(llm, modality):
    expected = (TrouperValidationError, UnsupportedFeatureError)
    with pytest.raises(expected, match=modality):
        llm.generate({"prompt": "a", "multi_modal_data": {modality: b""}}, params(), use_tqdm=False)


def test_options_of_the_processor_are_refused(llm):
    with pytest.raises(TrouperValidationError, match="supports no options, but 'n_fft'"):
        llm.chat(chat(recording(A)), params(), use_tqdm=False, mm_processor_kwargs={"n_fft": 1})


def test_a_limit_of_0_loads_no_tower(models):
    options = OPTIONS | {"limit_mm_per_prompt": {"audio": 0}}
    with LLM(model=str(models("voxtral").folder), **options) as llm:
        with pytest.raises(UnsupportedFeatureError, match="turned off"):
            llm.chat(chat(recording(A)), params(), use_tqdm=False)
        llm.chat(chat("Say it."), params(), use_tqdm=False)
