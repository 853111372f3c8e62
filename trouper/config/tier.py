"""Resolve the options of the KV cache's tier on disk, and check its folder.

Files of KV blocks contain enough to reconstruct prompts and answers.  So only their owner may read them, and a folder that belongs to
another user, or that other users may write to, is refused.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from trouper.config.args import EngineArgs
from trouper.config.checks import check_private_folder, human_int
from trouper.config.devices import DeviceKind
from trouper.errors import UnsupportedFeatureError, invalid

DEFAULT_BYTES = 20 * 2**30
OPTIONS = "kv_tier_size", "kv_tier_min_free", "kv_tier_write_rate"


class TierConfig(msgspec.Struct, frozen=True):
    """The folder for KV blocks on disk, and its limits.

    `folder` is absolute, because a worker process may have another working directory.
    """

    folder: str
    # Maximum size of all files together.
    max_bytes: int
    # Share of the file system that the tier leaves free.
    min_free: float
    # Maximum number of bytes written per second.
    write_rate: int


def tier_config(args: EngineArgs, device: DeviceKind, *, generates: bool) -> TierConfig | None:
    """Resolve the options of the tier, and create its folder.  Returns None if no option names a folder.

    Raises:
        TrouperValidationError: the folder cannot be used, or a value is out of range.
        UnsupportedFeatureError: the model or another option does not work with a tier.
    """
    folder = _connector_folder(args.kv_transfer_config)
    if folder is not None and args.kv_tier_dir not in (None, folder):
        raise invalid(
            "kv_tier_dir", "differs from the folder in kv_transfer_config", args.kv_tier_dir
        )
    folder = args.kv_tier_dir if folder is None else folder
    if folder is None:
        for name in OPTIONS:
            if getattr(args, name) is not None:
                raise invalid(name, "needs --kv-tier-dir", getattr(args, name))
        return None
    if not folder:
        raise invalid("kv_tier_dir", "must name a folder", folder)
    _check_support(args, device, generates=generates)
    if args.enable_prefix_caching is False:
        raise invalid("kv_tier_dir", "needs prefix caching: omit --no-enable-prefix-caching")
    rate = _num_bytes("kv_tier_write_rate", args.kv_tier_write_rate, 64 * 2**20)
    min_free = 0.05 if args.kv_tier_min_free is None else args.kv_tier_min_free
    if not 0 <= min_free < 1:
        raise invalid("kv_tier_min_free", "must be a share of the file system in [0, 1)", min_free)
    path = Path(folder).absolute()
    check_private_folder(path, "kv_tier_dir")
    status = os.statvfs(path)
    most = min(DEFAULT_BYTES, status.f_bavail * status.f_frsize // 4)
    size = _num_bytes("kv_tier_size", args.kv_tier_size, max(most, 1))
    return TierConfig(str(path), size, min_free, rate)


def _check_support(args: EngineArgs, device: DeviceKind, *, generates: bool) -> None:
    """Refuse options and models that do not work with a tier, by name."""
    reason = None
    if not generates:
        reason = "a pooling model has no KV cache"
    elif device != "cpu":
        reason = f"not supported with device={device!r}"
    elif args.nnodes > 1:
        reason = f"not supported with nnodes={args.nnodes}: all workers must share a folder of one machine"
    elif args.distributed_executor_backend == "ray":
        reason = (
            "not supported with distributed_executor_backend='ray', which chooses machines itself"
        )
    if reason is not None:
        raise UnsupportedFeatureError(f"kv_tier_dir: {reason}", parameter="kv_tier_dir")


def _num_bytes(name: str, given: int | str | None, default: int) -> int:
    """Read a number of bytes, such as 20GiB, which must be positive."""
    if given is None:
        return default
    if (found := human_int(given, name)) < 1:
        raise invalid(name, "must be a positive number of bytes, such as 20GiB", given)
    return found


class _FileTier(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's secondary tier on a file system, the only supported kind."""

    type: Literal["fs"]
    root_dir: str


class _Tiering(msgspec.Struct, forbid_unknown_fields=True):
    """The extra settings of vLLM's connector."""

    spec_name: Literal["TieringOffloadingSpec"]
    secondary_tiers: Annotated[list[_FileTier], msgspec.Meta(min_length=1, max_length=1)]


class _Connector(msgspec.Struct, forbid_unknown_fields=True):
    """The form of vLLM's `kv_transfer_config` equivalent to `kv_tier_dir`."""

    kv_connector: Literal["OffloadingConnector"]
    kv_connector_extra_config: _Tiering
    kv_role: Literal["kv_both"] = "kv_both"


def _connector_folder(config: dict[str, Any] | None) -> str | None:
    """Return the folder in vLLM's `kv_transfer_config`, or None without this option.

    Raises:
        UnsupportedFeatureError: it configures another connector, or has an unsupported field.
    """
    if config is None:
        return None
    try:
        found = msgspec.convert(config, _Connector)
    except msgspec.ValidationError as error:
        raise UnsupportedFeatureError(
            "kv_transfer_config: only OffloadingConnector with TieringOffloadingSpec and one secondary tier "
            f'{{"type": "fs", "root_dir": FOLDER}} is supported ({error}); --kv-tier-dir FOLDER has the same effect',
            parameter="kv_transfer_config",
        ) from None
    return found.kv_connector_extra_config.secondary_tiers[0].root_dir
