"""Load an encoder, and the heads behind its pooled hidden states, from a folder of safetensors or a GGUF file.

Heads are projections and classifiers, functions from hidden [C, E] or [L, E] to embeddings [.., size] or logits [.., labels].
They compute in float32.

Laws as in `decoder.py`: shapes are checked against the traits, one matrix at a time is cast and packed, nothing is unpickled.
Other contents of a checkpoint (other heads, buffers) are ignored.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from trouper.actors.executor.models.encoder import (
    Encoder,
    EncoderExperts,
    EncoderLayer,
    Norm,
    RmsNorm,
)
from trouper.actors.executor.models.encoder_traits import EncoderTraits, Head, TaskTraits
from trouper.actors.executor.models.names import LLAMA
from trouper.actors.executor.weights.checkpoint import Checkpoint, RandomWeights
from trouper.actors.executor.weights.decoder import indices_shown
from trouper.actors.executor.weights.gguf import GgufEncoder
from trouper.config.checkpoint.pooler import (
    LATE_INTERACTION,
    PAGE_RETRIEVERS,
    PoolerSpec,
    TokenClassifier,
)
from trouper.config.checkpoint.sentence_transformers import Dense, Splade
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid
from trouper.kernels.cpu.encoder_ops import LayerNorm, TokenEmbedding
from trouper.kernels.linear import LinearConfig, LinearMethod
from trouper.kernels.reference.norms import activate
from trouper.kernels.select import make_linear

PARAMETRIZED = ".original"  # ends the names of weights beside which adapters are stored
OLD_NAMES = {"weight": "gamma", "bias": "beta"}  # of layer norms, in BERT's first checkpoints


class Tensors:
    """Typed access to the tensors of an encoder's checkpoint.

    Some checkpoints put a prefix in front of all names; it is found here once.
    """

    def __init__(
        self,
        folder: Path,
        prefixes: tuple[str, ...],
        dtype: torch.dtype,
        load_format: str = "auto",
        seed: int = 0,
        task: TaskTraits | None = None,
        *,
        is_gguf: bool = False,
    ) -> None:
        self._task = task
        self._folder = folder
        self._dtype = dtype
        self._dummy = RandomWeights(seed, dtype) if load_format == "dummy" else None
        opened = GgufEncoder if is_gguf else Checkpoint
        self._checkpoint = None if self._dummy else opened(folder)
        self._shapes = self._checkpoint.shapes if self._checkpoint else {}
        self._prefixes = ("", *prefixes)

    def has(self, name: str) -> bool:
        return self._dummy is not None or self.stores(name)

    @property
    def is_dummy(self) -> bool:
        return self._dummy is not None

    def stores(self, name: str) -> bool:
        """Check whether the checkpoint contains a tensor.

        Dummy weights contain none, so optional modules are omitted.
        """
        return self._find(name) is not None

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor as a copy with the model's dtype.

        Raises:

            TrouperValidationError: it is missing or has another shape.
        """
        return self._stored(name, shape).to(self._dtype, copy=True)

    def rows(self, name: str, shape: tuple[int, ...], indices: Sequence[int]) -> Tensor:
        """Read some rows of a large table, without converting the rest. Raises the errors of `read`."""
        return self._stored(name, shape)[list(indices)].to(self._dtype)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if self._dummy is not None:
            return self._dummy.read(name, shape)
        found = self._find(name)
        if found is None or self._checkpoint is None:
            raise invalid("model", f"the checkpoint lacks {name}", str(self._folder))
        if self._shapes[found] != shape:
            problem = f"{found} has the shape {self._shapes[found]} instead of {shape}"
            raise invalid("model", problem, str(self._folder))
        tensor = self._checkpoint.read(found, shape)
        return self._with_task(tensor, found) if found.endswith(PARAMETRIZED) else tensor

    def _with_task(self, tensor: Tensor, name: str) -> Tensor:
        """Add the product of a task's two factors [tasks, …], if there is a task: B · A for a matrix, A · B for a table."""
        if self._task is None or self._checkpoint is None:
            return tensor
        stem, shapes = name.removesuffix("original"), self._shapes
        names = [f"{stem}0.lora_{side}" for side in "BA"]
        missing = [each for each in names if each not in shapes]
        if missing:
            raise invalid("model", f"the checkpoint lacks {missing[0]}", str(self._folder))
        left, right = (
            self._checkpoint.read(each, shapes[each])[self._task.index].float() for each in names
        )
        if left.shape[0] != tensor.shape[0]:
            left, right = right, left
        return tensor.float() + self._task.scale * (left @ right)

    def linear(
        self,
        parts: tuple[str, ...],
        num_outputs: int,
        num_inputs: int,
        *,
        swaps_halves: bool = False,
    ) -> LinearMethod:
        """Read matrices and stack their rows, with their biases if they have any.

        One product of q, k and v, for example, is faster than three.
        """
        share = num_outputs // len(parts)
        rows = [self.read(f"{part}.weight", (share, num_inputs)) for part in parts]
        biases: list[Tensor] = []
        if self.has(f"{parts[0]}.bias"):
            biases = [self.read(f"{part}.bias", (share,)) for part in parts]
        if swaps_halves:
            rows, biases = (
                [half for x in xs for half in x.chunk(2)[::-1]] for xs in (rows, biases)
            )
        weight = torch.cat(rows)
        bias = torch.cat(biases) if biases else None
        return make_linear(weight, bias, LinearConfig(is_for_many_rows=True))

    def qkv(self, parts: tuple[str, ...], traits: EncoderTraits) -> LinearMethod:
        """Read the projections to queries, keys and values of equally many heads.

        Where several query heads share one head of keys and values, its rows are repeated: attention without a cache gains
        nothing from sharing.
        """
        width, hidden = traits.head_dim, traits.hidden_size
        num_kv_heads = traits.num_kv_heads or traits.num_heads
        if num_kv_heads == traits.num_heads:
            return self.linear(parts, 3 * width * num_kv_heads, hidden)
        rows: list[Tensor] = []
        biases: list[Tensor] = []
        for part, num in zip(parts, (traits.num_heads, num_kv_heads, num_kv_heads), strict=True):
            repeats = traits.num_heads // num
            weight = self.read(f"{part}.weight", (num * width, hidden)).view(num, width, hidden)
            rows.append(weight.repeat_interleave(repeats, 0).flatten(0, 1))
            if self.has(f"{part}.bias"):
                bias = self.read(f"{part}.bias", (num * width,)).view(num, width)
                biases.append(bias.repeat_interleave(repeats, 0).flatten())
        bias = torch.cat(biases) if biases else None
        return make_linear(torch.cat(rows), bias, LinearConfig(is_for_many_rows=True))

    def experts(self, at: str, traits: EncoderTraits) -> EncoderExperts:
        """Read the experts of a layer: two matrices contain the products of all, one expert below the other."""
        experts, hidden, wide = traits.experts, traits.hidden_size, traits.intermediate_size
        assert experts is not None
        num, config = experts.num_experts, LinearConfig(is_for_many_rows=True)
        ups, downs = (
            self.read(f"{at}mlp.experts.mlp.{name}", (num * wide, hidden)).view(num, wide, hidden)
            for name in ("w1", "w2")
        )
        bias = f"{at}mlp.experts.bias"
        return EncoderExperts(
            experts,
            traits.act,
            router_XE=self.read(f"{at}mlp.router.layer.weight", (num, hidden)),
            ups=[make_linear(up, None, config) for up in ups],
            downs=[make_linear(down.T.contiguous(), None, config) for down in downs],
            bias_E=self.read(bias, (hidden,)) if self.has(bias) else None,
        )

    def any_norm(self, name: str, width: int, traits: EncoderTraits) -> Norm:
        """Read a norm of the model's kind."""
        if traits.norm_kind == "rms":
            return RmsNorm(self.read(f"{name}.weight", (width,)), traits.norm_eps)
        return self.norm(name, width, traits.norm_eps)

    def norm(self, name: str, width: int, eps: float) -> LayerNorm:
        bias = self.read(f"{name}.bias", (width,)) if self.has(f"{name}.bias") else None
        return LayerNorm(self.read(f"{name}.weight", (width,)), bias, eps)

    def _find(self, name: str) -> str | None:
        stem, _, kind = name.rpartition(".")
        old = f"{stem}.{OLD_NAMES.get(kind, kind)}"
        for candidate in (name, old, f"{stem}.parametrizations.{kind}{PARAMETRIZED}"):
            for prefix in self._prefixes:
                if prefix + candidate in self._shapes:
                    return prefix + candidate
        return None


