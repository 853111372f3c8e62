"""The study of recurrent models: its options, and what it refuses."""

import json

import pytest

from trouper.bench import peers
from trouper.bench.studies.models import step_profile
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


def test_recurrences_are_compared_with_other_kernels(tmp_path, monkeypatch):
    times = {
        "gated_delta_bf16": 5.0,
        "causal_conv_bf16": 1.0,
        "gated_norm_bf16": 20.0,
        "matmul": 80.0,
    }
    kernels = {name: {"launches": 1, "us": us} for name, us in times.items()}
    monkeypatch.setattr(step_profile, "measure", lambda *_, **__: {"kernels": kernels})
    found = PARTS["states"](Study(tmp_path, 1, None, None))
    assert [rows["states_over_rest"] for rows in found.values()] == [0.06, 0.06]


def test_part_determines_whose_code_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "compare", lambda given, *_, **__: {"results": given.model_impl})
    study = Study(tmp_path, 1, None, None)
    assert PARTS["library"](study) == "transformers"
    assert PARTS["speed"](study) is None
