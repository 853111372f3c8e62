"""Define and validate the parameters of generation, `SamplingParams` and `BeamSearchParams`.

The constructor checks everything that does not depend on a model; `verify` checks what depends on the vocabulary or on
the engine's limits.  `sampling_fields.py` declares types and ranges.
"""

import operator
import re
import sys
import warnings
from collections.abc import Collection, Mapping
from copy import deepcopy
from enum import IntEnum
from numbers import Real
from typing import Any, cast

import msgspec

from trouper.errors import (
    MAX_SHOWN,
    TrouperValidationError,
    UnsupportedFeatureError,
    invalid,
    out_of_vocabulary,
)
from trouper.sampling_fields import FIELDS, NOT_IMPLEMENTED, DeviceFields, SamplingField, named
from trouper.structured_outputs import StructuredOutputsParams

GREEDY_BELOW = 1e-5  # temperatures under this are greedy
LOWEST_TEMPERATURE = 1e-2
# Every new text is searched for each stop string, and each bad word is tokenized twice.  So their number and length are limited, to
# bound the cost of one request for the others.  A tokenizer takes about 30 ms for 16,384 characters.
MAX_STRINGS = {"stop": 64, "bad_words": 128}
MAX_STRING_CHARS = 256  # for each string
MAX_STRINGS_CHARS = 16_384  # for all strings of a list
# Characters of an invalid key to show in an error.
MAX_ECHO = 40
# Exactly one spelling of each integer, so that two keys never mean the same token.
TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)
# A key of `extra_args`.
MAX_DRAFTS = "num_speculative_tokens"
# Types of immutable values, which `clone` need not copy.
PLAIN = (bool, int, float, str, type(None))


class RequestOutputKind(IntEnum):
    # Each output contains the whole text so far.
    CUMULATIVE = 0
    # Each output contains only the new text.
    DELTA = 1
    # There is one output, at the end.
    FINAL_ONLY = 2