def load_encoder(tensors: Tensors, traits: EncoderTraits, max_model_len: int) -> Encoder:
    names, hidden = traits.names, traits.hidden_size
    width = traits.embedding_size or hidden

    def table(name: str, num_rows: int) -> Tensor | None:
        if not name or num_rows == 0:
            return None
        return tensors.read(f"{name}.weight", (num_rows, width))

    words = table(names.words, traits.vocab_size)
    rows = positions = table(names.positions, traits.num_positions)
    if rows is not None:
        positions = rows[traits.position_offset :]
        if len(positions) < max_model_len:
            raise TrouperValidationError(
                f"must be at most {len(positions)}, the positions that the model has",
                parameter="max_model_len",
                value=max_model_len,
            )
    if rows is not None and positions is not None and traits.padding_id is not None:
        # Kernels read rows from 0 on, so the row of padding tokens becomes the last one.
        last = traits.position_offset
        positions = torch.cat((positions, rows[last - 1 : last]))
    if traits.names.types and traits.num_types == 0 and tensors.stores(f"{names.types}.weight"):
        rule = f"config.json says type_vocab_size=0, but the checkpoint has {names.types}.weight"
        raise TrouperValidationError(rule, parameter="model")
    assert words is not None
    distances = _distance_table(tensors, traits)
    layers: dict[str, EncoderLayer] = {}  # by name: ALBERT's layers are one
    for i in indices_shown(traits.num_layers):
        at = names.layer.format(i)
        layers[at] = layers.get(at) or _layer(tensors, traits, at, distances)
    return Encoder(
        traits,
        embedding=TokenEmbedding(words, table(names.types, traits.num_types), positions),
        norm=tensors.any_norm(names.norm, width, traits) if names.norm else None,
        projection=tensors.linear((names.projection,), hidden, width) if names.projection else None,
        layers=[layers[names.layer.format(i)] for i in range(traits.num_layers)],
        final_norm=tensors.any_norm(names.final_norm, hidden, traits) if names.final_norm else None,
        relative_bias=_relative_bias(tensors, traits, "", names.relative_bias),
        max_model_len=max_model_len,
    )


