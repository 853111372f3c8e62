"""Make trouper's classes importable from vLLM's module paths.

A program written for vLLM imports from modules such as `vllm.engine.arg_utils`.  With `vllm` replaced by `trouper` such an import must
still work, but trouper defines its classes in other modules.  So for each path without a file, the import system asks `ModuleTable`,
which creates a module with the classes of the table.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType

ENGINE = "trouper.frontends.python"
# Maps a module path of vLLM to its public names, and each name to the module that defines it.
MODULES: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "trouper.engine.arg_utils": {
        "AsyncEngineArgs": "trouper.config.args",
        "EngineArgs": "trouper.config.args",
    },
    "trouper.engine.async_llm_engine": {"AsyncLLMEngine": f"{ENGINE}.async_engine"},
    "trouper.engine.llm_engine": {"LLMEngine": f"{ENGINE}.llm_engine"},
    "trouper.entrypoints.llm": {"LLM": f"{ENGINE}.llm"},
    "trouper.logprobs": {"Logprob": "trouper.outputs", "LogprobsOnePosition": "trouper.outputs"},
    "trouper.pooling_params": {"PoolingParams": "trouper.pooling"},
    "trouper.sampling_params": {
        "BeamSearchParams": "trouper.params",
        "RepetitionDetectionParams": "trouper.params",
        "RequestOutputKind": "trouper.params",
        "SamplingParams": "trouper.params",
        "SamplingType": "trouper.params",
        "StructuredOutputsParams": "trouper.structured_outputs",
    },
    "trouper.utils.argparse_utils": {"FlexibleArgumentParser": "trouper.config.args"},
    "trouper.v1.engine.async_llm": {"AsyncLLM": f"{ENGINE}.async_engine"},
    "trouper.v1.engine.llm_engine": {"LLMEngine": f"{ENGINE}.llm_engine"},
    "trouper.version": {"__version__": "trouper"},
})  # fmt: skip
PACKAGES = frozenset(
    path[:end] for path in MODULES for end in range(len("trouper."), len(path)) if path[end] == "."
)


class ModuleTable(MetaPathFinder, Loader):
    """An import finder and loader for the module paths in `MODULES` and their parent packages.

    It creates modules on demand, so programs written for vLLM can import trouper's classes from
    vLLM's paths, while no file of the package needs to imitate them.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the table.  Returns None for any other name, as the protocol requires."""
        if fullname in PACKAGES:
            return ModuleSpec(fullname, self, is_package=True)
        return ModuleSpec(fullname, self) if fullname in MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Let the import system create a plain module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Import the defining modules, and bind their classes in `module`.

        Only now are the defining modules imported, so unused paths cost nothing.  Parent packages
        of the table stay empty.
        """
        homes = MODULES.get(module.__name__, {})
        for name, home in homes.items():
            setattr(module, name, getattr(import_module(home), name))
        module.__dict__["__all__"] = list(homes)


def install() -> None:
    """Install the finder for vLLM's module paths.

    `import trouper` calls this.  The finder is appended to `sys.meta_path`, so real files have
    precedence.  A second call changes nothing.
    """
    if not any(isinstance(finder, ModuleTable) for finder in sys.meta_path):
        sys.meta_path.append(ModuleTable())
