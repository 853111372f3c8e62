"""From pooled hidden states to raw results: projections, classifiers.  All in float32.

hidden [C, E] or [L, E] -> embedding [.., size] or logits [.., labels]
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from trouper.actors.executor.models.encoder_traits import Head
from trouper.actors.executor.models.names import LLAMA
from trouper.actors.executor.weights.checkpoint import Checkpoint
from trouper.actors.executor.weights.encoder import Tensors
from trouper.actors.executor.weights.random import RandomWeights
from trouper.config.pooler import LATE_INTERACTION, Dense, PoolerSpec, TokenClassifier
from trouper.errors import UnsupportedFeatureError, invalid
from trouper.kernels.cpu.fused.layer_norm import LayerNorm
from trouper.kernels.reference.activation import activate

Project = Callable[[Tensor], Tensor]


def load_dense(modules: Sequence[Dense], load_format: str) -> Project:
    """The Dense modules of a sentence-transformers folder, one after the other."""
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
    """logits = out(norm(act(dense(x)))), as far as the checkpoint has them."""
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


def load_token_classifier(
    tensors: Tensors,
    classifier: TokenClassifier,
    shape: tuple[int, int],
    tokenizer: Path,
) -> Project:
    """Take a classifier's rows from the language model's head, or from the embedding where there is no head.

    Args:
        shape: of the head.
        tokenizer: the folder whose tokenizer.json has the ids of the classifier's tokens.

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
    """Load the layers between hidden states and an embedding; most models have none."""
    if architecture in LATE_INTERACTION and not spec.dense:
        weight, bias = _linear(tensors, "linear", spec.embedding_size, hidden_size)
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
