"""The fields of `SamplingParams`, each declared once with its type, its range and its treatment by other parts.

A sampling field appears in many places: validation, the bodies of the HTTP APIs, the command line, the message to the
device and beam search.  If each place kept its own list of names, a new field would be missed by some of them, and a
parameter would be ignored without an error.  So every such list is derived from `FIELDS`:

    validation        `params.py` checks the type and the range
    HTTP bodies       a field with `is_in_bodies` is passed on under its own name
    command line      the option's help is `help`
    device            a field with `is_on_device` is copied into the message `Sampling` under its own name
    beam search       `beam_search` says whether a search follows the field or refuses it
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

MAX_N = 16_384
INT64 = 2**63
MAX_LOGPROB_TOKEN_IDS = 128
Kind = Literal["integer", "number", "flag", "token ids", "other"]


class SamplingField(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of one field of `SamplingParams`.

    Args:
        kind: the type that validation requires; `other` types have their own checks in `params.py`.
        is_optional: whether None is a valid value of an integer.
        is_valid: returns whether a value is in the range, and `rule` is the end of the error's sentence if it is not.
        is_in_bodies: whether the HTTP APIs for completions and chats pass the field on under its own name.
        is_on_device: whether `Sampling` has a field with this name and the same value.
        beam_search: what a beam search does with this field in a request body.  It is empty for fields that a search
            sets itself.
        neutral: the values that change nothing, which a search therefore accepts.
        help: the help of the option on the command line, if there is one.
    """

    kind: Kind = "other"
    is_optional: bool = False
    is_valid: Callable[[Any], bool] | None = None
    rule: str = ""
    is_in_bodies: bool = True
    is_on_device: bool = False
    beam_search: Literal["", "follows", "refuses"] = ""
    neutral: tuple[Any, ...] = ()
    help: str = ""


def _penalty(help: str) -> SamplingField:
    return SamplingField(
        kind="number",
        is_valid=lambda v: -2 <= v <= 2,
        rule="must be in [-2, 2]",
        is_on_device=True,
        beam_search="refuses",
        neutral=(0,),
        help=help,
    )


