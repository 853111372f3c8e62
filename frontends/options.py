"""What all Python faces do with the options they are given."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from trouper.config import ModelConfig
from trouper.errors import TrouperValidationError
from trouper.params import SamplingParams

T = TypeVar("T")
TOKENIZATION_OPTIONS = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")


def default_sampling_params(model: ModelConfig) -> SamplingParams:
    """The model's own defaults, from its generation_config.json; spec section 2.2."""
    return SamplingParams(**model.default_sampling)


def tokenization_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Keep what the renderer knows; the rest is ignored with a warning (spec section 3.3)."""
    known = {name: value for name, value in (options or {}).items() if name in TOKENIZATION_OPTIONS}
    for name in (options or {}).keys() - known.keys():
        warnings.warn(f"tokenization_kwargs: {name!r} is ignored", stacklevel=3)
    return known


def one_each(value: T | Sequence[T] | None, num_prompts: int, name: str) -> list[T | None]:
    """A scalar stands for every prompt; a list must have one entry for each."""
    if isinstance(value, list | tuple):
        if len(value) != num_prompts:
            raise TrouperValidationError(
                f"{name} has {len(value)} entries for {num_prompts} prompts", parameter=name
            )
        return list(value)
    return [value] * num_prompts  # type: ignore[list-item]  # not a sequence: a T or None
