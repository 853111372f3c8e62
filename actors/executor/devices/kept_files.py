"""The memory files in which a device's workers put their KV cache, so that it outlives them.

The files belong to the engine's process: when all workers are gone, the keys and values of every answered step are still there, and the
next workers go on from them.  A worker answers a step after its last store, and only blocks of answered steps are offered as prefixes.

Laws:
1. Each worker of a device has a file, or none has: a block is whole only if the parts of all stages and ranks are there.
2. Files of which a worker may have spoilt the contents are closed, which frees their pages.  The next workers get new, empty ones.
"""

import os
from collections.abc import Sequence

from trouper.actors.executor.devices.worker_link import WorkerLink
from trouper.actors.executor.workers.wire import KeepMemory, Loaded, encode
from trouper.config.engine_config import EngineConfig


class KeptFiles:
    """The memory files of one device, by rank."""

    def __init__(self, config: EngineConfig) -> None:
        has_prefixes = config.pooler is None and config.scheduler.enable_prefix_caching
        self._is_wanted = config.device == "cpu" and has_prefixes and hasattr(os, "memfd_create")
        self._files: dict[int, int] = {}
        self._layouts: tuple[str, ...] | None = None
        # Whether the contents are those of the answered steps.
        self._are_sound = False

    def __repr__(self) -> str:
        return f"<KeptFiles: {len(self._files)}, {'sound' if self._are_sound else 'empty'}>"

    @property
    def are_sound(self) -> bool:
        """Whether the newest workers have found what their predecessors computed."""
        return self._are_sound

    def send(self, workers: Sequence[WorkerLink]) -> None:
        """Give each new worker its file, before the order to load.  A worker on another machine cannot have one."""
        if not self._is_wanted or any(worker.where for worker in workers):
            self.close()
            return
        for worker in workers:
            file = self._files.get(worker.rank)
            if file is None:
                name = f"trouper-kv-{worker.rank}"
                file = self._files[worker.rank] = os.memfd_create(name, os.MFD_CLOEXEC)
            worker.send(encode(KeepMemory())[0], file)

    def note_loaded(self, loaded: Sequence[Loaded]) -> bool:
        """Compare where new workers look for their memory with where their predecessors left it.

        Returns whether they can go on. They cannot if the installed code has changed meanwhile, so that the
        layout is another one.
        """
        layouts = tuple(frame.layout for frame in loaded)
        known, self._layouts = self._layouts, layouts
        return known is None or known == layouts or not self._files

    def note_end(self, *, is_sound: bool) -> None:
        """Note the end of all workers, and whether they left their memory as their answers describe it."""
        self._are_sound = is_sound and bool(self._files) and self._layouts is not None
        if not self._are_sound:
            self.close()

    def close(self) -> None:
        """Close the files.  Their pages are free once no worker maps them.  Idempotent."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._layouts = None
        self._are_sound = False
