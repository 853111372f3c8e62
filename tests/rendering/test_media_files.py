"""Image files: what is refused at the header, and what a person would see in the rest."""

import numpy as np
import pytest
from PIL import Image

from tests.support.image_payloads import HOSTILE, NOISE, TOO_LONG, png, saved
from trouper.actors.rendering.media.files import (
    MAX_PIXELS,
    RefusedFileError,
    decode,
    open_image,
)
from trouper.actors.rendering.media.urls import read_url

RED, WHITE = (255, 0, 0), (255, 255, 255)


def shown(data):
    return decode(open_image(data))


def refusal(data, **options):
    with pytest.raises(RefusedFileError) as caught:
        decode(open_image(data, **options))
    assert "PIL" not in caught.value.refusal.rule
    assert "0x" not in caught.value.refusal.rule
    return caught.value.refusal.code


@pytest.mark.parametrize("name", [*HOSTILE, "too long"])
def test_hostile_file_is_refused(name):
    data, code = HOSTILE.get(name, TOO_LONG)
    assert refusal(data) == code


def test_images_of_a_request_are_limited_together():
    assert refusal(saved(NOISE), max_pixels=64 * 48 - 1) == "media_too_large"
    assert open_image(saved(NOISE), max_pixels=64 * 48).size == (64, 48)


def test_largest_image_passes_the_header():
    assert open_image(png(8192, 4096)).size == (8192, 4096)
    assert MAX_PIXELS == 8192 * 4096


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_each_format_is_read(kind):
    image = shown(saved(NOISE, kind))
    assert (image.mode, image.size) == ("RGB", (64, 48))


def test_photo_is_turned_upright():
    wide = Image.new("RGB", (40, 20))
    wide.paste(RED, (0, 0, 20, 20))
    exif = wide.getexif()
    exif[0x112] = 6
    image = shown(saved(wide, "PNG", exif=exif))
    assert image.size == (20, 40)
    assert image.getpixel((10, 5)) == RED
    assert image.getpixel((10, 35)) == (0, 0, 0)


def test_broken_exif_turns_nothing():
    assert shown(saved(NOISE, "JPEG", exif=b"Exif\0\0garbage")).size == (64, 48)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(mode):
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 0)).convert(mode)
    options = {"transparency": image.getpixel((0, 0))} if mode == "P" else {}
    assert shown(saved(image, "PNG", **options)).getpixel((0, 0)) == WHITE


def test_half_transparent_pixels_are_mixed():
    assert shown(saved(Image.new("RGBA", (1, 1), (255, 0, 0, 128)))).getpixel((0, 0))[1] == 127


def test_transparent_colour_of_a_header_is_white():
    image = Image.new("RGB", (2, 1), RED)
    image.putpixel((1, 0), (0, 255, 0))
    found = shown(saved(image, "PNG", transparency=RED))
    assert [found.getpixel((x, 0)) for x in (0, 1)] == [WHITE, (0, 255, 0)]


def test_sixteen_bits_are_scaled():
    ramp = np.arange(65_536, dtype=np.uint16).reshape(256, 256)
    values = np.asarray(shown(saved(Image.fromarray(ramp))))
    assert values.mean() == 127.5
    assert (values[..., 0] == ramp >> 8).all()


@pytest.mark.parametrize("mode", ["I", "F"])
def test_mode_without_a_range_is_refused(mode):
    with pytest.raises(RefusedFileError, match=f"the PIL mode {mode}"):
        decode(Image.new("L", (8, 8), 200).convert(mode))


def test_transparent_grey_of_sixteen_bits_is_white():
    ramp = np.array([[1000, 0]], np.uint16)
    values = np.asarray(shown(saved(Image.fromarray(ramp), "PNG", transparency=1000)))
    assert values.tolist() == [[[255] * 3, [0] * 3]]


def test_colours_of_print_become_rgb():
    red = shown(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")).getpixel((0, 0))
    assert red[0] > 200
    assert max(red[1:]) < 60


def test_first_frame_is_taken():
    frames = [Image.new("RGB", (8, 8), color) for color in (RED, (0, 0, 255))]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert shown(data).getpixel((0, 0)) == RED


def test_data_url_holds_a_file():
    for url in ("data:image/png;base64,QUJD", "DATA:;BASE64,QUJD", "data:a/b;c=d;base64,QUJD"):
        assert read_url(url) == b"ABC"
        assert read_url(memoryview(url.encode())) == b"ABC"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("https://example.org/a.png", "media_url_blocked"),
        ("http://169.254.169.254/latest", "media_url_blocked"),
        ("file:///etc/passwd", "media_url_blocked"),
        ("FILE:///etc/passwd", "media_url_blocked"),
        ("gopher://x", "media_url_blocked"),
        ("javascript:alert(1)", "media_url_blocked"),
        ("/etc/passwd", "invalid_value"),
        ("", "invalid_value"),
        ("//example.org/a.png", "invalid_value"),
        ("data:,abc", "invalid_image"),
        ("data:image/png,%89PNG", "invalid_image"),
        ("data:image/png;base64,QUJ D", "invalid_image"),
        ("data:image/png;base64,QUI", "invalid_image"),
        ("data:image/png;base64,QUJD\n", "invalid_image"),
        ("data:image/png;base64,QU-_", "invalid_image"),
        ("data:image/png;base64,é===", "invalid_image"),
        ("data:image/png;base64," + "A" * (2**25 + 2**20), "media_too_large"),
    ],
    ids=lambda value: value[:30],
)
def test_other_urls_are_refused(url, code):
    with pytest.raises(RefusedFileError) as caught:
        read_url(url)
    assert caught.value.refusal.code == code
