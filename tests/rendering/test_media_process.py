"""The process that decodes and processes images: its results, its limits, and what it cannot reach."""

from pathlib import Path

import msgspec
import pytest

from tests.support.image_payloads import saved, slow_jpeg
from tests.support.vision import VisionModel, picture
from trouper.actors.rendering.media.confined import ConfinedMedia, MediaOrder
from trouper.actors.rendering.media.files import MAX_PIXELS
from trouper.actors.rendering.media.processor import ImageProcessor
from trouper.config.media import MediaConfig
from trouper.errors import MediaError, TrouperValidationError

WHERE = "messages[0].content[1]"
IMAGE = picture(1)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    model = VisionModel("llava", tmp_path_factory.mktemp("llava"))
    return MediaConfig(
        model_type="llava",
        folder=str(model.folder),
        row_token_id=model.row_id,
        placeholder_id=model.row_id,
        max_items=8,
        processor_cache_bytes=0,
        encoder_cache_bytes=0,
        processor_kwargs={},
    )


@pytest.fixture(scope="module")
def images(config):
    images = ConfinedMedia(config, "<image>")
    yield images
    images.close()


def refusal(images, data, **kwargs):
    with pytest.raises(TrouperValidationError) as caught:
        images.process(MediaOrder(data, WHERE, kwargs))
    return caught.value


@pytest.mark.parametrize("given", [saved(IMAGE), memoryview(saved(IMAGE)), IMAGE])
def test_process_gives_the_processors_arrays(images, config, given):
    found, num_pixels = images.process(MediaOrder(given, WHERE, {"do_normalize": False}))
    assert num_pixels == 40 * 28
    assert found == ImageProcessor(config, "<image>").process(IMAGE, {"do_normalize": False})
    assert all(array.data.readonly for array in found.arrays)


def test_refusal_names_the_part(images):
    error = refusal(images, b"%PDF-1.7")
    assert isinstance(error, MediaError)
    assert (error.code, error.parameter) == ("invalid_image", WHERE)
    assert str(error).startswith(f"{WHERE}: cannot be read as an image")


def test_request_limit_counts_for_pixels(images):
    order = MediaOrder(IMAGE, WHERE, {}, limit=40 * 28 - 1)
    with pytest.raises(MediaError) as caught:
        images.process(order)
    assert caught.value.code == "media_too_large"
    assert order.limit < MAX_PIXELS


@pytest.mark.parametrize("option", [{"size_": 1}, {"device": "cuda"}, {"size": object()}])
def test_wrong_option_is_named(images, option):
    assert refusal(images, IMAGE, **option).parameter == "mm_processor_kwargs"


def test_wrong_option_of_the_engine_fails_its_start(config):
    images = ConfinedMedia(
        msgspec.structs.replace(config, processor_kwargs={"size_": 1}), "<image>"
    )
    with pytest.raises(TrouperValidationError, match="no option 'size_'") as caught:
        images.warm()
    assert caught.value.parameter == "mm_processor_kwargs"


def test_process_has_no_torch_and_no_secrets(images, monkeypatch):
    monkeypatch.setenv("TROUPER_API_KEY", "sesame")
    images.process(MediaOrder(IMAGE, WHERE, {}))
    (process,) = images._idle
    place = Path("/proc", str(process._process.pid))
    assert "libtorch" not in (place / "maps").read_text()
    assert b"sesame" not in (place / "environ").read_bytes()


def test_memory_of_one_image_serves_the_next(images):
    """New pages for each image took a third of the time of a large one."""
    order = MediaOrder(saved(picture(2).resize((1920, 1080)), "JPEG"), WHERE, {})
    images.process(order)
    images.process(order)
    before = num_faults(images)
    images.process(order)
    assert num_faults(images) - before < 500


def num_faults(images):
    """Return how many pages the process has touched for the first time."""
    (process,) = images._idle
    fields = Path("/proc", str(process._process.pid), "stat").read_text().rpartition(")")[2].split()
    return int(fields[7])


def test_too_much_memory_ends_only_the_request(config):
    images = ConfinedMedia(config, "<image>")
    bomb = {"size": {"shortest_edge": 60_000}, "do_center_crop": False}
    error = refusal(images, IMAGE, **bomb)
    assert (error.code, error.parameter) == ("media_budget", WHERE)
    found, _ = images.process(MediaOrder(IMAGE, WHERE, {}))
    assert found.text == "<image>" * 16
    images.close()


@pytest.mark.slow
def test_too_much_time_ends_only_the_request(images):
    assert refusal(images, slow_jpeg()).code == "media_budget"
    images.process(MediaOrder(IMAGE, WHERE, {}))


def test_folder_without_processor_is_an_error(tmp_path, config):
    images = ConfinedMedia(msgspec.structs.replace(config, folder=str(tmp_path)), "<image>")
    with pytest.raises(TrouperValidationError, match="image processor"):
        images.warm()
