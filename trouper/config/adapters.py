"""Read LoRA adapters in PEFT's format without torch: the configuration and the weights.

    adapter_config.json         rank, scale and the adapted modules
    adapter_model.safetensors   base_model.model.X.lora_A.weight [r, I] and .lora_B.weight [O, r] for each module X

Adapters may come from untrusted sources.

Laws:
  * Only these two files are opened, and neither is ever unpickled.
  * A weight file is read only if its header matches its size, so a bad file costs no more than its header.
  * With a root, the folder must be below it, and no symbolic link is followed: each step opens the next one.
"""

import errno
import hashlib
import math
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, Self, cast

import msgspec

from trouper.config.args import EngineArgs
from trouper.config.checkpoint.files import checked
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.config.devices import DeviceKind
from trouper.errors import (
    LoRAAdapterNotFoundError,
    OutsideRootError,
    UnsupportedFeatureError,
    invalid,
)

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG_BYTES = 2**20
# Rank 64 on all projections of a model with 70 B parameters takes 1.7 GB in bfloat16.
MAX_WEIGHTS_BYTES = 2**31
MAX_HEADER_BYTES = 2**24  # about 100,000 tensors
PARAMETER = "lora_path"
REPEATS = ("*", "+", "?", "{")
# With these limits, matching a name of 100 characters takes about 10**6 steps.
MAX_PATTERN, MAX_REPEATS = 512, 3
Rank = Annotated[int, msgspec.Meta(ge=1, le=2**16)]
# Keys accepted only with these values, because any other value changes the model in a way that plain LoRA does not cover.
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias", "use_bdlora"), (False, [], {})),
    **dict.fromkeys(("layer_replication", "trainable_token_indices"), ([], {})),
    **dict.fromkeys(("target_parameters", "alora_invocation_tokens", "arrow_config"), ([], {})),
    **dict.fromkeys(("megatron_config", "lora_ga_config"), ([], {})),
}
VLLM_SENTENCES = {
    "use_dora": "This server does not yet support DoRA. ",
    "modules_to_save": "Unsupported modules_to_save. ",
}
# Names of the head in transformers.  Adapters may store it whole; any other whole module is refused.
HEADS = "lm_head", "embed_out"
MERGE = "merge the adapter into its model (peft's merge_and_unload) and serve the merged folder"
# Initialisations that rewrite the base model's weights.
CHANGES_BASE = (
    "pissa",
    "olora",
    "corda",
    "loftq",
)


# Default number of adapter slots.  On the CPU a slot takes memory only when an adapter is first loaded into it; a GPU allocates
# all slots at start.
ADAPTER_SLOTS: dict[DeviceKind, int] = {
    "cpu": 32,
    "cuda": 8,
}


class LoRAConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of an engine for adapters: at most `num_slots` of them, each with a rank of at most `max_rank`.

    It is fixed at start, so that the device can reserve memory for adapters in advance.
    """

    # The maximum number of different adapters among the running requests.
    max_loras: int = 1
    max_rank: int = 16
    # The maximum number of loaded adapters.
    num_slots: int = 1
    # The modules that an adapter may change; None allows any module.
    target_modules: tuple[str, ...] | None = None


class AdapterConfig(msgspec.Struct, frozen=True):
    """The fields of `adapter_config.json` that determine the adapter's computation.

    The defaults are PEFT's.  The patterns override rank and alpha for the modules that they match.
    """

    r: Rank = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] = {}
    alpha_pattern: dict[str, float] = {}
    # Modules whose full weights are in the adapter.  Only the head is supported.
    modules_to_save: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        """Return the rank for a module with this name."""
        return _matching(self.rank_pattern, module, self.r)

    def scale_of(self, module: str) -> float:
        """Return the factor of the product of a module's two matrices.

        It is alpha divided by the rank, or by the square root of the rank with rank-stabilised LoRA
        (`use_rslora`).
        """
        rank, alpha = self.rank_of(module), _matching(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


class AdapterFiles(msgspec.Struct, frozen=True):
    """The content of one adapter's folder.

    The weights are the last field, because workers get them separately.
    """

    config: AdapterConfig
    # A hash of the content.  Adapters with equal digests compute the same, regardless of their names and the time of loading.
    digest: bytes
    # A safetensors file.
    weights: bytes

    @classmethod
    def of(cls, config: AdapterConfig, weights: bytes) -> Self:
        """Combine a configuration with its weights, and compute their digest.

        Hashing runs at 1 to 2 GB/s, so call it from a thread for large adapters.
        """
        digest = hashlib.sha256(msgspec.json.encode(config))
        digest.update(b"\0")
        digest.update(weights)
        return cls(config, digest.digest(), weights)


class _TensorEntry(msgspec.Struct, frozen=True):
    """One tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


class _Place(NamedTuple):
    """An open folder, and the flags with which files in it are opened."""

    descriptor: int
    flags: int


