"""Validate image and audio files, and decode images to RGB pixels.  Sizes are checked before anything is decoded.  Pure.

A file of 50 KiB can describe an image of a gigabyte, so the header is checked first.  Only five formats are read, because
some of Pillow's other decoders start programs (EPS) or read other files.  Clients never see Pillow's messages, which contain
memory addresses: every refusal has a message and an error code of this module.

The model sees an image as a person does: the first frame, upright, on white, with eight bits per colour.

libsndfile reads a truncated or damaged recording, or the first of several concatenated ones, as if it were a shorter valid one. The
model would then silently answer about only part of the input. So `fault_of` checks the structure of the file, and such files are
refused with the reason. FLAC needs no check, because its decoder detects all of this.
"""

import io
import warnings
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL import Image


MAX_FILE_BYTES = 24 * 2**20
# Maximum pixels of one image.  With four channels of 16 bits, decoding that many takes 413 MiB.
MAX_PIXELS = 2**25
# Maximum pixels of all images of one request.
MAX_REQUEST_PIXELS = 2**27
# Maximum ratio of the longer side to the shorter one.  Processors scale one side, so an extreme ratio would create a huge image.
MAX_RATIO = 200
# The error code of invalid images.  `refused` in `parts.py` replaces it for recordings.
INVALID_IMAGE = "invalid_image"
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
NAMES = "JPEG, PNG, WebP, GIF or BMP"
WHITE = (255, 255, 255)


class Refusal(NamedTuple):
    """The reason why a file is refused: the error code, and a message that follows the file's location."""

    code: str
    rule: str


class RefusedFileError(Exception):
    """Raised if a file cannot be used.  `refusal` contains the reason."""

    def __init__(self, code: str, rule: str) -> None:
        super().__init__(rule)
        self.refusal = Refusal(code, rule)


def open_image(data: bytes | memoryview, max_pixels: int = MAX_PIXELS) -> "Image.Image":
    """Read the header of an image file and check the declared size.  No pixel is decoded.

    Args:
        max_pixels: the remaining pixels of the request; less than `MAX_PIXELS` if it already has other images.

    Raises:
        RefusedFileError: `invalid_image` or `media_too_large`.
    """
    from PIL import Image

    check_bytes(len(data))
    try:
        with warnings.catch_warnings():
            # Pillow's warning about large images is redundant, because `check_size` refuses them.
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        rule = f"has more than the maximum of {MAX_PIXELS} pixels; send a smaller image"
        raise RefusedFileError("media_too_large", rule) from None
    except MemoryError:
        raise
    except Exception:
        raise RefusedFileError(
            INVALID_IMAGE, f"cannot be read as an image; send a {NAMES} file"
        ) from None
    check_size(*image.size, max_pixels)
    return image


def check_bytes(num_bytes: int) -> None:
    """Check the length of a file.  Raises RefusedFileError."""
    if num_bytes > MAX_FILE_BYTES:
        rule = f"has {num_bytes} bytes (maximum {MAX_FILE_BYTES}); send a smaller file"
        raise RefusedFileError("media_too_large", rule)
    if num_bytes == 0:
        raise RefusedFileError(INVALID_IMAGE, f"is empty; send a {NAMES} file")


def check_size(width: int, height: int, max_pixels: int = MAX_PIXELS) -> None:
    """Check the width and height of an image.  Raises RefusedFileError: `media_too_large` or `invalid_image`."""
    if width < 1 or height < 1:
        raise RefusedFileError(INVALID_IMAGE, "has no pixels")
    if width * height > MAX_PIXELS:
        rule = f"has {width} x {height} pixels (maximum {MAX_PIXELS}); send a smaller image"
        raise RefusedFileError("media_too_large", rule)
    if width * height > max_pixels:
        rule = f"exceeds the maximum of {MAX_REQUEST_PIXELS} pixels for all images of a request; send fewer or smaller ones"
        raise RefusedFileError("media_too_large", rule)
    if max(width, height) > MAX_RATIO * min(width, height):
        rule = f"has {width} x {height} pixels; one side may be at most {MAX_RATIO} times the other"
        raise RefusedFileError("media_too_large", rule)


def decode(image: "Image.Image") -> "Image.Image":
    """Decode an opened file to upright RGB pixels on white.

    Raises:
        RefusedFileError: `invalid_image`, for a damaged file or a pixel format without a defined white.
        MemoryError: not enough memory to decode the image.
    """
    try:
        image.load()
        return to_rgb(_upright(image))
    except (MemoryError, RefusedFileError):
        raise
    except Exception:
        rule = f"is damaged or incomplete; send a whole {NAMES} file"
        raise RefusedFileError(INVALID_IMAGE, rule) from None


