"""CLIP, SigLIP and SigLIP 2: embeddings of texts and of images agree with transformers, and a prompt has one of them."""

import base64
import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers

from tests.server.client import Client
from tests.support.image_payloads import saved
from tests.support.vision import TOWER, picture, tokenizer
from trouper import LLM, AsyncLLMEngine, EngineArgs
from trouper.actors.executor.runners.cpu import unpaged_decoder as runner
from trouper.actors.rendering.media.items import MediaInThread
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.server.asgi.app import create_app

TEXT = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 24,
}  # fmt: skip
TEXTS = ["a red square", "two cats", "x", "a blue sky"]
PICTURES = [picture(1), picture(2, 60, 31), picture(3, 28, 28)]


class Towers:
    """A tiny model with random weights."""

    def __init__(self, kind, folder):
        t, self.kind, self.folder = transformers, kind, str(folder)
        self.tokens = tokenizer([], "")
        named = {
            f"{name}_token_id": getattr(self.tokens, f"{name}_token_id")
            for name in ("bos", "eos", "pad")
        }
        text = {**TEXT, **named}
        torch.manual_seed(3)
        square = {"height": 28, "width": 28}
        if kind == "clip":
            config = t.CLIPConfig(text_config=text, vision_config=TOWER, projection_dim=16)
            self.images = t.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=square)
            self.model = t.CLIPModel(config)
        elif kind == "siglip2":
            tower = {name: size for name, size in TOWER.items() if name != "image_size"}
            config = t.Siglip2Config(text_config=text, vision_config={**tower, "num_patches": 16})
            self.images = t.Siglip2ImageProcessorPil(patch_size=7, max_num_patches=16)
            self.model = t.Siglip2Model(config)
        else:
            self.images = t.SiglipImageProcessorPil(size=square)
            self.model = t.SiglipModel(t.SiglipConfig(text_config=text, vision_config=TOWER))
        with torch.no_grad():
            for parameter in self.model.parameters():
                # Some matrices are zeros at first, and all images would be equal.
                if parameter.dim() < 2 or not parameter.any():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:
                    parameter.mul_(3)
        self.model.eval().save_pretrained(folder)
        self.images.save_pretrained(folder)
        self.tokens.save_pretrained(folder)

    @torch.no_grad()
    def text(self, words):
        padding = {"padding": "max_length", "max_length": 24} if self.kind != "clip" else {}
        ids = self.tokens(words, return_tensors="pt", **padding).input_ids
        return unit(self.model.get_text_features(input_ids=ids))

    @torch.no_grad()
    def image(self, pixels):
        inputs = self.images([pixels], return_tensors="pt")
        return unit(self.model.get_image_features(**inputs))


def unit(found):
    return torch.nn.functional.normalize(getattr(found, "pooler_output", found)[0], dim=-1)


@pytest.fixture(scope="module", params=["clip", "siglip", "siglip2"])
def towers(request, tmp_path_factory):
    return Towers(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llm(towers):
    with LLM(model=towers.folder, dtype="float32", media_processor="thread") as llm:
        yield llm


def seen(image):
    return {"prompt": "", "multi_modal_data": {"image": image}}


def chat(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def test_both_towers_agree(towers, llm):
    prompts = [*TEXTS, *map(seen, PICTURES), chat({"type": "image", "image": PICTURES[0]})]
    found = [torch.tensor(o.outputs.embedding) for o in llm.embed(prompts, use_tqdm=False)]
    expected = [*map(towers.text, TEXTS), *map(towers.image, PICTURES), towers.image(PICTURES[0])]
    for mine, wanted in zip(found, expected, strict=True):
        assert torch.allclose(mine, wanted, atol=1e-5)
    assert (found[4] - found[5]).abs().max() > 1e-3


def test_texts_are_lowered_where_the_tokenizer_says_so(towers, llm, tmp_path):
    (plain,) = llm.embed("A Red Square", use_tqdm=False)
    assert plain.outputs.embedding != llm.embed(TEXTS[0], use_tqdm=False)[0].outputs.embedding
    shutil.copytree(towers.folder, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "do_lower_case": True}))
    spec = resolve(EngineArgs(model=str(tmp_path))).pooler
    assert spec.lowers_case
    assert not resolve(EngineArgs(model=towers.folder)).pooler.lowers_case


def test_score_compares_a_text_with_an_image(towers, llm):
    image = {"content": [{"type": "image", "image": PICTURES[1]}]}
    (score,) = llm.score(TEXTS[0], image, use_tqdm=False)
    expected = towers.text(TEXTS[0]) @ towers.image(PICTURES[1])
    assert score.outputs.score == pytest.approx(float(expected), abs=1e-5)


