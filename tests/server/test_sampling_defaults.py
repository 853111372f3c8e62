"""How a model is sampled where nobody says: by the file that it comes in and by who asks; and the page about it."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import trouper
from tests.server import sampling_page
from trouper.config.args import EngineArgs
from trouper.config.generation import (
    COMMON_SAMPLING,
    GGUF_FIELDS,
    describe_sampling,
    gguf_sampling,
    sampling_source,
)
from trouper.config.gguf.header import Gguf
from trouper.config.model import ModelConfig
from trouper.errors import TrouperValidationError
from trouper.frontends.cli.options import SamplingOptions
from trouper.frontends.server.generation.request_fields import Generating
from trouper.kernels.reference.sampling import PARAMETERS
from trouper.params import SamplingParams
from trouper.sampling_fields import BODY_FIELDS, FIELDS, NOT_IMPLEMENTED, DeviceFields

PAGE = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()
FRONTENDS = ("library", "terminal", "server", "batch")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 1000,
    "eos_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    def write(generation=None):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return str(tmp_path)

    return write


def gguf(**keys):
    metadata = {f"general.sampling.{key}": value for key, value in keys.items()}
    return Gguf(Path("model.gguf"), metadata, {})


def defaults(path, frontend, **options):
    return ModelConfig.load(EngineArgs(path, **options), frontend).default_sampling


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": 2, "bos_token_id": 1}])
def test_terminal_has_defaults_for_silent_folder(folder, generation):
    path = folder(generation)
    found = {frontend: defaults(path, frontend) for frontend in FRONTENDS}
    assert found == {key: {} for key in FRONTENDS} | {"terminal": COMMON_SAMPLING}


def test_folder_that_names_its_sampling_is_sampled_so_everywhere(folder):
    path = folder({"temperature": 0.6, "top_p": 0.9})
    for frontend in FRONTENDS:
        assert defaults(path, frontend) == {"temperature": 0.6, "top_p": 0.9}
        assert defaults(path, frontend, generation_config="vllm") == {}


def test_overrides_win_over_all_defaults(folder):
    override = {"temperature": 0.3, "max_new_tokens": 7}
    found = defaults(folder(), "terminal", override_generation_config=override)
    assert found == COMMON_SAMPLING | {"temperature": 0.3, "max_tokens": 7}
    for source in ("vllm", "auto"):
        options = {"generation_config": source, "override_generation_config": override}
        assert defaults(folder(), "server", **options) == {"temperature": 0.3, "max_tokens": 7}


def test_a_named_folder_alone_says_how_to_sample(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_k": 4}')
    path = folder({"temperature": 0.6})
    assert defaults(path, "terminal", generation_config=str(other)) == {"top_k": 4}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"temprature": 1.0}, "'temprature' would have no effect; did you mean temperature"),
        ({"max_tokens": 5}, "did you mean max_new_tokens"),
        ({"do_sample": False}, "temperature 0 is greedy"),
        ({"num_beams": 4}, "'num_beams' would have no effect"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_override_that_cannot_hold_is_refused_by_name(folder, override, message):
    with pytest.raises(TrouperValidationError, match=message):
        defaults(folder(), "server", override_generation_config=override)


def test_gguf_file_without_keys_has_common_defaults_but_for_library():
    for frontend in FRONTENDS:
        found = sampling_source("auto", {}, gguf(), frontend)
        assert found.fields == ({} if frontend == "library" else COMMON_SAMPLING)
        assert sampling_source("vllm", {}, gguf(temp=0.5), frontend).fields == {}


def test_keys_of_gguf_file_win_over_common_defaults():
    header = gguf(temp=0.6000000238418579, top_k=20, penalty_repeat=1.0499999523162842)
    found = sampling_source("auto", {}, header, "server")
    wanted = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert found.fields == COMMON_SAMPLING | wanted
    assert found.of == "the GGUF file"
    assert sampling_source("auto", {}, header, "library").fields == {}


def test_llama_cpps_ways_to_switch_off_are_understood():
    found = gguf_sampling(gguf(temp=-1.0, top_k=-1, top_p=1.5, min_p=-0.5))
    assert found == {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}
    SamplingParams(**found)


def test_keys_without_a_counterpart_are_named():
    found = sampling_source("auto", {}, gguf(temp=0.5, mirostat=2, xtc_probability=0.0), "terminal")
    assert found.of == "the GGUF file; not applied: general.sampling.mirostat"
    with pytest.raises(TrouperValidationError, match=r"general.sampling.temp"):
        gguf_sampling(gguf(temp="hot"))


def test_the_keys_are_those_that_converters_write():
    keys = pytest.importorskip("gguf").Keys.General
    written = {value for name, value in vars(keys).items() if name.startswith("SAMPLING_")}
    assert {f"general.sampling.{key}" for key in GGUF_FIELDS} <= written


def test_sampling_is_described_by_what_is_not_neutral():
    assert describe_sampling({}) == "temperature 1"
    assert describe_sampling({"temperature": 0, "top_k": 40}) == "greedy (temperature 0)"
    text = "temperature 0.8, top_k 40, top_p 0.95, min_p 0.05"
    assert describe_sampling(COMMON_SAMPLING) == text


def test_page_has_the_table_of_the_declarations():
    page = sampling_page.PAGE.read_text()
    assert sampling_page.rendered(page) == page, "python -m tests.server.sampling_page writes it"


def test_every_field_is_declared_once():
    assert set(SamplingParams.__struct_fields__) == FIELDS.keys() | NOT_IMPLEMENTED.keys()
    assert not FIELDS.keys() & NOT_IMPLEMENTED.keys()


def test_declared_fields_exist_where_they_are_passed_on():
    assert set(BODY_FIELDS) <= set(Generating.__struct_fields__)
    options = {field.name for field in dataclasses.fields(SamplingOptions)}
    assert {name for name, field in FIELDS.items() if field.help} <= options


def test_a_search_decides_about_every_field_of_a_body():
    """A field that a search neither follows nor refuses would be ignored without an error."""
    decided = {name for name, field in FIELDS.items() if field.beam_search}
    own = {"n", "temperature"}
    without_effect = {"seed", "spaces_between_special_tokens", "stream_interval"}
    assert set(BODY_FIELDS) == decided | own | without_effect


def test_the_page_names_the_common_defaults():
    for name, value in COMMON_SAMPLING.items():
        assert f"{name} {value}" in PAGE
    for key, field in GGUF_FIELDS.items():
        assert f"`general.sampling.{key}` | `{field}`" in PAGE


@pytest.mark.parametrize(
    ("folders", "kernels", "elsewhere"),
    [
        # The CPU subtracts two penalties before its kernel runs.
        (
            ("actors/executor/sampling", "actors/executor/runners/cpu"),
            "kernels/cpu",
            {"frequency", "presence"},
        ),
        (("actors/executor/runners/cuda",), "kernels/cuda", set()),
    ],
    ids=["cpu", "cuda"],
)
def test_devices_read_every_field_of_theirs(folders, kernels, elsewhere):
    def source(*folders):
        root = Path(trouper.__file__).parent
        return "".join(
            path.read_text() for folder in folders for path in sorted((root / folder).glob("*.py"))
        )

    read = source("kernels/reference", *folders)
    # The scheduler turns prompt logprobs into the rows of a plan.
    fields = set(DeviceFields.__struct_fields__) - {"prompt_logprobs"}
    # `Sampling.repetition` is 1 for requests without a penalty.
    names = {name.replace("repetition_penalty", "repetition") for name in fields}
    assert {name for name in names if not re.search(rf"""[."']{name}\b""", read)} == set()
    kernel = source(kernels)
    assert {name for name in PARAMETERS if f'WORD["{name}"]' not in kernel} == elsewhere
