"""Translate encoders in GGUF files to the config.json and the tensor names of a safetensors folder.

The architecture `bert` covers BERT's own models and XLM-RoBERTa's; for the latter the table of positions starts with the
first position in the file.  Files with the `pooling_type` RANK are classifiers, which llama.cpp computes like BERT's:
logits = out(tanh(dense(x))).
"""

import re
from typing import Any

from trouper.config.gguf.families import check_keys
from trouper.config.gguf.header import Gguf
from trouper.config.gguf.names import dtype_of, hf_config, pooling_of, quantization_of, rope_scaling
from trouper.errors import UnsupportedFeatureError, invalid

EPSILON = "attention.layer_norm_epsilon"
OUTER = {
    "token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings", "token_embd_norm": "embeddings.LayerNorm",
    "cls": "pooler.dense", "cls.output": "classifier",
}  # fmt: skip
BERT = {
    "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
}  # fmt: skip
NOMIC = {
    "attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "attn_output_norm": "norm1",
    "ffn_up": "mlp.fc11", "ffn_gate": "mlp.fc12", "ffn_down": "mlp.fc2", "layer_output_norm": "norm2",
}  # fmt: skip
# A single row of these tables is stored as a vector.
TABLES = ("token_types.weight", "cls.output.weight")
ENCODERS = {"bert": ("encoder.layer.", BERT), "nomic-bert": ("encoder.layers.", NOMIC)}
STORED = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


def gguf_config(header: Gguf) -> dict[str, Any]:
    """Return the config.json that corresponds to a decoder's or encoder's header.  Raises the errors of `hf_config`."""
    name = header.need("general.architecture", str)
    return _encoder_config(header, name) if name in ENCODERS else hf_config(header)


def encoder_shapes(header: Gguf) -> dict[str, tuple[str, tuple[int, ...]]]:
    """List the tensors of an encoder by their names in a checkpoint.

    The value is the tensor's name in the file and its shape, outermost dimension first.  Tensors with unknown names
    are omitted.
    """
    architecture = header.need("general.architecture", str)
    layers, modules = ENCODERS.get(architecture, ("", {}))
    outer = OUTER | ({"token_embd_norm": "emb_ln"} if architecture == "nomic-bert" else {})
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for stored, tensor in header.tensors.items():
        stem, _, kind = stored.rpartition(".")
        match = STORED.fullmatch(stored)
        if match is None:
            name = outer.get(stem)
        else:
            name = modules.get(match[2])
            name = name and f"{layers}{match[1]}.{name}"
        if name is None:
            continue
        is_row = stored in TABLES and len(tensor.shape) == 1
        found[f"{name}.{kind}"] = (stored, (1, *tensor.shape) if is_row else tensor.shape)
    return found


def _encoder_config(header: Gguf, name: str) -> dict[str, Any]:
    at = name + "."
    shapes = {key: shape for key, (_, shape) in encoder_shapes(header).items()}
    words = shapes.get("embeddings.word_embeddings.weight", ())
    if len(words) != 2:
        raise invalid("model", f"{header.path.name}: has no token_embd.weight", str(header.path))
    num_heads = header.need(at + "attention.head_count", int)
    rows = shapes.get("embeddings.position_embeddings.weight", (0,))[0]
    length = rows or header.need(at + "context_length", int)
    config: dict[str, Any] = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "dtype": dtype_of(header),
        "vocab_size": words[0],
        "hidden_size": header.need(at + "embedding_length", int),
        "intermediate_size": header.need(at + "feed_forward_length", int),
        "num_hidden_layers": header.need(at + "block_count", int),
        "num_attention_heads": num_heads,
        "max_position_embeddings": length,
        "layer_norm_eps": header.need(at + EPSILON, float),
        "hidden_act": "gelu",
        "type_vocab_size": shapes.get("embeddings.token_type_embeddings.weight", (0,))[0],
    }
    if (head_dim := header.get(at + "attention.key_length", int)) is not None:
        config["head_dim"] = head_dim
    check_keys(header, at, config, frozenset({EPSILON}))
    if header.get(at + "attention.causal", bool):
        rule = f"{header.path.name}: {at}attention.causal=true is not supported for an encoder"
        raise UnsupportedFeatureError(rule, parameter="model")
    if header.get(at + "attention.head_count_kv", int) not in (None, num_heads):
        rule = f"{header.path.name}: {at}attention.head_count_kv must be {num_heads}, as head_count"
        raise UnsupportedFeatureError(rule, parameter="model")
    config |= quantization_of(header) | pooling_of(header, at)
    if config.get("gguf_pooling") == "RANK":
        config |= _classifier(header, name, shapes)
    return config | (_nomic(header, at, config) if name == "nomic-bert" else {})


def _classifier(header: Gguf, name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    out = shapes.get("classifier.weight")
    if name != "bert" or out is None or "pooler.dense.weight" not in shapes:
        rule = f"{header.path.name}: pooling_type RANK needs the architecture bert with cls.weight and cls.output.weight"
        raise UnsupportedFeatureError(rule, parameter="model")
    labels = header.get(f"{name}.classifier.output_labels", list[str]) or []
    if labels and len(labels) != out[0]:
        rule = f"{name}.classifier.output_labels: {len(labels)} labels for {out[0]} outputs"
        raise invalid("model", f"{header.path.name}: {rule}", str(header.path))
    own: dict[str, Any] = {
        "architectures": ["BertForSequenceClassification"],
        "num_labels": out[0],
        "gguf_pooling": "CLS",
    }
    return own | ({"id2label": {str(i): label for i, label in enumerate(labels)}} if labels else {})


def _nomic(header: Gguf, at: str, config: dict[str, Any]) -> dict[str, Any]:
    if "blk.0.ffn_gate.weight" not in header.tensors:
        rule = f"{header.path.name}: {at[:-1]} without gates (ffn_gate) is not supported"
        raise UnsupportedFeatureError(rule, parameter="model")
    head_dim = max(1, config["hidden_size"] // max(1, config["num_attention_heads"]))
    rotated = header.get(at + "rope.dimension_count", int) or head_dim
    return {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "hidden_act": "silu",
        "layer_norm_epsilon": config["layer_norm_eps"],
        "rotary_emb_base": header.get(at + "rope.freq_base", float) or 10_000.0,
        "rotary_emb_fraction": rotated / head_dim,
        "rope_scaling": rope_scaling(header, at, config),
    }
