"""Encoders, and decoders that embed, in GGUF files: hidden states, tokens and scores equal those of the same model as safetensors."""

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoModelForSequenceClassification

from trouper import LLM
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.args import EngineArgs
from trouper.config.gguf.encoders import ENCODERS
from trouper.config.gguf.names import ENCODER_NAMES
from trouper.config.model import ModelConfig
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

from .test_encoders import prompts, run, save_tiny

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "[unused1]",
    "hello",
    "world",
    "##s",
    "##ly",
    "a",
    ",",
    "é",
]
SIZE = 97
# Architecture in the file: (kind of `save_tiny`, what the file says besides)
CASES = {
    "bert": ("bert", {}),
    "bert of XLM-RoBERTa": ("xlm-roberta", {}),
    "nomic-bert": ("nomic", {"rope.freq_base": 1_000.0}),
}  # fmt: skip
MEAN, CLS, LAST, RANK = 1, 2, 3, 4


def words(count=SIZE):
    """Work items as a file has them: ▁ in front of what begins a word, and nothing in front of a continuation."""
    items = WORDS + [f"w{i}" for i in range(count - len(WORDS))]
    special = [x if x in WORDS[:5] else x.removeprefix("##") if "##" in x else f"▁{x}" for x in items]  # fmt: skip
    return items, special


