"""Classifiers, cross-encoders and late interaction through `LLM`, equal to transformers on the same text."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
)

from trouper import LLM, EngineArgs, LLMEngine, PoolingParams
from trouper.actors.postprocessing import max_sim, normalized
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.errors import EnginePausedError, TrouperValidationError

SIZES = {
    "vocab_size": 340, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
TEXTS = ["the cat", "hello", "the cat sat on the mat"]


@pytest.fixture(scope="module")
def save(make_folder):
    """Write a tiny model beside a tokenizer; (folder, model)."""

    def save(make, **config):
        folder = make_folder("metaspace")
        torch.manual_seed(0)
        model = make(BertConfig(**SIZES, **config)).eval()
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter) / 3
        model.save_pretrained(folder)
        return folder, model

    return save


def ids_of(folder, *texts):
    ids, types = Tokenizer.load(folder).encode_within(*texts)
    return torch.tensor([ids]), torch.tensor([types])


def logits(model, folder, *texts):
    ids, types = ids_of(folder, *texts)
    with torch.no_grad():
        return model(input_ids=ids, token_type_ids=types).logits[0]


def test_a_classifier_gives_the_probability_of_each_class(save):
    folder, model = save(AutoModelForSequenceClassification.from_config, num_labels=3)
    with LLM(str(folder), dtype="float32") as llm:
        assert llm.supported_tasks == ("classify",)
        outputs = llm.classify(TEXTS, use_tqdm=False)
        raw = llm.classify(
            TEXTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False
        )
        with pytest.raises(TrouperValidationError, match="3 labels"):
            llm.score("a", "b", use_tqdm=False)
        with pytest.raises(TrouperValidationError, match="parameter=task"):
            llm.embed("a", use_tqdm=False)
    for text, output, plain in zip(TEXTS, outputs, raw, strict=True):
        want = logits(model, folder, text)
        np.testing.assert_allclose(output.outputs.probs, want.softmax(-1), atol=1e-4)
        np.testing.assert_allclose(plain.outputs.probs, want, atol=1e-4)


def test_a_cross_encoder_reads_both_texts_at_once(save):
    folder, model = save(AutoModelForSequenceClassification.from_config, num_labels=1)
    with LLM(str(folder), dtype="float32") as llm:
        outputs = llm.score("hello world", TEXTS, use_tqdm=False)
        cut = {"truncate_prompt_tokens": 9}
        (short,) = llm.score("the " * 30, "cat", use_tqdm=False, tokenization_kwargs=cut)
    for text, output in zip(TEXTS, outputs, strict=True):
        want = logits(model, folder, "hello world", text).sigmoid().item()
        assert output.outputs.score == pytest.approx(want, abs=1e-4)
    assert len(short.prompt_token_ids) == 9
    assert 2 not in short.prompt_token_ids


def test_a_token_classifier_has_a_row_for_each_token(save):
    folder, model = save(AutoModelForTokenClassification.from_config, num_labels=4)
    with LLM(str(folder), dtype="float32") as llm:
        outputs = llm.encode(TEXTS, pooling_task="token_classify", use_tqdm=False)
        assert llm.reward("hello", use_tqdm=False)[0].outputs.array.shape[1] == 4
    for text, output in zip(TEXTS, outputs, strict=True):
        want = logits(model, folder, text).softmax(-1)
        np.testing.assert_allclose(output.outputs.data, want, atol=1e-4)


def test_late_interaction_sums_the_best_matches(save):
    folder, model = save(AutoModel.from_config, dim=16)
    weight = torch.randn(16, 32)
    file = folder / "model.safetensors"
    save_file({**load_file(file), "linear.weight": weight}, file)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"BertModel"', '"HF_ColBERT"'))

    def tokens(text):
        with torch.no_grad():
            hidden = model(input_ids=ids_of(folder, text)[0]).last_hidden_state[0]
        return normalized((hidden @ weight.T).numpy())

    with LLM(str(folder), dtype="float32") as llm:
        outputs = llm.score(["hello", *TEXTS[:2]], TEXTS, use_tqdm=False)
    for query, text, output in zip(["hello", *TEXTS[:2]], TEXTS, outputs, strict=True):
        want = max_sim(tokens(query), tokens(text))
        assert output.outputs.score == pytest.approx(want, abs=1e-3)


def test_a_pooling_model_sleeps_and_wakes(save):
    folder, _ = save(AutoModel.from_config)
    with LLM(str(folder), dtype="float32") as llm:
        before = llm.embed(TEXTS, use_tqdm=False)
        llm.sleep(2)
        with pytest.raises(EnginePausedError):
            llm.embed("a", use_tqdm=False)
        llm.wake_up()
        after = llm.embed(TEXTS, use_tqdm=False)
    assert [o.outputs for o in before] == [o.outputs for o in after]


def test_what_makes_no_pairs_is_refused():
    with LLM(runner="pooling") as llm:
        for first, second, name in (
            ("a", [], "data_2"),
            (["a", "b"], ["c"] * 3, "data_2"),
            (1, "a", "data_1"),
        ):
            with pytest.raises(TrouperValidationError, match=f"parameter={name}"):
                llm.score(first, second, use_tqdm=False)
        with pytest.raises(TrouperValidationError, match="parameter=prompt"):
            llm.embed([], use_tqdm=False)


def test_a_generating_model_does_not_pool():
    with LLM() as llm:
        with pytest.raises(TrouperValidationError, match="runner='pooling'"):
            llm.embed("a", use_tqdm=False)
        with pytest.raises(TrouperValidationError, match="parameter=runner"):
            llm.score("a", "b", use_tqdm=False)


def test_an_engine_that_is_stepped_by_hand_pools():
    with LLM(runner="pooling") as llm:
        (want,) = llm.embed("one", use_tqdm=False)
    with LLMEngine(EngineArgs(runner="pooling")) as engine:
        for id in ("a", "b"):
            engine.add_request(id, "one", PoolingParams(task="embed"))
        engine.abort_request("b")
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
    by_id = {output.request_id: output for output in outputs}
    np.testing.assert_allclose(by_id["a"].outputs.array, want.outputs.embedding, atol=1e-6)
    assert by_id["b"].error.code == "aborted"
