"""Run the process that decodes and processes images and recordings.  It limits its own resources, then serves orders from a socket.

python -P -m trouper.actors.rendering.media.worker    (standard input is the socket)

The first order is the configuration of the processor.  Every later order is a frame: the length of a JSON object in four
bytes, the object, then the file or the pixels.  The answer is a frame with JSON.  The arrays are in a memory file (memfd), and its
descriptor is sent with the answer.  The file is sealed, so it cannot shrink or change while the engine reads it.  The
process ends when the socket is closed.

This process cannot import torch, because that would take 300 MiB and several seconds, and because a hostile file that
takes over a decoder should find as little code as possible.
"""

import ctypes
import fcntl
import importlib.machinery
import importlib.util
import logging
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from trouper.actors.messages.media import MediaArray, ProcessedMedia
from trouper.actors.rendering.confined_process import LENGTH_BYTES, OVER_BUDGET, framed
from trouper.actors.rendering.media.files import (
    MAX_PIXELS,
    RefusedFileError,
    check_size,
    decode,
    open_image,
)
from trouper.config.media import AUDIO, MediaConfig
from trouper.errors import TrouperValidationError

if TYPE_CHECKING:
    from PIL import Image

    from trouper.actors.rendering.media.audio import AudioProcessor
    from trouper.actors.rendering.media.processor import ImageProcessor

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
# Enough for the interpreter, the processors and the largest image (413 MiB to decode, then its copies).
MEMORY = 2 * 2**30
# CPU time for an image of at most `STEP_PIXELS`, plus one second for each further `STEP_PIXELS`.
CPU_S = 2
STEP_PIXELS = 10_000_000
# A recording gets the CPU time of an image of this size, 7 s.  Ten minutes at 192 kHz in eight channels take 4 s.
RECORDING_PIXELS = 60_000_000
# malloc serves blocks up to the first size from the heap, and returns the heap's free end to the system only above the second size.
# By default each image would use new pages, and faulting them in would take a third of its time.
HEAP_BLOCK, HEAP_FREE = 2**25, 2**26
# Arrays start at multiples of this, so that numpy and torch can use them without a copy.
ALIGNMENT = 64


class ImageFields(msgspec.Struct, frozen=True):
    """The header of an order, which precedes the file.

    Attributes:
        kwargs: options of the model's processor.
        limit: the maximum number of pixels of the image, or of seconds of the recording.
        size: width and height, if the order contains decoded RGB pixels; None for a file.
        rate: samples per second, if the order contains decoded samples; None for a file.
    """

    kwargs: dict[str, Any]
    limit: int = MAX_PIXELS
    size: tuple[int, int] | None = None
    rate: int | None = None


class ProcessorFields(msgspec.Struct, frozen=True):
    """The first order: the arguments of an `ImageProcessor` or `AudioProcessor`."""

    config: MediaConfig
    image_token: str


class ArrayPlace(msgspec.Struct, frozen=True):
    """The location of an array in the memory file of an answer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class ImageAnswer(msgspec.Struct, frozen=True):
    """The answer to an order: the processed image or recording, or the error code and message of a refusal."""

    code: str | None = None
    rule: str = ""
    # The name of the invalid processor option, if one is the reason.
    parameter: str | None = None
    arrays: tuple[ArrayPlace, ...] = ()
    text: str = ""
    size: int = 0
    seconds: float = 0.0


def main() -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    _limit_memory()
    _keep_pages()
    _hide_torch()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    orders = socket.socket(fileno=sys.stdin.fileno())
    try:
        with orders, orders.makefile("rb") as stream:
            _serve(orders, stream)
    except MemoryError:
        os._exit(OVER_BUDGET)


def _serve(orders: socket.socket, stream: BinaryIO) -> None:
    """Create the processor from the first order, and answer later orders until the socket is closed."""
    first = msgspec.json.decode(_read(stream), type=ProcessorFields)
    try:
        processor = make_processor(first.config, first.image_token)
    except TrouperValidationError as error:
        orders.sendall(framed(_encoded(_refusal(error))))
        return
    # The engine reads the stderr pipe only at the end.  Without this, library messages could fill it and block the process.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    orders.sendall(framed(_encoded(ImageAnswer())))
    while order := _read(stream):
        _limit_time(0)
        size = LENGTH_BYTES + int.from_bytes(order[:LENGTH_BYTES])
        fields = msgspec.json.decode(order[LENGTH_BYTES:size], type=ImageFields)
        _answer(orders, fields, memoryview(order)[size:], processor)


def _read(stream: BinaryIO) -> bytes:
    return stream.read(int.from_bytes(stream.read(LENGTH_BYTES)))


def make_processor(config: MediaConfig, token: str) -> "ImageProcessor | AudioProcessor":
    """Return the processor of a model's images or recordings.

    Raises:
        TrouperValidationError: the folder's files do not describe one, or it does not support the engine's options.
    """
    if config.modality == AUDIO:
        from trouper.actors.rendering.media.audio import AudioProcessor

        made = AudioProcessor(config, token)
    else:
        from trouper.actors.rendering.media.processor import ImageProcessor

        made = ImageProcessor(config, token)
    # An invalid engine option must fail at the start, not at the first image.
    made.check(config.processor_kwargs)
    return made


def _answer(
    orders: socket.socket,
    fields: ImageFields,
    data: memoryview,
    processor: "ImageProcessor | AudioProcessor",
) -> None:
    try:
        found, size = _processed(fields, data, processor)
    except RefusedFileError as error:
        orders.sendall(framed(_encoded(ImageAnswer(*error.refusal))))
        return
    except TrouperValidationError as error:
        orders.sendall(framed(_encoded(_refusal(error))))
        return
    with _sealed(found.arrays) as (file, places):
        answer = ImageAnswer(arrays=places, text=found.text, size=size, seconds=found.seconds)
        # The descriptor is attached to the first bytes.
        whole = framed(_encoded(answer))
        sent = socket.send_fds(orders, [whole], [file.fileno()])
        orders.sendall(whole[sent:])


def _refusal(error: TrouperValidationError) -> ImageAnswer:
    """Convert the processor's error about an option or about the image to an answer."""
    if error.parameter == "image":
        return ImageAnswer("invalid_image", error.rule)
    return ImageAnswer(error.code, error.rule, error.parameter or "")


