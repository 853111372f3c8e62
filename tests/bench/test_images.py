"""The study of images: the models and files that it writes, and two of its parts, as small as they can be."""

import argparse
import io

import pytest
from PIL import Image

from trouper.bench.studies.models import image_limits, image_model
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve


@pytest.fixture
def options():
    return argparse.Namespace(rounds=1, images=40, longest_edge=512, layers=1)


@pytest.mark.slow
def test_written_models_take_images(tmp_path):
    image_model.write_model(tmp_path / "smolvlm", 2, 512, tower_layers=1)
    image_model.write_clip(tmp_path / "clip")
    image_model.write_model(tmp_path / "idefics3", 2, 512, is_idefics=True)
    for kind in ("smolvlm", "clip", "idefics3"):
        config = resolve(EngineArgs(str(tmp_path / kind), load_format="dummy"), offline=True)
        assert config.media is not None
        assert config.media.model_type == kind


def test_photos_differ_in_their_bytes_only():
    file = image_model.photo(1)
    copy = image_model.another(file, 7)
    assert file != copy != image_model.another(file, 8)
    first, second = (Image.open(io.BytesIO(data)) for data in (file, copy))
    assert first.size == (1920, 1080)
    assert first.tobytes() == second.tobytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_is_read_while_images_pass(tmp_path, options):
    found = image_limits.memory(tmp_path, options)
    assert 0 < found["before MiB"] < found["peak MiB"]
    # Two samples of twenty images, each with arrays of 5 MiB.
    assert found["more MiB"] > 50


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processing_is_compared_in_both_places(tmp_path, options):
    found = image_limits.processing(tmp_path, options)
    assert found["process / thread"] == pytest.approx(
        found["process ms"] / found["thread ms"], rel=1
    )
