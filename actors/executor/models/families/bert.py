"""Encoders of BERT's kind: a table of positions or relative distances, norms mostly after the sums, an MLP without a gate.

Each function reads the config of one family.  Which biases and norms there are, the checkpoint shows.
"""

from typing import Any, cast

import msgspec

from trouper.actors.executor.models.encoder_traits import (
    ACTS,
    GATED_ACTS,
    DistanceTraits,
    EncoderNames,
    EncoderTraits,
    Head,
    VocabularyHead,
)
from trouper.actors.executor.models.traits import HfConfig, require
from trouper.errors import TrouperValidationError, UnsupportedFeatureError


def padding_id(config: HfConfig) -> int:
    """Return the id of the padding token, which may be 0.

    Configs of RoBERTa may omit it; the default of its classes in transformers is 1.
    """
    found = config.get("pad_token_id")
    return 1 if found is None else int(found)


def common_traits(config: HfConfig, **own: object) -> EncoderTraits:
    name = config.get("hidden_act") or config.get("hidden_activation") or config.get("activation")
    name = name or config.get("activation_function") or "gelu"
    if name not in ACTS:
        raise UnsupportedFeatureError(f"the activation {name!r} is not supported")
    halves = () if own.get("head_width") else ("is_encoder_decoder",)  # T5's encoder is one of two
    for field in ("is_decoder", "add_cross_attention", *halves):
        if config.get(field):
            raise UnsupportedFeatureError(f"{field}=true is not supported for an encoder")
    kind = config.get("position_embedding_type") or "absolute"
    if kind not in ("absolute", "rope", "rotary"):
        raise UnsupportedFeatureError(f"position_embedding_type={kind!r} is not supported")
    fields: dict[str, object] = {
        "vocab_size": require(config, "vocab_size"),
        "hidden_size": require(config, "hidden_size"),
        "num_heads": require(config, "num_attention_heads"),
        "num_layers": require(config, "num_hidden_layers"),
        "intermediate_size": require(config, "intermediate_size"),
        "num_positions": require(config, "max_position_embeddings"),
        "num_types": config.get("type_vocab_size") or 0,
        "norm_eps": config.get("layer_norm_eps") or 1e-12,
        "act": ACTS[name],
        **own,
    }
    if own.get("is_gated") and ACTS[name] not in GATED_ACTS:
        raise UnsupportedFeatureError(f"the activation {name!r} of a gated MLP is not supported")
    traits = EncoderTraits(**fields)  # type: ignore[arg-type]  # checked by `require` and the readers
    if traits.hidden_size % traits.num_heads and traits.head_width is None:
        rule = f"{traits.num_heads} heads do not divide hidden_size ({traits.hidden_size})"
        raise TrouperValidationError(rule, parameter="num_attention_heads", value=traits.num_heads)
    if config.get("head_dim") not in (None, traits.head_dim):
        rule = f"must be hidden_size / num_attention_heads ({traits.head_dim}) in an encoder"
        raise TrouperValidationError(rule, parameter="head_dim", value=config["head_dim"])
    if traits.windows and len(traits.windows) != traits.num_layers:
        rule = f"config.json describes {len(traits.windows)} layers, not {traits.num_layers}"
        raise TrouperValidationError(rule, parameter="layer_types")
    return traits


BERT_NAMES = EncoderNames(
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    o="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
)


ROBERTA_HEAD = Head(dense="classifier.dense", act="tanh", out="classifier.out_proj")
ROBERTA_VOCABULARY = VocabularyHead(
    dense="lm_head.dense", norm="lm_head.layer_norm", table="lm_head.decoder", bias="lm_head.bias"
)


def bert(config: HfConfig) -> EncoderTraits:
    return common_traits(
        config,
        names=BERT_NAMES,
        head=Head(dense="pooler.dense", act="tanh"),
        vocabulary_head=VocabularyHead(
            dense="cls.predictions.transform.dense",
            act=ACTS.get(config.get("hidden_act") or "gelu", "gelu"),
            norm="cls.predictions.transform.LayerNorm",
            table="cls.predictions.decoder",
            bias="cls.predictions.bias",
        ),
        prefixes=("bert.",),
    )