PICTURE, WORDS = {"type": "image", "image": PICTURES[0]}, {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": PICTURES[0]}}, "one of them"),
        (chat(PICTURE, WORDS), "one of them"),
        (chat(PICTURE, PICTURE), "second image"),
        (seen(PICTURES[:2]), "second image"),
        ({"messages": [*chat(WORDS)["messages"], *chat(WORDS)["messages"]]}, "one message"),
        (chat({"type": "x"}), "a text or an image"),
        ("a" * 60, "maximum context length"),
        ({**seen(PICTURES[0]), "x": 1}, "unknown keys"),
        (seen(b"no image"), "cannot be read"),
        ("", "empty"),
    ],
)  # fmt: skip
def test_other_prompts_are_refused(llm, prompt, words):
    with pytest.raises(TrouperValidationError, match=words):
        llm.embed(prompt, use_tqdm=False)
    with pytest.raises((TrouperValidationError, UnsupportedFeatureError)):
        llm.encode("a", pooling_task="token_embed", use_tqdm=False)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_embeddings_route_takes_both(towers):
    url = "data:image/png;base64," + base64.b64encode(saved(PICTURES[0])).decode()
    args = EngineArgs(model=towers.folder, dtype="float32", media_processor="thread")
    async with AsyncLLMEngine.from_engine_args(args) as engine:
        client = Client(create_app(engine))
        answer = await client.post("/v1/embeddings", {"input": TEXTS})
        for item, text in zip(answer.json["data"], TEXTS, strict=True):
            assert torch.allclose(torch.tensor(item["embedding"]), towers.text(text), atol=1e-5)
        part = {"type": "image_url", "image_url": {"url": url}}
        answer = await client.post("/v1/embeddings", chat(part))
        found = torch.tensor(answer.json["data"][0]["embedding"])
        assert torch.allclose(found, towers.image(PICTURES[0]), atol=1e-5)
        body = {"images": [url, url], "embedding_types": ["float"], "input_type": "image"}
        answer = await client.post("/v2/embed", body)
        for found in answer.json["embeddings"]["float"]:
            assert torch.allclose(torch.tensor(found), towers.image(PICTURES[0]), atol=1e-5)
        body = {"inputs": [{"content": [WORDS]}, {"content": [part]}]}
        answer = await client.post("/v2/embed", body)
        found = answer.json["embeddings"]["float"]
        assert torch.allclose(torch.tensor(found[0]), towers.text("a"), atol=1e-5)
        for body, param in (
            ({"images": [url, "data:;base64,QQ=="]}, "images[1]"),
            ({"images": ["https://a.org/b.png"]}, "images[0]"),
            ({"images": []}, "images"),
            ({"images": [url], "texts": ["a"]}, "images"),
            ({"images": [url], "max_tokens": 5}, "max_tokens"),
            ({"images": [url], "truncate": "END"}, "truncate"),
            ({"inputs": [{"content": []}]}, "inputs[0].content"),
            ({"inputs": [{"content": [{"image_url": 5}]}]}, "inputs[0].content[0].image_url"),
        ):
            answer = await client.post("/v2/embed", body)
            assert (answer.status in (400, 403), answer.json["error"]["param"]) == (True, param)
        body = {"query": TEXTS[0], "documents": [{"content": [part]}, TEXTS[0]]}
        answer = await client.post("/rerank", body)
        assert answer.json["results"][0]["index"] == 1
        answer = await client.post("/v1/embeddings", chat(part, WORDS))
        assert (answer.status, answer.json["error"]["param"]) == (400, "messages[0].content[0]")


@pytest.mark.slow
def test_commands_embed_and_score_files(tmp_path):
    towers = Towers("clip", tmp_path)
    image, broken, out = tmp_path / "a.png", tmp_path / "b.png", tmp_path / "out.jsonl"
    image.write_bytes(saved(PICTURES[0]))
    broken.write_bytes(b"no image")

    def run(*given):
        options = ["-m", towers.folder, "--dtype", "float32", "--media-processor", "thread"]
        line = [sys.executable, "-m", "trouper", *given, "--image", str(image), "-o", str(out)]
        code = subprocess.run([*line, *options], check=False).returncode
        return code, [json.loads(each) for each in out.read_text().splitlines()]

    code, (first, third, second) = run("embed", TEXTS[0], "--image", str(broken))
    assert code == 2  # a file is wrong
    assert torch.allclose(torch.tensor(first["embed"]), towers.text(TEXTS[0]), atol=1e-5)
    assert torch.allclose(torch.tensor(second["embed"]), towers.image(PICTURES[0]), atol=1e-5)
    assert (second["text"], third["text"]) == (str(image), str(broken))
    assert "cannot be read" in third["error"]
    out.unlink()
    code, records = run("score", TEXTS[0], TEXTS[1])
    question = towers.text(TEXTS[0])
    wanted = [float(question @ towers.text(TEXTS[1])), float(question @ towers.image(PICTURES[0]))]
    assert [each["score"] for each in records] == pytest.approx(wanted, abs=1e-5)
    assert code == 0


def test_threads_do_not_import_the_library_together(towers, monkeypatch):
    calls = []

    def noting(name, function):
        def call(*args):
            found = function(*args)
            calls.append(name)
            return found

        return call

    monkeypatch.setattr(runner, "load_whole", noting("weights", runner.load_whole))
    monkeypatch.setattr(MediaInThread, "warm", noting("processor", MediaInThread.warm))
    with LLM(model=towers.folder, dtype="float32", media_processor="thread"):
        assert calls == ["weights", "processor"]
