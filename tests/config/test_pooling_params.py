"""What a caller may ask of a pooling model, and what is refused by name."""

import json

import numpy as np
import pytest

from trouper.config.checkpoint.pooler import PoolerConfig, is_pooling, pooler_spec
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestError,
    ScoringOutput,
    ScoringRequestOutput,
)
from trouper.params import RequestOutputKind
from trouper.pooling import LateInteractionParams, PoolingParams

BERT = {"hidden_size": 8, "model_type": "bert", "id2label": {"0": "no", "1": "yes"}}


def spec(architecture="BertModel", folder=None, config=(), **wishes):
    folder = folder or pytest.tmp
    return pooler_spec(PoolerConfig(**wishes), folder, architecture, {**BERT, **dict(config)})


@pytest.fixture(autouse=True)
def _folder(tmp_path):
    pytest.tmp = tmp_path
    yield
    del pytest.tmp


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task", "score"), ("task", "encode"), ("task", "rank"), ("task", 7),
        ("use_activation", 1), ("dimensions", 0), ("dimensions", True), ("dimensions", 2.0),
        ("step_tag_id", -1), ("returned_token_ids", []), ("returned_token_ids", [-1]),
        ("late_interaction_params", {"mode": "cache_query"}),
        ("output_kind", RequestOutputKind.DELTA),
    ],
)  # fmt: skip
def test_value_that_cannot_be_is_refused_by_name(name, value):
    with pytest.raises(TrouperValidationError, match=f"parameter={name}"):
        PoolingParams(**{name: value})


@pytest.mark.parametrize(
    "given",
    [{"task": "plugin"}, {"late_chunking_params": {"chunk_size": 4}}, {"extra_kwargs": {"a": 1}}],
)
def test_what_is_not_built_yet_says_so(given):
    with pytest.raises(UnsupportedFeatureError):
        PoolingParams(**given)


def test_removed_tasks_name_their_replacement():
    with pytest.raises(TrouperValidationError, match="'classify'"):
        PoolingParams(task="score")
    with pytest.raises(TrouperValidationError, match="'token_embed'"):
        PoolingParams(task="encode")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"mode": "keep", "query_key": "a"}, "mode"),
        ({"mode": "score_doc", "query_key": ""}, "query_key"),
        ({"mode": "cache_query", "query_key": "a"}, "query_uses"),
        ({"mode": "cache_query", "query_key": "a", "query_uses": 0}, "query_uses"),
    ],
)
def test_late_interaction_needs_mode_key_and_uses(given, name):
    with pytest.raises(TrouperValidationError, match=f"parameter={name}"):
        LateInteractionParams(**given)


def test_what_is_left_open_comes_from_the_model():
    resolved = PoolingParams().resolve(spec())
    assert resolved.task == "token_embed"  # the engine's default, not the model's
    assert resolved.use_activation is True
    assert resolved.skip_reading_prefix_cache is True
    assert PoolingParams(task="embed").resolve(spec()).skip_reading_prefix_cache is False
    wished = spec(use_activation=False)
    assert PoolingParams(task="embed").resolve(wished).use_activation is False


def test_dimensions_that_model_has_are_taken_by_any():
    # as OpenAI's embedding models do: clients send the size that their index was made with
    params = PoolingParams(task="embed", dimensions=8)
    for config in ({}, {"is_matryoshka": True}, {"matryoshka_dimensions": [2, 4]}):
        assert params.resolve(spec(config=config)).dimensions == 8


def test_dimensions_are_for_matryoshka_models():
    params = PoolingParams(task="embed", dimensions=4)
    with pytest.raises(TrouperValidationError, match="parameter=dimensions"):
        params.resolve(spec())
    assert params.resolve(spec(config={"is_matryoshka": True})).dimensions == 4
    with pytest.raises(TrouperValidationError, match="must be one of 2, 8"):
        params.resolve(spec(config={"matryoshka_dimensions": [2, 8]}))
    with pytest.raises(TrouperValidationError, match=r"in \[1, 8\]"):
        PoolingParams(task="embed", dimensions=9).resolve(spec(config={"is_matryoshka": True}))


