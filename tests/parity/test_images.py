"""Models that see give the logprobs of transformers, whatever is chunked, cached, preempted or beside an image."""

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.adapters import write_adapter
from tests.support.vision import FAMILIES, VisionModel, image, picture, text
from trouper import LLM, BeamSearchParams, LLMEngine, LoRARequest, RequestOutputKind, SamplingParams
from trouper.actors.executor.media.encoder import MediaEncoder
from trouper.actors.executor.media.tower import MediaTower, _grey
from trouper.actors.executor.steps.request_slots import Axes
from trouper.actors.executor.weights.tower import load_tower
from trouper.actors.messages.media import MediaItem
from trouper.actors.rendering.media.items import MediaPreprocessor, media_digests
from trouper.actors.rendering.media.processor import ImageProcessor
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import ExecutionError, TrouperValidationError, UnsupportedFeatureError

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 64, "block_size": 16,
    "media_processor": "thread",
}  # fmt: skip
CHATS = {
    "no image": ["Say it."],
    "in the middle": [["Look: ", image(1), " What?"]],
    "first": [[image(2, 28, 56), "Describe <image>."]],
    "two": [["A ", image(3), " B ", image(4, 60, 60), " differ?"]],
    "the same twice": [[image(5), " and ", image(5), "?"]],
    "conversation": [[image(6), "What?"], "A thing.", ["And ", image(7), "?"]],
}
# Their folders are made in half a second; the others take the same paths.
QUICK = ("llava", "smolvlm", "qwen3_vl", "gemma3")


def chat(turns: list[Any]) -> list[dict[str, Any]]:
    """Make a conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    return [
        {
            "role": roles[i % 2],
            "content": turn
            if isinstance(turn, str)
            else [text(part) if isinstance(part, str) else part for part in turn],
        }
        for i, turn in enumerate(turns)
    ]


def params(n: int = 1, **given: Any) -> SamplingParams:
    fields = {"max_tokens": 5, "temperature": 0, "logprobs": 0, "prompt_logprobs": 0}
    return SamplingParams(n=n, ignore_eos=True, **fields | given)


class Oracle:
    """A tiny model's folder, and the answers that transformers gives for it."""

    def __init__(self, kind: str, folder: Any) -> None:
        self.model = VisionModel(kind, folder)
        media = resolve(EngineArgs(model=str(folder))).media
        assert media is not None
        self.processor = ImageProcessor(media, self.model.image_token)

    def arrays(self, picture: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        arrays = self.processor.process(picture, kwargs).arrays
        return {a.name: np.frombuffer(a.data, a.dtype).reshape(a.shape) for a in arrays}

    def check(self, output: Any, messages: list[dict[str, Any]]) -> None:
        """Compare the logprobs of prompt and output with those of the whole model."""
        prompt = list(output.prompt_token_ids)
        contents = [m["content"] for m in messages if not isinstance(m["content"], str)]
        pictures = [p["image"] for parts in contents for p in parts if p["type"] == "image"]
        inputs = [self.arrays(picture) for picture in pictures]
        for completion in output.outputs:
            ids = prompt + list(completion.token_ids)
            expected = self.model.logprobs(ids, inputs, len(prompt))
            scored = [*(output.prompt_logprobs or ()), *completion.logprobs][-len(ids) + 1 :]
            mine = [at[t].logprob for at, t in zip(scored, ids[-len(scored) :], strict=True)]
            places = torch.arange(len(ids) - len(scored) - 1, len(ids) - 1)
            wanted = expected[places, torch.tensor(ids[-len(scored) :])]
            assert torch.allclose(torch.tensor(mine), wanted, atol=1e-4)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    made: dict[str, Oracle] = {}

    def oracle(kind: str) -> Oracle:
        if kind not in made:
            made[kind] = Oracle(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return oracle


@pytest.fixture(scope="module")
def llava(oracles):
    return oracles("llava")


@pytest.fixture(scope="module")
def llm(llava):
    with LLM(model=str(llava.model.folder), **OPTIONS) as llm:
        yield llm


def opened(oracle: Oracle, **options: Any) -> LLM:
    return LLM(model=str(oracle.model.folder), **OPTIONS | options)


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in FAMILIES]
)
def test_conversations_agree_cold_warm_and_chunked(oracles, kind):
    oracle = oracles(kind)
    # Prompts of PaliGemma have an image and are computed as a whole.
    is_whole = kind.startswith("paligemma")
    chats = [chat(turns) for name, turns in CHATS.items() if not (is_whole and name == "no image")]
    budget = 100 if is_whole else 24
    with opened(oracle, max_num_batched_tokens=budget, max_num_seqs=8) as llm:
        cold = llm.chat(chats, params(), use_tqdm=False)
        # Prompt logprobs need the whole prompt, so they would read no prefix from the cache.
        warm = llm.chat(chats, params(prompt_logprobs=None), use_tqdm=False)
        others = [
            chat([["Other ", *turns[0]], *turns[1:]]) for turns in CHATS.values() if turns[1:]
        ]
        chunked = llm.chat(others, params(prompt_logprobs=None), use_tqdm=False)
    for messages, output in zip(others, chunked, strict=True):
        oracle.check(output, messages)
    for messages, first, second in zip(chats, cold, warm, strict=True):
        oracle.check(first, messages)
        assert second.outputs[0].token_ids == first.outputs[0].token_ids
        mine, theirs = first.outputs[0].logprobs, second.outputs[0].logprobs
        for a, b in zip(mine, theirs, strict=True):
            assert {t: x.logprob for t, x in a.items()} == pytest.approx(
                {t: x.logprob for t, x in b.items()}, abs=1e-4
            )
    assert all(output.num_cached_tokens for output in warm if len(output.prompt_token_ids) > 40)


