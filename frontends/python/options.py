"""Read the arguments that all Python interfaces share.

The signatures are vLLM's, so some arguments have no meaning here. They raise an error if they are set, because a
silently ignored argument would change results without notice.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from trouper.config.model import ModelConfig
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.params import SamplingParams

T = TypeVar("T")
TOKENIZATION_OPTIONS = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")


def default_sampling_params(model: ModelConfig) -> SamplingParams:
    """Return the sampling defaults in the model's generation_config.json.

    Calls without `sampling_params` use them.  They can be different from the defaults of `SamplingParams()`.
    """
    return SamplingParams(**model.default_sampling)


def tokenization_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the supported `tokenization_kwargs`; warn about any other.

    Raises:
        TrouperValidationError: `options` is not a dict, or `add_special_tokens` is not a bool.
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
    """Convert token ids in an array (NumPy, torch) to a list; return any other prompt unchanged.

    The engine accepts lists only, but datasets usually contain arrays.
    """
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
    """Raise UnsupportedFeatureError if one of these arguments of vLLM, which have no meaning here, is not None.

    Ignoring such an argument would silently give another result than vLLM.
    """
    for name, value in options.items():
        if value is not None:
            raise UnsupportedFeatureError(f"{name} is not supported yet; leave it None")


def one_each(value: T | Sequence[T] | None, num_prompts: int, name: str) -> list[T | None]:
    """Return one value for each prompt: a scalar is repeated, a list must have as many entries as there are prompts.

    Raises TrouperValidationError, with the argument's name, if the lengths differ.
    """
    if not isinstance(value, list | tuple):
        return [cast("T | None", value)] * num_prompts
    values = cast("Sequence[T]", value)
    if len(values) != num_prompts:
        raise TrouperValidationError(
            f"{name} has {len(values)} entries for {num_prompts} prompts", parameter=name
        )
    return list(values)
