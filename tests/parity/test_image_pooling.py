"""Models that see pool: embeddings of texts with images agree with transformers, in Python and over HTTP."""

import base64
import json
import shutil

import numpy as np
import pytest
import torch

from tests.server.client import Client
from tests.support.image_payloads import saved
from tests.support.vision import VisionModel, image, picture, text
from trouper import LLM, AsyncLLMEngine, EngineArgs
from trouper.actors.rendering.media.processor import ImageProcessor
from trouper.config.resolve import resolve
from trouper.errors import MediaError, TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.server.asgi.app import create_app

OPTIONS = {
    "runner": "pooling",
    "dtype": "float32",
    "max_model_len": 512,
    "media_processor": "thread",
}
# Several plans, each of several passes.
CHATS = [
    [text("Look: "), image(1), text(" What?")],
    [image(2, 60, 60), image(1), text("Differ?")],
    [text("only words")],
    [image(3, 28, 56)],
]
KINDS = [
    "llava",
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in ("qwen3_vl", "smolvlm", "gemma3", "paligemma2")
    ),
]


class Reference:
    """A tiny model, and the hidden states that transformers computes."""

    def __init__(self, kind, folder):
        self.model = VisionModel(kind, folder)
        media = resolve(EngineArgs(model=str(folder))).media
        self.processor = ImageProcessor(media, self.model.image_token)

    def hidden(self, ids, parts):
        pictures = [part["image"] for part in parts if part["type"] == "image"]
        inputs = [
            {a.name: np.frombuffer(a.data, a.dtype).reshape(a.shape) for a in found.arrays}
            for found in (self.processor.process(p, {}) for p in pictures)
        ]
        rows = self.model.joined(list(ids), inputs)
        if self.model.kind.startswith("paligemma"):
            rows["token_type_ids"] = torch.zeros((1, len(ids)), dtype=torch.int64)
        with torch.no_grad():
            found = self.model.model(
                input_ids=torch.tensor([list(ids)]), output_hidden_states=True, **rows
            )
        return torch.nn.functional.normalize(found.hidden_states[-1][0], dim=-1)


@pytest.fixture(scope="module")
def reference(request, tmp_path_factory):
    return Reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llm(reference):
    with LLM(model=str(reference.model.folder), **OPTIONS) as llm:
        yield llm


def chat(parts):
    return {"messages": [{"role": "user", "content": parts}]}


@pytest.mark.parametrize("reference", KINDS, indirect=True, scope="module")
def test_states_of_images_agree(llm, reference):
    # A PaliGemma reads no prompts without images.
    is_whole = reference.model.kind.startswith("paligemma")
    chats = [parts for parts in CHATS if not is_whole or any(p["type"] == "image" for p in parts)]
    prompts = [chat(parts) for parts in chats] * 3
    tokens = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    whole = llm.embed(prompts, use_tqdm=False)
    for parts, states, embedding in zip(chats * 3, tokens, whole, strict=True):
        expected = reference.hidden(states.prompt_token_ids, parts)
        found = torch.from_numpy(states.outputs.array)
        assert torch.allclose(found, expected, atol=1e-5)
        last = torch.tensor(embedding.outputs.embedding)
        assert torch.allclose(last, expected[-1], atol=1e-5)


@pytest.mark.parametrize("reference", ["llava"], indirect=True, scope="module")
def test_prompts_and_scores_take_images(llm, reference):
    data = {"image": picture(1)}
    prompt = {"prompt": "<image> is the colour", "multi_modal_data": data}
    (plain,) = llm.embed(prompt, use_tqdm=False)
    expected = reference.hidden(plain.prompt_token_ids, [image(1)])[-1]
    assert torch.allclose(torch.tensor(plain.outputs.embedding), expected, atol=1e-5)
    sides = [{"content": [image(1)]}, {"content": [image(2)]}, "words"]
    scores = [s.outputs.score for s in llm.score(sides[0], sides, use_tqdm=False)]
    assert scores[0] == pytest.approx(1, abs=1e-5)
    assert max(scores[1:]) < 0.999
    with pytest.raises(TrouperValidationError, match=r"data_2\[0\]"):
        llm.score("a", [{"content": []}], use_tqdm=False)
    with pytest.raises(MediaError, match=r"data_2.content\[0\].image_url"):
        llm.score("a", {"content": [{"image_url": "http://a.org"}]}, use_tqdm=False)
    with pytest.raises(TrouperValidationError, match="truncate"):
        llm.embed(prompt, tokenization_kwargs={"truncate_prompt_tokens": 4}, use_tqdm=False)


