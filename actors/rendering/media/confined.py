"""Files of images and recordings decoded and processed in processes of their own, on a budget.

A hostile file can at most end such a process: its memory and its time are limited, it has no secrets and no torch, and a
new one takes its place.  The processes are kept warm, because one takes seconds to start.  The engine's event loop only
passes messages: an order runs in a renderer's thread, which waits for the answer without the interpreter's lock.
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
# Of one image, on a busy machine.
WALL_S = 10.0
# Twice this is less than the time limit of a renderer's thread, 30 s.
START_WALL_S = 14.0
# Seconds between two starts, so that a flood of deadly files starts no flood of processes.
RESTART_S = 1.0
# This many images in a row that end their process are an error in the log.
ALARMING = 3


class MediaOrder(NamedTuple):
    """One image or recording to process.

    Attributes:
        image: the bytes of a file, or RGB pixels or samples that the caller has decoded.
        where: the client's name of its place, for errors.
        kwargs: options of the model's processor.
        limit: the most pixels, or seconds of a recording, that it may have.
    """

    image: "bytes | memoryview | Image.Image | Waveform"
    where: str
    kwargs: Mapping[str, Any]
    limit: int = MAX_PIXELS


class ConfinedMedia:
    """Warm processes for the images of one model: as many as there are threads that process at once.

    The processes end with this object, or at `close`.

    Args:
        config: names the folder of the processor.
        image_token: the text of the token in whose place a row is used.
    """

    def __init__(self, config: MediaConfig, image_token: str) -> None:
        self._first = msgspec.json.encode(ProcessorFields(config, image_token))
        self._idle: list[ConfinedProcess] = []
        self._lock = Lock()
        # The earliest moment of the next start.
        self._next_start = 0.0
        self._num_deaths = 0
        self.close = weakref.finalize(self, _close_all, self._idle)

    def warm(self) -> None:
        """Start a process before the first image needs it.

        Raises:
            TrouperValidationError: the model's files do not describe a processor.
            GenerationError: it cannot be started.
        """
        self._keep(self._started())

    def process(self, order: MediaOrder) -> tuple[ProcessedMedia, int]:
        """Decode and process one image or recording, and return it with the number of its pixels or seconds.

        Threads may call it at the same time.  The arrays are in read-only memory that nothing has copied.

        Raises:
            MediaError: the image cannot be used, or takes too much time or memory.
            TrouperValidationError: an option of the processor is wrong.
            GenerationError: there is no process to decode it in.
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
        """Give an order to a process; if a signal from outside kills the process, to another one once more."""
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
        """Start a process and wait until it has loaded the processor; one that hangs is started once more.

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
                raise GenerationError(f"no process to decode files in: {error}") from None
            if answer.code is not None:
                process.close()
                raise _refusal(answer, "model")
            return process
        raise GenerationError(
            f"no process to decode files in: none was ready after {START_WALL_S:g} s"
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
            logger.error("%d images in a row have ended their process", self._num_deaths)


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
        rule = "must hold numbers, texts, lists and dicts only"
        raise invalid("mm_processor_kwargs", rule) from None
    content = cast("bytes", data)
    return b"".join((len(head).to_bytes(LENGTH_BYTES), head, content))


def _refusal(answer: ImageAnswer, where: str) -> TrouperValidationError:
    if answer.parameter is not None:
        return invalid(answer.parameter, answer.rule)
    text = f"{where}: {answer.rule}"
    return MediaError(text, parameter=where, code=str(answer.code))


def _mapped(descriptor: int, places: tuple[ArrayPlace, ...]) -> tuple[MediaArray, ...]:
    """Map a sealed file and return the arrays in it, read-only."""
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise GenerationError("processing a file failed: its arrays could still change")
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
