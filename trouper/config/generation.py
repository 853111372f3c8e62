"""Sampling defaults of a model, and the options about structured outputs and reasoning.

The defaults apply to requests and command lines without their own values.  Each set of defaults records its source, so
that users can see why a model samples as it does.
"""

import difflib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from trouper.config.checkpoint.files import read_object
from trouper.config.gguf.header import Gguf
from trouper.errors import TrouperValidationError, invalid
from trouper.params import GREEDY_BELOW, LOWEST_TEMPERATURE, SamplingParams
from trouper.sampling_fields import FIELDS

# The interface in use: a Python program, `generate` and `chat`, `serve`, or `run-batch`, which samples like a server.
Frontend = Literal["library", "terminal", "server", "batch"]
GENERATION = "generation_config.json"
# Names in generation_config.json.
SAMPLING_FIELDS = (
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_new_tokens",
)
# The defaults of llama.cpp and Ollama, for a model without its own.
COMMON_SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
# Fields that the line about the sampling shows after the temperature, unless their value changes nothing.
SHOWN_FIELDS = (
    *(name for name, field in FIELDS.items() if field.forbids_unlikely),
    *(name for name in FIELDS if name.endswith("_penalty")),
)
# Keys of a GGUF file, and the field that each sets.
GGUF_KEYS = "general.sampling."
GGUF_FIELDS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Keys without a counterpart here; with these values they have no effect.
GGUF_IDLE = {"xtc_probability": 0, "mirostat": 0, "penalty_last_n": 0, "sequence": ""}
# Other fields of generation_config.json that users override, and fields unrelated to sampling.
OTHER_FIELDS = ("eos_token_id",)
HARMLESS_FIELDS = ("bos_token_id", "pad_token_id", "transformers_version", "_from_model_config")


class SamplingSource(NamedTuple):
    """Sampling fields under the names of generation_config.json; `of` describes their source for users."""

    fields: dict[str, Any]
    of: str


def sampling_source(
    wanted: str, own: Mapping[str, Any], header: Gguf | None, frontend: Frontend
) -> SamplingSource:
    """Choose the sampling defaults of a model.

    Args:
        wanted: the option `generation_config`.
        own: the model's generation_config.json, or that of the folder in `wanted`.
        header: the header of the GGUF file, if the model is one.
    """
    if wanted in ("vllm", "trouper"):
        return SamplingSource({}, "vLLM's")
    named = {name: own[name] for name in SAMPLING_FIELDS if own.get(name) is not None}
    if wanted != "auto":
        return SamplingSource(named, f"{GENERATION} of {wanted}")
    if frontend == "library" or (header is None and (named or frontend != "terminal")):
        return SamplingSource(named, GENERATION if named else "vLLM's")
    found = {} if header is None else gguf_sampling(header)
    if not found:
        return SamplingSource(dict(COMMON_SAMPLING), "trouper's; the model sets none")
    return SamplingSource(COMMON_SAMPLING | found, _gguf_source(header))


def gguf_sampling(header: Gguf) -> dict[str, Any]:
    """Read the sampling fields of a GGUF file.

    Values with which llama.cpp disables a field are replaced by trouper's.

    Raises:
        TrouperValidationError: a key has the wrong type.
    """
    found: dict[str, Any] = {}
    for key, field in GGUF_FIELDS.items():
        value = header.get(GGUF_KEYS + key, float)
        if value is not None:
            # Files store single precision: 0.95 is stored as 0.949999988.
            found[field] = float(f"{value:.6g}")
    if "top_k" in found:
        found["top_k"] = max(0, int(found["top_k"]))
    for field in ("temperature", "min_p"):
        if field in found:
            found[field] = max(0.0, found[field])
    if "top_p" in found:
        found["top_p"] = min(1.0, found["top_p"])
    return found


def _gguf_source(header: Gguf | None) -> str:
    """Describe the file as a source, with the names of its keys that have no effect here."""
    assert header is not None
    given = {key: header.metadata.get(GGUF_KEYS + key, idle) for key, idle in GGUF_IDLE.items()}
    left = [GGUF_KEYS + key for key, value in given.items() if value != GGUF_IDLE[key]]
    return "the GGUF file" + (f"; not applied: {', '.join(left)}" if left else "")


def read_generation_config(wanted: str, path: Path) -> dict[str, Any]:
    """Read generation_config.json of the model at `path`, or of the folder that the option `wanted` names.

    Raises:
        TrouperValidationError: the file cannot be read, or the named folder has none.
    """
    if wanted in ("auto", "vllm", "trouper"):
        return read_object(path / GENERATION) or {}
    folder = Path(wanted).expanduser()
    found = read_object(folder / GENERATION, "generation_config")
    if found is None:
        rule = f"no {GENERATION} in the generation_config folder"
        raise invalid("generation_config", rule, str(folder))
    return found


