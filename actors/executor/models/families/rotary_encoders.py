"""Encoders of a later kind: rotary positions, RMS norms, gated MLPs, experts; and T5's, whose kind of norm they share.

Each function reads the config of one family.
"""

from trouper.actors.executor.models.encoder_traits import (
    ACTS,
    EncoderExpertsTraits,
    EncoderNames,
    EncoderTraits,
    Head,
    TaskTraits,
    VocabularyHead,
)
from trouper.actors.executor.models.families.bert import (
    ROBERTA_HEAD,
    ROBERTA_VOCABULARY,
    common_traits,
    roberta,
)
from trouper.actors.executor.models.traits import HfConfig, require, rope_traits
from trouper.errors import TrouperValidationError, UnsupportedFeatureError


def modernbert(config: HfConfig) -> EncoderTraits:
    num_layers = require(config, "num_hidden_layers")
    every = config.get("global_attn_every_n_layers") or 3
    kinds = config.get("layer_types") or [
        "full_attention" if i % every == 0 else "sliding_attention" for i in range(num_layers)
    ]
    head_dim = require(config, "hidden_size") // require(config, "num_attention_heads")
    thetas = config.get("rope_parameters") or {
        "full_attention": {"rope_theta": config.get("global_rope_theta", 160_000.0)},
        "sliding_attention": {
            "rope_theta": config.get("local_rope_theta")
            or config.get("global_rope_theta", 160_000.0)
        },
    }
    is_local = [kind == "sliding_attention" for kind in kinds]
    head = Head(
        dense="head.dense",
        act=ACTS[config.get("classifier_activation") or "gelu"],
        norm="head.norm",
    )
    return common_traits(
        config,
        names=EncoderNames(
            words="embeddings.tok_embeddings",
            norm="embeddings.norm",
            final_norm="final_norm",
            layer="layers.{}.",
            qkv=("attn.Wqkv",),
            o="attn.Wo",
            attention_norm="attn_norm",
            up=("mlp.Wi",),
            down="mlp.Wo",
            mlp_norm="mlp_norm",
        ),
        head=head,
        token_head=head,
        vocabulary_head=VocabularyHead(
            dense="head.dense", act=head.act, norm="head.norm", table="decoder", bias="decoder.bias"
        ),
        prefixes=("model.",),
        norm_eps=config.get("norm_eps") or 1e-5,
        norm_first=True,
        is_gated=True,
        windows=tuple(
            (config.get("local_attention") or 128) // 2 if far else None for far in is_local
        ),
        ropes=tuple(
            rope_traits(config, head_dim, parameters=thetas[kind])
            for kind in ("full_attention", "sliding_attention")
        ),
        layer_ropes=tuple(map(int, is_local)),
    )


def nomic_experts(config: HfConfig) -> EncoderExpertsTraits | None:
    every = config.get("moe_every_n_layers") or 0
    if every < 1:
        return None
    for field in ("expert_choice_router", "num_shared_experts"):
        if config.get(field):
            raise UnsupportedFeatureError(f"{field}={config[field]!r} is not supported")
    return EncoderExpertsTraits(
        num_experts=require(config, "num_experts"),
        num_chosen=config.get("moe_top_k") or 1,
        every=every,
        is_renormalized=bool(config.get("moe_normalize_expert_weights")),
    )


def nomic(config: HfConfig) -> EncoderTraits:
    experts = nomic_experts(config)
    if config.get("prenorm") or config.get("rotary_emb_interleaved"):
        raise UnsupportedFeatureError("prenorm and interleaved rotary are not supported")
    is_gated = (config.get("activation_function") or "swiglu") in ("geglu", "glu", "swiglu")
    return common_traits(
        config,
        names=EncoderNames(
            types="embeddings.token_type_embeddings",
            norm="emb_ln",
            layer="encoder.layers.{}.",
            qkv=("attn.Wqkv",),
            o="attn.out_proj",
            attention_norm="norm1",
            up=("mlp.fc12", "mlp.fc11") if is_gated else ("mlp.fc1",),
            down="mlp.fc2",
            mlp_norm="norm2",
        ),
        head=Head(dense="pooler.dense", act="tanh"),
        prefixes=("bert.", "nomic_bert."),
        norm_eps=config.get("layer_norm_epsilon") or config.get("layer_norm_eps") or 1e-12,
        is_gated=is_gated,
        experts=experts,
        **one_rope(config, "rotary_emb_base", share=config.get("rotary_emb_fraction") or 1.0),
    )


def gte(config: HfConfig) -> EncoderTraits:
    return common_traits(
        config,
        names=EncoderNames(
            types="embeddings.token_type_embeddings",
            qkv=("attention.qkv_proj",),
            o="attention.o_proj",
            attention_norm="attn_ln",
            up=("mlp.up_gate_proj",),
            down="mlp.down_proj",
            mlp_norm="mlp_ln",
        ),
        head=Head(dense="pooler.dense", act="tanh"),
        prefixes=("new.", "gte."),
        is_gated=True,
        is_gate_second=True,
        **one_rope(config, "rope_theta"),
    )


