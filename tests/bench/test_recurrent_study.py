"""The study of recurrent models: its options, and what it refuses."""

import json

import pytest

from trouper.bench.studies.models.recurrent import PARTS, Study, write_geometry
from trouper.errors import TrouperValidationError


@pytest.mark.parametrize(("geometry", "kind"), [("qwen35", "linear_attention"), ("lfm2", "conv")])
def test_geometries_have_recurrent_layers(geometry, kind, tmp_path):
    write_geometry(tmp_path, geometry, 4)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["layer_types"].count(kind) >= 2
    assert config["layer_types"].count("full_attention") >= 1


def test_unknown_geometry_is_refused(tmp_path):
    with pytest.raises(TrouperValidationError, match="qwen35 or lfm2"):
        write_geometry(tmp_path, "mamba", None)


def test_comparison_of_files_needs_a_file(tmp_path):
    with pytest.raises(TrouperValidationError, match="needs a file"):
        PARTS["gguf"](Study(tmp_path, 1, None, None))
