"""The option `speculative_config`: the source and the number of drafted tokens that a step verifies."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from trouper.config.args import EngineArgs
from trouper.config.checkpoint.recurrent import keeps_state
from trouper.config.devices import DeviceKind
from trouper.config.model import ModelConfig
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid

logger = logging.getLogger("trouper")
METHODS = ("ngram", "suffix", "draft_model")
# Attention computes a chunk of at most 8 tokens token by token, with the same bits as single tokens: the last token and 7 drafts.
MAX_DRAFT_TOKENS = 7
DEFAULT_NGRAM = 5
# Maximum number of tokens of all sequences in a step with drafts.  On the CPU eight rows cost 1.2 to 1.55 times one row, sixteen twice.
MAX_VERIFIED = 16
# vLLM's keys of draft models, with the values that disable them.
OF_DRAFT_MODELS: dict[str, Any] = {
    "draft_tensor_parallel_size": None, "tensor_parallel_size": None, "quantization": None,
    "code_revision": None, "max_model_len": None, "parallel_drafting": False, "use_heterogeneous_vocab": False,
    "disable_padded_drafter_batch": False, "num_speculative_tokens_per_batch_size": None, "enforce_eager": None,
}  # fmt: skip
# vLLM's keys of drafts by frequency, with the values that change nothing here: the latest continuation is the draft, and its
# length depends on the success of earlier drafts.
OF_FREQUENCIES: dict[str, tuple[Any, ...]] = {"suffix_decoding_min_token_prob": (None, 0.1)}


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How drafts are proposed, under vLLM's keys.

    `ngram` repeats the continuation of the last earlier place with the same `prompt_lookup_max` tokens, or fewer, down to
    `prompt_lookup_min`.  `suffix` uses the longest match; drafts are longer if more tokens match.  `draft_model` asks a second,
    smaller model with the same vocabulary.
    """

    method: Literal["ngram", "suffix", "draft_model"]
    num_speculative_tokens: int
    # The draft model: a folder, a file or a hub id, like the engine's own model.
    model: str | None = None
    revision: str | None = None
    prompt_lookup_max: int = DEFAULT_NGRAM
    prompt_lookup_min: int = DEFAULT_NGRAM
    suffix_decoding_max_tree_depth: int = 24  # tokens to compare
    suffix_decoding_max_spec_factor: float | None = None  # drafts for each matching token
    # The number of requests with stored answers; 0 stores none.
    suffix_decoding_max_cached_requests: int = 10_000


def speculative_config(
    value: Any, device: DeviceKind, *, pools: bool = False
) -> SpeculativeConfig | None:
    """Check the option; None and {} disable speculation.

    Raises:
        TrouperValidationError: a key is unknown, or a value has the wrong type or is out of range.
        UnsupportedFeatureError: trouper does not support the method, the key, or speculation on the device.
    """
    if not value:
        return None
    given = _given(value)
    if pools:
        raise _wrong("is not supported for pooling models, which generate no tokens", value)
    method = given.get("method")
    if method is None and given.get("model") is not None:
        method = given["method"] = "draft_model"
    if method not in METHODS:
        raise UnsupportedFeatureError(
            f"speculative_config: the method {method!r} is not supported; supported: {', '.join(METHODS)}",
            parameter="speculative_config",
        )
    without = {key: (default,) for key, default in OF_DRAFT_MODELS.items()} | OF_FREQUENCIES
    for key, accepted in without.items():
        if given.pop(key, accepted[0]) not in accepted:
            raise UnsupportedFeatureError(
                f"speculative_config: {key} is not supported with {method!r}",
                parameter="speculative_config",
            )
    if device != "cpu":
        raise UnsupportedFeatureError(
            "speculative_config is not supported on a GPU yet; use device='cpu'",
            parameter="speculative_config",
        )
    given.setdefault("num_speculative_tokens", MAX_DRAFT_TOKENS)
    longest, shortest = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
    fallback = next((each for each in (longest, shortest) if each is not None), DEFAULT_NGRAM)
    given["prompt_lookup_max"] = fallback if longest is None else longest
    given["prompt_lookup_min"] = fallback if shortest is None else shortest
    try:
        config = msgspec.convert(given, SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise _wrong(str(error), value) from None
    _check_ranges(config, value)
    if config.num_speculative_tokens > MAX_DRAFT_TOKENS:
        logger.info(
            "num_speculative_tokens is lowered to %d, the maximum on the CPU", MAX_DRAFT_TOKENS
        )
        return msgspec.structs.replace(config, num_speculative_tokens=MAX_DRAFT_TOKENS)
    return config


def _given(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong("must be a dict, or a JSON object", value)
    return dict(cast("Mapping[str, Any]", value))


def _check_ranges(config: SpeculativeConfig, value: Any) -> None:
    if (config.method == "draft_model") != (config.model is not None):
        raise _wrong("model must be set with method='draft_model', and only with it", value)
    if config.revision is not None and config.model is None:
        raise _wrong("revision belongs to the draft model, and needs model", value)
    if config.num_speculative_tokens < 1:
        raise _wrong("num_speculative_tokens must be at least 1", value)
    if not 1 <= config.prompt_lookup_min <= config.prompt_lookup_max:
        raise _wrong("prompt_lookup_min must be at least 1 and at most prompt_lookup_max", value)
    if config.suffix_decoding_max_cached_requests < 0:
        raise _wrong("suffix_decoding_max_cached_requests must be at least 0", value)
    factor = config.suffix_decoding_max_spec_factor
    if config.suffix_decoding_max_tree_depth < 1 or (factor is not None and not factor > 0):
        raise _wrong("suffix_decoding_max_tree_depth and _max_spec_factor must be above 0", value)


def draft_model(
    args: EngineArgs, model: ModelConfig, speculation: SpeculativeConfig | None
) -> ModelConfig | None:
    """Find the draft model, if there is one.  It may download it, like the engine's own model.

    Raises:
        TrouperValidationError: the model does not exist, or has another vocabulary.
        UnsupportedFeatureError: the draft model has recurrent layers.
    """
    if speculation is None or speculation.model is None:
        return None
    own = dataclasses.replace(
        args, model=speculation.model, revision=speculation.revision, hf_overrides=None
    )
    try:
        draft = ModelConfig.load(own)
    except TrouperValidationError as error:
        raise _wrong(f"the draft model: {error.message}", speculation.model) from error
    if keeps_state(draft.hf_config):
        raise UnsupportedFeatureError(
            f"speculative_config: the draft model ({draft.hf_config.get('model_type')}) has recurrent layers, which cannot undo "
            "rejected drafts; use a draft model with attention layers only",
            parameter="speculative_config",
        )
    size = model.vocab_size
    if draft.vocab_size != size:
        raise _wrong(
            f"the draft model must have the model's vocabulary: it has {draft.vocab_size} tokens instead of {size}",
            speculation.model,
        )
    return draft


def _wrong(rule: str, value: Any) -> TrouperValidationError:
    return invalid("speculative_config", rule, value)