def eurobert(config: HfConfig) -> EncoderTraits:
    for field in ("attention_bias", "mlp_bias"):
        if config.get(field):
            raise UnsupportedFeatureError(f"{field}=true is not supported for EuroBERT")
    pooling = config.get("classifier_pooling") or "late"
    if pooling not in ("bos", "mean", "late"):
        raise UnsupportedFeatureError(f"classifier_pooling={pooling!r} is not supported")
    return common_traits(
        config,
        names=EncoderNames(
            words="embed_tokens",
            norm="",
            final_norm="norm",
            layer="layers.{}.",
            qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            o="self_attn.o_proj",
            attention_norm="input_layernorm",
            up=("mlp.gate_proj", "mlp.up_proj"),
            down="mlp.down_proj",
            mlp_norm="post_attention_layernorm",
        ),
        head=Head(dense="dense", act="gelu", is_before_pooling=pooling == "late"),
        prefixes=("model.",),
        norm_eps=config.get("rms_norm_eps") or 1e-5,
        norm_kind="rms",
        norm_first=True,
        is_gated=True,
        num_kv_heads=config.get("num_key_value_heads"),
        head_width=config.get("head_dim"),
        **one_rope(config, "rope_theta"),
    )


def xlm_roberta(config: HfConfig) -> EncoderTraits:
    return jina_v3(config) if config.get("lora_adaptations") else roberta(config)


def jina_v3(config: HfConfig) -> EncoderTraits:
    """The files of transformers, and the first ones, which hold an adapter for each task beside the weights."""
    task = None
    if (name := config.get("default_task")) is not None:
        tasks: list[str] = config.get("lora_adaptations") or []
        if name not in tasks:
            rule = f"must be one of {', '.join(map(str, tasks)) or 'none'}"
            raise TrouperValidationError(rule, parameter="default_task", value=name)
        rank = require(config, "lora_rank")
        task = TaskTraits(index=tasks.index(name), scale=(config.get("lora_alpha") or 1) / rank)
    theta = "rotary_emb_base" if config.get("rotary_emb_base") else "rope_theta"
    return common_traits(
        config,
        names=EncoderNames(
            types="embeddings.token_type_embeddings",
            norm="emb_ln",
            layer="encoder.layers.{}.",
            qkv=("mixer.Wqkv",),
            o="mixer.out_proj",
            attention_norm="norm1",
            up=("mlp.fc1",),
            down="mlp.fc2",
            mlp_norm="norm2",
        ),
        head=ROBERTA_HEAD,
        vocabulary_head=ROBERTA_VOCABULARY,
        prefixes=("roberta.",),
        task=task,
        **one_rope(config, theta, default_theta=20_000.0),
    )


def t5(config: HfConfig) -> EncoderTraits:
    """Read the config of the encoder half of T5, mT5 and related models: sentence-t5, gtr-t5, instructor.

    Raises:

        UnsupportedFeatureError: an unknown activation, or contradicting fields.
    """
    return _t5(config, activation="relu")


def mt5(config: HfConfig) -> EncoderTraits:
    """Read the config of mT5's encoder half.  Raises the errors of `t5`."""
    return _t5(config, activation="gated-gelu")


def umt5(config: HfConfig) -> EncoderTraits:
    """Read the config of UMT5's encoder half, where each layer has relative positions of its own.  Raises the errors of `t5`."""
    return _t5(config, activation="gated-gelu", has_layer_biases=True)


def _t5(config: HfConfig, *, activation: str, has_layer_biases: bool = False) -> EncoderTraits:
    """Read the config of a member of T5's family.

    Args:
        activation: the default of `feed_forward_proj`.
        has_layer_biases: whether each layer has a table of relative positions, instead of the first one for all.
    """
    kind, _, act = str(config.get("feed_forward_proj") or activation).rpartition("-")
    if kind not in ("", "gated") or act not in ACTS:
        raise UnsupportedFeatureError(f"feed_forward_proj={kind}-{act} is not supported")
    # T5 v1.1 calls its gelu exact, and computes the approximation.
    act = "gelu_new" if kind and act == "gelu" else act
    act = config.get("dense_act_fn") or act
    if config.get("is_gated_act", bool(kind)) != bool(kind):
        raise UnsupportedFeatureError("is_gated_act contradicts feed_forward_proj")
    dense, bias = "layer.1.DenseReluDense.", "layer.0.SelfAttention.relative_attention_bias"
    return common_traits(
        {**config, "hidden_act": act},
        names=EncoderNames(
            words="shared",
            norm="",
            final_norm="encoder.final_layer_norm",
            relative_bias="" if has_layer_biases else f"encoder.block.0.{bias}",
            layer_bias=bias if has_layer_biases else "",
            layer="encoder.block.{}.",
            qkv=tuple(f"layer.0.SelfAttention.{name}" for name in "qkv"),
            o="layer.0.SelfAttention.o",
            attention_norm="layer.0.layer_norm",
            up=(f"{dense}wi_0", f"{dense}wi_1") if kind else (f"{dense}wi",),
            down=f"{dense}wo",
            mlp_norm="layer.1.layer_norm",
        ),
        head=Head(),
        prefixes=("transformer.",),
        norm_eps=config.get("layer_norm_epsilon") or 1e-6,
        norm_kind="rms",
        norm_first=True,
        is_gated=bool(kind),
        head_width=require(config, "d_kv"),
        is_scaled=False,
        relative_buckets=_at_least_one(config, "relative_attention_num_buckets", 32),
        max_distance=_at_least_one(config, "relative_attention_max_distance", 128),
    )


def _at_least_one(config: HfConfig, name: str, default: int) -> int:
    """Return a size that a config may leave out, but not set to 0."""
    value = config.get(name)
    return default if value is None else require(config, name)


def one_rope(
    config: HfConfig, theta: str, share: float = 1.0, default_theta: float = 10_000.0
) -> dict[str, object]:
    head_dim = config.get("head_dim") or (
        require(config, "hidden_size") // require(config, "num_attention_heads")
    )
    rope = rope_traits(
        config, int(head_dim * share), default_theta=float(config.get(theta) or default_theta)
    )
    return {"ropes": (rope,), "layer_ropes": (0,) * require(config, "num_hidden_layers")}
