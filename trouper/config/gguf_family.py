"""Describe how one architecture of GGUF differs from the others."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from trouper.config.gguf import Gguf

PRE_NORMS: Mapping[str, str] = MappingProxyType({"post_attention_layernorm": "ffn_norm"})


class Family(NamedTuple):
    """How one architecture of GGUF differs from the others."""

    architecture: str
    model_type: str
    norms: Mapping[str, str] = PRE_NORMS
    is_permuted: bool = False  # rows of q and k: pairs side by side, not in halves
    norm_offset: float = 0.0  # that the file's norms hold and a checkpoint's do not
    modules: Mapping[str, str] = MappingProxyType(
        {}
    )  # of a layer, where they are not named as Llama's
    layers: str = "model.layers."  # the beginning of their names
    outer: Mapping[str, str] = MappingProxyType({})
    eps: tuple[str, str] = (
        "attention.layer_norm_rms_epsilon",
        "rms_norm_eps",
    )  # key, and name in config.json
    # The checkpoint's rows of q, k and v are by KV head, and the file's are all of q, all of k, all of v.
    is_regrouped: bool = False
    own: Callable[[Gguf, str, dict[str, Any]], dict[str, Any]] | None = None
    reads: frozenset[str] = frozenset()  # keys of attention and positions that `own` understands
