"""What `model` may name: folders, GGUF files in them and in repositories, and everything else by its error."""

import json
import os
import socket
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from trouper.config.args import EngineArgs
from trouper.config.checkpoint.model_path import model_path
from trouper.config.gguf.header import is_gguf, read_gguf
from trouper.config.gguf.names import choose_gguf, gguf_models
from trouper.config.model import ModelConfig
from trouper.errors import TrouperValidationError

SPLIT = [f"X-Q4_K_M-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
PLAIN = ["config.json", "model.safetensors"]


class Hub:
    """A hub of one repository, whose snapshot is a folder."""

    def __init__(self, folder, files):
        self.files, self.is_reached, self.folder = files, True, folder / "snapshot"

    def model_info(self, _api, repo_id, **_):
        if not self.is_reached:
            raise httpx2.ConnectError("no route")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def snapshot_download(self, repo_id, *, allow_patterns, local_files_only=False, **_):
        names = [n for n in self.files if any(fnmatchcase(n, each) for each in allow_patterns)]
        if not self.is_reached or local_files_only:
            if not all((self.folder / name).exists() for name in names) or not self.fetched:
                raise LocalEntryNotFoundError("not there")
            return str(self.folder)
        for name in names:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(b"GGUF" if name.endswith(".gguf") else b"{}")
        return str(self.folder)

    @property
    def fetched(self):
        files = [file for file in self.folder.rglob("*") if file.is_file()]
        return sorted(file.relative_to(self.folder).as_posix() for file in files)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    def make(*files):
        found = Hub(tmp_path, list(files))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", found.snapshot_download)
        api = huggingface_hub.HfApi
        monkeypatch.setattr(api, "model_info", lambda *a, **k: found.model_info(*a, **k))
        return found

    return make


def place(model, **changes):
    return model_path(EngineArgs(model, **changes))


@pytest.mark.parametrize(
    ("quantization", "wanted"),
    [
        ("Q4_K_M", "x-q4_k_m.gguf"), ("q4_k_m", "x-q4_k_m.gguf"), ("UD-Q4_K_XL", "x-UD-Q4_K_XL.gguf"),
        ("Q4_K_XL", "x-UD-Q4_K_XL.gguf"), ("F16", "x.f16.gguf"), ("BF16", "x-BF16.gguf"),
        ("Q8_0", "x_Q8_0.gguf"), ("IQ4_XS", "IQ4_XS/x.gguf"), ("x-BF16.gguf", "x-BF16.gguf"),
        ("IQ4_XS/x", "IQ4_XS/x.gguf"), ("Q6_K", "Q6_K/x-Q6_K-00001-of-00002.gguf"),
    ],
)  # fmt: skip
def test_quant_matches_whole_parts_of_name(hub, quantization, wanted):
    files = [
        "README.md", "x-q4_k_m.gguf", "x-Q4_K_S.gguf", "x-UD-Q4_K_XL.gguf", "x.f16.gguf", "x-BF16.gguf", "x_Q8_0.gguf",
        "IQ4_XS/x.gguf", "Q6_K/x-Q6_K-00001-of-00002.gguf", "Q6_K/x-Q6_K-00002-of-00002.gguf",
        "mmproj-F16.gguf", "mmproj-x-BF16.gguf", "x-imatrix.gguf",
    ]  # fmt: skip
    hub = hub(*files)
    assert place(f"org/x:{quantization}") == hub.folder / wanted
    assert len(hub.fetched) == (2 if "Q6_K" in wanted else 1)
    hub.is_reached = False
    assert place(f"org/x:{quantization}") == hub.folder / wanted
    for name in files:
        (hub.folder / name).parent.mkdir(exist_ok=True)
        (hub.folder / name).touch()
    assert place(f"{hub.folder}:{quantization}") == hub.folder / wanted


@pytest.mark.parametrize(
    ("quantization", "rule"),
    [
        ("Q4_K", r"no model matches Q4_K among its GGUF files: a-IQ4_K\.gguf, a-Q4_K_M\.gguf, a-Q4_K_S\.gguf, b-Q4_K_M"),
        ("Q4_K_M", r"Q4_K_M matches several of its GGUF files: a-Q4_K_M\.gguf, b-Q4_K_M\.gguf"),
        ("", r"several models among its GGUF files; choose one with org/x:QUANT: a-IQ4_K"),
    ],
)  # fmt: skip
def test_quant_of_none_or_several_lists_files(quantization, rule):
    names = ["a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "b-Q4_K_M.gguf", "a-IQ4_K.gguf"]
    with pytest.raises(TrouperValidationError, match=rule):
        choose_gguf(names, quantization, "org/x")
    assert choose_gguf(names, "a-Q4_K_M", "org/x") == ["a-Q4_K_M.gguf"]


def test_split_is_one_model_and_files_of_no_other():
    others = ["X-Q4_K_M-00001-of-00002.gguf", "X-Q4_K_M.gguf", "X-Q4_K_M-b-00002-of-00003.gguf"]
    assert gguf_models(SPLIT[::-1]) == {"X-Q4_K_M": SPLIT}
    found = sorted(gguf_models([*SPLIT, *others]).values())
    assert found == [others[:1], SPLIT, others[1:2]]


def test_split_in_folder_of_repository_is_fetched_whole(hub):
    hub = hub("README.md", *(f"Q4_K_M/{name}" for name in SPLIT), "Q8_0/X-Q8_0.gguf")
    assert place("org/x:Q4_K_M") == hub.folder / "Q4_K_M" / SPLIT[0]
    assert hub.fetched == [f"Q4_K_M/{name}" for name in SPLIT]


def test_names_patterns_are_fetched_unchanged(hub):
    hub = hub("x[1]-Q8_0.gguf", "x1-Q4_0.gguf")
    assert place("org/x:Q8_0") == hub.folder / "x[1]-Q8_0.gguf"
    assert hub.fetched == ["x[1]-Q8_0.gguf"]


@pytest.mark.parametrize("extra", [[], ["config.json"]])
def test_repository_with_several_gguf_files_lists_them(hub, extra):
    one = hub(*extra, "README.md", "X-Q8_0.gguf", "mmproj-F16.gguf")
    for one.is_reached in (True, False):
        assert place("org/x") == one.folder / "X-Q8_0.gguf"
    hub(*extra, "X-Q8_0.gguf", "X-Q4_0.gguf")
    with pytest.raises(
        TrouperValidationError, match=r"choose one with org/x:QUANT: X-Q4_0\.gguf, X-Q8"
    ):
        place("org/x")


def test_safetensors_win_unless_gguf_is_asked_for(hub):
    hub = hub(*PLAIN, "X-Q8_0.gguf")
    assert place("org/x") == hub.folder
    assert place("org/x", load_format="gguf") == hub.folder / "X-Q8_0.gguf"
    assert place(f"{hub.folder}", load_format="gguf") == hub.folder / "X-Q8_0.gguf"
    assert place(f"{hub.folder}") == hub.folder


def test_a_repository_without_gguf_files_says_so(hub):
    hub(*PLAIN)
    for model, changes in (("org/x:Q4_1", {}), ("org/x", {"load_format": "gguf"})):
        with pytest.raises(TrouperValidationError, match=r"no GGUF files.*org/x"):
            place(model, **changes)
    hub("README.md")
    with pytest.raises(TrouperValidationError, match=r"neither config\.json nor GGUF files"):
        place("org/x")


def test_offline_quant_not_fetched_says_what_was(hub):
    hub = hub("X-Q8_0.gguf", "X-Q4_0.gguf")
    place("org/x:Q8_0")
    hub.is_reached = False
    with pytest.raises(
        TrouperValidationError,
        match=r"no model matches Q4_0 among the downloaded .* \(the hub cannot be",
    ):
        place("org/x:Q4_0")
    (hub.folder / "X-Q8_0.gguf").unlink()
    with pytest.raises(TrouperValidationError, match="hub cannot be reached"):
        place("org/x:Q4_0")


def test_id_without_slash_is_one_of_hub(hub):
    hub = hub(*PLAIN, "x-Q8_0.gguf")
    assert place("gpt2") == hub.folder
    assert place("gpt2:Q8_0") == hub.folder / "x-Q8_0.gguf"


def test_unknown_short_name_is_shown_whole_and_explained(hub):
    hub(*PLAIN, "x-Q8_0.gguf")
    with pytest.raises(TrouperValidationError, match=r"ORG/NAME:QUANT.*'qwen2\.5:0\.5b'"):
        place("qwen2.5:0.5b")
    with pytest.raises(TrouperValidationError, match="'org/x:Q2_K'") as caught:
        place("org/x:Q2_K")
    assert "Ollama" not in str(caught.value)
    with pytest.raises(TrouperValidationError, match="without the address: ORG/NAME"):
        place("hf.co/org/x:Q8_0")


def test_file_of_another_name_is_known_by_its_first_bytes(tmp_path):
    blob = tmp_path / "sha256-0"
    blob.write_bytes(b"GGUF")
    assert place(str(blob)) == blob
    assert is_gguf(blob)
    blob.write_bytes(b"GGML")
    with pytest.raises(TrouperValidationError, match="not a GGUF file"):
        place(str(blob))


@pytest.mark.parametrize("name", ["x", "x.gguf"])
def test_pipes_and_sockets_are_refused_without_a_wait(tmp_path, name, monkeypatch):
    os.mkfifo(tmp_path / name)
    (tmp_path / "s").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(tmp_path / "s")
        listener.bind(name)
        for path in (tmp_path / name, tmp_path / "s" / name):
            with pytest.raises(TrouperValidationError, match="nor a regular file"):
                place(str(path))
            assert is_gguf(path) is (name == "x.gguf")
            with pytest.raises(TrouperValidationError, match=r"regular file|cannot be read"):
                read_gguf(path)


def test_a_folder_may_have_any_name(tmp_path):
    folder = tmp_path / "x.gguf"
    folder.mkdir()
    with pytest.raises(TrouperValidationError, match=r"no config\.json in the model folder"):
        ModelConfig.load(EngineArgs(str(folder)))
    (folder / "config.json").write_text(json.dumps({}))
    with pytest.raises(TrouperValidationError, match="'architectures'"):
        ModelConfig.load(EngineArgs(str(folder)))
    assert not is_gguf(folder)
    assert place(f"{folder}") == Path(folder)


@pytest.mark.parametrize("form", ["{folder}/typo.gguf", "./typo.gguf", "models/typo.gguf"])
def test_missing_file_is_named_as_file_with_those_beside_it(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for folder in (tmp_path, tmp_path / "models"):
        (folder / "type.gguf").write_bytes(b"GGUF")
    with pytest.raises(TrouperValidationError, match=r"no such file; \S+ has type\.gguf"):
        place(form.format(folder=tmp_path))