def _relative_bias(tensors: Tensors, traits: EncoderTraits, at: str, name: str) -> Tensor | None:
    """Read a table of relative positions [buckets, N], if such a model has one here."""
    if not name:
        return None
    return tensors.read(f"{at}{name}.weight", (traits.relative_buckets, traits.num_heads))


def _distance_table(tensors: Tensors, traits: EncoderTraits) -> Tensor | None:
    """Read DeBERTa's table of distances [2 · span, E], in float32."""
    names, hidden = traits.names, traits.hidden_size
    if traits.distances is None:
        return None
    table = tensors.read(f"{names.distances}.weight", (2 * traits.distances.span, hidden)).float()
    if not names.distance_norm:
        return table
    weight, bias = (
        tensors.read(f"{names.distance_norm}.{kind}", (hidden,)).float()
        for kind in ("weight", "bias")
    )
    return F.layer_norm(table, (hidden,), weight, bias, traits.norm_eps)


def _distances(
    tensors: Tensors, traits: EncoderTraits, at: str, table: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Project the table of distances to a layer's keys and queries, if the model has them."""
    hidden, distances = traits.hidden_size, traits.distances
    if table is None or distances is None:
        return None, None

    def projected(name: str) -> Tensor:
        weight = tensors.read(f"{at}{name}.weight", (hidden, hidden))
        bias = tensors.read(f"{at}{name}.bias", (hidden,))
        rows = F.linear(table, weight.float(), bias.float()).to(weight.dtype)
        return rows.view(-1, traits.num_heads, traits.head_dim)

    keys, queries = traits.names.distance_projections
    return (
        projected(keys) if distances.has_content_to_position else None,
        projected(queries) if distances.has_position_to_content else None,
    )


def _layer(
    tensors: Tensors, traits: EncoderTraits, at: str, distances: Tensor | None
) -> EncoderLayer:
    names, hidden, wide = traits.names, traits.hidden_size, traits.intermediate_size
    inner = traits.num_heads * traits.head_dim
    # Dummy weights have every name, so for them the number of the layer decides.
    router = f"{at}mlp.router.layer.weight"
    has_experts = traits.experts is not None and (
        tensors.stores(router) or (tensors.is_dummy and _is_expert_layer(traits, at))
    )

    def norm(name: str) -> Norm:
        return tensors.any_norm(at + name, hidden, traits)

    has_norm = tensors.has(f"{at}{names.attention_norm}.weight")
    up = None
    if not has_experts:
        parts = tuple(at + part for part in names.up)
        num_up = wide * (1 + traits.is_gated)
        up = tensors.linear(parts, num_up, hidden, swaps_halves=traits.is_gate_second)
    return EncoderLayer(
        qkv=tensors.qkv(tuple(at + part for part in names.qkv), traits),
        o=tensors.linear((at + names.o,), hidden, inner),
        up=up,
        down=None if has_experts else tensors.linear((at + names.down,), hidden, wide),
        attention_norm=norm(names.attention_norm) if has_norm or not traits.norm_first else None,
        mlp_norm=norm(names.mlp_norm),
        distances=_distances(tensors, traits, at, distances),
        experts=tensors.experts(at, traits) if has_experts else None,
        relative_bias=_relative_bias(tensors, traits, at, names.layer_bias),
    )


def _is_expert_layer(traits: EncoderTraits, at: str) -> bool:
    assert traits.experts is not None
    number = next(i for i in range(traits.num_layers) if traits.names.layer.format(i) == at)
    return number % traits.experts.every == traits.experts.every - 1


Project = Callable[[Tensor], Tensor]
# Tokens of a text whose logits are made at once: with a vocabulary of 250,000 a quarter of a gigabyte.
SPLADE_TOKENS = 256


def load_dense(modules: Sequence[Dense], load_format: str) -> Project:
    """Load the Dense modules of a sentence-transformers folder.

    Returns a function that applies them one after the other.
    """
    layers = [(dense, *_dense_weights(dense, load_format)) for dense in modules]

    def project(x: Tensor) -> Tensor:
        for dense, weight, bias in layers:
            x = F.normalize(x, dim=-1) if dense.normalizes_input else x
            x = activate(F.linear(x, weight, bias), dense.activation)
        return x

    return project


def load_head(
    tensors: Tensors, head: Head, hidden_size: int, num_labels: int, eps: float
) -> Project:
    """Load a classifier: logits = out(norm(act(dense(x)))), as far as the checkpoint has these modules.

    Returns it as a function of hidden states. Missing modules are skipped.
    """
    dense = _linear(tensors, head.dense, hidden_size, hidden_size) if head.dense else None
    norm: LayerNorm | None = tensors.norm(head.norm, hidden_size, eps) if head.norm else None
    out = _linear(tensors, head.out, num_labels, hidden_size)

    def classify(x: Tensor) -> Tensor:
        if dense is not None:
            x = activate(F.linear(x, *dense), head.act)
        if norm is not None:
            x = norm(x)
        return F.linear(x, *out)

    return classify


def load_splade(tensors: Tensors, traits: EncoderTraits, splade: Splade) -> Project:
    """Return what makes the hidden states [L, E] of a text a sparse embedding [V].

    Raises:
        UnsupportedFeatureError: the head of this family is not known.
    """
    head, hidden, size = traits.vocabulary_head, traits.hidden_size, traits.vocab_size
    if head is None:
        rule = "sparse embeddings (SpladePooling) are not supported for this architecture"
        raise UnsupportedFeatureError(rule, parameter="model")
    dense = _linear(tensors, head.dense, hidden, hidden)
    norm = tensors.norm(head.norm, hidden, traits.norm_eps)
    own = f"{head.table}.weight"
    table = own if tensors.stores(own) else f"{traits.names.words}.weight"
    name = f"{head.table}.bias" if tensors.stores(f"{head.table}.bias") else head.bias
    bias = tensors.read(name, (size,)) if tensors.has(name) else None
    out = make_linear(
        tensors.read(table, (size, hidden)), bias, LinearConfig(is_for_many_rows=True)
    )

    def embed(x_LE: Tensor) -> Tensor:
        found = torch.zeros(size)
        # In parts, since the logits of a long text over a large vocabulary take gigabytes.
        for first in range(0, len(x_LE), SPLADE_TOKENS):
            part_LE = x_LE[first : first + SPLADE_TOKENS].to(dense[0].dtype)
            logits_LV = out.apply(norm(activate(F.linear(part_LE, *dense), head.act)))
            weights_LV = logits_LV.float().relu_()
            if splade.takes_sum:
                found += _logs(weights_LV, splade.num_logs).sum(0)
            else:
                found = torch.maximum(found, weights_LV.amax(0))
        return found if splade.takes_sum else _logs(found, splade.num_logs)

    return embed


def _logs(x: Tensor, num: int) -> Tensor:
    for _ in range(num):
        x = x.log1p()
    return x


def load_token_classifier(
    tensors: Tensors,
    classifier: TokenClassifier,
    shape: tuple[int, int],
    tokenizer: Path,
) -> Project:
    """Take a classifier's rows from the language model's head, or from the embedding if there is no head.

    Args:
        shape: of the head.
        tokenizer: the folder with a tokenizer.json that has the ids of the classifier's tokens.

    Raises:
        TrouperValidationError: the vocabulary lacks a token, or the checkpoint both tables.
    """
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids: list[int] = []
    for token in classifier.tokens:
        found = vocabulary.token_to_id(token)
        if found is None:
            rule = "classifier_from_token: the vocabulary has no such token"
            raise invalid("hf_overrides", rule, token)
        ids.append(found)
    head = f"{LLAMA.head}.weight"
    name = head if tensors.stores(head) else "embed_tokens.weight"
    if tensors.stores(f"{LLAMA.head}.bias"):
        rule = "classifier_from_token: a head with biases is not supported"
        raise UnsupportedFeatureError(rule, parameter="hf_overrides")
    weight = tensors.rows(name, shape, ids)
    if classifier.is_difference:
        weight = weight[1:] - weight[:1]
    return lambda x: F.linear(x, weight)


def load_projection(
    tensors: Tensors, spec: PoolerSpec, architecture: str, hidden_size: int, load_format: str
) -> Project:
    """Load the layers between hidden states and an embedding.

    Most models have none; the returned function is then the identity.
    """
    if architecture in (*LATE_INTERACTION, *PAGE_RETRIEVERS) and not spec.dense:
        name = "linear" if architecture in LATE_INTERACTION else "embedding_proj_layer"
        weight, bias = _linear(tensors, name, spec.embedding_size, hidden_size)
        return lambda x: F.linear(x, weight, bias)
    return load_dense(spec.dense, load_format)


def _linear(
    tensors: Tensors, name: str, num_outputs: int, num_inputs: int
) -> tuple[Tensor, Tensor | None]:
    weight = tensors.read(f"{name}.weight", (num_outputs, num_inputs))
    has_bias = tensors.has(f"{name}.bias")
    return weight, tensors.read(f"{name}.bias", (num_outputs,)) if has_bias else None


def _dense_weights(dense: Dense, load_format: str) -> tuple[Tensor, Tensor | None]:
    source = RandomWeights(0) if load_format == "dummy" else Checkpoint(Path(dense.folder))
    weight = source.read("linear.weight", (dense.num_outputs, dense.num_inputs)).float().clone()
    if not dense.has_bias:
        return weight, None
    return weight, source.read("linear.bias", (dense.num_outputs,)).float().clone()
