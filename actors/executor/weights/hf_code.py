"""Classes that a model folder brings along as Python code: run only where the caller has allowed it."""

import logging
import re
from collections.abc import Callable
from typing import Any, cast

from trouper.config.model import ModelConfig
from trouper.errors import UnsupportedFeatureError

logger = logging.getLogger(__name__)
NEEDED = (
    "it needs its own code, which is run with trust_remote_code=True from a local folder, "
    "or from the hub with code_revision, a full commit"
)


def own_code(model: ModelConfig, code_path: str | None) -> tuple[Any, Any]:
    """Return the class and config that a model's own code defines.

    Raises:
        UnsupportedFeatureError: the code may not be run, or defines no causal language model.
    """
    if code_path is None:
        raise UnsupportedFeatureError(NEEDED, parameter="trust_remote_code")
    from transformers import dynamic_module_utils

    auto_map: dict[str, Any] = model.source_config["auto_map"]
    found: list[Any] = []
    for name in ("AutoConfig", "AutoModelForCausalLM"):
        reference = auto_map.get(name)
        # "other/repository--file.Class" names code that the caller has not seen
        if not isinstance(reference, str) or not re.fullmatch(r"\w+\.\w+", reference):
            raise UnsupportedFeatureError(
                f"auto_map has no class of its folder as {name}: {reference!r}"
            )
        found.append(reference)
    logger.warning("%s runs Python code of its own, from %s", model.name, code_path)
    load_class = cast(
        "Callable[..., Any]", cast("Any", dynamic_module_utils).get_class_from_dynamic_module
    )
    try:
        config_class, cls = (
            load_class(reference, code_path, local_files_only=True) for reference in found
        )
        return cls, config_class.from_dict(dict(model.source_config))
    except Exception as error:  # whatever that code raises
        line = str(error).strip().partition("\n")[0]
        raise UnsupportedFeatureError(f"its code fails ({type(error).__name__}: {line})") from error
