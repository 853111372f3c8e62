"""Names of the tensors of a text model that is stored as a part of a larger one, which also sees or hears."""

import re
from collections.abc import Iterable

# Beginnings in a checkpoint, and in one of the text model alone; the first that fits some name is the checkpoint's own.
STYLES = (
    {"model.language_model.": "model.", "lm_head.": "lm_head."},
    {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
    {"model.text_model.": "model.", "lm_head.": "lm_head."},
    {"model.layers.": "model.layers.", "model.embed_tokens.": "model.embed_tokens.", "model.norm.": "model.norm.", "lm_head.": "lm_head."},
)  # fmt: skip


# Parts of a checkpoint that its model does not use to generate: layers that predict several tokens ahead, heads that value or score.
OF_OTHER_USES = re.compile(r"(?:model\.)?(?:mtp|v_head|value_head|score)\.")
LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def is_of_other_uses(name: str, num_layers: int) -> bool:
    """Decide whether a tensor may be left out: it belongs to a layer behind the last one, or to a head for another use."""
    found = LAYER_NUMBER.search(name)
    is_behind = found is not None and int(found[1]) >= num_layers
    return is_behind or OF_OTHER_USES.match(name) is not None


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """Map the names of the text model alone to those that are stored; the rest of the checkpoint is left out."""
    names = list(stored)
    for style in STYLES:
        first = next(iter(style))
        if any(name.startswith(first) for name in names):
            return {
                plain + name.removeprefix(begin): name
                for name in names
                for begin, plain in style.items()
                if name.startswith(begin)
            }
    return {}


def key_mapping() -> dict[str, str]:
    """Return the same as patterns and their replacements, as transformers takes them."""
    return {
        f"^{re.escape(begin)}": plain
        for style in STYLES[:-1]
        for begin, plain in style.items()
        if begin != plain
    }
