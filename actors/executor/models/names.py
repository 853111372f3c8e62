"""The names of a decoder's tensors in its checkpoint.

Each family names its modules differently; a family's entry in `NAMES` states only the differences from Llama. A text model
may also be stored within a multimodal model, under prefixes that `text_names` removes.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

Family = Literal[
    "llama", "phi3", "gpt2", "bigcode", "gpt_neo", "opt", "gpt_neox", "phi", "starcoder2", "stablelm", "falcon",
    "falcon_two_norms", "persimmon", "gptj", "glm", "hunyuan", "granite_hybrid", "granite_apart", "lfm2",
]  # fmt: skip


class Names(NamedTuple):
    """The names of a decoder's modules in its checkpoint.

    Names within a layer follow the layer's number.  The defaults are Llama's.  Families with other names have an
    entry in `NAMES`.
    """

    # The prefix of all modules but the head. Some checkpoints omit it.
    base: str = "model."
    layers: str = "layers."
    embedding: str = "embed_tokens"
    positions: str = "embed_positions"
    norm: str = "norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    # For layers with a norm behind the attention and behind the MLP.
    attention_post_norm: str = "post_attention_layernorm"
    inner_mlp_norm: str = "pre_feedforward_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attention: str = "self_attn"
    # One module, or one each for queries, keys and values.
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    o: str = "o_proj"
    mlp: str = "mlp"
    # Two modules, one module with gate above up, or only up if there is no gate.
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    # Modules of recurrent mixers.
    gated_delta: str = "linear_attn"
    mamba2: str = "mamba"
    short_conv: str = "conv"
    # Suffixes of attention masks, which old releases stored and nothing reads.
    masks: tuple[str, ...] = ()
    # Whether matrices of layers are stored as [inputs, outputs].
    is_transposed: bool = False


LLAMA = Names()
_GPT2 = Names(
    base="transformer.",
    layers="h.",
    embedding="wte",
    positions="wpe",
    norm="ln_f",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    attention="attn",
    masks=(".attn.bias", ".attn.masked_bias"),
    qkv=("c_attn",),
    o="c_proj",
    gate_up=("c_fc",),
    down="c_proj",
)
_NEOX = Names(
    base="gpt_neox.",
    embedding="embed_in",
    norm="final_layer_norm",
    head="embed_out",
    attention="attention",
    masks=(".attention.bias", ".attention.masked_bias"),
    qkv=("query_key_value",),
    o="dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)
_FALCON = _NEOX._replace(
    base="transformer.",
    layers="h.",
    embedding="word_embeddings",
    norm="ln_f",
    head="lm_head",
    attention="self_attention",
)
_PHI = Names(
    norm="final_layernorm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="dense",
    gate_up=("fc1",),
    down="fc2",
)
NAMES: dict[Family, Names] = {
    "llama": LLAMA,
    "phi3": Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    "glm": Names(
        attention_post_norm="post_self_attn_layernorm",
        inner_mlp_norm="post_attention_layernorm",
        mlp_post_norm="post_mlp_layernorm",
        gate_up=("gate_up_proj",),
    ),
    "granite_hybrid": Names(mlp="shared_mlp", gate_up=("input_linear",), down="output_linear"),
    # In GGUF files gate and up are two matrices.
    "granite_apart": Names(mlp="shared_mlp"),
    "lfm2": Names(
        norm="embedding_norm",
        attention_norm="operator_norm",
        mlp_norm="ffn_norm",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        o="out_proj",
        mlp="feed_forward",
        gate_up=("w1", "w3"),
        down="w2",
    ),
    "hunyuan": Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
    "gpt2": _GPT2._replace(is_transposed=True),
    "bigcode": _GPT2,
    "gpt_neo": _GPT2._replace(
        attention="attn.attention",
        masks=_NEOX.masks,
        qkv=("q_proj", "k_proj", "v_proj"),
        o="out_proj",
    ),
    "gptj": _GPT2._replace(
        qkv=("q_proj", "k_proj", "v_proj"), o="out_proj", gate_up=("fc_in",), down="fc_out"
    ),
    "opt": Names(
        base="model.decoder.",
        norm="final_layer_norm",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        o="out_proj",
        mlp="",
        gate_up=("fc1",),
        down="fc2",
    ),
    "gpt_neox": _NEOX,
    "phi": _PHI,
    "starcoder2": Names(gate_up=("c_fc",), down="c_proj"),
    "stablelm": Names(q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm"),
    "falcon": _FALCON,
    "falcon_two_norms": _FALCON._replace(attention_norm="ln_attn", mlp_norm="ln_mlp"),
    "persimmon": _PHI._replace(
        qkv=("query_key_value",), gate_up=("dense_h_to_4h",), down="dense_4h_to_h"
    ),
}


# Prefixes in a multimodal checkpoint, and the corresponding ones of a text model. A checkpoint follows the first style
# whose first prefix occurs.
STYLES = (
    {"model.language_model.": "model.", "lm_head.": "lm_head."},
    {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
    {"model.text_model.": "model.", "lm_head.": "lm_head."},
    {"model.layers.": "model.layers.", "model.embed_tokens.": "model.embed_tokens.", "model.norm.": "model.norm.", "lm_head.": "lm_head."},
)  # fmt: skip
# ColPali and ColQwen2 have a projection next to a multimodal model without a head.
RETRIEVER = "vlm."
BARE = {"language_model.": "model."}


# Parts of a checkpoint without a use in generation: multi-token prediction layers, and value or score heads.
OF_OTHER_USES = re.compile(r"(?:model\.)?(?:mtp|v_head|value_head|score)\.")
LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def is_of_other_uses(name: str, num_layers: int) -> bool:
    """Decide whether a tensor may be ignored: it belongs to a layer behind the last one, or to a head for another
    purpose.

    Any other unexpected tensor is an error.
    """
    found = LAYER_NUMBER.search(name)
    is_behind = found is not None and int(found[1]) >= num_layers
    return is_behind or OF_OTHER_USES.match(name) is not None


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """Map the names of a text model to the stored names of a multimodal checkpoint.

    Tensors of other parts are omitted. Checkpoints nest the text model below several prefixes.
    """
    names = list(stored)
    outer = RETRIEVER if any(name.startswith(RETRIEVER) for name in names) else ""
    found = {name.removeprefix(outer): name for name in names}
    for style in (*STYLES, BARE) if outer else STYLES:
        first = next(iter(style))
        if any(name.startswith(first) for name in found):
            return {
                plain + name.removeprefix(begin): whole
                for name, whole in found.items()
                for begin, plain in style.items()
                if name.startswith(begin)
            }
    return {}


def key_mapping() -> dict[str, str]:
    """Return the same renaming in transformers' format: patterns and their replacements.

    The library's models are loaded with it, while trouper's own code uses `text_names`.
    """
    return {
        f"^{re.escape(begin)}": plain
        for style in STYLES[:-1]
        for begin, plain in style.items()
        if begin != plain
    }
