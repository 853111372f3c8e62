"""ColPali and ColQwen2: embeddings of questions and of pages, and their scores, agree with transformers."""

import base64
import io
import subprocess
import sys

import pytest
import torch
import transformers

from tests.server.client import Client
from tests.support.vision import TEXT, TOWER, picture, tokenizer
from trouper import LLM, AsyncLLMEngine, EngineArgs
from trouper.actors.executor.models.names import text_names
from trouper.config.checkpoint.hf_config import flattened, of_retriever, outer_fields
from trouper.errors import TrouperValidationError
from trouper.frontends.server.asgi.app import create_app

QUESTIONS = ["which colour is it?", "two cats"]
PAGES = [picture(1, 56, 28), picture(2, 60, 31)]


class Retriever:
    """A tiny model with random weights, and the processor of transformers."""

    def __init__(self, kind, folder):
        t, self.kind, self.folder = transformers, kind, str(folder)
        square = {"height": 28, "width": 28}
        torch.manual_seed(3)
        if kind == "colpali":
            tokens = tokenizer(["<image>"], "")
            image_id = tokens.convert_tokens_to_ids("<image>")
            inner = {
                "model_type": "paligemma", "image_token_index": image_id, "projection_dim": 64,
                "vision_config": {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
                "text_config": {**TEXT, "model_type": "gemma", "head_dim": 16, "num_key_value_heads": 1},
            }  # fmt: skip
            config = t.ColPaliConfig(vlm_config=inner, embedding_dim=16)
            images = t.SiglipImageProcessorPil(size=square)
            images.image_seq_length = 16
            self.model = t.ColPaliForRetrieval(config)
            kind_of_processor = t.ColPaliProcessor
        else:
            names = [
                "<|image_pad|>", "<|vision_start|>", "<|vision_end|>",
                "<|im_start|>", "<|im_end|>", "<|endoftext|>",
            ]  # fmt: skip
            tokens = tokenizer(names, "")
            ids = tokens.convert_tokens_to_ids(names)
            inner = {
                "model_type": "qwen2_vl", "image_token_id": ids[0], "vision_start_token_id": ids[1],
                "vision_end_token_id": ids[2],
                "vision_config": {
                    "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 7,
                    "spatial_merge_size": 2, "temporal_patch_size": 2,
                },
                "text_config": {
                    **TEXT, "model_type": "qwen2_vl_text",
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
                },
            }  # fmt: skip
            config = t.ColQwen2Config(vlm_config=inner, embedding_dim=16)
            images = t.Qwen2VLImageProcessorPil(
                patch_size=7, min_pixels=14 * 14, max_pixels=56 * 56
            )
            self.model = t.ColQwen2ForRetrieval(config)
            kind_of_processor = t.ColQwen2Processor
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() < 2 or not parameter.any():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:
                    parameter.mul_(3)
        self.model.eval().save_pretrained(folder)
        images.save_pretrained(folder)
        tokens.save_pretrained(folder)
        self.processor = kind_of_processor(image_processor=images, tokenizer=tokens)

    @torch.no_grad()
    def question(self, words):
        return self.model(**self.processor.process_queries([words])).embeddings[0]

    @torch.no_grad()
    def page(self, image):
        return self.model(**self.processor.process_images([image])).embeddings[0]


@pytest.fixture(scope="module", params=["colpali", "colqwen2"])
def retriever(request, tmp_path_factory):
    return Retriever(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llm(retriever):
    with LLM(model=retriever.folder, dtype="float32", media_processor="thread") as llm:
        yield llm


def page(image, *more):
    return {"messages": [{"role": "user", "content": [{"type": "image", "image": image}, *more]}]}


def words(text):
    return {"type": "text", "text": text}


def embedded(llm, prompt):
    (found,) = llm.encode(prompt, pooling_task="token_embed", use_tqdm=False)
    return torch.as_tensor(found.outputs.data)


def test_questions_and_pages_agree_with_the_library(retriever, llm):
    for text in QUESTIONS:
        torch.testing.assert_close(embedded(llm, text), retriever.question(text), atol=1e-5, rtol=0)
    wanted = [retriever.page(image) for image in PAGES]
    for image, rows in zip(PAGES, wanted, strict=True):
        data = {"prompt": "", "multi_modal_data": {"image": image}}
        for prompt in (page(image), page(image, words("Describe the image.")), data):
            torch.testing.assert_close(embedded(llm, prompt), rows, atol=1e-5, rtol=0)
    assert (wanted[0][-1] - wanted[1][-1]).abs().max() > 1e-3


def test_other_words_about_a_page_count(llm):
    plain, other = embedded(llm, page(PAGES[0])), embedded(llm, page(PAGES[0], words("Its table.")))
    assert plain.shape != other.shape


def test_scores_are_late_interaction_as_in_the_library(retriever, llm):
    documents = [{"content": [{"type": "image", "image": image}]} for image in PAGES]
    for text in QUESTIONS:
        question = retriever.question(text)
        wanted = [float((question @ retriever.page(i).T).max(1).values.sum()) for i in PAGES]
        found = [each.outputs.score for each in llm.score(text, documents, use_tqdm=False)]
        assert found == pytest.approx(wanted, abs=1e-4)


def test_a_document_of_text_is_no_question(retriever, llm):
    ids = retriever.processor.tokenizer("two dogs", return_tensors="pt").input_ids
    with torch.no_grad():
        document = retriever.model(input_ids=ids, attention_mask=torch.ones_like(ids)).embeddings[0]
    wanted = float((retriever.question("cats") @ document.T).max(1).values.sum())
    (found,) = llm.score("cats", "two dogs", use_tqdm=False)
    assert found.outputs.score == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("prompt", "rule"),
    [
        (page(PAGES[0], {"type": "image", "image": PAGES[1]}), "second image"),
        ("", "empty"),
        (page(b"no image"), "cannot be read"),
        ({"messages": page(PAGES[0])["messages"] * 2}, "one message"),
    ],
)
def test_what_is_no_page_is_refused(llm, prompt, rule):
    with pytest.raises(TrouperValidationError, match=rule):
        embedded(llm, prompt)


def test_tasks_other_than_token_embed_are_refused(llm):
    with pytest.raises(TrouperValidationError, match="token_embed"):
        llm.embed("a", use_tqdm=False)


def url(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"},
    }


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_pages_over_http_are_pooled_and_ranked(retriever):
    args = EngineArgs(model=retriever.folder, dtype="float32", media_processor="thread")
    async with AsyncLLMEngine.from_engine_args(args) as engine:
        client = Client(create_app(engine))
        message = [{"role": "user", "content": [url(PAGES[0])]}]
        pooled = await client.post("/pooling", {"messages": message, "task": "token_embed"})
        rows = torch.tensor(pooled.json["data"][0]["data"])
        torch.testing.assert_close(rows, retriever.page(PAGES[0]), atol=1e-5, rtol=0)
        documents = [{"content": [url(image)]} for image in PAGES]
        scored = await client.post("/score", {"text_1": QUESTIONS[0], "text_2": documents})
        scores = [each["score"] for each in scored.json["data"]]
        ranked = await client.post("/rerank", {"query": QUESTIONS[0], "documents": documents})
        best = ranked.json["results"][0]
        assert best["index"] == max(range(2), key=scores.__getitem__)
        assert best["relevance_score"] == pytest.approx(max(scores), abs=1e-5)
        cut = {"query": "cats and dogs", "documents": documents, "max_tokens_per_query": 4}
        short = await client.post("/rerank", {**cut})
        whole = await client.post("/rerank", {"query": "cats", "documents": documents})
        assert short.json["results"] == whole.json["results"]


@pytest.mark.slow
def test_example_of_pages_ranks_files(retriever, tmp_path):
    names = [str(tmp_path / f"{i}.png") for i in range(2)]
    for image, name in zip(PAGES, names, strict=True):
        image.save(name)
    line = [sys.executable, "docs/examples/pages.py", retriever.folder, *names]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert [each.split()[1] for each in done.stdout.splitlines()] == names


@pytest.mark.parametrize(
    ("stored", "plain"),
    [
        ("vlm.language_model.model.norm.weight", "model.norm.weight"),
        ("vlm.model.language_model.norm.weight", "model.norm.weight"),
        ("vlm.language_model.norm.weight", "model.norm.weight"),
        ("vlm.model.norm.weight", "model.norm.weight"),
    ],
)
def test_checkpoints_of_any_release_have_known_names(stored, plain):
    stored = [stored.replace("norm", each) for each in ("norm", "layers.0.q", "embed_tokens")]
    wanted = {plain.replace("norm", "layers.0.q"): stored[1]}
    found = text_names([*stored, "vlm.vision_tower.x", "embedding_proj_layer.weight"])
    assert wanted.items() <= found.items()
    assert len(found) == 3


def test_configs_of_the_hub_omit_defaults():
    text = {"model_type": "gemma", "hidden_size": 2048, "num_hidden_layers": 18}
    raw = {
        "model_type": "colpali", "architectures": ["ColPaliForRetrieval"], "embedding_dim": 128,
        "vlm_config": {"model_type": "paligemma", "text_config": text, "image_token_index": 257152},
    }  # fmt: skip
    found = flattened(of_retriever(raw))
    assert (found["hidden_size"], found["max_position_embeddings"]) == (2048, 8192)
    assert outer_fields(of_retriever(raw)) == raw