def test_layers_give_images_back(oracles):
    """In memory for 160 tokens in all layers, which two thirds of the layers do not keep."""
    oracle = oracles("gemma3")
    turns = ["What?" * 9, image(1), " and ", image(2), "?"], "A thing." * 9, ["And ", image(3), "?"]
    messages = chat([*turns, "So." * 9, [image(4), "!"]])
    memory = {"kv_cache_memory_bytes": 160 * 768, "num_gpu_blocks_override": None}
    with opened(oracle, **memory, max_model_len=300, max_num_batched_tokens=24, block_size=4) as llm:  # fmt: skip
        for wishes in ({}, {"prompt_logprobs": None}):
            (output,) = llm.chat([messages], params(**wishes), use_tqdm=False)
            oracle.check(output, messages)
    assert len(output.prompt_token_ids) > 200
    assert output.num_cached_tokens > 190


@pytest.mark.parametrize("kind", ["llava", "idefics3", "gemma3", "paligemma"])
def test_ids_are_those_of_the_whole_processor(oracles, kind):
    import transformers

    oracle = oracles(kind)
    model, fields = oracle.model, {"patch_size": 7, "vision_feature_select_strategy": "default"}
    if kind == "llava":
        processor = transformers.LlavaProcessor(
            model.images, model.tokens, num_additional_image_tokens=1, **fields
        )
    elif kind == "idefics3":
        processor = transformers.Idefics3Processor(model.images, model.tokens, image_seq_len=4)
    elif kind == "gemma3":
        for name, token in zip(("image", "boi", "eoi"), model.names, strict=True):
            setattr(model.tokens, f"{name}_token", token)
            setattr(model.tokens, f"{name}_token_id", model.tokens.convert_tokens_to_ids(token))
        processor = transformers.Gemma3Processor(model.images, model.tokens, image_seq_length=4)
    else:
        processor = transformers.PaliGemmaProcessor(model.images, model.tokens)
    mark = model.placeholder
    # Line ends at an image and of Gemma's text in its place are one token.
    words = f"A {mark} b\n{mark}\nc {mark}\n\n\n{mark}"
    pictures = [picture(1), picture(2, 90, 30), picture(3, 20, 70), picture(4)]
    prompt = {"prompt": words, "multi_modal_data": {"image": pictures}}
    with opened(oracle) as llm:
        found = llm.generate(prompt, params(), use_tqdm=False)[0]
    wanted = processor(text=words, images=pictures, add_special_tokens=False)["input_ids"]
    assert list(found.prompt_token_ids) == np.array(wanted).reshape(-1).tolist()