FIELDS: Mapping[str, SamplingField] = MappingProxyType({
    "n": SamplingField(
        kind="integer", is_valid=lambda v: 1 <= v <= MAX_N, rule=f"must be in [1, {MAX_N}]"
    ),
    "presence_penalty": _penalty("Penalty on tokens that are already in the text."),
    "frequency_penalty": _penalty("Penalty on tokens by the number of their uses."),
    "repetition_penalty": SamplingField(
        kind="number", is_valid=lambda v: v > 0, rule="must be > 0", is_on_device=True,
        beam_search="refuses", neutral=(1,), help="Factor that makes repeated tokens less likely.",
    ),
    "temperature": SamplingField(
        kind="number", is_valid=lambda v: 0 <= v <= 2, rule="must be in [0, 2]",
        help="Randomness of the text; 0 takes the likeliest token.",
    ),
    "top_p": SamplingField(
        kind="number", is_valid=lambda v: 0 < v <= 1, rule="must be in (0, 1]", is_on_device=True,
        beam_search="refuses", neutral=(1,), help="Keep the likeliest tokens of this total.",
    ),
    "top_k": SamplingField(
        kind="integer", is_valid=lambda v: -1 <= v < INT64, rule="must be ≥ -1; 0 and -1 switch it off",
        is_on_device=True, beam_search="refuses", neutral=(0, -1),
        help="Keep this many likeliest tokens; 0 is off.",
    ),
    "min_p": SamplingField(
        kind="number", is_valid=lambda v: 0 <= v <= 1, rule="must be in [0, 1]", is_on_device=True,
        beam_search="refuses", neutral=(0,), help="Drop tokens below this share of the best.",
    ),
    # The rule contains two words of pydantic's, because clients of vLLM look for them.
    "seed": SamplingField(
        kind="integer", is_optional=True, is_valid=lambda v: -INT64 <= v < INT64,
        rule="must fit into 64 bits (greater_than_equal -2**63, less_than_equal 2**63-1)",
        help="Seed of the sampling; equal seeds give equal text.",
    ),
    "stop": SamplingField(beam_search="refuses", help="End the text before this string; repeatable."),
    "stop_token_ids": SamplingField(kind="token ids", beam_search="refuses"),
    "ignore_eos": SamplingField(
        kind="flag", beam_search="follows", help="Continue after an end-of-text token."
    ),
    "max_tokens": SamplingField(
        kind="integer", is_optional=True, is_valid=lambda v: v >= 1, rule="must be at least 1",
        is_in_bodies=False, help="Largest number of tokens to generate.",
    ),
    "min_tokens": SamplingField(
        kind="integer", is_valid=lambda v: v >= 0, rule="must be at least 0", is_on_device=True,
        beam_search="refuses", neutral=(0,), help="Tokens to generate before the text may end.",
    ),
    "logprobs": SamplingField(
        kind="integer", is_optional=True, is_valid=lambda v: v >= -1, rule="must be -1 or at least 0",
        is_in_bodies=False, is_on_device=True,
    ),
    "prompt_logprobs": SamplingField(
        kind="integer", is_optional=True, is_valid=lambda v: v >= -1, rule="must be -1 or at least 0",
        is_on_device=True, beam_search="refuses",
    ),
    "logprob_token_ids": SamplingField(
        kind="token ids", is_valid=lambda v: len(v) <= MAX_LOGPROB_TOKEN_IDS,
        rule=f"at most {MAX_LOGPROB_TOKEN_IDS} ids", is_on_device=True, beam_search="refuses",
    ),
    "detokenize": SamplingField(kind="flag", is_in_bodies=False),
    "skip_special_tokens": SamplingField(kind="flag", beam_search="follows"),
    "spaces_between_special_tokens": SamplingField(kind="flag"),
    "include_stop_str_in_output": SamplingField(kind="flag", beam_search="follows"),
    "output_kind": SamplingField(is_in_bodies=False),
    "stream_interval": SamplingField(
        kind="integer", is_optional=True, is_valid=lambda v: v >= 1, rule="must be at least 1"
    ),
    "logit_bias": SamplingField(beam_search="refuses"),
    "allowed_token_ids": SamplingField(
        kind="token ids", is_on_device=True, beam_search="follows"
    ),
    "bad_words": SamplingField(beam_search="refuses"),
    "skip_reading_prefix_cache": SamplingField(kind="flag", is_in_bodies=False),
    "extra_args": SamplingField(is_in_bodies=False),
    "repetition_detection": SamplingField(beam_search="refuses"),
    "structured_outputs": SamplingField(is_in_bodies=False),
    "thinking_token_budget": SamplingField(
        kind="integer", is_optional=True, is_valid=lambda v: v >= 0,
        rule="must be a non-negative integer or -1 for unlimited", beam_search="refuses", neutral=(-1,),
    ),
})  # fmt: skip
# The only value at which a field of vLLM's is accepted that trouper does not implement.
NOT_IMPLEMENTED: Mapping[str, Any] = MappingProxyType({
    "flat_logprobs": False, "prompt_logprob_token_ids": None, "prompt_logprob_start": None,
    "trace_decode_token_ids": None, "routed_experts_prompt_start": 0, "watermarking": None,
})  # fmt: skip


def named(kind: Kind) -> tuple[str, ...]:
    """Return the names of the fields with this type, in the order of their declarations."""
    return tuple(name for name, field in FIELDS.items() if field.kind == kind)


BODY_FIELDS = tuple(name for name, field in FIELDS.items() if field.is_in_bodies)
DEVICE_FIELDS = tuple(name for name, field in FIELDS.items() if field.is_on_device)
BEAM_FOLLOWED = tuple(n for n, field in FIELDS.items() if field.beam_search == "follows")
BEAM_REFUSED = tuple(n for n, field in FIELDS.items() if field.beam_search == "refuses")
