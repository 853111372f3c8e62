"""The traits that distinguish one encoder from another, as plain data, and the names in its checkpoint.

An encoder is: embed -> norm -> layers of (bidirectional attention, MLP) with residual sums.  A new one
is a reader here, if its differences are traits already.  Which biases and norms there are, the
checkpoint itself says.
"""

from typing import Literal

import msgspec

from trouper.actors.executor.models.traits import (
    RopeTraits,
)

Act = Literal["gelu", "gelu_tanh", "silu", "relu"]
ACTS: dict[str, Act] = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu",
    "swiglu": "silu", "swish": "silu", "relu": "relu", "geglu": "gelu",
}  # fmt: skip
GATED_ACTS: tuple[Act, ...] = ("gelu", "gelu_tanh", "silu")


class DistanceTraits(msgspec.Struct, frozen=True, kw_only=True):
    """How distances between tokens contribute to scores.

    The table of distances has 2 × `span` rows. With `num_buckets` > 0, distances beyond half of the buckets share buckets by
    their logarithm, up to `max_distance`.
    """

    span: int
    num_buckets: int = 0
    max_distance: int
    has_content_to_position: bool
    has_position_to_content: bool
    norms_table: bool

    @property
    def num_terms(self) -> int:
        return 1 + self.has_content_to_position + self.has_position_to_content


class EncoderNames(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint's modules.  Several parts are stacked, one below the other; "" = there is none."""

    words: str = "embeddings.word_embeddings"
    positions: str = ""
    types: str = ""
    norm: str = "embeddings.LayerNorm"
    projection: str = ""  # from the width of the embedding to that of the layers
    final_norm: str = ""
    relative_bias: str = ""
    # The same within each layer, where every layer has a table of its own.
    layer_bias: str = ""
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
    """The modules of a classifier: logits = out(norm(act(dense(x)))).

    An empty name means that the model has no such module.
    """

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
    every: int  # layers; the last of them has experts
    is_renormalized: bool  # the shares of the chosen ones are made to sum up to 1


class TaskTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter merged into the weights at load, one of those stored with them."""

    index: int
    scale: float


class EncoderTraits(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture, with the sizes of one model.

    It is plain data, made from config.json, from which `Encoder` computes any supported family. No code depends on
    the name of a family.
    """

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
