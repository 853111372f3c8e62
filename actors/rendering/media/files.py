"""Judge the files of images and recordings, and decode images to RGB pixels, within limits that hold before a pixel exists.  Pure.

A file of 50 KiB can describe an image of a gigabyte, so the header is read and judged first.  Five formats are read, and
no others: Pillow knows decoders that start programs (EPS) or read other files.  No text of Pillow reaches a client, because
such texts contain addresses of memory; every refusal is a sentence of this module with a code of its own.

An image looks to the model as it does to a person: the first frame, upright, on white, with eight bits per colour.

libsndfile reads a recording that was cut, or damaged, or to which another one was appended, as if it was a shorter one. A model
would then answer about a part of what it was sent, without an error. So `fault_of` checks the structure of such a file, and what
would be left out is refused by name. FLAC needs no check, because its decoder notices all of this.
"""

import io
import warnings
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL import Image


MAX_FILE_BYTES = 24 * 2**20
# Pixels of one image; 2**25 pixels of four colours in 16 bits take 413 MiB to decode.
MAX_PIXELS = 2**25
# Pixels of all images of one request.
MAX_REQUEST_PIXELS = 2**27
# The longer side may be this many times the shorter one: processors scale one of them.
MAX_RATIO = 200
# Files of recordings with the same faults get another code.
INVALID_IMAGE = "invalid_image"
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
NAMES = "JPEG, PNG, WebP, GIF or BMP"
WHITE = (255, 255, 255)


class Refusal(NamedTuple):
    """Why a file is refused: the code of the error, and a sentence that follows the name of its place."""

    code: str
    rule: str


class RefusedFileError(Exception):
    """A file cannot be used; `refusal` contains the reason."""

    def __init__(self, code: str, rule: str) -> None:
        super().__init__(rule)
        self.refusal = Refusal(code, rule)


def open_image(data: bytes | memoryview, max_pixels: int = MAX_PIXELS) -> "Image.Image":
    """Read the header of a file and check the size that it declares.  No pixel is decoded.

    Args:
        max_pixels: the most pixels; less than `MAX_PIXELS` if the request already has other images.

    Raises:
        RefusedFileError: `invalid_image` or `media_too_large`.
    """
    from PIL import Image

    check_bytes(len(data))
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images; the limits below decide about them.
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        rule = f"has more pixels than the {MAX_PIXELS} that an image may have; send a smaller one"
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
        rule = f"has {num_bytes} bytes, and an image may have {MAX_FILE_BYTES}; send a smaller one"
        raise RefusedFileError("media_too_large", rule)
    if num_bytes == 0:
        raise RefusedFileError(INVALID_IMAGE, f"is empty; send a {NAMES} file")


def check_size(width: int, height: int, max_pixels: int = MAX_PIXELS) -> None:
    """Check the width and height of an image.  Raises RefusedFileError: `media_too_large` or `invalid_image`."""
    if width < 1 or height < 1:
        raise RefusedFileError(INVALID_IMAGE, "has no pixels")
    if width * height > MAX_PIXELS:
        rule = (
            f"has {width} x {height} pixels, and an image may have {MAX_PIXELS}; send a smaller one"
        )
        raise RefusedFileError("media_too_large", rule)
    if width * height > max_pixels:
        rule = f"is too much: all images of a request may have {MAX_REQUEST_PIXELS} pixels; send fewer or smaller ones"
        raise RefusedFileError("media_too_large", rule)
    if max(width, height) > MAX_RATIO * min(width, height):
        rule = f"has {width} x {height} pixels, and one side may be at most {MAX_RATIO} times the other"
        raise RefusedFileError("media_too_large", rule)


def decode(image: "Image.Image") -> "Image.Image":
    """Decode an opened file to upright RGB pixels on white.

    Raises:
        RefusedFileError: `invalid_image`, for a damaged file or a mode without a range.
        MemoryError: there is not enough memory for it.
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
    """Convert decoded pixels to RGB: 16 bits are scaled, and transparent pixels become white.

    Raises:
        RefusedFileError: a Python caller's image has a mode without a range.
    """
    from PIL import Image

    if image.mode in ("I", "F"):
        rule = f"has the mode {image.mode}, in which white can be any number; convert it to L, RGB or I;16"
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
    """Turn an image as its EXIF data demand.  Broken EXIF data turn nothing, as in browsers."""
    from PIL import ImageOps

    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:
        return image
    return image


def _scaled(image: "Image.Image") -> "Image.Image":
    """Scale grey values of 16 bits to 8.  Pillow's own conversion makes every value above 255 white."""
    import numpy as np
    from PIL import Image

    values: np.ndarray[Any, Any] = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    colours = np.repeat(grey[:, :, None], 3, axis=2)
    clear: Any = image.info.get("transparency")
    if isinstance(clear, int):
        colours[values == clear] = WHITE
    return Image.fromarray(colours)


