"""SPLADE's sparse embeddings equal those of transformers' masked language models, and of sentence-transformers."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from trouper import LLM
from trouper.errors import UnsupportedFeatureError

from .test_encoders import WIDE, prompts, run, save_tiny

KINDS = ["bert", "distilbert", "roberta", "mpnet", "modernbert"]


def save_modules(folder, strategy="max", act="relu", names=("MLMTransformer", "SpladePooling")):
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.x.{name}"}
        for i, name in enumerate(names)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    pooling = folder / "1_SpladePooling"
    pooling.mkdir(exist_ok=True)
    config = {"pooling_strategy": strategy, "activation_function": act}
    (pooling / "config.json").write_text(json.dumps(config))


def expected(model, ids, strategy, act):
    with torch.no_grad():
        weights = model(input_ids=torch.tensor([ids])).logits[0].relu().log1p()
    weights = weights.log1p() if act == "log1p_relu" else weights
    return (weights.sum(0) if strategy == "sum" else weights.amax(0)).numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("strategy", "act"), [("max", "relu"), ("sum", "log1p_relu")])
def test_sparse_embeddings_equal_the_masked_language_model_s(kind, strategy, act, tmp_path):
    model = save_tiny(kind, AutoModelForMaskedLM, tmp_path)
    save_modules(tmp_path, strategy, act)
    found = run(tmp_path, "embed")
    for ids, mine in zip(prompts(), found, strict=True):
        theirs = expected(model, ids, strategy, act)
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
        assert mine.min() >= 0


def test_an_own_table_of_the_head_counts(tmp_path):
    model = save_tiny("bert", AutoModelForMaskedLM, tmp_path, tie_word_embeddings=False)
    save_modules(tmp_path)
    np.testing.assert_allclose(
        run(tmp_path, "embed")[-1], expected(model, prompts()[-1], "max", "relu"), atol=1e-4
    )


def test_sparse_embedding_has_vocabulary_s_size_and_is_not_normalised(tmp_path):
    save_tiny("bert", AutoModelForMaskedLM, tmp_path, **WIDE)
    save_modules(tmp_path)
    with LLM(str(tmp_path), skip_tokenizer_init=True, device="cpu") as llm:
        (output,) = llm.embed([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False)
        assert len(output.outputs.embedding) == 97
        assert np.linalg.norm(output.outputs.embedding) > 1.5


@pytest.mark.parametrize(
    ("names", "how"),
    [
        (("MLMTransformer", "Pooling"), {}),
        (("MLMTransformer",), {}),
        (("Transformer", "SpladePooling"), {}),
        (("MLMTransformer", "SpladePooling"), {"strategy": "mean"}),
        (("MLMTransformer", "SpladePooling"), {"act": "gelu"}),
    ],
)
def test_other_modules_of_sparse_encoders_are_refused_by_name(names, how, tmp_path):
    save_tiny("bert", AutoModelForMaskedLM, tmp_path)
    save_modules(tmp_path, names=names, **how)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(UnsupportedFeatureError, match=r"MLMTransformer|SpladePooling"):
        run(tmp_path, "embed")


def test_a_family_without_a_known_head_is_refused(tmp_path):
    save_tiny("albert", AutoModelForMaskedLM, tmp_path)
    save_modules(tmp_path)
    with pytest.raises(UnsupportedFeatureError, match="SpladePooling"):
        run(tmp_path, "embed")
