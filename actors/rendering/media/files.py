"""Decode image files to RGB pixels within limits that hold before a pixel exists.  Pure.

A file of 50 KiB can describe an image of a gigabyte, so the header is read and judged first.  Five formats are read, and
no others: Pillow knows decoders that start programs (EPS) or read other files.  No text of Pillow reaches a client, because
such texts contain addresses of memory; every refusal is a sentence of this module with a code of its own.

An image looks to the model as it does to a person: the first frame, upright, on white, with eight bits per colour.
"""

import io
import warnings
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