def _processed(
    fields: ImageFields, data: memoryview, processor: "ImageProcessor | AudioProcessor"
) -> tuple[ProcessedMedia, int]:
    """Process an image or a recording.  Returns the result, and the number of pixels or of seconds."""
    import numpy as np

    from trouper.actors.rendering.media.audio import AudioProcessor, Waveform

    if isinstance(processor, AudioProcessor):
        given = data
        if fields.rate is not None:
            given = Waveform(np.frombuffer(data, np.float32), fields.rate)
        _limit_time(RECORDING_PIXELS)
        return processor.hear(given, fields.kwargs, fields.limit)
    image = _image(fields, data)
    return processor.process(image, fields.kwargs), image.width * image.height


def _image(fields: ImageFields, data: memoryview) -> "Image.Image":
    """Decode a file to upright RGB pixels, or wrap pixels that the caller has already decoded."""
    from PIL import Image

    if fields.size is not None:
        check_size(*fields.size, fields.limit)
        _limit_time(fields.size[0] * fields.size[1])
        return Image.frombytes("RGB", fields.size, data)
    image = open_image(data, fields.limit)
    _limit_time(image.width * image.height)
    return decode(image)


@contextmanager
def _sealed(arrays: Sequence[MediaArray]) -> Generator[tuple[BinaryIO, tuple[ArrayPlace, ...]]]:
    """Write arrays to a memory file, and seal it against changes."""
    places: list[ArrayPlace] = []
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    with os.fdopen(os.memfd_create("media", flags), "wb") as file:
        for array in arrays:
            file.write(bytes(-file.tell() % ALIGNMENT))
            place = file.tell(), array.data.nbytes
            places.append(ArrayPlace(array.name, array.dtype, array.shape, *place))
            file.write(array.data)
        file.flush()
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        yield file, tuple(places)


def _encoded(answer: ImageAnswer) -> bytes:
    return msgspec.json.encode(answer)


def _limit_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # macOS maps more than any useful limit before a program starts.
    if sys.platform != "darwin":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _keep_pages() -> None:
    """Let the C library reuse the pages of one image for the next.  Does nothing without `mallopt`."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        set_option(m_mmap_threshold, HEAP_BLOCK)
        set_option(m_trim_threshold, HEAP_FREE)


def _limit_time(num_pixels: int) -> None:
    """Limit the CPU time of the next order to that of an image of this size.  The kernel kills the process at the limit."""
    import resource

    seconds = CPU_S + max(0, math.ceil(num_pixels / STEP_PIXELS) - 1)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, hard))


def _hide_torch() -> None:
    """Make every import of torch fail as if it were not installed."""
    find = importlib.util.find_spec

    def find_without(
        name: str, package: str | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return None if name.partition(".")[0] in ("torch", "torchvision") else find(name, package)

    class Hidden:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name.partition(".")[0] in ("torch", "torchvision"):
                raise ModuleNotFoundError(name=name)

    importlib.util.find_spec = find_without
    sys.meta_path.insert(0, Hidden)  # type: ignore[arg-type]  # it only raises


if __name__ == "__main__":
    main()
