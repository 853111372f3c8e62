"""The lists of `docs/models.md`, made of what the code and its tests know: `python -m tests.parity.models_page` writes them."""

import re
from pathlib import Path

from trouper.actors.executor.models.families.registry import ENCODERS, TEXT_MODELS
from trouper.actors.executor.models.families.registry import READERS as DECODERS
from trouper.actors.executor.weights.schemes import READERS as QUANTIZED
from trouper.config.checks import ROUNDED
from trouper.config.gguf.names import ENCODER_NAMES
from trouper.config.gguf.names import FAMILIES as GGUF

from .hf_families import FAMILIES, HYBRIDS, NOT_CAUSAL, OWN_ATTENTION, REFUSED, architecture_of

REASONS = {
    OWN_ATTENTION: "attention that cannot be exchanged",
    NOT_CAUSAL: "tokens that see those behind them",
}
OTHER_STATE = "layers that keep another state than keys and values"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def lists():
    """The text between the marks of each list, by its name."""
    fallback = {architecture_of(family) for family in FAMILIES} - DECODERS.keys()
    recurrent = {architecture_of(family) for family in HYBRIDS}
    return {
        "own": named(DECODERS),
        "text": named(TEXT_MODELS),
        "encoders": named(ENCODERS),
        "transformers": named(fallback),
        "recurrent": named(recurrent),
        "refused": "\n".join(f"* {reason}: {named(names)}" for reason, names in refused().items()),
        "gguf": named([*GGUF, *ENCODER_NAMES]),
        "checkpoints": named(QUANTIZED),
        "rounding": named(ROUNDED),
    }


def refused():
    """Architectures without own code, by the reason of their refusal."""
    found = {}
    for family, reason in REFUSED.items():
        if architecture_of(family) not in DECODERS:
            found.setdefault(REASONS.get(reason, OTHER_STATE), []).append(architecture_of(family))
    return found


def named(names):
    return ", ".join(f"`{name}`" for name in sorted(names, key=str.lower))


def rendered(page):
    """The page with its lists as they should be."""

    def replaced(match):
        return f"{match[1]}\n{found.pop(match[2])}\n{match[3]}"

    found = lists()
    page = re.sub(r"(<!-- list: (\w+) -->)\n.*?(<!-- end -->)", replaced, page, flags=re.DOTALL)
    assert not found, f"no marks of {sorted(found)}"
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