@pytest.mark.parametrize(
    ("architecture", "given", "name"),
    [
        ("BertModel", {"task": "classify"}, "task"),
        ("BertForSequenceClassification", {"task": "embed"}, "task"),
        ("BertForSequenceClassification", {"task": "classify", "dimensions": 2}, "dimensions"),
        ("BertForTokenClassification", {"task": "token_classify", "step_tag_id": 1}, "step_tag_id"),
    ],
)
def test_a_parameter_outside_its_task_is_refused(architecture, given, name):
    with pytest.raises(TrouperValidationError, match=f"parameter={name}"):
        PoolingParams(**given).resolve(spec(architecture))


@pytest.mark.parametrize(
    ("architecture", "task", "engine_task"),
    [
        ("BertModel", "embed", "token_embed"),
        ("BertForSequenceClassification", "classify", "classify"),
        ("BertForTokenClassification", "token_classify", "token_classify"),
        ("HF_ColBERT", "token_embed", "token_embed"),
    ],
)
def test_model_and_engine_have_defaults_of_their_own(architecture, task, engine_task):
    made = spec(architecture)
    assert (made.task, made.engine_task) == (task, engine_task)


def test_explicit_wish_beats_files_which_beat_architecture(tmp_path):
    assert spec("BertModel").seq_pooling_type == "CLS"
    assert spec("Qwen3ForCausalLM").seq_pooling_type == "LAST"
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "sentence_bert_config.json").write_text(
        '{"max_seq_length": 5, "do_lower_case": true}'
    )
    made = spec("BertModel", tmp_path)
    assert (made.seq_pooling_type, made.normalizes) == ("MEAN", False)
    assert (made.max_length, made.lowers_case) == (5, True)
    assert spec("BertModel", tmp_path, pooling_type="LAST").seq_pooling_type == "LAST"


def write(folder, name, **content):
    (folder / name).write_text(json.dumps(content))


def test_old_folder_names_length_by_model_key(tmp_path):
    (tmp_path / "modules.json").write_text('[{"path": "", "type": "x.Transformer"}]')
    write(tmp_path, "sentence_xlm-roberta_config.json", max_seq_length=128)
    assert spec("XLMRobertaModel", tmp_path).max_length == 128
    write(tmp_path, "sentence_bert_config.json", max_seq_length=64)
    assert spec("XLMRobertaModel", tmp_path).max_length == 64


def test_missing_length_is_taken_from_tokenizer(tmp_path):
    assert spec("BertModel", tmp_path).max_length is None
    write(tmp_path, "tokenizer_config.json", model_max_length=48)
    assert spec("BertModel", tmp_path).max_length == 48
    (tmp_path / "modules.json").write_text('[{"path": "", "type": "x.Transformer"}]')
    assert spec("BertModel", tmp_path).max_length == 48
    write(tmp_path, "sentence_bert_config.json", max_seq_length=64)
    assert spec("BertModel", tmp_path).max_length == 64


@pytest.mark.parametrize("length", [None, 0, -1, "many", True, 10**30, 1e30, float("inf")])
def test_a_tokenizer_that_names_no_length_limits_nothing(length, tmp_path):
    write(tmp_path, "tokenizer_config.json", model_max_length=length)
    assert spec("BertModel", tmp_path).max_length is None