def test_adapters_of_a_tower_are_refused(llava, tmp_path):
    places = (
        "model.language_model.layers.0.self_attn.q_proj",
        "model.vision_tower.encoder.layers.0.mlp.fc1",
    )
    tensors = {
        f"base_model.model.{place}.lora_{side}.weight": torch.ones(shape)
        for place in places
        for side, shape in (("A", (4, 64 if "language" in place else 32)), ("B", (64, 4)))
    }
    adapter = LoRARequest("tower", 1, write_adapter(tmp_path / "tower", tensors))
    for options in ({}, {"language_model_only": True}):
        with opened(llava, enable_lora=True, **options) as llm:
            if options:
                assert llm.generate("a", params(), lora_request=adapter, use_tqdm=False)
                continue
            with pytest.raises(
                UnsupportedFeatureError, match=f"1 modules of the vision.*{places[1]}"
            ):
                llm.generate("a", params(), lora_request=adapter, use_tqdm=False)


def test_adapter_of_only_a_tower_is_refused_by_name(llava, tmp_path):
    place = "model.multi_modal_projector.linear_1"
    tensors = {f"base_model.model.{place}.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    adapter = LoRARequest("tower", 1, write_adapter(tmp_path / "tower", tensors))
    for options in ({}, {"language_model_only": True}):
        with (
            opened(llava, enable_lora=True, **options) as llm,
            pytest.raises((UnsupportedFeatureError, TrouperValidationError), match=place),
        ):
            llm.generate("a", params(), lora_request=adapter, use_tqdm=False)


def test_an_image_may_be_a_single_row(oracles, monkeypatch):
    """The library's own method takes its one row for the axis of images, so the reference gets it another axis."""
    oracle, messages = oracles("mistral3"), chat([["A ", image(1, 5, 5), " dot"]])
    with opened(oracle) as llm:
        (output,) = llm.chat([messages], params(), use_tqdm=False)
    projector = type(oracle.model.model.model.multi_modal_projector)
    forward = projector.forward
    monkeypatch.setattr(projector, "forward", lambda *given: forward(*given)[None])
    oracle.check(output, messages)


def test_a_step_shorter_than_an_image_is_named(oracles):
    messages = chat([[image(1)]])
    with opened(oracles("gemma3"), max_num_batched_tokens=3, max_num_seqs=1) as llm:
        with pytest.raises(TrouperValidationError, match="max_num_batched_tokens to 4"):
            llm.chat(messages, params(), use_tqdm=False)
        assert llm.generate("text", params(), use_tqdm=False)[0].finished


def test_a_paligemma_refuses_what_is_no_prompt_with_images(oracles):
    image_only = {"prompt": "caption", "multi_modal_data": {"image": picture(1)}}
    begin = oracles("paligemma").model.tokens.bos_token_id
    with opened(oracles("paligemma")) as llm:
        # As in its processor, an image without a place is in front.
        found = llm.generate(image_only, params(), use_tqdm=False)[0].prompt_token_ids
        assert found.index(begin) == 16
        with pytest.raises(TrouperValidationError, match="needs an image"):
            llm.generate("caption", params(), use_tqdm=False)
        with pytest.raises(UnsupportedFeatureError, match="beam search"):
            llm.beam_search([image_only], BeamSearchParams(beam_width=2, max_tokens=2))


def test_crops_of_a_large_image_see_themselves(oracles):
    oracle, kwargs = oracles("gemma3"), {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 14}
    prompt = {"prompt": "A <start_of_image>", "multi_modal_data": {"image": picture(5, 90, 28)}}
    with opened(oracle) as llm:
        found = llm.generate(prompt | {"mm_processor_kwargs": kwargs}, params(), use_tqdm=False)[0]
    ids = list(found.prompt_token_ids)
    assert ids.count(oracle.model.row_id) == 16
    wanted = oracle.model.logprobs(ids, [oracle.arrays(picture(5, 90, 28), **kwargs)])
    mine = [at[t].logprob for at, t in zip(found.prompt_logprobs[1:], ids[1:], strict=True)]
    places = torch.arange(len(ids) - 1)
    assert torch.allclose(torch.tensor(mine), wanted[places, torch.tensor(ids[1:])], atol=1e-4)


def test_another_image_is_another_prefix(llm, llava):
    for seed in (11, 12):
        messages = chat([[image(seed), " the same text behind either image, for several blocks"]])
        llava.check(llm.chat(messages, params(), use_tqdm=False)[0], messages)


def test_a_prefix_may_end_inside_an_image(llm, llava):
    for words in ("one text", "and another"):
        messages = chat([["A ", image(13), words]])
        output = llm.chat(messages, params(prompt_logprobs=None), use_tqdm=False)[0]
        llava.check(output, messages)
    assert output.num_cached_tokens == 16


def test_rows_outlive_a_cache_without_room(llava):
    chats = [chat([[image(seed), " and ", image(99), f" {seed}?"]]) for seed in range(5)]
    with opened(
        llava, encoder_cache_gb=0, mm_processor_cache_gb=0, max_num_batched_tokens=8, max_num_seqs=8
    ) as llm:
        for output, messages in zip(llm.chat(chats, params(), use_tqdm=False), chats, strict=True):
            llava.check(output, messages)


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl", "gemma3"])
def test_preempted_requests_see_their_images_again(oracles, kind):
    oracle = oracles(kind)
    chats = [chat([["A ", image(seed), f" {seed}?"]]) for seed in range(6)]
    asked = params(max_tokens=40, prompt_logprobs=None)
    tight = {"num_gpu_blocks_override": 13, "max_model_len": 128, "enable_prefix_caching": False}
    with opened(oracle, **tight, scheduler_reserve_full_isl=False) as small:
        outputs = small.chat(chats, asked, use_tqdm=False)
        assert small.llm_engine.statistics().scheduler.num_preemptions > 0
    with opened(oracle) as large:
        wanted = large.chat(chats, asked, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in wanted]


def test_every_round_of_a_beam_search_sees_the_image(llm, llava):
    beams = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    inputs = [llava.arrays(picture(23))]
    in_chat, in_text = chat([["A ", image(23)]]), {"prompt": "A <image>"}
    prompts = [{"messages": in_chat}, in_text | {"multi_modal_data": {"image": picture(23)}}]
    for found in llm.beam_search(prompts, beams):
        ids = list(found.sequences[0].tokens)
        scores = llava.model.logprobs(ids, inputs)
        total = sum(float(scores[i - 1, ids[i]]) for i in range(len(ids) - 4, len(ids)))
        assert found.sequences[0].cum_logprob == pytest.approx(total, abs=1e-3)


def test_completions_of_one_prompt_share_its_image(llm, llava):
    messages = chat([["Look ", image(21), "!"]])
    output = llm.chat(messages, params(n=3, temperature=1.0, seed=5), use_tqdm=False)[0]
    llava.check(output, messages)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_images_are_seen_after_a_sleep(llava, level):
    messages = chat([["Look ", image(22), "!"]])
    with opened(llava, enable_sleep_mode=True) as llm:
        llm.chat(messages, params(), use_tqdm=False)
        llm.sleep(level)
        llm.wake_up()
        llava.check(llm.chat(messages, params(), use_tqdm=False)[0], messages)


def test_each_form_of_an_image_is_the_same_image(llm):
    png, pixels = io.BytesIO(), np.asarray(picture(31))
    picture(31).save(png, "PNG")
    forms = [
        picture(31), pixels, pixels.transpose(2, 0, 1), torch.from_numpy(pixels.copy()), png.getvalue(),
        picture(31).convert("RGBA"),
    ]  # fmt: skip
    prompts = [{"prompt": "See <image>!", "multi_modal_data": {"image": form}} for form in forms]
    outputs = llm.generate(prompts, params(), use_tqdm=False)
    first = outputs[0].outputs[0].logprobs
    assert all(output.outputs[0].logprobs == first for output in outputs)


def test_token_ids_are_expanded_once(llm, llava):
    prompt = {"prompt": "a<image>b", "multi_modal_data": {"image": picture(32)}}
    expanded = llm.generate(prompt, params(), use_tqdm=False)[0].prompt_token_ids
    single = [expanded[0], llava.model.row_id, expanded[-1]]
    for ids in (single, expanded):
        given = {"prompt_token_ids": ids, "multi_modal_data": {"image": picture(32)}}
        assert llm.generate(given, params(), use_tqdm=False)[0].prompt_token_ids == expanded


def test_a_uuid_stands_for_its_image(llm):
    named = {"prompt": "a<image>b", "multi_modal_uuids": {"image": ["mine"]}}
    with pytest.raises(TrouperValidationError, match="not cached"):
        llm.generate(named, params(), use_tqdm=False)
    with_data = {**named, "multi_modal_data": {"image": picture(33)}}
    first, second = (llm.generate(p, params(), use_tqdm=False)[0] for p in (with_data, named))
    assert first.outputs[0].logprobs == second.outputs[0].logprobs
    with pytest.raises(TrouperValidationError, match="not cached"):
        llm.generate({**named, "cache_salt": "another"}, params(), use_tqdm=False)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "none", "multi_modal_data": {"image": picture(1)}}, "0 places for images"),
        ({"prompt": "<image><image>", "multi_modal_data": {"image": picture(1)}}, "2 places"),
        ({"prompt": "<image>", "multi_modal_data": {"image": "a.png"}}, "image_url"),
        ({"prompt": "<image>", "multi_modal_data": {"image": b"no image"}}, "cannot be read"),
        ({"prompt": "<image>", "multi_modal_data": {"image": np.zeros((2, 2))}}, "float64"),
        ({"prompt": "<image>", "multi_modal_data": [1]}, "must be a dict"),
        ({"prompt": "<image>" * 33, "multi_modal_data": {"image": [picture(1)] * 33}}, "33 images"),
        ({"prompt": "<image>" * 32, "multi_modal_data": {"image": [picture(1)] * 32}}, "32 images"),
    ],
)
def test_wrong_images_are_refused_by_name(llm, prompt, message):
    with pytest.raises(TrouperValidationError, match=message):
        llm.generate(prompt, params(), use_tqdm=False)


