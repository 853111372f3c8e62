"""Decode and process images and recordings in separate processes with limited memory and time.

A hostile file can at most kill such a process, which has no secrets and no torch, and is replaced by a new one.  The
processes are kept running, because one takes seconds to start.  The engine's event loop is not blocked: a renderer's thread
sends the file and waits for the answer without holding the GIL.
"""

import fcntl
import logging
import mmap
import os
import time
import weakref
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from trouper.actors.messages.media import MediaArray, ProcessedMedia
from trouper.actors.rendering.confined_process import (
    LENGTH_BYTES,
    ConfinedProcess,
    HelperKilledError,
)
from trouper.actors.rendering.media.files import MAX_PIXELS
from trouper.actors.rendering.media.worker import (
    SEALS,
    ArrayPlace,
    ImageAnswer,
    ImageFields,
    ProcessorFields,
)
from trouper.config.media import MediaConfig
from trouper.errors import GenerationError, MediaError, TrouperValidationError, invalid

if TYPE_CHECKING:
    from PIL import Image

    from trouper.actors.rendering.media.audio import Waveform

logger = logging.getLogger(__name__)

WORKER = "trouper.actors.rendering.media.worker"
# Time limit for one file, long enough for a busy machine.
WALL_S = 10.0
# Time limit for the start of a process.  Two attempts must fit into the 30 s of a renderer's thread.
START_WALL_S = 14.0
# Minimum time between two starts, so that a flood of files that kill their process does not cause a flood of new processes.
RESTART_S = 1.0
# Log an error after this many files in a row have killed their process.
ALARMING = 3


class MediaOrder(NamedTuple):
    """One image or recording to process.

    Attributes:
        image: the bytes of a file, or pixels (RGB) or samples that the caller has already decoded.
        where: its location in the client's request, for errors.
        kwargs: options of the model's processor.
        limit: the maximum number of pixels of an image, or of seconds of a recording.
    """

    image: "bytes | memoryview | Image.Image | Waveform"
    where: str
    kwargs: Mapping[str, Any]
    limit: int = MAX_PIXELS


