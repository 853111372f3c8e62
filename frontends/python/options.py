"""Reading of the options that all Python interfaces share."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from trouper.config.model import ModelConfig
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.params import SamplingParams

T = TypeVar("T")
TOKENIZATION_OPTIONS = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")


def default_sampling_params(model: ModelConfig) -> SamplingParams:
    """Return the model's own defaults, from its generation_config.json."""
    return SamplingParams(**model.default_sampling)


def tokenization_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Keep what the renderer knows; the rest is ignored with a warning.

    Raises:
        TrouperValidationError: not a dict, or `add_special_tokens` not a bool.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
        raise TrouperValidationError(
            "must be a dict", parameter="tokenization_kwargs", value=type(options).__name__
        )
    known = {name: value for name, value in options.items() if name in TOKENIZATION_OPTIONS}
    for name in options.keys() - known.keys():
        warnings.warn(f"tokenization_kwargs: {name!r} is ignored", stacklevel=3)
    adds = known.get("add_special_tokens")
    if not isinstance(adds, bool | None):
        raise TrouperValidationError(
            "must be True or False", parameter="add_special_tokens", value=adds
        )
    return known


def plain_prompt(prompt: Any) -> Any:
    """Return arrays of token ids, numpy's and others', as lists; anything else as it is."""
    if isinstance(prompt, str):
        return prompt
    if hasattr(prompt, "tolist"):
        return prompt.tolist()
    if isinstance(prompt, Mapping):
        fields = cast("Mapping[str, Any]", prompt)
        if hasattr(fields.get("prompt_token_ids"), "tolist"):
            return {**fields, "prompt_token_ids": plain_prompt(fields["prompt_token_ids"])}
    return cast("object", prompt)


def check_unused(**options: Any) -> None:
    """Raises UnsupportedFeatureError for vLLM's arguments that have no meaning here, unless None."""
    for name, value in options.items():
        if value is not None:
            raise UnsupportedFeatureError(f"{name} is not supported yet; leave it at None")


def one_each(value: T | Sequence[T] | None, num_prompts: int, name: str) -> list[T | None]:
    """Return one value for each prompt: a scalar stands for all, a list must have one entry for each."""
    if not isinstance(value, list | tuple):
        return [cast("T | None", value)] * num_prompts
    values = cast("Sequence[T]", value)
    if len(values) != num_prompts:
        raise TrouperValidationError(
            f"{name} has {len(values)} entries for {num_prompts} prompts", parameter=name
        )
    return list(values)