@pytest.mark.parametrize("modality", ["audio", "video"])
def test_other_modalities_are_refused_by_name(llm, modality):
    refusals = (TrouperValidationError, UnsupportedFeatureError)
    with pytest.raises(refusals, match=modality):
        llm.generate({"prompt": "a", "multi_modal_data": {modality: b""}}, params(), use_tqdm=False)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"nonsense": 1}, "no option 'nonsense'"),
        ({"return_tensors": "pt"}, "return_tensors cannot be set"),
    ],
)
def test_wrong_options_of_the_processor_are_named(llm, kwargs, message):
    messages = chat([[image(1)]])
    with pytest.raises(TrouperValidationError, match=message):
        llm.chat(messages, params(), use_tqdm=False, mm_processor_kwargs=kwargs)


@pytest.fixture
def recorded(monkeypatch):
    """Record the options that reach the image processor."""
    seen: list[dict[str, Any]] = []
    process = ImageProcessor.process

    def recording(self, image, kwargs):
        seen.append(dict(kwargs))
        return process(self, image, kwargs)

    monkeypatch.setattr(ImageProcessor, "process", recording)
    return seen


def test_chat_passes_options_to_the_processor(llm, recorded):
    kwargs = {"do_rescale": False, "images_kwargs": {"do_normalize": False}}
    llm.chat(chat([[image(41)]]), params(), use_tqdm=False, mm_processor_kwargs=kwargs)
    assert recorded == [kwargs]