class ConfinedMedia:
    """A pool of running processes for the media of one model.  It grows to the number of threads that call `process` at once.

    The processes end at `close`, or when this object is collected.

    Args:
        config: contains the folder of the processor.
        image_token: the text of the token that is replaced by a row of the tower's output.
    """

    def __init__(self, config: MediaConfig, image_token: str) -> None:
        self._first = msgspec.json.encode(ProcessorFields(config, image_token))
        self._idle: list[ConfinedProcess] = []
        self._lock = Lock()
        # The next process may start from this time on.
        self._next_start = 0.0
        self._num_deaths = 0
        self.close = weakref.finalize(self, _close_all, self._idle)

    def warm(self) -> None:
        """Start a process before the first request needs it.

        Raises:
            TrouperValidationError: the model's files do not describe a processor.
            GenerationError: the process cannot be started.
        """
        self._keep(self._started())

    def process(self, order: MediaOrder) -> tuple[ProcessedMedia, int]:
        """Decode and process one image or recording.  Returns it with its number of pixels or seconds.

        Thread-safe.  The returned arrays are read-only, memory-mapped and not copied.

        Raises:
            MediaError: the file cannot be used, or takes too much time or memory.
            TrouperValidationError: an option of the processor is invalid.
            GenerationError: no process could be started.
        """
        message = _message(order)
        try:
            answer, descriptor = self._ask(message)
        except (TimeoutError, HelperKilledError):
            self._note_death()
            rule = f"{order.where}: takes too much time or memory to process; send a smaller or simpler file"
            raise MediaError(rule, parameter=order.where, code="media_budget") from None
        except ChildProcessError as error:
            raise GenerationError(f"processing a file failed: {error}") from None
        self._num_deaths = 0
        found = msgspec.json.decode(answer, type=ImageAnswer)
        if descriptor is None:
            raise _refusal(found, order.where)
        with os.fdopen(descriptor, "rb") as file:
            arrays = _mapped(file.fileno(), found.arrays)
        return ProcessedMedia(arrays, found.text, found.seconds), found.size

    def _ask(self, message: bytes) -> tuple[bytes, int | None]:
        """Send an order to a process.  If the process is killed from outside, retry once, because the file is not at fault."""
        try:
            return self._ask_once(message)
        except HelperKilledError:
            return self._ask_once(message)

    def _ask_once(self, message: bytes) -> tuple[bytes, int | None]:
        process = self._take()
        try:
            return process.ask_for_file(message, WALL_S)
        finally:
            self._keep(process)

    def _take(self) -> ConfinedProcess:
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return self._started()
            if process.is_usable:
                return process
            process.close()

    def _keep(self, process: ConfinedProcess) -> None:
        if process.is_usable and self.close.alive:
            self._idle.append(process)
        else:
            process.close()

    def _started(self) -> ConfinedProcess:
        """Start a process and wait until it has loaded the processor.  If it hangs, try once more.

        Raises:
            TrouperValidationError: the processor cannot be loaded.
            GenerationError: the process cannot be started.
        """
        for _ in range(2):
            self._wait_for_turn()
            try:
                process = ConfinedProcess(WORKER)
                answer = msgspec.json.decode(
                    process.ask(self._first, START_WALL_S), type=ImageAnswer
                )
            except TimeoutError:
                continue
            except OSError as error:
                raise GenerationError(f"cannot start the media process: {error}") from None
            if answer.code is not None:
                process.close()
                raise _refusal(answer, "model")
            return process
        raise GenerationError(
            f"cannot start the media process: it was not ready within {START_WALL_S:g} s, twice in a row"
        )

    def _wait_for_turn(self) -> None:
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next_start)
            self._next_start = turn + RESTART_S
        time.sleep(turn - now)

    def _note_death(self) -> None:
        self._num_deaths += 1
        if self._num_deaths >= ALARMING:
            logger.error(
                "%d media files in a row have killed their process: by time, memory or a crash",
                self._num_deaths,
            )


def _message(order: MediaOrder) -> bytes:
    size: tuple[int, int] | None = None
    rate: int | None = None
    data: Any = order.image
    if isinstance(data, tuple):
        samples, rate = cast("Waveform", data)
        data = samples.tobytes()
    elif not isinstance(data, bytes | memoryview):
        size, data = data.size, data.tobytes()
    fields = ImageFields(dict(order.kwargs), order.limit, size, rate)
    try:
        head = msgspec.json.encode(fields)
    except (TypeError, ValueError):
        rule = "must contain only numbers, strings, lists and dicts"
        raise invalid("mm_processor_kwargs", rule) from None
    content = cast("bytes", data)
    return b"".join((len(head).to_bytes(LENGTH_BYTES), head, content))


def _refusal(answer: ImageAnswer, where: str) -> TrouperValidationError:
    if answer.parameter is not None:
        return invalid(answer.parameter, answer.rule)
    text = f"{where}: {answer.rule}"
    return MediaError(text, parameter=where, code=str(answer.code))


def _mapped(descriptor: int, places: tuple[ArrayPlace, ...]) -> tuple[MediaArray, ...]:
    """Map a sealed memory file, and return its arrays as read-only views."""
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise GenerationError("processing a file failed: the media process did not seal its arrays")
    size = os.fstat(descriptor).st_size
    # A private mapping, because a sealed file refuses a shared one on older kernels.  Nothing is copied.
    whole = memoryview(mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ))
    return tuple(
        MediaArray(p.name, p.dtype, p.shape, whole[p.offset : p.offset + p.num_bytes])
        for p in places
    )


def _close_all(processes: list[ConfinedProcess]) -> None:
    while processes:
        processes.pop().close()
