"""Check the files of a model before its weights are read: whether it can be served, and whether all machines have the same.

`judge` decides from the JSON files and the header of a GGUF file. `trouper models` lists many folders by it, so it reads no
weights, and imports torch only for models of the transformers library, because its classes must be inspected.

Workers on different machines read their own copies of a model. A different revision would silently produce
wrong tokens, so each worker compares a sample of its files with the engine's before it loads them. A sample
consists of the size of a file and a digest of its header, where names, shapes and dtypes of tensors are
stored, and of windows spread over the file. It takes a few ms and detects another revision or a fine-tune,
but does not prove that files are identical. Config, tokenizer, seed and adapters come from the engine and
need no comparison; paths in its config are mapped to those of the other machine.
"""

import hashlib
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import msgspec

from trouper.actors.executor.models.families.registry import (
    decoder_traits,
    encoder_traits,
    generating_sibling,
    has_own_code,
)
from trouper.actors.executor.weights.checkpoint import tensor_files
from trouper.actors.executor.weights.schemes import read_scheme
from trouper.config.args import EngineArgs
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.config.checkpoint.recurrent import state_bytes
from trouper.config.engine_config import EngineConfig
from trouper.config.gguf.header import SPLIT
from trouper.config.model import ITEM_BYTES, ModelConfig, concrete_dtype
from trouper.errors import TrouperError, TrouperValidationError, UnsupportedFeatureError, invalid


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the check: what the model is and, if it cannot be served, why.

    `task` is "generate" or "pooling", and empty for an unusable model. `code` is "trouper" or "transformers",
    the library that computes the model. `reason` is empty for a model that can be served as far as the check
    can determine.
    """

    architecture: str = ""
    task: str = ""
    code: str = ""
    reason: str = ""
    # The size of the recurrent states of one sequence; 0 without such states.
    state_bytes: int = 0


def judge(path: Path) -> Verdict:
    """Check a model folder or a GGUF file. Never raises for a bad model; the verdict contains the reason."""
    architecture = ""
    try:
        args = EngineArgs(str(path))
        model = ModelConfig.load(args)
        architecture = model.architecture
        if not model.is_gguf:
            _check_files(path)
        if model.pooler(args.runner, args.convert, None) is not None:
            _check_pooling(model)
            return Verdict(architecture=architecture, task="pooling", code="trouper")
        if not model.is_gguf:
            read_scheme(model.hf_config)
        code = "trouper" if has_own_code(model.hf_config, architecture) else "transformers"
        if code == "transformers":
            _check_transformers(model)
        dtype = concrete_dtype("auto", model)
        return Verdict(
            architecture=architecture,
            task="generate",
            code=code,
            state_bytes=state_bytes(model.hf_config, ITEM_BYTES[dtype]),
        )
    except (TrouperError, OSError) as error:
        message = getattr(error, "message", str(error)).removeprefix("model: ")
        return Verdict(architecture=architecture, reason=message)


def _check_files(path: Path) -> None:
    if any(path.glob("*.safetensors")):
        missing = [name for name in tensor_files(path) if not (path / name).is_file()]
        if missing:
            raise invalid("model", f"the folder lacks {missing[0]}, which is listed in its index")
        return
    pickled = any(path.glob("*.bin")) or any(path.glob("*.pt"))
    rule = (
        "its weights are pickled, which trouper never reads; convert them to safetensors"
        if pickled
        else "no weights in the folder"
    )
    raise invalid("model", rule)


def _check_pooling(model: ModelConfig) -> None:
    if encoder_traits(model.hf_config, model.architecture) is None:
        sibling = generating_sibling(model.architecture)
        decoder_traits(model.hf_config, sibling, may_see_ahead=True)


def _check_transformers(model: ModelConfig) -> None:
    if model.is_gguf:
        decoder_traits(model.hf_config, model.architecture)
    if find_spec("transformers") is None:
        raise UnsupportedFeatureError("the package transformers is not installed")
    from trouper.actors.executor.weights.hf_model import admit

    admit(model)


HEAD_BYTES, WINDOW_BYTES = 2**16, 2**12
# Windows over all files together, but at least `LEAST_WINDOWS` for each file.
NUM_WINDOWS = 64
LEAST_WINDOWS = 3


class FileSample(msgspec.Struct, frozen=True):
    """Record the size and the digest of one file. The name is for messages and is not compared."""

    name: str
    num_bytes: int
    digest: str

    def describe(self) -> str:
        """Describe the sample for an error message about different files.

        The digest covers parts of the file only.  This is enough to find a different model.
        """
        return f"{self.num_bytes} bytes, digest {self.digest}"


def sample_model(config: EngineConfig) -> tuple[FileSample, ...]:
    """Sample the files with weights and any code of the model that may run. The samples of all machines must be equal.

    Returns none for dummy weights, and none for unreadable files, because loading reports these.
    """
    if config.load_format == "dummy":
        return ()
    try:
        files = weight_files(config)
        num_windows = max(NUM_WINDOWS // len(files), LEAST_WINDOWS)
        return tuple(_sample(file, num_windows) for file in files)
    except (OSError, TrouperValidationError):
        return ()


def weight_files(config: EngineConfig) -> list[Path]:
    """List the files with weights, and with any code of the model that may run.  Returns none for dummy weights.

    Raises:
        OSError: a folder cannot be read.
        TrouperValidationError: the index of the files is damaged.
    """
    if config.load_format == "dummy":
        return []
    files = [
        file
        for model in (config.model, config.draft_model)
        if model is not None
        for file in _weights(Path(model.path), is_gguf=model.is_gguf)
    ]
    for dense in () if config.pooler is None else config.pooler.dense:
        files += _weights(Path(dense.folder))
    if config.code_path is not None:
        files += sorted(Path(config.code_path).glob("*.py"))
    return files


def check_model(config: EngineConfig, wanted: Sequence[FileSample]) -> None:
    """Compare the files on this machine with those of the engine.

    Args:
        wanted: samples taken by the engine at its start; empty to skip the comparison.

    Raises:
        TrouperValidationError: a file differs; the message names it.
    """
    found = sample_model(config) if wanted else ()
    if not found:
        return
    difference = _difference(found, wanted)
    if difference is not None:
        rule = (
            f"is not the model with which the engine was started: {difference}; "
            "every machine must have the same files, and they must not change while the engine runs"
        )
        raise invalid("model", rule, config.model.path)


def _difference(found: Sequence[FileSample], wanted: Sequence[FileSample]) -> str | None:
    if len(found) != len(wanted):
        return f"{len(found)} files here, {len(wanted)} there"
    for here, there in zip(found, wanted, strict=True):
        if (here.num_bytes, here.digest) != (there.num_bytes, there.digest):
            return f"{here.name} has {here.describe()} here, {there.describe()} there"
    return None


def _weights(path: Path, *, is_gguf: bool = False) -> list[Path]:
    if not is_gguf:
        return [path / name for name in tensor_files(path)]
    split = SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split[3])
    return [path.with_name(f"{split[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]


def _sample(path: Path, num_windows: int) -> FileSample:
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        num_bytes = os.fstat(file).st_size
        digest = hashlib.sha256(os.pread(file, HEAD_BYTES, 0))
        last = max(num_bytes - WINDOW_BYTES, 0)
        for i in range(num_windows):
            digest.update(os.pread(file, WINDOW_BYTES, last * i // (num_windows - 1)))
    finally:
        os.close(file)
    return FileSample(path.name, num_bytes, digest.hexdigest()[:16])


class MachineFacts(msgspec.Struct, frozen=True):
    """Describe the machine on which a worker runs, to replace the paths and cores in the coordinator's config.

    `num_workers` share the cores of the machine. `model` is None if the coordinator's paths are valid here.
    `dense` holds the folders of a pooling model's final dense modules.
    """

    num_workers: int
    model: str | None = None
    tokenizer: str | None = None
    code_path: str | None = None
    draft_model: str | None = None
    dense: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Take the paths from a config that was resolved on this machine. They are sent only to this machine's workers."""
        draft = config.draft_model
        return cls(
            config.num_workers,
            config.model.path,
            config.tokenizer,
            config.code_path,
            None if draft is None else draft.path,
            _dense_folders(config.pooler),
        )

    def localise(self, config: EngineConfig) -> EngineConfig:
        """Return the coordinator's config with the paths of this machine.

        Models may be in different folders on each machine; everything else must be equal.
        """
        replace = msgspec.structs.replace
        found = replace(config, num_workers_here=self.num_workers)
        if self.model is None:
            return found
        draft = config.draft_model
        if draft is not None and self.draft_model is not None:
            draft = replace(draft, path=self.draft_model)
        return replace(
            found,
            model=replace(config.model, path=self.model),
            tokenizer=self.tokenizer,
            code_path=self.code_path,
            draft_model=draft,
            pooler=self._localise_pooler(config.pooler),
        )

    def _localise_pooler(self, pooler: PoolerSpec | None) -> PoolerSpec | None:
        if pooler is None or len(pooler.dense) != len(self.dense):
            return pooler
        pairs = zip(pooler.dense, self.dense, strict=True)
        dense = tuple(msgspec.structs.replace(each, folder=folder) for each, folder in pairs)
        return msgspec.structs.replace(pooler, dense=dense)

    def as_argument(self) -> bytes:
        """Encode the facts for the command line of a worker. `of_argument` is the reverse."""
        return msgspec.json.encode(self)

    @classmethod
    def of_argument(cls, text: str) -> Self:
        """Decode the facts from a worker's command line."""
        return msgspec.json.decode(text, type=cls)


def _dense_folders(pooler: PoolerSpec | None) -> tuple[str, ...]:
    return () if pooler is None else tuple(each.folder for each in pooler.dense)
