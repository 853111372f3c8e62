"""The state that calls have brought the workers into, and that their successors are brought into.  Pure."""

from collections.abc import Mapping

from trouper.actors.executor.devices.model_files import FileSample
from trouper.actors.executor.devices.wire import Call, Load
from trouper.config.adapters import AdapterFiles
from trouper.config.resolve import EngineConfig

ALL_MEMORY = frozenset({"weights", "kv_cache"})


class StateInForce:
    """The state that is in force: how deep the workers sleep, their trace, and their adapters.

    Memory: the files of at most `num_slots` adapters, each as large as it lay on the disk.

    Args:
        files: of the model, a sample of what every worker is to have.
    """

    def __init__(self, files: tuple[FileSample, ...] = ()) -> None:
        self._files = files
        self._sleep_level, self._woken = 0, ALL_MEMORY
        self._profile: tuple[str, str] | None = None
        self._adapters: dict[int, AdapterFiles] = {}  # by slot

    def __repr__(self) -> str:
        return f"<StateInForce: sleep level {self._sleep_level}, {len(self._adapters)} adapters>"

    @property
    def adapters(self) -> Mapping[int, AdapterFiles]:
        """The adapters by slot, which go to a successor one by one once it is loaded."""
        return self._adapters

    def load(self, config: EngineConfig, rank: int) -> Load:
        """Make the first frame to the worker of a rank."""
        woken = () if self._sleep_level == 0 else tuple(sorted(self._woken))
        return Load(config, rank, self._sleep_level, woken, self._profile, self._files)

    def follow(self, call: Call) -> None:
        """Take note of a call that all workers have done."""
        match call.method:
            case "sleep":
                self._sleep_level, self._woken = call.level, frozenset()
            case "wake":
                self._woken |= frozenset(call.tags)
                if self._woken >= ALL_MEMORY:
                    self._sleep_level = 0
            case "start_profile":
                self._profile = call.folder, call.prefix
            case "stop_profile":
                self._profile = None
            case "load_adapter":
                if call.adapter is not None:
                    self._adapters[call.slot] = call.adapter
            case _:
                pass
