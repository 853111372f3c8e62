"""trouper's own vision towers compute the rows of transformers' modules, whatever layers, shapes and options a family has."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tests.support.vision import VisionModel, _parts
from trouper.actors.executor.media.projectors import best_shape
from trouper.actors.executor.media.tower import MediaTower, Slices
from trouper.actors.executor.media.vision import KINDS, VisionTower, own_tower, side_of
from trouper.actors.executor.weights import tower as tower_module
from trouper.actors.executor.weights.tower import _filled
from trouper.config.media import FAMILIES
from trouper.errors import TrouperValidationError

torch.manual_seed(0)
SQUARE = {"pixel_values": torch.randn(1, 3, 28, 28)}
TILES = {"pixel_values": torch.randn(1, 3, 3, 28, 28), "image_sizes": torch.tensor([[20, 70]])}
LARGE = {"pixel_values": torch.randn(1, 5, 3, 28, 28), "image_sizes": torch.tensor([[60, 50]])}
PADDED = {
    "pixel_values": torch.randn(1, 3, 3, 28, 28),
    "pixel_attention_mask": torch.ones(1, 3, 28, 28, dtype=torch.int64),
}
PADDED["pixel_attention_mask"][:, 0, 14:] = 0
PADDED["pixel_attention_mask"][:, 1, :, 9:] = 0
PADDED["pixel_values"][:, 2] = 0
WIDE = {"pixel_values": torch.randn(1, 3, 28, 56), "image_sizes": torch.tensor([[28, 42]])}
INTERN: dict[str, Any] = {
    "attention_bias": True,
    "norm_type": "rms_norm",
    "use_mean_pooling": False,
}
# The family, what differs from its tiny model, and the arrays of an image.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "clip": ("llava", {"vision_feature_layer": -2}, SQUARE),
    "class token": ("llava", {"vision_feature_select_strategy": "full"}, SQUARE),
    "two layers": ("llava", {"vision_feature_layer": [0, -1]}, SQUARE),
    "activation": ("llava", {"projector_hidden_act": "relu"}, SQUARE),
    "next": ("llava_next", {}, TILES),
    "next, large": ("llava_next", {}, LARGE),
    "one vision": ("llava_onevision", {"vision_aspect_ratio": "anyres_max_1"}, LARGE),
    "one of several": (
        "llava_onevision", {}, {**TILES, "pixel_values": TILES["pixel_values"][:, :1], "batch_num_images": torch.tensor([2])},
    ),
    "idefics3": ("idefics3", {}, PADDED),
    "smolvlm": ("smolvlm", {}, PADDED),
    "internvl": ("internvl", {}, {"pixel_values": torch.randn(2, 3, 28, 28)}),
    "internvl, an inner layer": ("internvl", {"vision_feature_layer": 1}, SQUARE),
    "internvl, norms": ("internvl", {"vision_config": INTERN}, SQUARE),
    "internvl, stretched": ("internvl", {}, {"pixel_values": torch.randn(1, 3, 56, 56)}),
    "mistral3": ("mistral3", {}, WIDE),
    "pixtral": ("pixtral", {}, WIDE),
    "gemma3": ("gemma3", {}, SQUARE),
    "paligemma": ("paligemma", {}, SQUARE),
}  # fmt: skip


def library_model(kind: str, changes: dict[str, Any]) -> Any:
    """Make transformers' tower of a family with random weights, and a text model of one layer."""
    fields = _parts(kind)[0].to_dict()
    for name, value in changes.items():
        fields[name] = {**fields[name], **value} if isinstance(value, dict) else value
    config = transformers.AutoConfig.for_model(**fields)
    config.text_config.num_hidden_layers = 1
    torch.manual_seed(1)
    mapping: Any = transformers.AutoModelForImageTextToText._model_mapping
    model = mapping[type(config)](config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model


def few_fields(config: Any) -> dict[str, Any]:
    """Return the fields that differ from the library's defaults, as in old files, and two without which the library computes."""
    fields, kept = config.to_dict(), ("model_type", "image_size", "image_grid_pinpoints")
    for part, found in ((fields, config), (fields["vision_config"], config.vision_config)):
        for name, value in type(found).default_config_fields().items():
            if name not in kept and part.get(name) == value:
                del part[name]
    return fields


def filled(model: Any, folder: Any) -> VisionTower:
    """Save a model, and read its tower as an engine does."""
    model.save_pretrained(folder)
    given: Any = SimpleNamespace(load_format="auto", model=SimpleNamespace(path=str(folder)))
    with torch.device("meta"):
        own = own_tower(few_fields(model.config), 64)
    assert own is not None
    return _filled(own, given, torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_library(case, tmp_path):
    kind, changes, arrays = CASES[case]
    model = library_model(kind, changes)
    with torch.no_grad():
        found = model.model.get_image_features(**arrays).pooler_output
        wanted = torch.cat([part.reshape(-1, 64) for part in found])
        own = filled(model, tmp_path)
        mine = own(**arrays)
        is_pixtral = model.config.vision_config.model_type == "pixtral"
        family = FAMILIES["mistral3" if is_pixtral else model.config.model_type]
        media: Any = SimpleNamespace(modality="image", family=family)
        # The trial at start needs fields of the configuration, too.
        MediaTower(own, media, torch.float32, 64, Slices()).check()
    assert mine.shape == wanted.shape
    assert (mine - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_the_library(kind):
    name = kind if kind.endswith("_model") or kind == "pixtral" else f"{kind}_vision"
    theirs = transformers.CONFIG_MAPPING[name]()
    for field, value in KINDS[kind].defaults.items():
        wanted = getattr(theirs, field)
        if field == "head_dim":
            assert (value, wanted) == (None, theirs.hidden_size // theirs.num_attention_heads)
        else:
            assert (side_of(wanted) if field.endswith("_size") else wanted) == value


def test_fields_of_other_towers_have_no_effect(tmp_path):
    extra = {"attention_bias": False, "use_mean_pooling": True, "norm_type": "rms_norm"}
    model = library_model("paligemma", {"vision_config": extra})
    with torch.no_grad():
        wanted = model.model.get_image_features(**SQUARE).pooler_output.reshape(-1, 64)
        mine = filled(model, tmp_path)(**SQUARE)
    assert (mine - wanted).abs().max() < 2e-5 * wanted.abs().max()


def test_rotation_has_the_base_beside_its_parameters():
    fields = _parts("pixtral")[0].to_dict()
    fields["vision_config"] |= {"rope_parameters": {"rope_type": "axial"}, "rope_theta": 500.0}
    with torch.device("meta"):
        own = own_tower(fields, 64)
    assert own is not None
    assert own._rotary._theta == 500.0


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("llava", {"vision_feature_layer": -4}, "vision_feature_layer is -4, but the tower has 2"),
        ("llava", {"vision_feature_layer": []}, r"vision_feature_layer is \[\]"),
        ("llava", {"vision_feature_select_strategy": "patch"}, "vision_feature_select_strategy"),
        ("internvl", {"vision_config": {"image_size": [28, 56]}}, "height and width of"),
        ("gemma3", {"vision_config": {"num_attention_heads": 0}}, "ZeroDivisionError"),
        ("smolvlm", {"scale_factor": None}, "TypeError"),
    ],
)
def test_configurations_of_no_tower_are_refused(kind, changes, problem):
    config = _parts(kind)[0]
    fields = config.to_dict()
    for name, value in changes.items():
        fields[name] = {**fields[name], **value} if isinstance(value, dict) else value
    architecture = transformers.AutoModelForImageTextToText._model_mapping[type(config)].__name__
    described = SimpleNamespace(
        source_config=fields, architecture=architecture, hidden_size=64, path="folder"
    )
    given: Any = SimpleNamespace(model=described, dtype="float32", load_format="auto")
    media: Any = SimpleNamespace(folder="folder")
    with pytest.raises(TrouperValidationError, match=f"does not describe a tower.*{problem}"):
        tower_module.load_tower(given, media)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llava", {"vision_config": {"model_type": "dinov2"}}),
        ("llava", {"vision_config": {"hidden_act": "gelu_new"}}),
        ("llava", {"vision_feature_select_strategy": "patch"}),
        ("pixtral", {"vision_config": {"rope_scaling": {"type": "linear", "factor": 2.0}}}),
        ("internvl", {"vision_feature_layer": [-2, -1]}),
        ("llava_next", {"image_grid_pinpoints": None}),
        ("internvl", {"vision_config": {"use_qk_norm": True}}),
        ("mistral3", {"text_config": {}}),
        ("qwen2_vl", {}),
    ],
)
def test_other_towers_are_left_to_the_library(kind, changes):
    fields = _parts(kind)[0].to_dict()
    for name, value in changes.items():
        is_merged = isinstance(value, dict) and value
        fields[name] = {**fields[name], **value} if is_merged else value
    assert own_tower(fields, 64) is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: {**t, "linear_1.weight": None}, "lacks 1 tensors of the tower: projector.linear_1"),
        (lambda t: {**t, "linear_1.weight": t["linear_1.weight"][:, 1:]}, "has misshapen 1"),
        (lambda t: {**t, "linear_1.weight": t["linear_1.weight"].to(torch.float8_e4m3fn)}, "has quantized 1"),
        # Another release of the library had this name.
        (lambda t: {**t, "model.connector.linear_1.weight": t["linear_1.weight"]}, "has duplicates among 2 .*connector.*projector"),
    ],
)  # fmt: skip
def test_damaged_checkpoints_are_refused(change, problem, tmp_path):
    from safetensors.torch import load_file, save_file

    model = library_model("llava", {})
    filled(model, tmp_path)
    place = "linear_1.weight"
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith(place))
    for found, tensor in change({place: tensors.pop(name)}).items():
        if tensor is not None:
            tensors[name if found == place else found] = tensor.clone().contiguous()
    save_file(tensors, file)
    given: Any = SimpleNamespace(load_format="auto", model=SimpleNamespace(path=str(tmp_path)))
    own = own_tower(model.config.to_dict(), 64)
    assert own is not None
    with pytest.raises(TrouperValidationError, match=problem):
        _filled(own, given, torch.float32)


@pytest.mark.parametrize("size", [(20, 70), (60, 50), (28, 28), (1, 200), (300, 299)])
def test_an_image_gets_the_shape_of_the_library(size):
    from transformers.image_processing_utils import select_best_resolution

    shapes = [[28, 56], [56, 28], [56, 56], [28, 84], [84, 28]]
    assert best_shape(size, shapes) == select_best_resolution(size, shapes)


PROGRAM = """
import sys
from trouper import LLM

if __name__ == "__main__":
    options = {"dtype": "float32", "num_gpu_blocks_override": 16, "block_size": 16, "max_model_len": 64}
    with LLM(sys.argv[1], **options):
        print(*sys.modules)
"""


@pytest.mark.slow
def test_an_engine_that_sees_imports_no_library(tmp_path):
    """Check the start only: another process imports the library, to decode files."""
    folder, program = tmp_path / "model", tmp_path / "program.py"
    VisionModel("smolvlm", folder)
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "trouper.actors.executor.media.vision" in found
    assert not [name for name in found if name.split(".")[0] in ("transformers", "scipy")]