def roberta(config: HfConfig) -> EncoderTraits:
    return common_traits(
        config,
        names=BERT_NAMES,
        head=ROBERTA_HEAD,
        vocabulary_head=ROBERTA_VOCABULARY,
        prefixes=("roberta.", "data2vec_text."),
        position_offset=padding_id(config) + 1,
        padding_id=padding_id(config),
    )


def xlm_roberta_xl(config: HfConfig) -> EncoderTraits:
    return common_traits(
        config,
        names=msgspec.structs.replace(
            BERT_NAMES,
            norm="",
            final_norm="encoder.LayerNorm",
            attention_norm="attention.self_attn_layer_norm",
            mlp_norm="LayerNorm",
        ),
        head=ROBERTA_HEAD,
        vocabulary_head=ROBERTA_VOCABULARY,
        prefixes=("roberta.",),
        position_offset=padding_id(config) + 1,
        padding_id=padding_id(config),
        norm_first=True,
    )


def megatron_bert(config: HfConfig) -> EncoderTraits:
    return common_traits(
        config,
        names=msgspec.structs.replace(
            BERT_NAMES,
            norm="",
            final_norm="encoder.ln",
            attention_norm="attention.ln",
            mlp_norm="ln",
        ),
        head=Head(dense="pooler.dense", act="tanh"),
        prefixes=("bert.",),
        norm_first=True,
    )


def electra(config: HfConfig) -> EncoderTraits:
    width = config.get("embedding_size") or 128
    is_projected = width != require(config, "hidden_size")
    return common_traits(
        config,
        names=msgspec.structs.replace(
            BERT_NAMES, projection="embeddings_project" if is_projected else ""
        ),
        head=Head(dense="classifier.dense", act="gelu", out="classifier.out_proj"),
        prefixes=("electra.",),
        embedding_size=width if is_projected else None,
    )


def albert(config: HfConfig) -> EncoderTraits:
    for field in ("num_hidden_groups", "inner_group_num"):
        if config.get(field) not in (None, 1):
            raise UnsupportedFeatureError(f"{field}={config[field]} is not supported, only 1 is")
    return common_traits(
        config,
        names=EncoderNames(
            positions="embeddings.position_embeddings",
            types="embeddings.token_type_embeddings",
            projection="encoder.embedding_hidden_mapping_in",
            # Every layer reads the same tensors.
            layer="encoder.albert_layer_groups.0.albert_layers.0.",
            qkv=("attention.query", "attention.key", "attention.value"),
            o="attention.dense",
            attention_norm="attention.LayerNorm",
            up=("ffn",),
            down="ffn_output",
            mlp_norm="full_layer_layer_norm",
        ),
        head=Head(dense="pooler", act="tanh"),
        prefixes=("albert.",),
        embedding_size=config.get("embedding_size") or 128,
    )


def distilbert(config: HfConfig) -> EncoderTraits:
    return common_traits(
        config,
        names=EncoderNames(
            positions="embeddings.position_embeddings",
            layer="transformer.layer.{}.",
            qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
            o="attention.out_lin",
            attention_norm="sa_layer_norm",
            up=("ffn.lin1",),
            down="ffn.lin2",
            mlp_norm="output_layer_norm",
        ),
        head=Head(dense="pre_classifier", act="relu"),
        vocabulary_head=VocabularyHead(
            dense="vocab_transform",
            act=ACTS.get(config.get("activation") or "gelu", "gelu"),
            norm="vocab_layer_norm",
            table="vocab_projector",
            bias="vocab_projector.bias",
        ),
        prefixes=("distilbert.",),
    )