class SamplingType(IntEnum):
    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RepetitionDetectionParams(msgspec.Struct, frozen=True):
    """End an output when its last tokens are a pattern repeated `min_count` times.

    The pattern has from `min_pattern_size` (0 means 1) to `max_pattern_size` tokens.  A `max_pattern_size` of 0
    disables the detection.

    Raises:

        TrouperValidationError: a value outside its range; the message names the parameter.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise invalid(name, "must be an integer ≥ 0", value)
        if self.min_pattern_size > self.max_pattern_size:
            raise invalid("min_pattern_size", "must be ≤ max_pattern_size", self.min_pattern_size)
        if self.max_pattern_size > 0 and self.min_count < 2:
            raise invalid("min_count", "must be at least 2", self.min_count)


class SamplingParams(DeviceFields, kw_only=True):
    """The parameters for sampling, stopping and returning the output of one request.

    Names and defaults are vLLM's.  `stop` accepts up to 64 strings and `bad_words` up to 128, each
    of at most 256 characters, and at most 16,384 characters in one list.

    Raises:

        TrouperValidationError: a value outside its range; the message names the parameter.
        UnsupportedFeatureError: a parameter of vLLM that trouper does not implement, with a value other than its default.
    """

    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_args: dict[str, Any] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    # Accepted at their defaults only.
    flat_logprobs: bool = False
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    trace_decode_token_ids: Any = None
    routed_experts_prompt_start: int = 0
    watermarking: Any = None

    def __post_init__(self) -> None:
        self._check_supported()
        self._convert()
        self._check_containers()
        self._normalise()
        self._check_types()
        self._check_ranges()
        if self.is_greedy:
            if self.n > 1:
                raise TrouperValidationError(
                    "greedy sampling gives n equal completions; n must be 1",
                    parameter="n",
                    value=self.n,
                )
            for name, default in _RESET_IF_GREEDY.items():
                setattr(self, name, default)

    @classmethod
    def from_optional(cls, **kwargs: Any) -> "SamplingParams":
        """Create parameters from keywords; None means the default.

        String keys of `logit_bias` are converted to token ids, because JSON has no integer keys.  Raises the errors
        of the constructor.
        """
        return cls(**{name: value for name, value in kwargs.items() if value is not None})

    def clone(self) -> "SamplingParams":
        """Return an independent copy."""
        copies: dict[str, Any] = {
            name: value if isinstance(value, PLAIN) else deepcopy(value)
            for name in self.__struct_fields__
            for value in [getattr(self, name)]
        }
        return SamplingParams(**copies)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def sampling_type(self) -> SamplingType:
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def max_draft_tokens(self) -> int | None:
        """The maximum number of draft tokens in a step of this request, from `extra_args`.

        None uses the engine's setting, and 0 disables speculation.
        """
        return (self.extra_args or {}).get(MAX_DRAFTS)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    def verify(self, *, vocab_size: int, max_logprobs: int) -> None:
        """Check the values that depend on the model.

        Token ids must be in the vocabulary, and `logprobs` must not exceed the engine's
        `max_logprobs` (-1 allows the whole vocabulary).

        Raises:

            TrouperValidationError: the message names the parameter.
        """
        for name in _ID_LISTS:
            wrong = [token for token in getattr(self, name) or () if not 0 <= token < vocab_size]
            if wrong:
                raise out_of_vocabulary(name, *wrong, vocab_size=vocab_size)
        wrong = [token for token in self.logit_bias or () if not 0 <= token < vocab_size]
        if wrong:
            raise out_of_vocabulary("logit_bias", *wrong, vocab_size=vocab_size)
        limit = vocab_size if max_logprobs == -1 else max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            if wanted is not None and (vocab_size if wanted == -1 else wanted) > limit:
                raise invalid(name, f"must be at most {limit} (max_logprobs)", wanted)

    def _check_supported(self) -> None:
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        for name, default in NOT_IMPLEMENTED.items():
            value = getattr(self, name)
            if type(value) is not type(default) or value != default:
                raise UnsupportedFeatureError(
                    f"{name} is not supported yet; leave it at {default}", parameter=name
                )

    def _convert(self) -> None:
        """Replace numbers of other libraries, such as numpy's, by Python's."""
        for name in _INTEGERS:
            setattr(self, name, _plain(getattr(self, name)))
        for name in _NUMBERS:
            setattr(self, name, _plain(getattr(self, name)))
        for name in _ID_LISTS:
            value: Any = getattr(self, name)
            if hasattr(value, "tolist"):
                value = value.tolist()
            if isinstance(value, _LISTS):
                setattr(self, name, [_plain(v) for v in cast("list[Any]", value)])

    def _check_containers(self) -> None:
        for name, types, rule in _CONTAINERS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, types):
                raise invalid(name, rule, value)
        for name in _ID_LISTS:
            for token in getattr(self, name) or ():
                if isinstance(token, bool) or not isinstance(token, int):
                    raise invalid(name, "must hold integers", token)
        for name, limit in MAX_STRINGS.items():
            value: Any = getattr(self, name)
            _check_strings(name, [value] if isinstance(value, str) else value or (), limit)

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = list(self.stop or ())
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or ()))
        self.bad_words = list(dict.fromkeys(self.bad_words or ()))
        if self.seed == -1:
            self.seed = None
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        if self.logit_bias is not None:
            self.logit_bias = _logit_bias(self.logit_bias)
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _check_types(self) -> None:
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is None and FIELDS[name].is_optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise invalid(name, "must be an integer", value)
        for name in _NUMBERS:
            _check_finite(name, getattr(self, name))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise invalid(name, "must be True or False", getattr(self, name))
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            raise invalid("output_kind", "must be a RequestOutputKind", self.output_kind) from None

    def _check_ranges(self) -> None:
        for name, field in FIELDS.items():
            value = getattr(self, name)
            if value is not None and field.rule and not _is_in_range(value, field):
                raise invalid(name, field.rule, value)
        drafts = (self.extra_args or {}).get(MAX_DRAFTS, 0)
        if type(drafts) is not int or drafts < 0:
            raise invalid(f"extra_args.{MAX_DRAFTS}", "must be an integer ≥ 0", drafts)
        if 0 < self.temperature < LOWEST_TEMPERATURE and not self.is_greedy:
            warnings.warn(
                f"temperature {self.temperature} is raised to {LOWEST_TEMPERATURE}", stacklevel=4
            )
            self.temperature = LOWEST_TEMPERATURE
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid(
                "min_tokens", f"must be ≤ max_tokens ({self.max_tokens})", self.min_tokens
            )
        if self.stop and not self.detokenize:
            raise invalid("stop", "stop strings need detokenize=True", self.stop)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise invalid("allowed_token_ids", "must not be empty", self.allowed_token_ids)
        ids = self.logprob_token_ids
        if ids is not None and self.logprobs is not None and self.logprobs != len(ids):
            raise invalid("logprobs", f"must equal the {len(ids)} logprob_token_ids", self.logprobs)


class BeamSearchParams(msgspec.Struct):
    """Parameters of `LLM.beam_search`.

    Raises:
        TrouperValidationError: a value outside its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    structured_outputs: Any = None  # accepted at its default only

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            text = (
                "structured_outputs is not supported with beam search, whose candidates are the likeliest tokens, even if a "
                "grammar forbids all of them; use allowed_token_ids, or generate with n > 1"
            )
            raise UnsupportedFeatureError(text, parameter="structured_outputs")
        for name in ("beam_width", "max_tokens"):
            value = _plain(getattr(self, name))
            setattr(self, name, value)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise invalid(name, "must be at least 1", value)
        for name in ("temperature", "length_penalty"):
            value = _plain(getattr(self, name))
            setattr(self, name, value)
            _check_finite(name, value)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise invalid(name, "must be True or False", getattr(self, name))
        if self.allowed_token_ids is not None:
            # Its rules are those of sampling.
            self.allowed_token_ids = SamplingParams(
                allowed_token_ids=self.allowed_token_ids
            ).allowed_token_ids


