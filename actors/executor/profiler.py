"""Torch's profiler around the work of a model runner."""

import logging
import time
from pathlib import Path

import torch

from trouper.errors import ProfilerAlreadyActiveError

logger = logging.getLogger(__name__)


class Profiler:
    """At most one trace at a time."""

    def __init__(self) -> None:
        self._profile: tuple[torch.profiler.profile, Path] | None = None

    def start(self, folder: str, prefix: str) -> None:
        """Trace what follows, until `stop` writes a Chrome trace into the folder.

        Raises:
            ProfilerAlreadyActiveError: it runs already.
        """
        if self._profile is not None:
            raise ProfilerAlreadyActiveError("stop_profile first")
        profile = torch.profiler.profile()
        profile.start()
        self._profile = profile, Path(folder) / f"{prefix}-{time.time_ns()}.json"

    def stop(self) -> None:
        """Write the trace; without one, warn and do nothing else."""
        if self._profile is None:
            logger.warning("stop_profile without start_profile")
            return
        (profile, file), self._profile = self._profile, None
        profile.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(file))