def to_rgb(image: "Image.Image") -> "Image.Image":
    """Convert decoded pixels to RGB.  16-bit values are scaled, and transparent pixels become white.

    Raises:
        RefusedFileError: a Python caller's image has a pixel format without a defined white.
    """
    from PIL import Image

    if image.mode in ("I", "F"):
        rule = f"has the PIL mode {image.mode}, which does not define a value for white; convert it to L, RGB or I;16"
        raise RefusedFileError(INVALID_IMAGE, rule)
    if image.mode.startswith("I;16"):
        return _scaled(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        whole = Image.new("RGB", layer.size, WHITE)
        whole.paste(layer, mask=layer.getchannel("A"))
        return whole
    return image if image.mode == "RGB" else image.convert("RGB")


def _upright(image: "Image.Image") -> "Image.Image":
    """Rotate an image by its EXIF orientation.  Invalid EXIF data are ignored, as in browsers."""
    from PIL import ImageOps

    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:
        return image
    return image


def _scaled(image: "Image.Image") -> "Image.Image":
    """Scale 16-bit grey values to 8 bits.  Pillow's own conversion would turn every value above 255 white."""
    import numpy as np
    from PIL import Image

    values: np.ndarray[Any, Any] = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    colours = np.repeat(grey[:, :, None], 3, axis=2)
    clear: Any = image.info.get("transparency")
    if isinstance(clear, int):
        colours[values == clear] = WHITE
    return Image.fromarray(colours)


# An encoder that writes a WAV file to a pipe does not know its length, and declares 2 or 4 GiB.
PIPED_BYTES = 0x7FFF_0000
CUT = "is incomplete: its header declares more samples than the file contains"
APPENDED = "contains another recording after the first, which would be ignored; send each in a part of its own"
# The checksum of OGG reads the bits of each byte from the highest, and zlib's from the lowest.
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
_FIRST, _LAST = 2, 4
# MP3 tables: kbit/s of layer III for versions 2 and 2.5 (_SLOW) and 1 (_FAST), and sample rates for versions 2.5, reserved, 2, 1.
_SLOW = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_FAST = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_RATES = ((11025, 12000, 8000), (), (22050, 24000, 16000), (44100, 48000, 32000))


def fault_of(data: bytes | memoryview) -> str | None:
    """Return why libsndfile would decode only part of a recording, as an error message, or None if the file is complete."""
    raw = bytes(data)
    if raw[:4] in (b"RIFF", b"RIFX"):
        return CUT if _is_cut_wav(raw) else None
    if raw[:4] == b"OggS":
        return _fault_of_ogg(raw)
    return APPENDED if _is_longer_mp3(raw) else None


def _is_cut_wav(data: bytes) -> bool:
    """Return whether a WAV file contains fewer samples than its header declares."""
    order = "big" if data[:4] == b"RIFX" else "little"
    place = 12
    while place + 8 <= len(data):
        size = int.from_bytes(data[place + 4 : place + 8], order)
        if data[place : place + 4] == b"data":
            return len(data) - place - 8 < size < PIPED_BYTES
        place += 8 + size + size % 2
    return False


def _fault_of_ogg(data: bytes) -> str | None:
    """Check that all pages of an OGG file are complete and consecutive, and that the last one is marked as such."""
    # Maps a stream to the number of its next page, or to None after its last page.
    expected: dict[bytes, int | None] = {}
    place, has_data = 0, False
    while place < len(data):
        head = data[place : place + 27]
        if head[:4] != b"OggS" or len(head) < 27:
            return "is damaged: an OGG page does not follow the previous one"
        sizes = data[place + 27 : place + 27 + head[26]]
        end = place + 27 + head[26] + sum(sizes)
        if len(sizes) < head[26] or end > len(data):
            return "is incomplete: it ends in the middle of an OGG page"
        page = head[:22] + bytes(4) + data[place + 26 : end]
        if _ogg_checksum(page) != int.from_bytes(head[22:26], "little"):
            return "is damaged: the checksum of an OGG page is wrong"
        flags, stream, number = head[5], head[14:18], int.from_bytes(head[18:22], "little")
        if flags & _FIRST:
            if has_data:
                return APPENDED
            expected[stream] = number
        has_data = has_data or not flags & _FIRST
        if expected.get(stream) != number:
            return "is damaged: an OGG page is missing"
        expected[stream] = None if flags & _LAST else number + 1
        place = end
    if any(number is not None for number in expected.values()):
        return "is incomplete: no OGG page is marked as its last one"
    return None


def _ogg_checksum(page: bytes) -> int:
    found = zlib.crc32(page.translate(_REVERSED), 0xFFFF_FFFF) ^ 0xFFFF_FFFF
    return int(f"{found:032b}"[::-1], 2)


def _is_longer_mp3(data: bytes) -> bool:
    """Return whether an MP3 file contains more frames than its first frame declares.  The decoder would ignore the others."""
    place = _behind_tag(data, 0)
    size = _mp3_frame(data, place)
    # The encoder's header (Xing or Info) is stored instead of samples in the first frame.
    marks = [
        found for mark in (b"Xing", b"Info") if (found := data.find(mark, place, place + 64)) > 0
    ]
    if not size or not marks or not data[marks[0] + 7] & 1:
        return False
    declared = int.from_bytes(data[marks[0] + 8 : marks[0] + 12], "big")
    place += size
    for _ in range(declared):
        size = _mp3_frame(data, place)
        if not size:
            return False
        place += size
    place = _behind_tag(data, place)
    size = _mp3_frame(data, place)
    return bool(size and _mp3_frame(data, place + size))


def _behind_tag(data: bytes, place: int) -> int:
    """Return the position after the ID3 tags at `place`, or `place` itself without any."""
    if data[place : place + 3] == b"TAG":
        place += 128
    head = data[place : place + 10]
    if head[:3] != b"ID3" or len(head) < 10:
        return place
    # The size is stored in four bytes of seven bits.
    size = sum((byte & 127) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
    return place + 10 + size + (10 if head[5] & 16 else 0)


def _mp3_frame(data: bytes, place: int) -> int:
    """Return the size in bytes of the frame at `place`, or 0 if no frame starts there."""
    head = data[place : place + 4]
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return 0
    version, bitrate, rate = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or rate == 3 or bitrate in (0, 15):
        return 0
    is_one = version == 3
    bits = (_FAST if is_one else _SLOW)[bitrate] * (144_000 if is_one else 72_000)
    return bits // _RATES[version][rate] + (head[2] >> 1 & 1)
