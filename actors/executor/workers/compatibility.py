"""Whether a model that is on this machine can be served, told from its json files and the head of its GGUF file.

No weights are read, and torch is imported for models of the transformers library alone, whose classes say more.
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
from trouper.config.gguf.header import is_gguf
from trouper.config.model import ModelConfig
from trouper.errors import TrouperError, UnsupportedFeatureError, invalid


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to whether a model can be served, given before it is loaded."""

    architecture: str = ""
    task: str = ""  # generate or pooling; "" where nothing can be done with it
    code: str = ""  # trouper or transformers
    reason: str = ""  # why it cannot be served; "" if it can, as far as can be seen


def judge(path: Path) -> Verdict:
    """Tell what a model folder or a GGUF file is good for; never raises for a bad one."""
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
        return Verdict(architecture=architecture, task="generate", code=code)
    except (TrouperError, OSError) as error:
        message = getattr(error, "message", str(error)).removeprefix("model: ")
        return Verdict(architecture=architecture, reason=message)


def _check_files(path: Path) -> None:
    if is_gguf(path):
        return
    if any(path.glob("*.safetensors")):
        missing = [name for name in tensor_files(path) if not (path / name).is_file()]
        if missing:
            raise invalid("model", f"the folder lacks {missing[0]}, which its index names")
        return
    pickled = any(path.glob("*.bin")) or any(path.glob("*.pt"))
    rule = "its weights are pickled, and never read" if pickled else "no weights in the folder"
    raise invalid("model", rule)


def _check_pooling(model: ModelConfig) -> None:
    if encoder_traits(model.hf_config, model.architecture) is None:
        sibling = generating_sibling(model.architecture)
        decoder_traits(model.hf_config, sibling, may_see_ahead=True)


def _check_transformers(model: ModelConfig) -> None:
    if is_gguf(Path(model.path)):
        decoder_traits(model.hf_config, model.architecture)
    if find_spec("transformers") is None:
        raise UnsupportedFeatureError("the package transformers is not installed")
    from trouper.actors.executor.weights.hf_model import admit

    admit(model)
