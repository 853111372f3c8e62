"""Read the experts of a mixture from a GGUF header: their number, widths, and the tensors that contain all of them."""

from typing import Any

from trouper.config.gguf.header import Gguf, GgufTensor
from trouper.errors import invalid

# A projection of all experts, or gate and up of all experts with the rows of gate first.
GATES = (".ffn_gate_exps.weight", ".ffn_gate_up_exps.weight")
SHARED_WIDTH = "expert_shared_feed_forward_length"


def experts_of(header: Gguf, at: str) -> dict[str, Any]:
    """Return the number of experts and how many of them a token uses.

    Args:
        at: the architecture's name and a dot.

    Raises:
        TrouperValidationError: the file has no tensor of that many experts. A number without such a tensor could allocate
            memory for any number of names.
    """
    count = header.need(at + "expert_count", int)
    gate = _first(header, *GATES)
    found = 0 if gate is None else gate.shape[0]
    if count != found:
        rule = (
            f"{header.path.name}: {at}expert_count: {count} of {found} in the tensors ffn_gate_exps"
        )
        raise invalid("model", rule, str(header.path))
    return {
        "num_experts": count,
        "num_experts_per_tok": header.need(at + "expert_used_count", int),
    }


def expert_width(header: Gguf, at: str, config: dict[str, Any]) -> int:
    """Return the width of an expert.  Files whose MLPs all have the same width lack a key of its own."""
    return header.get(at + "expert_feed_forward_length", int) or config["intermediate_size"]


def shared_width(header: Gguf, at: str) -> int | None:
    """Return the width of the shared expert, from its tensor in files from before the key, or None without one."""
    width = header.get(at + SHARED_WIDTH, int)
    gate = _first(header, ".ffn_gate_shexp.weight")
    return width or (None if gate is None else gate.shape[0])


def _first(header: Gguf, *endings: str) -> GgufTensor | None:
    return next((each for name, each in header.tensors.items() if name.endswith(endings)), None)