@pytest.mark.parametrize("reference", ["llava"], indirect=True, scope="module")
def test_pairs_of_a_cross_encoder_have_no_images(reference):
    options = {
        **OPTIONS,
        "convert": "classify",
        "load_format": "dummy",
        "hf_overrides": {"num_labels": 1},
    }
    with LLM(model=str(reference.model.folder), **options) as llm:
        assert llm.classify(chat(CHATS[0]), use_tqdm=False)[0].outputs.num_classes == 1
        with pytest.raises(UnsupportedFeatureError, match="data_2"):
            llm.score("a", {"content": [image(1)]}, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["qwen3_vl"], indirect=True, scope="module")
def test_folder_of_sentence_transformers_embeds_images(reference, tmp_path):
    """As Qwen3-VL-Embedding is published: the class generates, and modules.json says that the model embeds."""
    folder = tmp_path / "embeds"
    shutil.copytree(reference.model.folder, folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in kinds.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    asked = chat(CHATS[1]) | {"add_generation_prompt": True}
    with LLM(model=str(folder), **OPTIONS | {"runner": "auto"}) as llm:
        (result,) = llm.embed(asked, use_tqdm=False)
    expected = reference.hidden(result.prompt_token_ids, CHATS[1])[-1]
    assert torch.allclose(torch.tensor(result.outputs.embedding), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["qwen3_vl"], indirect=True, scope="module")
@pytest.mark.parametrize("name", [{}, {"architectures": ["Qwen3VLForSequenceClassification"]}])
def test_reranker_judges_images_of_a_conversation(reference, name):
    """As Qwen3-VL-Reranker answers: the score compares the logits of two tokens."""
    overrides = {"classifier_from_token": ["n", "y"], "is_original_qwen3_reranker": True, **name}
    options = {**OPTIONS, "runner": "auto", "hf_overrides": overrides}
    asked = chat(CHATS[0]) | {"add_generation_prompt": True}
    with LLM(model=str(reference.model.folder), **options) as llm:
        (result,) = llm.classify(asked, use_tqdm=False)
        with pytest.raises(UnsupportedFeatureError, match="classify"):
            llm.score("a", {"content": [image(1)]}, use_tqdm=False)
    arrays = reference.processor.process(picture(1), {}).arrays
    inputs = [{a.name: np.frombuffer(a.data, a.dtype).reshape(a.shape) for a in arrays}]
    scores = reference.model.logprobs(list(result.prompt_token_ids), inputs)[-1]
    no, yes = (reference.model.tokens.convert_tokens_to_ids(token) for token in "ny")
    assert result.outputs.probs == pytest.approx([float((scores[yes] - scores[no]).sigmoid())])


@pytest.mark.anyio
@pytest.mark.parametrize("reference", ["llava"], indirect=True, scope="module")
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_pooling_routes_take_images(reference):
    args = EngineArgs(model=str(reference.model.folder), served_model_name="sees", **OPTIONS)
    url = "data:image/png;base64," + base64.b64encode(saved(picture(1))).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    async with AsyncLLMEngine.from_engine_args(args) as engine:
        client = Client(create_app(engine))
        answer = await client.post("/v1/embeddings", chat([part]))
        assert answer.status == 200, answer.body
        found = torch.tensor(answer.json["data"][0]["embedding"])
        ids = (await engine.encode(chat([image(1)])).__anext__()).prompt_token_ids
        assert torch.allclose(found, reference.hidden(ids, [image(1)])[-1], atol=1e-5)
        answer = await client.post("/pooling", {**chat([part]), "task": "token_embed"})
        assert len(answer.json["data"][0]["data"]) == len(ids)
        asked = {"query": {"content": [part]}, "documents": ["words", {"content": [part]}]}
        answer = await client.post("/rerank", asked)
        best = answer.json["results"][0]
        assert (best["index"], best["document"]["multi_modal"]) == (1, [part])
        for route, body, param in (
            ("/score", {"data_1": "a", "data_2": {"content": []}}, "data_2.content"),
            ("/score", {"data_1": "a", "data_2": {}}, "data_2"),
            ("/rerank", {"query": "a", "documents": [{"content": [{"image_url": 5}]}]}, "documents[0].content[0].image_url"),
            ("/v1/embeddings", chat([{"image_url": "data:;base64,QQ=="}]), "messages[0].content[0].image_url"),
            ("/v1/embeddings", {**chat([part]), "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
            ("/rerank", {"query": "a", "documents": ["b", {"content": [part]}], "max_tokens_per_doc": 3}, "max_tokens_per_doc"),
            ("/score", {"data_1": {"content": [part]}, "data_2": "a", "max_tokens_per_query": 3}, "max_tokens_per_query"),
            ("/score", {"data_1": "a", "data_2": "b", "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ):  # fmt: skip
            answer = await client.post(route, body)
            assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.body