def _check_strings(name: str, texts: Collection[Any], limit: int) -> None:
    """Check the number of strings, before any of them is examined, and their lengths."""
    if len(texts) > limit:
        raise invalid(name, f"must have at most {limit} strings", len(texts))
    num_chars = 0
    for text in texts:
        if not isinstance(text, str) or not text:
            raise invalid(name, "must contain only nonempty strings", text)
        num_chars += len(text)
        if len(text) > MAX_STRING_CHARS:
            rule = f"each string must have at most {MAX_STRING_CHARS} characters"
            raise invalid(name, rule, text[:64] + "…")
    if num_chars > MAX_STRINGS_CHARS:
        rule = f"its strings must have at most {MAX_STRINGS_CHARS} characters in total"
        raise invalid(name, rule, num_chars)


def _check_finite(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(name, "must be a number", value)
    if not _is_finite(value):
        raise invalid(name, "must be finite", value)


def _is_in_range(value: Any, field: SamplingField) -> bool:
    if field.max_length is not None:
        return len(value) <= field.max_length
    return field.least <= value <= field.most and value > field.above


def _is_finite(value: float) -> bool:
    """Return whether a float can represent the value; an integer may be too large."""
    return abs(value) <= sys.float_info.max


def _plain(value: Any) -> Any:
    """Convert an integer or a real number to int or float; return a bool and anything else as it is."""
    if isinstance(value, bool | int | float | str | None):
        return float(value) if isinstance(value, float) else value
    try:
        return operator.index(value)
    except TypeError:
        return float(value) if isinstance(value, Real) else value


def _logit_bias(bias: Mapping[Any, Any]) -> dict[int, float]:
    clean: dict[int, float] = {}
    wrong = [key for key in bias if not _is_token_id(key)]
    if wrong:
        keys = ", ".join(repr(str(key)[:MAX_ECHO]) for key in wrong[:MAX_SHOWN])
        which = (
            f"the key {keys} is not a token id"
            if len(wrong) == 1
            else f"the keys {keys} are not token ids"
        )
        rule = f"{which} in plain decimal digits"
        raise invalid("logit_bias", rule, wrong[0] if len(wrong) == 1 else None)
    for key, given in bias.items():
        token, value = int(_plain(key)), _plain(given)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            rule = f"the value of {str(key)[:MAX_ECHO]!r} must be a finite number"
            raise invalid("logit_bias", rule, value)
        clean[token] = min(100.0, max(-100.0, float(value)))
    return clean


def _is_token_id(key: Any) -> bool:
    token = _plain(key)
    return isinstance(token, int) or (isinstance(token, str) and bool(TOKEN_ID.fullmatch(token)))


_RESET_IF_GREEDY = {
    name: getattr(DeviceFields(), name) for name, field in FIELDS.items() if field.forbids_unlikely
}
_INTEGERS, _NUMBERS, _FLAGS = map(named, ("integer", "number", "flag"))
# Sorted, because `allowed_token_ids` must be checked first: a beam search derives `logprob_token_ids` from it.
_ID_LISTS = tuple(sorted(named("token ids")))
_LISTS = (list, tuple, set, frozenset)
_CONTAINERS: tuple[tuple[str, Any, str], ...] = (
    ("stop", (str, *_LISTS), "must be a string or a list of strings"),
    ("bad_words", _LISTS, "must be a list of strings"),
    *((name, _LISTS, "must be a list of token ids") for name in _ID_LISTS),
    ("logit_bias", Mapping, "must map token ids to numbers"),
    ("extra_args", Mapping, "must be a dict"),
    ("repetition_detection", RepetitionDetectionParams, "must be RepetitionDetectionParams"),
    ("structured_outputs", StructuredOutputsParams, "must be StructuredOutputsParams"),
)