# Encoders that write a WAV file to a pipe give it a length of 2 or 4 GiB.
PIPED_BYTES = 0x7FFF_0000
CUT = "is incomplete: its header promises more samples"
APPENDED = "has another recording behind the first, which would not be heard; send each by itself"
# The checksum of OGG takes the bits of each byte from the highest, and that of zlib from the lowest.
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
_FIRST, _LAST = 2, 4
# By version (2.5, none, 2, 1): kilobits a second of layer III, and samples a second.
_SLOW = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_FAST = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_RATES = ((11025, 12000, 8000), (), (22050, 24000, 16000), (44100, 48000, 32000))


def fault_of(data: bytes | memoryview) -> str | None:
    """Return what of a recording would be left out, as a rule that it breaks, or None if it is whole."""
    raw = bytes(data)
    if raw[:4] in (b"RIFF", b"RIFX"):
        return CUT if _is_cut_wav(raw) else None
    if raw[:4] == b"OggS":
        return _fault_of_ogg(raw)
    return APPENDED if _is_longer_mp3(raw) else None


def _is_cut_wav(data: bytes) -> bool:
    """Return whether a WAV file ends before its samples do."""
    order = "big" if data[:4] == b"RIFX" else "little"
    place = 12
    while place + 8 <= len(data):
        size = int.from_bytes(data[place + 4 : place + 8], order)
        if data[place : place + 4] == b"data":
            return len(data) - place - 8 < size < PIPED_BYTES
        place += 8 + size + size % 2
    return False


def _fault_of_ogg(data: bytes) -> str | None:
    """Check the pages of an OGG file: each is whole, follows the one before, and the last one is marked as such."""
    # By stream: the number of its next page, or None behind its last.
    expected: dict[bytes, int | None] = {}
    place, has_data = 0, False
    while place < len(data):
        head = data[place : place + 27]
        if head[:4] != b"OggS" or len(head) < 27:
            return "is damaged: a page does not follow the page before it"
        sizes = data[place + 27 : place + 27 + head[26]]
        end = place + 27 + head[26] + sum(sizes)
        if len(sizes) < head[26] or end > len(data):
            return "is incomplete: it ends within a page"
        page = head[:22] + bytes(4) + data[place + 26 : end]
        if _ogg_checksum(page) != int.from_bytes(head[22:26], "little"):
            return "is damaged: the checksum of a page is wrong"
        flags, stream, number = head[5], head[14:18], int.from_bytes(head[18:22], "little")
        if flags & _FIRST:
            if has_data:
                return APPENDED
            expected[stream] = number
        has_data = has_data or not flags & _FIRST
        if expected.get(stream) != number:
            return "is damaged: a page is missing"
        expected[stream] = None if flags & _LAST else number + 1
        place = end
    if any(number is not None for number in expected.values()):
        return "is incomplete: no page is marked as its last"
    return None


def _ogg_checksum(page: bytes) -> int:
    found = zlib.crc32(page.translate(_REVERSED), 0xFFFF_FFFF) ^ 0xFFFF_FFFF
    return int(f"{found:032b}"[::-1], 2)


def _is_longer_mp3(data: bytes) -> bool:
    """Return whether an MP3 file has more frames than its first frame declares, which are those that the decoder reads."""
    place = _behind_tag(data, 0)
    size = _mp3_frame(data, place)
    # The header of the encoder is in the place of the first frame's samples.
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
    """Return the place behind an ID3 tag, if there is one."""
    if data[place : place + 3] == b"TAG":
        place += 128
    head = data[place : place + 10]
    if head[:3] != b"ID3" or len(head) < 10:
        return place
    # Seven bits in each byte.
    size = sum((byte & 127) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
    return place + 10 + size + (10 if head[5] & 16 else 0)


def _mp3_frame(data: bytes, place: int) -> int:
    """Return the bytes of the frame at a place, or 0 if there is none."""
    head = data[place : place + 4]
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return 0
    version, bitrate, rate = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or rate == 3 or bitrate in (0, 15):
        return 0
    is_one = version == 3
    bits = (_FAST if is_one else _SLOW)[bitrate] * (144_000 if is_one else 72_000)
    return bits // _RATES[version][rate] + (head[2] >> 1 & 1)
