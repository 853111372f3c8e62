"""Classifiers, cross-encoders and late interaction through `LLM`, equal to transformers on the same text."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DistilBertConfig,
)

from trouper import LLM, EngineArgs, LLMEngine, PoolingParams
from trouper.actors.output.pooler import MAX_QUERIES
from trouper.actors.output.postprocessing import max_sim, normalized
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.errors import EnginePausedError, TrouperValidationError
from trouper.frontends.python.scoring import Scorer
from trouper.pooling import LateInteractionParams

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
        for sides, name in (
            (("a", ["b", "the " * 999]), "data_2[1]"), (("a", "the " * 999), "data_2"),
            ((["a", ""], ["b", "c"]), "data_1[1]"),
        ):  # fmt: skip
            with pytest.raises(TrouperValidationError) as caught:
                llm.score(*sides, use_tqdm=False)
            assert caught.value.parameter == name
    for text, output in zip(TEXTS, outputs, strict=True):
        want = logits(model, folder, "hello world", text).sigmoid().item()
        assert output.outputs.score == pytest.approx(want, abs=1e-4)
    assert len(short.prompt_token_ids) == 9
    assert 2 not in short.prompt_token_ids


def test_each_text_of_pair_may_have_length_of_its_own(save):
    folder, _ = save(AutoModelForSequenceClassification.from_config, num_labels=1)
    with LLM(str(folder), dtype="float32") as llm:
        engine = llm.thread.engine

        def read(query, document, **most):
            (output,) = llm.thread.call(
                Scorer(engine.encode, engine.config.pooler, **most).score, [query], [document]
            )
            return output.prompt_token_ids

        one, two = "hello world", "the cat sat on the mat"
        tokenizer = Tokenizer.load(folder)
        ids, more = (tokenizer.encode(text, add_special_tokens=False) for text in (one, two))
        assert read(one, two, max_tokens_per_query=2) == [1, *ids[:2], 1, *more]
        assert read(one, two, max_tokens_per_doc=5) == [1, *ids, 1, *more[:5]]
        both = {"max_tokens_per_query": 2, "max_tokens_per_doc": 5}
        assert read(one, two, **both) == [1, *ids[:2], 1, *more[:5]]
        assert read(one, two + " mat" * 9999, **both) == [1, *ids[:2], 1, *more[:5]]


RERANKERS = {
    "qwen3": ("Qwen3", {"is_original_qwen3_reranker": True, "classifier_from_token": ["the", "cat"]}, True),
    "two tokens": ("Qwen2", {"method": "from_2_way_softmax", "classifier_from_token": ["the", "cat"]}, True),
    "one token": ("Gemma", {"method": "no_post_processing", "classifier_from_token": ["cat"]}, False),
}  # fmt: skip


def published(make_folder, family, tokens, is_tied):
    """A language model that reranks by the logits of two tokens, and the ids of those."""
    folder = make_folder("metaspace")
    sizes = {
        "vocab_size": 340, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": is_tied,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    names = [next(t for t in backend.get_vocab() if t.strip("▁") == token) for token in tokens]
    return folder, model, names, [backend.token_to_id(name) for name in names]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", RERANKERS)
def test_published_rerankers_score_by_logits_of_their_tokens(kind, is_tied, make_folder):
    family, overrides, is_difference = RERANKERS[kind]
    tokens = overrides["classifier_from_token"]
    folder, model, names, ids = published(make_folder, family, tokens, is_tied)
    overrides = overrides | {
        "architectures": [f"{family}ForSequenceClassification"], "classifier_from_token": names,
    }  # fmt: skip
    with LLM(str(folder), dtype="float32", hf_overrides=overrides) as llm:
        (score,) = llm.score("the cat", "hello", use_tqdm=False)
    with torch.no_grad():
        found = model(ids_of(folder, "the cat", "hello")[0]).logits[0, -1, ids]
    expected = (found[1] - found[0] if is_difference else found[0]).sigmoid()
    assert score.outputs.score == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("overrides", [
    {"classifier_from_token": ["a", "b"]}, {"method": "from_2_way_softmax"},
    {"method": "from_2_way_softmax", "classifier_from_token": ["a"]},
    {"method": "from_2_way_softmax", "classifier_from_token": "ab"},
    {"method": "no_post_processing", "classifier_from_token": []},
    {"method": "no_post_processing", "classifier_from_token": ["no such token"]},
    {"is_original_qwen3_reranker": True},
])  # fmt: skip
def test_bad_token_classifier_is_refused_by_its_field(overrides, make_folder):
    folder, *_ = published(make_folder, "Qwen2", ["the", "cat"], True)
    overrides = overrides | {"architectures": ["Qwen2ForSequenceClassification"]}
    with pytest.raises(TrouperValidationError, match="parameter=hf_overrides"):
        LLM(str(folder), dtype="float32", hf_overrides=overrides)


@pytest.mark.parametrize("num_types", [0, 1, 2])
def test_token_types_are_those_that_the_model_has(num_types, save):
    """One without types ignores them."""
    folder, _ = save(AutoModel.from_config, type_vocab_size=num_types or 2)
    if not num_types:
        distil = DistilBertConfig(
            vocab_size=340, dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=64
        )
        AutoModel.from_config(distil).save_pretrained(folder)
    file = str(folder / "tokenizer.json")
    backend = Backend.from_file(file)
    backend.post_processor = TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    backend.save(file)
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    pair = {"prompt": "the cat", "text_pair": "hello"}
    assert ids_of(folder, *pair.values())[1].max() == 1  # whatever the model has
    ids = [5, 6, 7]
    with LLM(str(folder), dtype="float32") as llm:
        for wrong in ([0, num_types or 2, 0], [0, -1, 0], ["a", 0, 0], [None] * 3, [0], "000"):
            with pytest.raises(TrouperValidationError, match="parameter=token_type_ids"):
                llm.embed({"prompt_token_ids": ids, "token_type_ids": wrong}, use_tqdm=False)
        plain, typed = llm.embed(
            [
                {"prompt_token_ids": ids},
                {"prompt_token_ids": ids, "token_type_ids": [0, 0, abs(num_types - 1)]},
            ],
            use_tqdm=False,
        )
        assert (plain.outputs.embedding == typed.outputs.embedding) is (num_types < 2)
        assert llm.embed(pair, use_tqdm=False)


def test_token_classifier_has_row_for_each_token(save):
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


def test_more_queries_than_pooler_keeps_meet_their_documents(save):
    folder, _ = save(AutoModel.from_config)
    queries = [f"the cat {i}" for i in range(MAX_QUERIES + 6)]
    task = {"task": "token_embed"}
    with LLM(str(folder), dtype="float32", pooler_config=task) as llm:
        scores = llm.score([*queries, queries[0]], [*queries, "the mat"], use_tqdm=False)
        alone = llm.score(queries[0], [queries[0], "the mat"], use_tqdm=False)
    for index, want in ((0, alone[0]), (-1, alone[1])):
        assert scores[index].outputs.score == pytest.approx(want.outputs.score, abs=1e-4)
    for query, score in zip(queries, scores, strict=False):  # each of its tokens has found itself
        num_tokens = len(score.prompt_token_ids) / 2
        assert score.outputs.score == pytest.approx(num_tokens, abs=1e-3), query


def pylate_folder(save, **settings):
    """As PyLate saves one: a projection of each token, markers, and no pooling over the tokens."""
    folder, model = save(AutoModel.from_config)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["[MASK]"])
    backend.add_tokens([AddedToken(marker, normalized=False) for marker in ("[Q] ", "[D] ")])
    backend.save(str(folder / "tokenizer.json"))
    names = json.loads((folder / "tokenizer_config.json").read_text())
    names |= {"mask_token": "[MASK]", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    own = {"max_seq_length": 7, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(own))
    markers = {
        "model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] ",
        "query_length": 12, "document_length": 20, "attend_to_expansion_tokens": False,
        "skiplist_words": ["c", "▁cat", "no such token"], **settings,
    }  # fmt: skip
    (folder / "config_sentence_transformers.json").write_text(json.dumps(markers))
    weight = torch.randn(16, 32)
    dense = {
        "in_features": 32, "out_features": 16, "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }  # fmt: skip
    (folder / "1_Dense").mkdir()
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
    return folder, model, weight


QUERIES = ["the cat", "hello", "the cat sat on the mat and hello world again"]
DOCUMENTS = ["the cat sat on the mat", "a cat", "hello world hello user " * 3]


@pytest.mark.parametrize(
    "settings",
    [{}, {"attend_to_expansion_tokens": True}, {"do_query_expansion": False}],
    ids=["unseen", "seen", "unexpanded"],
)
def test_a_colbert_folder_marks_expands_cuts_and_skips(settings, save):
    folder, model, weight = pylate_folder(save, **settings)
    tokenizer = Tokenizer.load(folder)
    skipped = {tokenizer.token_id("c"), tokenizer.token_id("▁cat")}

    def embedded(ids, num_seen):
        seen = torch.tensor([[int(i < num_seen) for i in range(len(ids))]])
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([ids]), attention_mask=seen).last_hidden_state[0]
        return normalized((hidden @ weight.T).numpy())

    def query_of(text):
        first, *rest = tokenizer.encode(text)[:11]
        ids = [first, tokenizer.token_id("[Q] "), *rest]
        if settings.get("do_query_expansion") is False:
            return embedded(ids, len(ids))
        whole = ids + [tokenizer.mask_token_id] * (12 - len(ids))
        return embedded(whole, 12 if settings else len(ids))

    def document_of(text):
        first, *rest = tokenizer.encode(text)[:19]
        ids = [first, tokenizer.token_id("[D] "), *rest]
        return embedded(ids, len(ids))[[i for i, id in enumerate(ids) if id not in skipped]]

    with LLM(str(folder), dtype="float32") as llm:
        outputs = llm.score(QUERIES, DOCUMENTS, use_tqdm=False)
        (plain,) = llm.encode("the cat", pooling_task="token_embed", use_tqdm=False)
    for query, text, output in zip(QUERIES, DOCUMENTS, outputs, strict=True):
        want = max_sim(query_of(query), document_of(text))
        assert output.outputs.score == pytest.approx(want, abs=1e-4)
    ids = tokenizer.encode("the cat")
    np.testing.assert_allclose(plain.outputs.data, embedded(ids, len(ids)), atol=1e-4)


def test_colbert_text_is_cut_where_its_tokenizer_says(save):
    """Nobody asked for it to be cut: such a text always is."""
    folder, *_ = pylate_folder(save)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"truncation_side": "left"}))
    tokenizer = Tokenizer.load(folder)
    text = " ".join(QUERIES) * 3
    late = LateInteractionParams(mode="cache_query", query_key="q", query_uses=1)
    params = PoolingParams(task="token_embed", late_interaction_params=late)
    with LLM(str(folder), dtype="float32") as llm:
        (output,) = llm.encode(text, params, pooling_task="token_embed", use_tqdm=False)
    assert output.prompt_token_ids[-4:] == tokenizer.encode(text)[-4:]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # of their packages
@pytest.mark.parametrize("form", ["PyLate's", "their own", "with texts"])
def test_a_colbert_folder_scores_as_sentence_transformers_does(form, save, tmp_path):
    from sentence_transformers import MultiVectorEncoder

    folder, *_ = pylate_folder(save)
    theirs = MultiVectorEncoder(str(folder), device="cpu")
    if form != "PyLate's":
        if form == "with texts":
            theirs.prompts = {"query": "the query: ", "document": ""}
            theirs[0].query_expansion, theirs[0].query_length = None, 9
        theirs.save_pretrained(str(tmp_path))
        folder = tmp_path
    with LLM(str(folder), dtype="float32") as llm:
        outputs = llm.score(QUERIES, DOCUMENTS, use_tqdm=False)
    for query, document, output in zip(QUERIES, DOCUMENTS, outputs, strict=True):
        sides = theirs.encode_query(query), theirs.encode_document(document)
        want = max_sim(*(side.numpy() for side in sides))
        assert output.outputs.score == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"query_length": "long"}, "parameter=model"),
        ({"no mask": True}, "lacks a mask token.*parameter=tokenizer"),
        ({"few rows": True}, "marks with token.*parameter=tokenizer"),
    ],
)
def test_a_colbert_folder_that_lacks_something_is_refused(settings, fault, save):
    folder, *_ = pylate_folder(save, **settings)
    if "no mask" in settings:
        config = folder / "tokenizer_config.json"
        config.write_text(config.read_text().replace("mask_token", "other_token"))
    if "few rows" in settings:  # the embeddings were not resized for the markers
        num = Backend.from_file(str(folder / "tokenizer.json")).token_to_id("[D] ")
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"vocab_size": 340', f'"vocab_size": {num}'))
    with pytest.raises(TrouperValidationError, match=fault):
        LLM(str(folder), dtype="float32", load_format="dummy")


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