def test_enqueue_chat_passes_options_to_the_processor(llm, recorded):
    kwargs = {"do_normalize": False}
    llm.enqueue_chat(chat([[image(42)]]), params(), use_tqdm=False, mm_processor_kwargs=kwargs)
    llm.wait_for_completion(use_tqdm=False)
    assert recorded == [kwargs]


def test_options_make_another_image(llm):
    messages = chat([[image(43), "?"]])
    plain, other = (
        llm.chat(messages, params(), use_tqdm=False, mm_processor_kwargs=kwargs)[0]
        for kwargs in (None, {"do_normalize": False})
    )
    assert plain.outputs[0].logprobs != other.outputs[0].logprobs


def test_a_limit_of_0_loads_no_tower(llava):
    with opened(llava, limit_mm_per_prompt={"image": 0}) as llm:
        assert llm.generate("a", params(), use_tqdm=False)[0].finished
        with pytest.raises(UnsupportedFeatureError, match="turned off"):
            llm.chat(chat([[image(1)]]), params(), use_tqdm=False)
    off = {"limit_mm_per_prompt": {"image": 0}, "mm_processor_kwargs": {"do_normalize": False}}
    with pytest.raises(TrouperValidationError, match="turned off"), opened(llava, **off):
        pass


def item(key: bytes, first: int, num_tokens: int = 6) -> MediaItem:
    return MediaItem(key * 32, "image", (), num_tokens, ((0, num_tokens),), first)


