"""Samples of a model's files: another model in the place of an engine's is found, whatever its shape, without reading it whole."""

import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from trouper.actors.executor.workers import model_files
from trouper.actors.executor.workers.model_files import check_model, sample_model
from trouper.actors.executor.workers.wire import Load
from trouper.actors.executor.workers.worker import Worker
from trouper.config.args import EngineArgs
from trouper.config.model import DEMO_MODEL
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError

from .test_machine_workers import with_dense
from .test_machines import tcp_pair

NAME = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    """A copy of the model, under another path."""
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


def at(path, **changes):
    """The config of an engine with the model of a path."""
    config = resolve(EngineArgs(**changes))
    is_gguf = Path(path).suffix == ".gguf"
    model = msgspec.structs.replace(config.model, path=str(path), is_gguf=is_gguf)
    return msgspec.structs.replace(config, model=model)


def change(folder, names=("",)):
    """Make a fine-tune: the same shapes, other numbers in the tensors with such names."""
    content = bytearray((folder / NAME).read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    for name, tensor in json.loads(content[8:begin]).items():
        if name != "__metadata__" and any(part in name for part in names):
            first, end = (begin + offset for offset in tensor["data_offsets"])
            content[first:end] = bytes(byte ^ 1 for byte in content[first:end])
    (folder / NAME).write_bytes(content)


def test_copy_is_same_model_whatever_its_files_are_called(folder):
    wanted = sample_model(at(DEMO_MODEL))
    assert [(file.name, file.num_bytes) for file in wanted] == [
        (NAME, (DEMO_MODEL / NAME).stat().st_size)
    ]
    (folder / NAME).rename(folder / "weights.safetensors")
    check_model(at(folder), wanted)


@pytest.mark.parametrize("names", [("",), ("q_proj", "v_proj"), ("embed",)])
def test_fine_tune_of_same_shapes_is_refused_with_both_digests(folder, names):
    wanted = sample_model(at(folder))
    change(folder, names)
    (found,) = sample_model(at(folder))
    with pytest.raises(TrouperValidationError) as caught:
        check_model(at(folder), wanted)
    assert (caught.value.parameter, caught.value.value) == ("model", str(folder))
    assert found.num_bytes == wanted[0].num_bytes
    here, there = (f"{x.num_bytes} bytes, digest {x.digest}" for x in (found, wanted[0]))
    assert f"model.safetensors has {here} here, {there} there" in str(caught.value)


def test_another_number_of_files_is_refused(folder):
    wanted = sample_model(at(folder))
    shutil.copy(folder / NAME, folder / "another.safetensors")
    check_model(at(folder), wanted)  # a stray file is not part of the checkpoint
    (folder / NAME).rename(folder / "one.safetensors")
    with pytest.raises(TrouperValidationError, match="2 files here, 1 there"):
        check_model(at(folder), wanted)


def test_the_files_of_a_split_gguf_are_compared(tmp_path):
    files = [tmp_path / f"a-{n:05}-of-00002.gguf" for n in (1, 2)]
    for file in files:
        file.write_bytes(b"GGUF" * 50_000)
    wanted = sample_model(at(files[0]))
    assert [sample.name for sample in wanted] == [file.name for file in files]
    files[1].write_bytes(b"GGUG" * 50_000)
    with pytest.raises(TrouperValidationError, match=r"a-00002-of-00002\.gguf has"):
        check_model(at(files[0]), wanted)


def test_code_that_may_be_run_is_compared(folder):
    (folder / "modeling.py").write_text("a = 1")
    config = msgspec.structs.replace(at(folder), code_path=str(folder))
    wanted = sample_model(config)
    (folder / "modeling.py").write_text("a = 2")
    with pytest.raises(TrouperValidationError, match=r"modeling\.py has 5 bytes"):
        check_model(config, wanted)


def test_dense_modules_of_model_that_pools_are_compared(folder, tmp_path):
    dense = Path(shutil.copytree(folder, tmp_path / "2_Dense"))
    config = with_dense(at(folder), dense)
    wanted = sample_model(config)
    assert len(wanted) == 2
    change(dense)
    with pytest.raises(TrouperValidationError, match="is not the model"):
        check_model(config, wanted)


def test_unreadable_weights_are_left_to_loading(folder, tmp_path):
    assert sample_model(at(DEMO_MODEL, load_format="dummy")) == ()
    assert sample_model(at(tmp_path / "nothing")) == ()
    wanted = sample_model(at(folder))
    (folder / NAME).unlink()
    check_model(at(folder), wanted)
    check_model(at(DEMO_MODEL), ())


def test_little_of_a_large_checkpoint_is_read(tmp_path, monkeypatch):
    num_read, pread = [], os.pread

    def counted(file, num_bytes, offset):
        num_read.append(len(data := pread(file, num_bytes, offset)))
        return data

    monkeypatch.setattr(model_files.os, "pread", counted)
    for number in range(20):
        with open(tmp_path / f"{number}.safetensors", "wb") as file:
            file.truncate(2**30)
    assert len(sample_model(at(tmp_path))) == 20
    assert sum(num_read) == 20 * (2**16 + 3 * 2**12)


def test_a_worker_refuses_another_model_before_it_loads(folder):
    """No torch is imported, and no weight is read."""
    near, far = tcp_pair()
    wanted = sample_model(at(folder))
    change(folder)
    worker = Worker(near)
    with near, far, pytest.raises(TrouperValidationError, match="is not the model"):
        worker._answer(Load(at(folder), files=wanted))
    assert worker._host is None