def read_adapter(path: str | os.PathLike[str], root: str | None = None) -> AdapterFiles:
    """Read an adapter's files.  Waits for the disk, so it must be called from a thread.

    Args:
        root: the folder that must contain the adapter; by default any folder is allowed.

    Raises:
        LoRAAdapterNotFoundError: the folder does not exist.
        OutsideRootError: the path leads out of the root.
        TrouperValidationError: the adapter is malformed; the message names the file.
        UnsupportedFeatureError: the adapter changes the model in another way than LoRA.
    """
    place = _open_folder(Path(path), root)
    try:
        config = adapter_config(_read(place, CONFIG, MAX_CONFIG_BYTES))
        return AdapterFiles.of(config, _read(place, WEIGHTS, MAX_WEIGHTS_BYTES, _check_header))
    finally:
        os.close(place.descriptor)


def adapter_config(text: bytes) -> AdapterConfig:
    """Parse and check the bytes of `adapter_config.json`.

    A field that would change the computation in an unsupported way is refused by name, because
    ignoring it would silently produce another model.  Raises the errors of `read_adapter`.
    """
    try:
        given: Any = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(PARAMETER, f"{CONFIG} cannot be read: {error}") from None
    fields = checked(given, dict[str, Any], CONFIG, PARAMETER)
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedFeatureError(
            f"{CONFIG}: peft_type={_shown(kind)} is not supported, only LORA", parameter=PARAMETER
        )
    for name, plain in PLAIN.items():
        value = fields.get(name)
        if value is not None and value not in plain:
            vllms = VLLM_SENTENCES.get(name, "")
            raise UnsupportedFeatureError(
                f"{vllms}{CONFIG}: {name}={_shown(value)} is not supported; {MERGE}",
                parameter=PARAMETER,
            )
    saved: object = fields.get("modules_to_save")
    if saved and not _are_heads(saved):
        raise UnsupportedFeatureError(
            f"{VLLM_SENTENCES['modules_to_save']}{CONFIG}: modules_to_save={_shown(saved)} is not supported, only the head ({HEADS[0]}); {MERGE}",
            parameter=PARAMETER,
        )
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(CHANGES_BASE):
        raise UnsupportedFeatureError(
            f"{CONFIG}: init_lora_weights={_shown(start)} rewrites the base model; convert the adapter to plain LoRA",
            parameter=PARAMETER,
        )
    known = {
        name: fields[name]
        for name in AdapterConfig.__struct_fields__
        if fields.get(name) is not None
    }
    config = checked(known, AdapterConfig, CONFIG, PARAMETER)
    for alpha in (config.lora_alpha, *config.alpha_pattern.values()):
        if not math.isfinite(alpha):
            raise invalid(PARAMETER, f"{CONFIG}: lora_alpha: must be a finite number", alpha)
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        _check_pattern(pattern)
    return config


def _check_pattern(pattern: str) -> None:
    """Check that a regular expression of an adapter cannot take long, because it is matched with each module's name.

    If an expression has n repetitions, and none of them repeats a group with repetitions or alternatives, matching takes at most
    about length ** n steps.  So n is limited to `MAX_REPEATS`.

    Raises:
        TrouperValidationError: the expression is malformed.
        UnsupportedFeatureError: it could take too long.
    """
    if len(pattern) > MAX_PATTERN or _num_repeats(pattern) > MAX_REPEATS:
        rule = (
            f"the pattern {_shown(pattern)} is too complex (maximum {MAX_PATTERN} characters and {MAX_REPEATS} repetitions, "
            "none of them of a group with repetitions or alternatives)"
        )
        raise UnsupportedFeatureError(f"{CONFIG}: {rule}", parameter=PARAMETER)
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise invalid(
            PARAMETER, f"{CONFIG}: {_shown(pattern)} is not a regular expression: {error}"
        ) from None


def _num_repeats(pattern: str) -> float:
    """Count the repetitions of an expression.

    Returns infinity if a group with repetitions or alternatives is repeated, and for rare constructs (`(?=`, `\1`).
    """
    text = re.sub(r"\\\D|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL).replace(
        "(?:", "("
    )
    if "(?" in text or "\\" in text:
        return math.inf
    repeats, has_choice = [0.0], [False]  # of the open groups
    for at, letter in enumerate(text):
        if letter == "(":
            repeats.append(0)
            has_choice.append(False)
        elif letter == ")" and len(repeats) > 1:
            inner, is_open = repeats.pop(), has_choice.pop()
            is_repeated = text[at + 1 : at + 2] in REPEATS
            repeats[-1] += math.inf if is_repeated and (inner or is_open) else inner
            has_choice[-1] |= is_open
        elif letter == "|":
            has_choice[-1] = True
        elif letter in REPEATS:
            repeats[-1] += 1
    return sum(repeats)