def test_positions_of_grids_are_those_of_transformers(oracles):
    model, rng = oracles("qwen3_vl").model, np.random.default_rng(0)
    for _ in range(30):
        ids, grids, shapes = [], [], []
        for _ in range(rng.integers(1, 4)):
            ids += [1] * rng.integers(1, 6)
            height, width = (int(x) for x in rng.integers(1, 5, 2))
            grids.append((len(ids), 1, height, width))
            shapes.append([1, 2 * height, 2 * width])
            ids += [model.row_id] * (height * width)
        ids += [1] * rng.integers(1, 6)
        kinds = (torch.tensor([ids]) == model.row_id).int()
        wanted, _ = model.model.model.get_rope_index(
            torch.tensor([ids]), mm_token_type_ids=kinds, image_grid_thw=torch.tensor(shapes)
        )
        assert (Axes.of(grids).at(np.arange(len(ids))) == wanted[:, 0].numpy()).all()


def test_blocks_are_named_by_key_and_offset():
    names = {media_digests([item(*place)], 4) for place in ((b"a", 0), (b"b", 0), (b"a", 1))}
    assert len(names) == 3
    assert media_digests([item(b"a", 5)], 4)[0] == b""
    # The last block of the first prompt begins elsewhere in the image.
    assert media_digests([item(b"a", 4)], 4)[1] == media_digests([item(b"a", 4)], 4)[1]
    assert len(media_digests([item(b"a", 4)], 4)) == 3


def test_a_reset_forgets_processed_images(llm, recorded):
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": picture(52)}}
    for _ in range(2):
        llm.generate(prompt, params(), use_tqdm=False)
        llm.reset_mm_cache()
    assert len(recorded) == 2


def test_a_failing_tower_ends_only_its_request(llava, monkeypatch):
    compute = MediaTower.compute

    def failing(self, arrays):
        if float(arrays["pixel_values"].mean()) < -1:
            raise RuntimeError("a defect")
        return compute(self, arrays)

    monkeypatch.setattr(MediaTower, "compute", failing)
    black = {"prompt": "a<image>", "multi_modal_data": {"image": np.zeros((28, 28, 3), np.uint8)}}
    prompts = ["a text", black, {"prompt": "b<image>", "multi_modal_data": {"image": picture(1)}}]
    with opened(llava) as llm:
        with pytest.raises(ExecutionError, match="a defect") as caught:
            llm.generate(prompts, params(), use_tqdm=False)
        assert len(caught.value.request_ids) == 1
        assert llm.generate(prompts[::2], params(), use_tqdm=False)[1].finished