def test_default_prompt_is_read_where_texts_are_embedded(tmp_path):
    name, prompts = "config_sentence_transformers.json", {"query": "query: ", "document": ""}
    for default, found in (("document", ""), (None, ""), ("query", "query: ")):
        write(tmp_path, name, default_prompt_name=default, prompts=prompts)
        assert spec("BertModel", tmp_path).default_prompt == found
    with pytest.raises(UnsupportedFeatureError, match="default_prompt_name='query'"):
        spec("BertForSequenceClassification", tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    write(tmp_path / "1_Pooling", "config.json", include_prompt=False)
    with pytest.raises(UnsupportedFeatureError, match="include_prompt"):
        spec("BertModel", tmp_path)
    write(tmp_path, name, default_prompt_name="title", prompts=prompts)
    with pytest.raises(TrouperValidationError, match="default_prompt_name is not in its prompts"):
        spec("BertModel", tmp_path)


def test_folder_says_how_queries_and_documents_are_read(tmp_path):
    assert spec("HF_ColBERT", tmp_path).late is None
    write(tmp_path, "artifact.metadata", query_token_id="[unused7]", doc_maxlen=99, dim=128)
    stanford = spec("HF_ColBERT", tmp_path)
    assert (stanford.late.query_prefix, stanford.late.query_length) == ("[unused7]", 32)
    assert stanford.late.document_prefix == "[unused1]"
    assert (stanford.max_length, "," in stanford.late.skiplist_words) == (99, True)
    write(tmp_path, "artifact.metadata", mask_punctuation=False)
    assert spec("HF_ColBERT", tmp_path).late.skiplist_words == ()
    name = "config_sentence_transformers.json"
    write(tmp_path, name, query_prefix="? ", query_length=48, skiplist_words=["a"], prompts={})
    pylate = spec("HF_ColBERT", tmp_path).late
    assert (pylate.query_prefix, pylate.document_prefix) == ("? ", "[D] ")
    assert (pylate.query_length, pylate.skiplist_words) == (48, ("a",))
    assert spec("BertModel", tmp_path).late is None
    write(tmp_path, name, query_length="many")
    with pytest.raises(TrouperValidationError, match=r"parameter=model.*"):
        spec("HF_ColBERT", tmp_path)


@pytest.mark.parametrize(
    ("transformer", "mask"),
    [
        ({"query_expansion": {"strategy": "min", "length": 9}}, {}),
        ({"query_expansion": {"strategy": "fixed", "length": 9, "token": "x"}}, {}),
        ({}, {"skiplist_tasks": ["query"]}),
        ({}, {"keep_only_token_ids": [5]}),
    ],
)
def test_option_of_multi_vectors_not_read_is_refused(transformer, mask, tmp_path):
    kinds = {"": "Transformer", "mask": "MultiVectorMask"}
    modules = [{"path": path, "type": f"x.{kind}"} for path, kind in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "mask").mkdir()
    write(tmp_path / "mask", "config.json")
    write(tmp_path, "sentence_bert_config.json", max_seq_length=99)
    late = spec("BertModel", tmp_path).late
    assert (late.query_length, late.document_length, late.skiplist_words) == (99, 99, ())
    assert not late.do_query_expansion
    write(tmp_path / "mask", "config.json", **mask)
    write(tmp_path, "sentence_bert_config.json", **transformer)
    with pytest.raises(UnsupportedFeatureError, match="MultiVectorEncoder"):
        spec("BertModel", tmp_path)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({}, "softmax"), ({"id2label": {"0": "x"}}, "sigmoid"), ({"problem_type": "regression"}, "identity"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
    ],
)  # fmt: skip
def test_the_activation_of_logits_is_the_models_own(config, activation):
    assert spec("BertForSequenceClassification", config=config).activation == activation


def test_activation_that_cross_encoder_was_saved_with_comes_first(tmp_path):
    own = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}
    saved = "config_sentence_transformers.json"
    write(tmp_path, saved, activation_fn="torch.nn.modules.linear.Identity")
    classifier = "BertForSequenceClassification"
    assert spec(classifier, tmp_path, own).activation == "identity"
    write(tmp_path, saved, activation_fn=None)
    assert spec(classifier, tmp_path, own).activation == "sigmoid"
    write(tmp_path, saved, activation_fn="their.own.Curve")
    with pytest.raises(UnsupportedFeatureError, match=r"their\.own\.Curve"):
        spec(classifier, tmp_path, own)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"pooling_type": "CLS", "seq_pooling_type": "CLS"}, "pooling_type"),
        ({"seq_pooling_type": "MAX"}, "seq_pooling_type"),
        ({"logit_sigma": 0}, "logit_sigma"),
    ],
)
def test_pooler_options_are_checked(given, name):
    with pytest.raises(TrouperValidationError, match=f"parameter={name}"):
        PoolerConfig(**given)


