"""Options about what outputs must match and about their reasoning: dicts of vLLM's -> checked values."""

import logging
from typing import Any

import msgspec

from trouper.errors import TrouperValidationError, invalid

logger = logging.getLogger(__name__)
Marks = tuple[str, str]  # around the reasoning
OTHER_BACKENDS = ("xgrammar", "outlines", "lm-format-enforcer")
REASONING_KEYS = ("reasoning_start_str", "reasoning_end_str")


class StructuredOutputsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults of structured outputs.

    Attributes:
        backend: `auto` and `guidance` are one; `none` refuses every grammar.
        disable_any_whitespace, disable_additional_properties: as a request may say for itself.
        enable_in_reasoning: a grammar begins with the output, not behind its reasoning.
    """

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False


def structured_outputs_config(given: dict[str, Any] | None) -> StructuredOutputsConfig:
    """Read the option `structured_outputs_config`.

    Raises:
        TrouperValidationError: an unknown key or backend, or a wrong type.
    """
    name = "structured_outputs_config"
    try:
        config = msgspec.convert(given or {}, StructuredOutputsConfig)
    except msgspec.ValidationError as error:
        raise TrouperValidationError(f"{name}: {error}", parameter=name, value=given) from None
    if config.backend in OTHER_BACKENDS:
        logger.warning("grammars are llguidance's here, not those of %s", config.backend)
        return msgspec.structs.replace(config, backend="auto")
    if config.backend not in ("auto", "guidance", "none"):
        raise invalid(name, "backend must be auto, guidance or none", config.backend)
    return config


def reasoning_marks(given: dict[str, Any] | None) -> Marks | None:
    """Read the option `reasoning_config`, which names both marks; None: they are not known.

    Raises:
        TrouperValidationError: a key is unknown or missing, or a mark is empty.
    """
    if given is None:
        return None
    marks = [given.get(key) for key in REASONING_KEYS]
    is_named = all(isinstance(mark, str) and mark.strip() for mark in marks)
    if not is_named or given.keys() - set(REASONING_KEYS):
        rule = f"must have the texts {' and '.join(REASONING_KEYS)}, and nothing else"
        raise invalid("reasoning_config", rule, given)
    return str(marks[0]), str(marks[1])
