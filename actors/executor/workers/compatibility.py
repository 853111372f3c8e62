"""Checks whether a model on this machine can be served, from its JSON files and the header of its GGUF file.

`trouper models` lists many folders, so the check reads no weights. It imports torch only for models of the
transformers library, because its classes must be inspected.
"""

from importlib.util import find_spec
from pathlib import Path

import msgspec

from trouper.actors.executor.models.families.encoders import encoder_traits
from trouper.actors.executor.models.families.registry import (
    decoder_traits,
    generating_sibling,
    has_own_code,
)
from trouper.actors.executor.weights.checkpoint import tensor_files
from trouper.actors.executor.weights.schemes import read_scheme
from trouper.config.args import EngineArgs
from trouper.config.checkpoint.state_sizes import state_bytes
from trouper.config.gguf.header import is_gguf
from trouper.config.model import ITEM_BYTES, ModelConfig, concrete_dtype
from trouper.errors import TrouperError, UnsupportedFeatureError, invalid


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
    # Of the recurrent states of one sequence; 0 without such states.
    state_bytes: int = 0


def judge(path: Path) -> Verdict:
    """Check a model folder or a GGUF file. Never raises for a bad model; the verdict contains the reason."""
    architecture = ""
    try:
        args = EngineArgs(str(path))
        model = ModelConfig.load(args)
        architecture = model.architecture
        _check_files(path)
        if model.pooler(args.runner, args.convert, None) is not None:
            _check_pooling(model)
            return Verdict(architecture=architecture, task="pooling", code="trouper")
        if not is_gguf(path):
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
    if is_gguf(path):
        return
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