def _matching(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the module's whole name, or its end after a dot, like PEFT."""
    starts = [0, *(at + 1 for at, letter in enumerate(module) if letter == ".")]
    for pattern, value in patterns.items():
        # With a start other than 0, `^` still matches the beginning of the whole name only.
        if any(re.compile(pattern).fullmatch(module, start) for start in starts):
            return value
    return default


def _open_folder(path: Path, root: str | None) -> _Place:
    if root is None:
        try:
            return _Place(os.open(path, os.O_RDONLY | os.O_DIRECTORY), 0)
        except OSError as error:
            raise _no_adapter(path, error) from None
    parts = path.parts
    if path.is_absolute():
        base = Path(root).absolute().parts
        if parts[: len(base)] != base:
            raise _outside(path)
        parts = parts[len(base) :]
    if ".." in parts or not parts:
        raise _outside(path)
    flags = os.O_NOFOLLOW
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for part in parts:
        try:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | flags, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):  # a link, or not a folder
                raise _outside(path) from None
            raise _no_adapter(path, error) from None
        finally:
            os.close(folder)
        folder = inner
    return _Place(folder, flags)


def _no_adapter(path: Path, error: OSError) -> Exception:
    rule = f"{PARAMETER}: No adapter found for {_shown(str(path))}: {error.strerror}"
    return LoRAAdapterNotFoundError(rule, parameter=PARAMETER)


def _outside(path: Path) -> Exception:
    rule = f"{PARAMETER}: must be a folder below the lora_root, without symbolic links"
    return OutsideRootError(rule, parameter=PARAMETER, value=str(path))


def _open(folder: int, name: str, flags: int) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            rule = f"{PARAMETER}: {name} is a symbolic link, and links below the lora_root are not followed"
            raise OutsideRootError(rule, parameter=PARAMETER) from None
        rule = f"{name} cannot be opened: {error.strerror}"
        raise invalid(PARAMETER, rule, name) from None


def _check_header(file: BinaryIO, size: int) -> None:
    """Check by its header that a safetensors file is complete.

    Raises:
        TrouperValidationError: the file is incomplete or malformed.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise invalid(PARAMETER, f"{WEIGHTS} is truncated, or is not a safetensors file")
    try:
        header = msgspec.json.decode(file.read(length), type=dict[str, Any])
        header.pop("__metadata__", None)
        ends = [msgspec.convert(entry, _TensorEntry).data_offsets[1] for entry in header.values()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(PARAMETER, f"{WEIGHTS}: its header cannot be read: {error}") from None
    if max(ends, default=0) != size - 8 - length:
        declared, found = max(ends, default=0), size - 8 - length
        rule = (
            f"{WEIGHTS}: its header declares {declared} bytes of tensors, but the file has {found}"
        )
        raise invalid(PARAMETER, rule)
    file.seek(0)


def _read(
    place: _Place,
    name: str,
    limit: int,
    check: Callable[[BinaryIO, int], None] = lambda file, size: None,
) -> bytes:
    if name == WEIGHTS and _is_pickled(place):
        raise UnsupportedFeatureError(
            f"{PICKLED} is a pickle, which is never read, because it could run code: save the adapter as safetensors",
            parameter=PARAMETER,
        )
    descriptor = _open(place.descriptor, name, place.flags)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise invalid(PARAMETER, f"{name} is not a regular file")
    with open(descriptor, "rb") as file:
        if status.st_size > limit:
            raise invalid(PARAMETER, f"{name} is larger than {limit} bytes", status.st_size)
        try:
            check(file, status.st_size)
            return file.read(limit)
        except OSError as error:
            raise invalid(PARAMETER, f"{name} cannot be read: {error.strerror}") from None


def _is_pickled(place: _Place) -> bool:
    names = os.listdir(place.descriptor)
    return PICKLED in names and WEIGHTS not in names


def _are_heads(names: object) -> bool:
    return isinstance(names, list) and all(name in HEADS for name in cast("list[object]", names))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"


def lora_config(
    args: EngineArgs, dtype: str, device: DeviceKind, pooler: PoolerSpec | None
) -> LoRAConfig | None:
    """Choose the limits of adapters.  Returns None if adapters are off.

    Raises:
        TrouperValidationError: the options contradict each other.
        UnsupportedFeatureError: the model pools.
    """
    if not args.enable_lora:
        return None
    if pooler is not None:
        raise UnsupportedFeatureError(
            "enable_lora: adapters are not supported for pooling models yet",
            parameter="enable_lora",
        )
    if args.lora_dtype not in ("auto", dtype):
        raise invalid("lora_dtype", f"must be auto or the model's dtype, {dtype}", args.lora_dtype)
    num_slots = args.max_cpu_loras or max(args.max_loras, ADAPTER_SLOTS[device])
    if num_slots < args.max_loras:
        raise invalid("max_cpu_loras", f"must be at least max_loras ({args.max_loras})", num_slots)
    targets = args.lora_target_modules
    return LoRAConfig(
        max_loras=args.max_loras,
        max_rank=args.max_lora_rank,
        num_slots=num_slots,
        target_modules=None if targets is None else tuple(targets),
    )