def write(path, arch, config, tensors, numbers=None, pooling=None, kind=None, labels=()):
    """A file with a tokenizer of word work items."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(value=False)
    for key, value in (numbers or {}).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{arch}.{key}", value)  # fmt: skip
    if pooling is not None:
        writer.add_uint32(f"{arch}.pooling_type", pooling)
    if labels:
        writer.add_array(f"{arch}.classifier.output_labels", labels)
    _, stored = words()
    writer.add_tokenizer_model("bert")
    writer.add_token_list(stored)
    writer.add_token_types([3] * 5 + [1] * (SIZE - 5))
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    for name, array in tensors.items():
        given = kind if array.ndim > 1 and name.startswith("blk") else None
        array = array if given is None else gguf.quantize(array, given)
        writer.add_tensor(name, array, raw_dtype=given)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(model, folder, arch, **options):
    """The saved model as llama.cpp's converter writes it: names are those of the package's own map."""
    found = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, arch.upper().replace("-", "_")), model.config.num_hidden_layers
    )
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, kind = name.removeprefix("bert.").removeprefix("roberta.").rpartition(".")
        if stem == "pooler.dense" and not options.get("labels"):
            continue  # of a model that embeds
        array = tensor.float().numpy()
        if stem.endswith("position_embeddings") and model.config.model_type == "xlm-roberta":
            array = array[model.config.pad_token_id + 1 :]
        of_head = {"pooler.dense": "cls", "classifier": "cls.output"}
        tensors[f"{of_head.get(stem) or found.get_name(stem)}.{kind}"] = np.atleast_1d(
            array.squeeze()
        )
    return write(folder / "m.gguf", arch, model.config, tensors, **options)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_equal_those_of_model_converted(case, tmp_path):
    kind, numbers = CASES[case]
    model = save_tiny(kind, AutoModel, tmp_path)
    path = converted(model, tmp_path, case.split()[0], numbers=numbers)
    for ids, mine in zip(prompts(), run(path, "token_embed"), strict=True):
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-5, rtol=1e-4)


def test_packed_layers_equal_their_dequantised_weights(tmp_path):
    model = save_tiny("bert", AutoModel, tmp_path, hidden_size=64, intermediate_size=96)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, parameter in model.named_parameters():
        if name.startswith("encoder") and parameter.ndim > 1:
            packed = gguf.quantize(parameter.detach().numpy(), kind)
            parameter.data = torch.from_numpy(gguf.dequantize(packed, kind).copy())
    path = converted(model, tmp_path, "bert", kind=kind)
    for ids, mine in zip(prompts(), run(path, "token_embed", dtype="float32"), strict=True):
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pooling", [None, MEAN, CLS, LAST])
def test_embeddings_are_pooled_as_the_file_says(pooling, tmp_path):
    model = save_tiny("bert", AutoModel, tmp_path)
    path = converted(model, tmp_path, "bert", pooling=pooling)
    with LLM(str(path)) as llm:
        (output,) = llm.embed(["hello worlds, a"], use_tqdm=False)
    ids = [2, 6, 7, 8, 11, 10, 3]
    assert output.prompt_token_ids == ids
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    wanted = {MEAN: states.mean(0), LAST: states[-1]}.get(pooling, states[0])
    wanted = torch.nn.functional.normalize(wanted, dim=0).numpy()
    np.testing.assert_allclose(output.outputs.embedding, wanted, atol=1e-5)


def test_a_file_that_ranks_scores_pairs(tmp_path):
    model = save_tiny("bert", AutoModelForSequenceClassification, tmp_path, num_labels=1)
    path = converted(model, tmp_path, "bert", pooling=RANK, labels=["relevant"])
    with LLM(str(path)) as llm:
        (output,) = llm.score("hello", "worlds", use_tqdm=False)
    ids, types = [2, 6, 3, 7, 8, 3], [0, 0, 0, 1, 1, 1]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
    assert output.outputs.score == pytest.approx(float(logits.sigmoid()), abs=1e-5)


def test_word_pieces_are_those_of_berts_own_tokenizer(tmp_path):
    model = save_tiny("bert", AutoModel, tmp_path)
    own = Tokenizer.load(converted(model, tmp_path, "bert"))
    items, _ = words()
    reference = Backend(models.WordPiece({x: i for i, x in enumerate(items)}, unk_token="[UNK]"))
    reference.normalizer = normalizers.BertNormalizer()
    reference.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    reference.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    reference.add_special_tokens(items[:5])
    for text in ("Hello  worldS", "a,a hello[MASK]ly", "日本 w3", "", "Éa é", "hello" * 40):
        assert own.encode(text) == reference.encode(text).ids
    ids, types = own.encode_within("hello", "world")
    pair = reference.encode("hello", "world")
    assert (ids, types) == (pair.ids, pair.type_ids)


def test_a_vocabulary_with_capitals_keeps_them(tmp_path, monkeypatch):
    model = save_tiny("bert", AutoModel, tmp_path)
    monkeypatch.setitem(globals(), "WORDS", [*WORDS[:10], "A", *WORDS[11:]])
    own = Tokenizer.load(converted(model, tmp_path, "bert"))
    assert own.encode("A a") == [2, 10, 1, 3]


def test_unigram_pieces_are_those_of_xlm_roberta(tmp_path):
    items = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0), ("▁he", -2.0), ("llo", -2.5), ("▁hello", -4.0), ("a", -5.0), ("b", -5.0)]  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bert")
    writer.add_tokenizer_model("t5")
    writer.add_token_list([item for item, _ in items])
    writer.add_token_scores([score for _, score in items])
    writer.add_token_types([3, 3, 3, 2] + [1] * 6)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(value=True)
    writer.add_add_eos_token(value=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    own = Tokenizer.load(tmp_path / "m.gguf")
    assert own.encode(" hello  ab ") == [0, 7, 4, 8, 9, 2]
    ids, types = own.encode_within("hello", "a")
    assert (ids, types) == ([0, 7, 2, 2, 4, 8, 2], [0] * 7)
    assert own.decode(ids) == "hello a"


def test_what_file_of_encoder_lacks_or_contradicts_is_named(tmp_path):
    model = save_tiny("bert", AutoModel, tmp_path)
    refused = {
        "attention.head_count_kv": 2, "rope.a_key_of_tomorrow": 1, "attention.sliding_window": 8, "pooling_type": 9,
    }  # fmt: skip
    for key, value in refused.items():
        path = converted(model, tmp_path, "bert", numbers={key: value})
        with pytest.raises(UnsupportedFeatureError, match=key):
            ModelConfig.load(EngineArgs(str(path)))
    path = converted(model, tmp_path, "bert", numbers={"attention.key_length": 16})
    with pytest.raises(TrouperValidationError, match="head_dim"):
        run(path, "embed")
    path = converted(model, tmp_path, "bert", pooling=RANK)
    with pytest.raises(UnsupportedFeatureError, match="RANK needs"):
        ModelConfig.load(EngineArgs(str(path)))
    tensors = {"token_embd.weight": np.zeros((SIZE, 48), np.float32)}
    path = write(tmp_path / "n.gguf", "bert", model.config, tensors)
    with pytest.raises(TrouperValidationError, match="lacks embeddings"):
        run(path, "embed")
    path = write(tmp_path / "o.gguf", "nomic-bert", model.config, tensors)
    with pytest.raises(UnsupportedFeatureError, match="without gates"):
        ModelConfig.load(EngineArgs(str(path)))


def test_an_encoder_generates_nothing_and_says_so(tmp_path):
    path = converted(save_tiny("bert", AutoModel, tmp_path), tmp_path, "bert")
    with pytest.raises(TrouperValidationError, match="is a pooling model"):
        resolve(EngineArgs(str(path), runner="generate"))


def test_the_architectures_are_listed_once():
    assert tuple(ENCODERS) == ENCODER_NAMES
