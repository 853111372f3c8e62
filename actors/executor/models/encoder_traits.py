"""The traits that distinguish one encoder from another, as plain data, and the names in its checkpoint.

An encoder is: embed -> norm -> layers of (bidirectional attention, MLP) with residual sums.  A new one
is a reader here, if its differences are traits already.  Which biases and norms there are, the
checkpoint itself says.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from trouper.actors.executor.models.disentangled import DistanceTraits
from trouper.actors.executor.models.traits import (
    HfConfig,
    RopeTraits,
    read_traits,
    require,
    rope_traits,
)
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

Act = Literal["gelu", "gelu_tanh", "silu", "relu"]
ACTS: dict[str, Act] = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu",
    "swiglu": "silu", "swish": "silu", "relu": "relu", "geglu": "gelu",
}  # fmt: skip
GATED_ACTS: tuple[Act, ...] = ("gelu", "gelu_tanh", "silu")


class EncoderNames(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint's modules.  Several parts are stacked, one below the other; "" = there is none."""

    words: str = "embeddings.word_embeddings"
    positions: str = ""
    types: str = ""
    norm: str = "embeddings.LayerNorm"
    projection: str = ""  # from the width of the embedding to that of the layers
    final_norm: str = ""
    relative_bias: str = ""
    distances: str = ""  # a table, whose norm is `distance_norm`
    distance_norm: str = ""
    distance_projections: tuple[str, str] = ("", "")  # of a layer: to keys, to queries
    layer: str = "encoder.layer.{}."  # the rest is below it
    qkv: tuple[str, ...]
    o: str
    attention_norm: str
    up: tuple[str, ...]  # of a gated MLP the activated half first
    down: str
    mlp_norm: str


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The modules of a classifier: logits = out(norm(act(dense(x)))); "" = there is no such module."""

    dense: str = ""
    act: str = "identity"
    norm: str = ""
    out: str = "classifier"
    is_before_pooling: bool = False  # it reads every token, and the mean of its logits counts


class VocabularyHead(msgspec.Struct, frozen=True, kw_only=True):
    """The modules of a masked language model's head: logits = norm(act(dense(x))) · table + bias; "" = there is no such module.

    The table is the one of the embedding, unless the checkpoint stores another under `table`.
    """

    dense: str = ""
    act: str = "gelu"
    norm: str = ""
    table: str = ""
    bias: str = (
        ""  # the whole name of the tensor, which counts unless the table has a bias of its own
    )


class EncoderExpertsTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The experts that take the place of the MLP in some layers; the checkpoint shows in which."""

    num_experts: int
    num_chosen: int  # for each token
    every: int  # layers, of which the last has experts
    is_renormalized: bool  # the shares of the chosen ones are made to sum up to 1


class TaskTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter, among those stored with the weights, that is merged into them at load."""

    index: int
    scale: float


class EncoderTraits(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture with the sizes of one model."""

    names: EncoderNames
    head: Head
    token_head: Head = Head()
    vocabulary_head: VocabularyHead | None = None  # of models that make sparse embeddings
    prefixes: tuple[str, ...]  # before all names but the head's; which one, the checkpoint says
    vocab_size: int
    hidden_size: int
    embedding_size: int | None = None  # None: hidden_size, without a projection
    num_heads: int
    num_layers: int
    intermediate_size: int
    num_positions: int  # rows of the position table
    position_offset: int = 0  # the row of the first position
    # A token with this id takes no position, wherever it is in a text, and reads the row before the first one.
    padding_id: int | None = None
    num_types: int = 0
    norm_eps: float
    norm_kind: Literal["layer", "rms"] = "layer"
    norm_first: bool = False  # norms before attention and MLP, instead of after the sums
    act: Act
    is_gated: bool = False
    is_gate_second: bool = False  # stored so
    relative_buckets: int = 0
    max_distance: int = 128  # from which on all distances share the last of the relative buckets
    num_kv_heads: int | None = None  # None: as many as heads
    head_width: int | None = None  # None: hidden_size / num_heads
    is_scaled: bool = True  # scores are divided by the root of head_dim
    experts: EncoderExpertsTraits | None = None
    task: TaskTraits | None = None  # None: weights stand for every task
    distances: DistanceTraits | None = None  # of DeBERTa's attention
    windows: tuple[int | None, ...] = ()  # by layer: how far a token sees; empty = all see all
    ropes: tuple[RopeTraits, ...] = ()
    layer_ropes: tuple[int, ...] = ()  # by layer: index into `ropes`

    @property
    def head_dim(self) -> int:
        return self.head_width or self.hidden_size // self.num_heads

    @property
    def scale(self) -> float:
        """The factor of attention scores."""
        return self.head_dim**-0.5 if self.is_scaled else 1.0


