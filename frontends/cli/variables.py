"""Environment variables that begin with TROUPER_ and that nothing reads: misspelt ones, most likely."""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator

from trouper.config.args import EngineArgs
from trouper.frontends.cli.serve import ServerOptions

PREFIX = "TROUPER_"
# Variables that are no option of `serve`.
OWN = (
    "ALLOW_RUNTIME_LORA_UPDATING", "BATCH_INVARIANT", "CHAT_TEMPLATE_RENDER_TIMEOUT", "CLUSTER_KEY", "CONFIG",
    "CPU_BIND", "CPU_KVCACHE_SPACE", "DEVICE", "KEEP_ALIVE_ON_ENGINE_DEATH", "KERNELS", "LOG_STATS_INTERVAL",
    "PP_LAYER_PARTITION", "RAY_CPUS_PER_WORKER", "SERVER_DEV_MODE", "SMOLLM2", "TEST_FAULT",
)  # fmt: skip
# Kubernetes sets these for every container beside a service of the name "trouper".
OF_KUBERNETES = ("TROUPER_SERVICE_", "TROUPER_PORT_")


def known_variables() -> list[str]:
    """List the variables that some part of the program reads."""
    options = [
        field.name for kind in (EngineArgs, ServerOptions) for field in dataclasses.fields(kind)
    ]
    return [PREFIX + name.upper() for name in (*OWN, *options)]


def unknown_variables(names: Iterable[str]) -> Iterator[str]:
    """Name each variable that nothing reads, with the one that was probably meant."""
    known = known_variables()
    for name in sorted(names):
        if not name.startswith(PREFIX) or name in known or name.startswith(OF_KUBERNETES):
            continue
        near = difflib.get_close_matches(name, known, 1, 0.75)
        yield f"warning: nothing reads the variable {name}" + (
            f"; did you mean {near[0]}?" if near else ""
        )
