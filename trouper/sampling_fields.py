"""Declare the fields of `SamplingParams`, each once, with its type, its range and its treatment by other parts.

A sampling field appears in many places: validation, the bodies of the HTTP APIs, the command line, the message to the
device and beam search.  If each place kept its own list of names, a new field would be missed by some of them, and a
parameter would be ignored without an error.  So every such list is derived from `FIELDS`:

    validation        `params.py` checks the type and the range
    HTTP bodies       a field with `bodies` is accepted and passed on under its own name
    command line      a field with `help` is an option
    device            the fields of `DeviceFields` are also those of the message `Sampling`
    beam search       `beam_search` determines whether a search applies the field or refuses it

A field of one number or flag that the device needs is therefore declared only here: in `DeviceFields` with its type and default,
and in `FIELDS`.  A field that the device does not need has its default in `SamplingParams`.
"""

import math
from collections.abc import Mapping
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
        least, most: the range, with both ends.
        above: the end of a range that does not include it.
        max_length: the largest number of token ids.
        rule: the end of the error's sentence for a value outside its range.
        bodies: the HTTP APIs with a field of this name: all, only completions and chats, or none.
        beam_search: whether a beam search follows or refuses this field of a request body.  It is empty for fields
            that a search sets itself.
        neutral: values without effect, which a search accepts.
        forbids_unlikely: whether the field excludes unlikely tokens.  Greedy requests reset it to its default.
        help: the help of the option on the command line, if there is one.
    """

    kind: Kind = "other"
    is_optional: bool = False
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    max_length: int | None = None
    rule: str = ""
    bodies: Literal["all", "completions and chats", ""] = "all"
    beam_search: Literal["", "follows", "refuses"] = ""
    neutral: tuple[Any, ...] = ()
    forbids_unlikely: bool = False
    help: str = ""


def _penalty(help: str) -> SamplingField:
    return SamplingField(
        kind="number",
        least=-2,
        most=2,
        rule="must be in [-2, 2]",
        beam_search="refuses",
        neutral=(0,),
        help=help,
    )


class DeviceFields(msgspec.Struct, kw_only=True):
    """The fields that the device needs with the client's own values.

    `SamplingParams` and the message `Sampling` inherit them.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None


FIELDS: Mapping[str, SamplingField] = MappingProxyType({
    "n": SamplingField(
        kind="integer", bodies="completions and chats", least=1, most=MAX_N, rule=f"must be in [1, {MAX_N}]"
    ),
    "max_tokens": SamplingField(
        kind="integer", is_optional=True, least=1, rule="must be at least 1",
        bodies="", help="Largest number of tokens to generate.",
    ),
    "min_tokens": SamplingField(
        kind="integer", least=0, rule="must be at least 0",
        beam_search="refuses", neutral=(0,), help="Tokens to generate before the text may end.",
    ),
    "temperature": SamplingField(
        kind="number", least=0, most=2, rule="must be in [0, 2]",
        help="Randomness of the text; 0 takes the likeliest token.",
    ),
    "top_k": SamplingField(
        kind="integer", least=-1, most=INT64 - 1, rule="must be ≥ -1; 0 and -1 switch it off",
        beam_search="refuses", neutral=(0, -1), forbids_unlikely=True,
        help="Keep this many likeliest tokens; 0 is off.",
    ),
    "top_p": SamplingField(
        kind="number", above=0, most=1, rule="must be in (0, 1]", forbids_unlikely=True,
        beam_search="refuses", neutral=(1,), help="Keep the likeliest tokens of this total.",
    ),
    "min_p": SamplingField(
        kind="number", least=0, most=1, rule="must be in [0, 1]", forbids_unlikely=True,
        beam_search="refuses", neutral=(0,), help="Drop tokens below this share of the best.",
    ),
    "presence_penalty": _penalty("Penalty on tokens that are already in the text."),
    "frequency_penalty": _penalty("Penalty on tokens by the number of their uses."),
    "repetition_penalty": SamplingField(
        kind="number", above=0, rule="must be > 0",
        beam_search="refuses", neutral=(1,), help="Factor that makes repeated tokens less likely.",
    ),
    # The rule contains two words of pydantic's, because clients of vLLM look for them.
    "seed": SamplingField(
        kind="integer", is_optional=True, least=-INT64, most=INT64 - 1,
        rule="must fit into 64 bits (greater_than_equal -2**63, less_than_equal 2**63-1)",
        help="Seed of the sampling; equal seeds give equal text.",
    ),
    "stop": SamplingField(bodies="completions and chats", beam_search="refuses", help="End the text before this string; repeatable."),
    "stop_token_ids": SamplingField(kind="token ids", beam_search="refuses"),
    "ignore_eos": SamplingField(
        kind="flag", beam_search="follows", help="Continue after an end-of-text token."
    ),
    "logprobs": SamplingField(
        kind="integer", is_optional=True, least=-1, rule="must be -1 or at least 0",
        bodies="",
    ),
    "prompt_logprobs": SamplingField(
        kind="integer", is_optional=True, least=-1, rule="must be -1 or at least 0",
        bodies="completions and chats", beam_search="refuses",
    ),
    "logprob_token_ids": SamplingField(
        kind="token ids", max_length=MAX_LOGPROB_TOKEN_IDS, rule=f"at most {MAX_LOGPROB_TOKEN_IDS} ids", bodies="completions and chats", beam_search="refuses",
    ),
    "detokenize": SamplingField(kind="flag", bodies=""),
    "skip_special_tokens": SamplingField(kind="flag", beam_search="follows"),
    "spaces_between_special_tokens": SamplingField(kind="flag"),
    "include_stop_str_in_output": SamplingField(kind="flag", beam_search="follows"),
    "output_kind": SamplingField(bodies=""),
    "stream_interval": SamplingField(
        kind="integer", is_optional=True, least=1, rule="must be at least 1"
    ),
    "logit_bias": SamplingField(beam_search="refuses"),
    "allowed_token_ids": SamplingField(
        kind="token ids", beam_search="follows"
    ),
    "bad_words": SamplingField(beam_search="refuses"),
    "skip_reading_prefix_cache": SamplingField(kind="flag", bodies=""),
    "extra_args": SamplingField(bodies=""),
    "repetition_detection": SamplingField(beam_search="refuses"),
    "structured_outputs": SamplingField(bodies=""),
    "thinking_token_budget": SamplingField(
        kind="integer", is_optional=True, least=0,
        rule="must be a non-negative integer or -1 for unlimited", beam_search="refuses", neutral=(-1,),
    ),
})  # fmt: skip
# Fields of vLLM that trouper does not implement, with the only accepted value.
NOT_IMPLEMENTED: Mapping[str, Any] = MappingProxyType({
    "flat_logprobs": False, "prompt_logprob_token_ids": None, "prompt_logprob_start": None,
    "trace_decode_token_ids": None, "routed_experts_prompt_start": 0, "watermarking": None,
})  # fmt: skip


def named(kind: Kind) -> tuple[str, ...]:
    """Return the names of the fields with this type, in the order of their declarations."""
    return tuple(name for name, field in FIELDS.items() if field.kind == kind)


BODY_FIELDS = tuple(name for name, field in FIELDS.items() if field.bodies)
BEAM_FOLLOWED = tuple(n for n, field in FIELDS.items() if field.beam_search == "follows")
BEAM_REFUSED = tuple(n for n, field in FIELDS.items() if field.beam_search == "refuses")