def test_pooler_options_come_in_any_form():
    assert PoolerConfig.of('{"task": "embed"}') == PoolerConfig.of({"task": "embed"})
    with pytest.raises(TrouperValidationError, match="parameter=pooler_config"):
        PoolerConfig.of({"tasc": "embed"})
    with pytest.raises(TrouperValidationError, match="parameter=pooler_config"):
        PoolerConfig.of("embed")


def test_runner_follows_model_unless_it_is_said(tmp_path):
    assert not is_pooling("auto", "auto", tmp_path, "Qwen3ForCausalLM")
    assert is_pooling("auto", "auto", tmp_path, "BertModel")
    assert is_pooling("pooling", "auto", tmp_path, "Qwen3ForCausalLM")
    assert is_pooling("auto", "embed", tmp_path, "Qwen3ForCausalLM")
    assert is_pooling("auto", "classify", tmp_path, "Qwen3ForCausalLM")
    for runner, convert, architecture, name in (
        ("generate", "auto", "BertModel", "runner"),
        ("generate", "classify", "Qwen3ForCausalLM", "convert"),
        ("pooling", "none", "Qwen3ForCausalLM", "convert"),
        ("auto", "rank", "BertModel", "convert"),
    ):
        with pytest.raises(TrouperValidationError, match=f"parameter={name}"):
            is_pooling(runner, convert, tmp_path, architecture)
    (tmp_path / "modules.json").write_text("[]")
    assert is_pooling("auto", "auto", tmp_path, "Qwen3ForCausalLM")
    assert not is_pooling("auto", "none", tmp_path, "Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "convert", "tasks"),
    [
        ("Qwen3ForCausalLM", "classify", ("classify", "token_classify")),
        ("BertForSequenceClassification", "embed", ("embed", "token_embed")),
        ("BertForTokenClassification", "classify", ("token_classify",)),
        ("HF_ColBERT", "embed", ("token_embed",)),
    ],
)
def test_converted_model_has_tasks_of_its_new_kind(architecture, convert, tasks, tmp_path):
    assert pooler_spec(PoolerConfig(), tmp_path, architecture, BERT, convert).tasks == tasks


def output(array, error=None):
    made = PoolingOutput(np.array(array, np.float32))
    return PoolingRequestOutput(request_id="a", outputs=made, prompt_token_ids=[1], error=error)


def test_results_are_made_of_arrays_of_right_shape():
    embedding = EmbeddingRequestOutput.from_base(output([1, 2])).outputs
    assert (embedding.embedding, embedding.hidden_size) == ([1.0, 2.0], 2)
    classes = ClassificationRequestOutput.from_base(output([0.25, 0.75])).outputs
    assert (classes.probs, classes.num_classes) == ([0.25, 0.75], 2)
    assert ScoringRequestOutput.from_base(output([0.5])).outputs == ScoringOutput(0.5)
    for kind, array in ((EmbeddingRequestOutput, [[1]]), (ScoringRequestOutput, [1, 2])):
        with pytest.raises(ValueError, match=r"must have one dimension|must be one number"):
            kind.from_base(output(array))


def test_an_aborted_request_has_empty_results():
    aborted = output([], RequestError("aborted", "x"))
    assert EmbeddingRequestOutput.from_base(aborted).outputs.embedding == []
    assert ClassificationRequestOutput.from_base(aborted).outputs.probs == []
    assert ScoringRequestOutput.from_base(aborted).outputs.score == 0.0
    assert PoolingOutput(np.ones(2, np.float32)).data.tolist() == [1.0, 1.0]
