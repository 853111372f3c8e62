"""Read the models of a server from `--model NAME=PATH`, from the tables of a TOML file (`--models`), and from a folder (`--models-dir`).

A model's own table overrides `[defaults]`, and an engine option on the command line overrides both.  Durations such as `5m` have
Ollama's format.
"""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from trouper.config.args import EngineArgs
from trouper.errors import TrouperValidationError, invalid
from trouper.frontends.server.models.policy import ResidencyLimits
from trouper.frontends.server.shared.settings import ServeSettings
from trouper.lora import LoRARequest

DURATION = re.compile(r"-?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+")
PART = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)")
SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(value: str | float, parameter: str) -> float:
    """Return a duration in seconds.  A negative duration means forever, so it becomes infinity.

    Raises:
        TrouperValidationError: the value is neither a number of seconds nor a duration such as 5m or 1h30m.
    """
    if isinstance(value, str) and DURATION.fullmatch(value) is not None:
        if value.startswith("-"):
            return math.inf
        return sum(float(number) * SECONDS[unit] for number, unit in PART.findall(value))
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        rule = "must be a number of seconds or a duration such as 5m or 1h30m"
        raise invalid(parameter, rule, value)
    return math.inf if seconds < 0 else seconds


UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
SHARD = re.compile(r"-(\d{5})-of-\d{5}$")
DEFAULTS = "defaults"
# Options that describe a single model, so they cannot apply to all models of a server.
OF_ONE_MODEL = (
    "served_model_name",
    "tokenizer",
    "chat_template",
    "nnodes",
    "node_rank",
    "revision",
)
# Options that only a server with several models accepts.
OF_SEVERAL = (
    "memory_budget",
    "keep_alive",
    "turn",
    "max_loaded",
    "default_model",
    "preload",
    "pin",
)
# Keys of a model's table in addition to the engine options.
OWN_KEYS = ("alias", "pin", "preload", "keep_alive", "lora")


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Describe one model of a server: its names for clients, its engine options, and how long it stays in memory."""

    name: str
    args: EngineArgs
    keep_alive_s: float
    aliases: tuple[str, ...] = ()
    is_pinned: bool = False
    is_preloaded: bool = False
    adapters: tuple[LoRARequest, ...] = ()
    # Whether it comes from `--models-dir`, so that it is removed together with its files.
    is_found: bool = False


def bytes_of(value: str, parameter: str) -> int:
    """Parse a size such as `12GiB`, `12G` or a number of bytes; units are powers of 1024.

    Raises:
        TrouperValidationError: the value is not a size.
    """
    found = BYTES.fullmatch(value.strip())
    if found is None:
        raise invalid(parameter, "must be a size such as 12GiB or a number of bytes", value)
    return int(float(found[1]) * UNITS[found[2].lower()])


def split_name(given: str) -> tuple[str | None, str]:
    """Split `NAME=PATH` into name and path.  Without `=` before the first slash, the name is None."""
    head, equals, path = given.partition("=")
    return (head, path) if equals and "/" not in head else (None, given)


def has_several(named: Sequence[str], settings: ServeSettings) -> bool:
    """Return whether the command line describes a server with several models, or one model by name."""
    is_named = any(split_name(each)[0] is not None for each in named)
    return is_named or len(named) > 1 or bool(settings.models or settings.models_dir)


def check_one(settings: ServeSettings) -> None:
    """Raise TrouperValidationError for options that only a server with several models accepts.  Call it for a single model."""
    given = {name: getattr(settings, name) for name in OF_SEVERAL}
    given["no_autoload"] = not settings.autoload
    for name, value in given.items():
        if value not in (None, (), False):
            rule = "requires named models; give --model NAME=PATH, --models or --models-dir"
            raise invalid(name, rule)


def read_limits(settings: ServeSettings, budget: int) -> ResidencyLimits:
    turn = 5.0 if settings.turn is None else seconds_of(settings.turn, "turn")
    return ResidencyLimits(budget, turn, settings.max_loaded)


def read_models(
    named: Sequence[str],
    tables: Mapping[str, Mapping[str, Any]],
    settings: ServeSettings,
    base: EngineArgs,
    given: Collection[str],
) -> list[ModelOptions]:
    """Return the models from the command line, the TOML file and the folder, in this order.

    Args:
        named: the values of `--model`.
        tables: the tables in the file of `--models`.
        base: the engine options of the command line, for all models.
        given: the names of engine options set on the command line, which the tables cannot override.

    Raises:
        TrouperValidationError: a name is missing or repeated, or an option or its value is wrong.
    """
    one = [name for name in OF_ONE_MODEL if name in given]
    if settings.lora_modules:
        one.append("lora_modules")
    for name in one:
        raise invalid(
            name, "describes a single model; set it in the table of that model (--models FILE)"
        )
    builder = _Builder(settings, base, frozenset(given), tables.get(DEFAULTS, {}))
    found: list[ModelOptions] = []
    for text in named:
        name, path = split_name(text)
        if name is None:
            raise invalid("model", "needs a name among several models (NAME=PATH)", text)
        found.append(builder.build(name, {"model": path}))
    for name, table in tables.items():
        if name != DEFAULTS:
            found.append(builder.build(name, table))
    if settings.models_dir is not None:
        found += found_models(settings, base, given, tables)
    if not found:
        raise invalid("models", "contains no model", settings.models or settings.models_dir)
    _check_names(found)
    _check_chosen(found, settings)
    return found


def _check_chosen(models: Iterable[ModelOptions], settings: ServeSettings) -> None:
    """Raise TrouperValidationError if an option names a model that the server does not have."""
    known = {alias for each in models for alias in (each.name, *each.aliases)}
    for option in ("preload", "pin"):
        for name in getattr(settings, option):
            _check_known(option, name, known)
    if settings.default_model is not None:
        _check_known("default_model", settings.default_model, known)


def found_models(
    settings: ServeSettings,
    base: EngineArgs,
    given: Collection[str],
    tables: Mapping[str, Mapping[str, Any]],
) -> list[ModelOptions]:
    """Return the models that `--models-dir` contains now.

    Raises:
        TrouperValidationError: the folder does not exist.
    """
    folder = Path(settings.models_dir or "").expanduser()
    if not folder.is_dir():
        raise invalid("models_dir", "is not a folder", str(folder))
    builder = _Builder(settings, base, frozenset(given), tables.get(DEFAULTS, {}))
    return [
        dataclasses.replace(builder.build(name, {"model": str(path)}), is_found=True)
        for name, path in sorted(_scan(folder).items())
    ]


def _scan(folder: Path) -> dict[str, Path]:
    """Return the paths of models by name: folders with a config.json, and GGUF files, of which only the first shard counts.

    Folders inside a model's folder belong to that model.
    """
    found: dict[str, Path] = {}
    for place, folders, files in os.walk(folder, followlinks=True):
        path = Path(place)
        if "config.json" in files:
            folders.clear()
            found[_shown(path.relative_to(folder), folder)] = path
            continue
        # Skipped, because a link to a parent folder would never end.
        folders[:] = [
            each for each in folders
            if not each.startswith(".") and path.resolve().is_relative_to((path / each).resolve()) is False
        ]  # fmt: skip
        for file in files:
            stem, end = os.path.splitext(file)
            shard = SHARD.search(stem)
            if end == ".gguf" and (shard is None or int(shard[1]) == 1):
                found[str((path / SHARD.sub("", stem)).relative_to(folder))] = path / file
    return found


def _shown(relative: Path, folder: Path) -> str:
    return folder.name if str(relative) == "." else str(relative)


def _check_names(models: Iterable[ModelOptions]) -> None:
    seen: dict[str, str] = {}
    for each in models:
        for name in (each.name, *each.aliases):
            if not name.strip():
                raise invalid("model", "needs a non-empty name (NAME=PATH)", str(each.args.model))
            if name in seen:
                rule = f"is the name of two models, {seen[name]} and {each.args.model}; give one of them another name"
                raise invalid("model", rule, name)
            seen[name] = str(each.args.model)


def _check_known(option: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise invalid(
            option, f"must be one of the server's models, {', '.join(sorted(known))}", name
        )


@dataclasses.dataclass(frozen=True)
class _Builder:
    """Merge a model's table, the `[defaults]` and the command line into the model's options."""

    settings: ServeSettings
    base: EngineArgs
    given: frozenset[str]
    defaults: Mapping[str, Any]

    def build(self, name: str, table: Mapping[str, Any]) -> ModelOptions:
        merged = {**_plain(self.defaults, DEFAULTS), **_plain(table, name)}
        aliases = merged.pop("alias", ())
        aliases = (aliases,) if isinstance(aliases, str) else tuple(aliases)
        keep_alive = merged.pop("keep_alive", None)
        if keep_alive is None or self.settings.keep_alive is not None:
            keep_alive = self.settings.keep_alive or "5m"
        adapters = merged.pop("lora", {})
        is_pinned = bool(merged.pop("pin", False)) or name in self.settings.pin
        is_preloaded = bool(merged.pop("preload", False)) or name in self.settings.preload
        fields = {key: value for key, value in merged.items() if key not in self.given}
        if not fields.get("model"):
            raise invalid("model", f"is missing in the table of {name}")
        args = dataclasses.replace(self.base, **fields)
        args.served_model_name = [name, *aliases]
        # Only the end of a process returns all its memory to the system.
        if args.device_worker == "inline":
            rule = "must be process on a server with several models, because unloading a model frees the memory of its process"
            raise invalid("device_worker", rule, "inline")
        args.device_worker = "process"
        args.enable_lora |= bool(adapters)
        if not isinstance(adapters, dict):
            raise invalid("lora", f"must be a table of names and folders in the table of {name}")
        paths = cast("dict[str, Any]", adapters)
        return ModelOptions(
            name,
            args,
            seconds_of(keep_alive, "keep_alive"),
            aliases=aliases,
            is_pinned=is_pinned,
            is_preloaded=is_preloaded or is_pinned,
            adapters=tuple(
                LoRARequest(adapter, number + 1, str(path))
                for number, (adapter, path) in enumerate(paths.items())
            ),
        )


def _plain(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a table with hyphens in its keys replaced by underscores.  Raises TrouperValidationError for an unknown key."""
    known = {field.name for field in dataclasses.fields(EngineArgs)} | {*OWN_KEYS}
    known -= {"served_model_name", "nnodes", "node_rank"}
    found = {key.replace("-", "_"): value for key, value in table.items()}
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
            text = f"[{name}] contains the unknown key {key.replace('_', '-')}{hint}"
            raise TrouperValidationError(text, parameter="models")
    return found