def mpnet(config: HfConfig) -> EncoderTraits:
    return common_traits(
        config,
        names=EncoderNames(
            positions="embeddings.position_embeddings",
            relative_bias="encoder.relative_attention_bias",
            qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
            o="attention.attn.o",
            attention_norm="attention.LayerNorm",
            up=("intermediate.dense",),
            down="output.dense",
            mlp_norm="output.LayerNorm",
        ),
        head=Head(dense="classifier.dense", act="tanh", out="classifier.out_proj"),
        vocabulary_head=ROBERTA_VOCABULARY,
        prefixes=("mpnet.",),
        # Whatever the config's padding token is.
        position_offset=2,
        padding_id=1,
        relative_buckets=config.get("relative_attention_num_buckets") or 32,
    )


def _listed(config: HfConfig, field: str, *known: str) -> set[str]:
    """Read a field that holds a list, or a string of items separated by `|`.

    Raises:
        UnsupportedFeatureError: an unknown item.
    """
    given: Any = config.get(field) or ()
    parts = given.lower().split("|") if isinstance(given, str) else cast("list[Any]", given)
    found = {str(part).strip() for part in parts}
    if others := found - set(known):
        rule = f"{field}={given!r}: {min(others)!r} is not one of {', '.join(known)}"
        raise UnsupportedFeatureError(rule)
    return found


def deberta_v2(config: HfConfig) -> EncoderTraits:
    """Read the config of DeBERTa v2 and v3, which differ only in its values.

    Raises:

        UnsupportedFeatureError: a variant that this engine cannot compute, such as convolutions.
    """
    for field, plain in (("relative_attention", True), ("conv_kernel_size", 0)):
        if config.get(field, plain) not in (plain, None):
            raise UnsupportedFeatureError(f"{field}={config[field]!r} is not supported for DeBERTa")
    for field in ("embedding_size", "pooler_hidden_size"):
        if config.get(field) not in (None, config.get("hidden_size")):
            raise UnsupportedFeatureError(f"{field}: another than hidden_size is not supported")
    if config.get("relative_attention") is None:
        raise UnsupportedFeatureError("relative_attention=false is not supported for DeBERTa")
    most = config.get("max_relative_positions") or -1
    most = require(config, "max_position_embeddings") if most < 1 else int(most)
    num_buckets = max(0, int(config.get("position_buckets") or -1))
    kinds = _listed(config, "pos_att_type", "c2p", "p2c")
    norms_table = "layer_norm" in _listed(config, "norm_rel_ebd", "layer_norm", "none")
    shares = bool(config.get("share_att_key"))
    act = config.get("pooler_hidden_act") or "gelu"
    if act not in (*ACTS, "tanh"):
        raise UnsupportedFeatureError(f"pooler_hidden_act={act!r} is not supported")
    return common_traits(
        config,
        names=EncoderNames(
            positions="embeddings.position_embeddings"
            if config.get("position_biased_input", True)
            else "",
            types="embeddings.token_type_embeddings",
            distances="encoder.rel_embeddings",
            distance_norm="encoder.LayerNorm" if norms_table else "",
            distance_projections=("attention.self.key_proj", "attention.self.query_proj")
            if shares
            else ("attention.self.pos_key_proj", "attention.self.pos_query_proj"),
            qkv=(
                "attention.self.query_proj",
                "attention.self.key_proj",
                "attention.self.value_proj",
            ),
            o="attention.output.dense",
            attention_norm="attention.output.LayerNorm",
            up=("intermediate.dense",),
            down="output.dense",
            mlp_norm="output.LayerNorm",
        ),
        head=Head(dense="pooler.dense", act=ACTS.get(act, "tanh")),
        prefixes=("deberta.",),
        norm_eps=config.get("layer_norm_eps") or 1e-7,
        distances=DistanceTraits(
            span=num_buckets or most,
            num_buckets=num_buckets,
            max_distance=most,
            has_content_to_position="c2p" in kinds,
            has_position_to_content="p2c" in kinds,
            norms_table=norms_table,
        ),
    )