def test_trial_of_large_tiles_is_small():
    vision = SimpleNamespace(image_size=512, patch_size=16, model_type="smolvlm_vision")
    config = SimpleNamespace(vision_config=vision, scale_factor=4)
    made = _grey(config, ("pixel_values", "pixel_attention_mask"))
    assert made["pixel_values"].shape == (1, 1, 3, 128, 128)
    assert made["pixel_attention_mask"].shape == (1, 1, 128, 128)


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in FAMILIES]
)
def test_slices_change_no_bit(oracles, kind):
    oracle = oracles(kind)
    config = resolve(EngineArgs(model=str(oracle.model.folder), dtype="float32"))
    tower = load_tower(config, config.media)
    arrays = oracle.processor.process(picture(61, 56, 84), {}).arrays
    sizes = {
        a.name: torch.from_numpy(np.frombuffer(a.data, a.dtype).reshape(a.shape).copy())
        for a in arrays
    }
    with torch.inference_mode():
        wanted = tower.compute(sizes)
    one = MediaItem(b"a" * 32, "image", arrays, len(wanted), ((0, len(wanted)),))
    work, num_slices = tower.begin(one), 1
    while not work.advance(0):
        num_slices += 1
    assert torch.equal(work.result(), wanted)
    assert num_slices > 8


def test_streams_go_on_beside_an_image(llava, monkeypatch):
    advance = MediaEncoder.advance
    monkeypatch.setattr(MediaEncoder, "advance", lambda self, wholes, _: advance(self, wholes, 0))
    messages, streamed = chat([["A ", image(62), "?"]]), params(prompt_logprobs=None, max_tokens=60)
    streamed.output_kind = RequestOutputKind.DELTA
    args = EngineArgs(model=str(llava.model.folder), **OPTIONS)
    with LLMEngine.from_engine_args(args) as engine:
        engine.add_request("stream", "a text", streamed)
        for _ in range(4):
            engine.step()
        engine.add_request("image", {"messages": messages}, params(prompt_logprobs=None))
        num_between, found = 0, None
        while found is None:
            for output in engine.step():
                num_between += output.request_id == "stream"
                found = output if output.request_id == "image" and output.finished else found
    llava.check(found, messages)
    assert num_between > 20


def test_outputs_name_the_places_of_images(llm):
    given = {"prompt": "a<image>b<image>", "multi_modal_data": {"image": [picture(1)] * 2}}
    found = llm.generate([given, "a"], params(), use_tqdm=False)
    assert found[0].multi_modal_placeholders == {"image": [(1, 16), (18, 16)]}
    assert found[1].multi_modal_placeholders is None


def test_equal_images_are_processed_once(llava, recorded):
    with opened(llava) as llm:
        prompts = [
            {"prompt": f"{i}<image>", "multi_modal_data": {"image": picture(51)}} for i in "ab"
        ]
        llm.generate(prompts, params(), use_tqdm=False)
    assert len(recorded) == 1


def test_the_cache_of_items_keeps_its_bound(llava):
    media = resolve(EngineArgs(model=str(llava.model.folder), media_processor="thread")).media
    import msgspec

    from trouper.actors.rendering.media.parts import MediaPart
    from trouper.actors.rendering.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(str(llava.model.folder))
    one = 3 * 28 * 28 * 4
    items = MediaPreprocessor(
        msgspec.structs.replace(media, processor_cache_bytes=2 * one), tokenizer
    )
    for seed in (1, 2, 3, 1, 3):
        items.place([MediaPart(picture(seed), None, "x")], (), b"", "")
    assert items.counts == (5, 1)
