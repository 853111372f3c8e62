"""Hostile image files, each with the code of its refusal."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

from trouper.actors.rendering.media.files import MAX_FILE_BYTES

NOISE = Image.fromarray(np.random.default_rng(1).integers(0, 255, (48, 64, 3), dtype=np.uint8))


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, *, bits=8, color=2, rows=0, extra=b""):
    """A PNG whose header promises a size, with as few rows of zeros as wanted."""
    row = bytes((width * bits * {0: 1, 2: 3, 6: 4}[color] + 7) // 8 + 1)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))
    packer = zlib.compressobj(9)
    body = b"".join(packer.compress(row) for _ in range(rows)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def slow_jpeg():
    """A progressive JPEG that repeats the last scan of 9 megapixels 2,000 times."""
    data = saved(NOISE.resize((3000, 3000)).convert("L"), "JPEG", progressive=True, quality=1)
    scan = data[data.rfind(b"\xff\xda") : -2]
    return data[:-2] + scan * 2000 + data[-2:]


JPEG = saved(NOISE, "JPEG")
SOF = JPEG.find(b"\xff\xc0")
TEXT = b"a\0\0" + zlib.compress(bytes(10**7), 9)
HOSTILE = {
    "PNG of 20,000 x 20,000 in one bit": (png(20_000, 20_000, bits=1, color=0), "media_too_large"),
    "PNG of 13,300 x 13,300": (png(13_300, 13_300), "media_too_large"),
    "PNG header of 2³¹ - 1 x 1": (png(2**31 - 1, 1), "media_too_large"),
    "PNG 201 times as wide as high": (png(402, 2), "media_too_large"),
    "JPEG header of 65,500 x 65,500": (
        JPEG[: SOF + 5] + struct.pack(">HH", 65_500, 65_500) + JPEG[SOF + 9 :], "media_too_large",
    ),
    "BMP header of 30,000 x 30,000": (
        b"BM" + struct.pack("<IHHI", 100, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 30_000, 30_000, 1, 8, 1, 0, 0, 0, 0, 0),
        "media_too_large",
    ),
    "PNG whose text unpacks to 10 MB": (png(8, 8, extra=chunk(b"zTXt", TEXT)), "invalid_image"),
    "PNG whose profile unpacks to 10 MB": (png(8, 8, extra=chunk(b"iCCP", TEXT)), "invalid_image"),
    "half a JPEG": (JPEG[: len(JPEG) // 2], "invalid_image"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', "invalid_image"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n(/etc/passwd) (r) file\n", "invalid_image"),
    "TIFF": (saved(NOISE, "TIFF"), "invalid_image"),
    "ICO": (saved(NOISE, "ICO"), "invalid_image"),
    "PDF": (b"%PDF-1.7\n", "invalid_image"),
    "HTML": (b"<html></html>", "invalid_image"),
    "nothing": (b"", "invalid_image"),
}  # fmt: skip
TOO_LONG = bytes(MAX_FILE_BYTES + 1), "media_too_large"