def encoder_traits(config: HfConfig, architecture: str) -> EncoderTraits | None:
    """Read a Hugging Face config; None when the architecture is no encoder that is known here.

    Raises:
        UnsupportedFeatureError: a trait of this model is not known.
        TrouperValidationError: the config lacks a number or contradicts itself.
    """
    for prefix, reason in REFUSED.items():
        if architecture.startswith(prefix):
            raise UnsupportedFeatureError(f"{architecture}: {reason}", parameter="model")
    for prefix, reader in READERS.items():
        if architecture.startswith(prefix):
            return read_traits(reader, config, architecture)
    return None


def padding_id(config: HfConfig) -> int:
    """Return the id of the padding token, which may be 0; 1 is the default of RoBERTa's classes."""
    found = config.get("pad_token_id")
    return 1 if found is None else int(found)


def _common(config: HfConfig, **own: object) -> EncoderTraits:
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


def _bert(config: HfConfig) -> EncoderTraits:
    return _common(
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


def _roberta(config: HfConfig) -> EncoderTraits:
    return _common(
        config,
        names=BERT_NAMES,
        head=ROBERTA_HEAD,
        vocabulary_head=ROBERTA_VOCABULARY,
        prefixes=("roberta.", "data2vec_text."),
        position_offset=padding_id(config) + 1,
        padding_id=padding_id(config),
    )


def _xlm_roberta_xl(config: HfConfig) -> EncoderTraits:
    return _common(
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


def _megatron_bert(config: HfConfig) -> EncoderTraits:
    return _common(
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


def _electra(config: HfConfig) -> EncoderTraits:
    width = config.get("embedding_size") or 128
    is_projected = width != require(config, "hidden_size")
    return _common(
        config,
        names=msgspec.structs.replace(
            BERT_NAMES, projection="embeddings_project" if is_projected else ""
        ),
        head=Head(dense="classifier.dense", act="gelu", out="classifier.out_proj"),
        prefixes=("electra.",),
        embedding_size=width if is_projected else None,
    )


def _albert(config: HfConfig) -> EncoderTraits:
    for field in ("num_hidden_groups", "inner_group_num"):
        if config.get(field) not in (None, 1):
            raise UnsupportedFeatureError(f"{field}={config[field]} is not supported, only 1 is")
    return _common(
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


def _distilbert(config: HfConfig) -> EncoderTraits:
    return _common(
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


def _mpnet(config: HfConfig) -> EncoderTraits:
    return _common(
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


def _deberta_v2(config: HfConfig) -> EncoderTraits:
    """DeBERTa v2 and v3."""
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
    kinds = config.get("pos_att_type") or ()
    norms_table = "layer_norm" in str(config.get("norm_rel_ebd") or "none").lower()
    shares = bool(config.get("share_att_key"))
    act = config.get("pooler_hidden_act") or "gelu"
    if act not in (*ACTS, "tanh"):
        raise UnsupportedFeatureError(f"pooler_hidden_act={act!r} is not supported")
    return _common(
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


def _modernbert(config: HfConfig) -> EncoderTraits:
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
    return _common(
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


def _nomic_experts(config: HfConfig) -> EncoderExpertsTraits | None:
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


def _nomic(config: HfConfig) -> EncoderTraits:
    experts = _nomic_experts(config)
    if config.get("prenorm") or config.get("rotary_emb_interleaved"):
        raise UnsupportedFeatureError("prenorm and interleaved rotary are not supported")
    is_gated = "glu" in str(config.get("activation_function") or "swiglu")
    return _common(
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
        **_one_rope(config, "rotary_emb_base", share=config.get("rotary_emb_fraction") or 1.0),
    )


def _gte(config: HfConfig) -> EncoderTraits:
    return _common(
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
        **_one_rope(config, "rope_theta"),
    )


def _eurobert(config: HfConfig) -> EncoderTraits:
    pooling = config.get("classifier_pooling") or "late"
    if pooling not in ("bos", "mean", "late"):
        raise UnsupportedFeatureError(f"classifier_pooling={pooling!r} is not supported")
    return _common(
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
        **_one_rope(config, "rope_theta"),
    )


def _xlm_roberta(config: HfConfig) -> EncoderTraits:
    return _jina_v3(config) if config.get("lora_adaptations") else _roberta(config)


def _jina_v3(config: HfConfig) -> EncoderTraits:
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
    return _common(
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
        **_one_rope(config, theta, default_theta=20_000.0),
    )


def _t5(config: HfConfig) -> EncoderTraits:
    """The encoder half of T5, mT5 and their like: sentence-t5, gtr-t5, instructor."""
    kind, _, act = str(config.get("feed_forward_proj") or "relu").rpartition("-")
    if kind not in ("", "gated") or act not in ACTS:
        raise UnsupportedFeatureError(f"feed_forward_proj={kind}-{act} is not supported")
    # T5 v1.1 calls its gelu exact, and computes the approximation.
    act = "gelu_new" if kind and act == "gelu" else act
    dense = "layer.1.DenseReluDense."
    return _common(
        {**config, "hidden_act": act},
        names=EncoderNames(
            words="shared",
            norm="",
            final_norm="encoder.final_layer_norm",
            relative_bias="encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
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
        relative_buckets=config.get("relative_attention_num_buckets") or 32,
        max_distance=config.get("relative_attention_max_distance") or 128,
    )


def _one_rope(
    config: HfConfig, theta: str, share: float = 1.0, default_theta: float = 10_000.0
) -> dict[str, object]:
    head_dim = config.get("head_dim") or (
        require(config, "hidden_size") // require(config, "num_attention_heads")
    )
    rope = rope_traits(
        config, int(head_dim * share), default_theta=float(config.get(theta) or default_theta)
    )
    return {"ropes": (rope,), "layer_ropes": (0,) * require(config, "num_hidden_layers")}


# Names that begin like those of a reader, and are of other models.
REFUSED = {
    "UMT5": "relative positions of each layer are not supported; T5 and mT5 are",
    "BertGeneration": "is not supported; a BERT that embeds is a BertModel",
}
READERS: dict[str, Callable[[HfConfig], EncoderTraits]] = {
    "Bert": _bert,
    "Roberta": _roberta,
    # The first prefix that fits counts.
    "XLMRobertaXL": _xlm_roberta_xl,
    "XLMRoberta": _xlm_roberta,
    "Data2VecText": _roberta,
    "MegatronBert": _megatron_bert,
    "Electra": _electra,
    "Albert": _albert,
    "Camembert": _roberta,
    "DistilBert": _distilbert,
    "MPNet": _mpnet,
    "DebertaV2": _deberta_v2,
    "ModernBert": _modernbert,
    "EuroBert": _eurobert,
    "JinaEmbeddingsV3": _jina_v3,
    "T5Encoder": _t5,
    "MT5Encoder": _t5,
    "NomicBert": _nomic,
    "Gte": _gte,
    "New": _gte,
    "HF_ColBERT": _bert,
    "ColBERT": _bert,
}