def check_override(override: Mapping[str, Any]) -> None:
    """Refuse fields of `override_generation_config` that would have no effect.

    Raises:
        TrouperValidationError: the message names the field, and a similar existing one.
    """
    known = (*SAMPLING_FIELDS, *OTHER_FIELDS, *HARMLESS_FIELDS)
    for name, value in override.items():
        if name in known or (name == "do_sample" and value is True):
            continue
        near = (
            ["max_new_tokens"]
            if name == "max_tokens"
            else difflib.get_close_matches(name, known, 1)
        )
        hint = (
            "temperature 0 is greedy" if name == "do_sample"
            else f"did you mean {near[0]}?" if near
            else f"there are {', '.join((*SAMPLING_FIELDS, *OTHER_FIELDS))}"
        )  # fmt: skip
        raise invalid("override_generation_config", f"{name!r} would have no effect; {hint}", value)


def default_sampling(fields: Mapping[str, Any], file: str = GENERATION) -> dict[str, Any]:
    """Convert fields of generation_config.json to sampling parameters.

    Args:
        file: the name of the file for error messages.

    Raises:
        TrouperValidationError: a value that no request could use; the message names the file and the field.
    """
    found = {n: fields[n] for n in SAMPLING_FIELDS if fields.get(n) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    temperature = found.get("temperature")
    if isinstance(temperature, float) and GREEDY_BELOW <= temperature < LOWEST_TEMPERATURE:
        # `SamplingParams` does the same, with a warning.
        found["temperature"] = LOWEST_TEMPERATURE
    try:
        SamplingParams(**found)
    except TrouperValidationError as error:
        rule = f"{file}: {error.message}"
        raise TrouperValidationError(
            rule, parameter=error.parameter, value=fields.get(error.parameter or "", error.value)
        ) from None
    return found


def describe_sampling(params: Mapping[str, Any]) -> str:
    """Describe the sampling for users: the temperature, and every parameter with an effect.

    For greedy sampling only penalties are listed, because top-k, top-p and min-p do not change it.
    """
    temperature = params.get("temperature", 1.0)
    if temperature < GREEDY_BELOW:
        parts = ["greedy (temperature 0)"]
    else:
        parts = [f"temperature {temperature:g}"]
    neutral = {name: FIELDS[name].neutral for name in SHOWN_FIELDS}
    for name, values in neutral.items():
        if temperature < GREEDY_BELOW and FIELDS[name].forbids_unlikely:
            continue
        value = params.get(name, values[0])
        if value not in values:
            parts.append(f"{name} {value:g}")
    return ", ".join(parts)


logger = logging.getLogger(__name__)
Marks = tuple[str, str]  # around the reasoning
OTHER_BACKENDS = ("xgrammar", "outlines", "lm-format-enforcer")
REASONING_KEYS = ("reasoning_start_str", "reasoning_end_str")


class StructuredOutputsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults of structured outputs.

    Attributes:
        backend: `auto` and `guidance` are the same; `none` refuses every grammar.
        disable_any_whitespace, disable_additional_properties: defaults of the request's fields.
        enable_in_reasoning: whether a grammar applies from the start of the output, not only after the reasoning.
    """

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False


def structured_outputs_config(given: dict[str, Any] | None) -> StructuredOutputsConfig:
    """Parse the option `structured_outputs_config`.

    The names of vLLM's other grammar backends are accepted with a warning, because llguidance
    handles the same constraints.

    Raises:

        TrouperValidationError: a key or backend is unknown, or a value has the wrong type.
    """
    name = "structured_outputs_config"
    try:
        config = msgspec.convert(given or {}, StructuredOutputsConfig)
    except msgspec.ValidationError as error:
        raise TrouperValidationError(f"{name}: {error}", parameter=name, value=given) from None
    if config.backend in OTHER_BACKENDS:
        logger.warning(
            "structured_outputs_config: llguidance is used instead of the backend %s",
            config.backend,
        )
        return msgspec.structs.replace(config, backend="auto")
    if config.backend not in ("auto", "guidance", "none"):
        raise invalid(name, "backend must be auto, guidance or none", config.backend)
    return config


def reasoning_marks(given: dict[str, Any] | None) -> Marks | None:
    """Parse the option `reasoning_config`, which names both marks.  Returns None without it.

    Raises:
        TrouperValidationError: a key is unknown or missing, or a mark is empty.
    """
    if given is None:
        return None
    marks = [given.get(key) for key in REASONING_KEYS]
    is_named = all(isinstance(mark, str) and mark.strip() for mark in marks)
    if not is_named or given.keys() - set(REASONING_KEYS):
        rule = f"must have exactly the keys {' and '.join(REASONING_KEYS)}, with nonempty texts"
        raise invalid("reasoning_config", rule, given)
    return str(marks[0]), str(marks[1])
