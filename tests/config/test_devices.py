"""Which device is taken, and what is said where there is none."""

import ctypes
import importlib.util
from types import SimpleNamespace

import pytest

from trouper.config import devices
from trouper.config.args import EngineArgs
from trouper.config.devices import choose_device, cuda_problem
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError


class Driver:
    """libcuda with so many devices, or none at all."""

    def __init__(self, count, status=0, capability=9):
        self.count, self.status, self.capability = count, status, capability

    def cuInit(self, flags):
        return self.status

    def cuDeviceGetCount(self, count):
        count._obj.value = self.count
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert (attribute, device) == (75, 0)
        value._obj.value = self.capability
        return 0


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a GPU, from which a test takes parts away."""
    monkeypatch.delenv("TROUPER_DEVICE")
    (tmp_path / "lib").mkdir()
    for name in ("libtorch_cuda.so", "torch_cuda.dll"):
        (tmp_path / "lib" / name).touch()
    found = {"torch": SimpleNamespace(origin=str(tmp_path / "__init__.py")), "triton": object()}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(1))
    return SimpleNamespace(packages=found, folder=tmp_path / "lib", patch=monkeypatch)


def test_auto_takes_a_gpu_that_can_be_used(machine):
    assert choose_device("auto") == choose_device("cuda") == "cuda"
    assert choose_device("cpu") == "cpu"
    assert choose_device("auto", pools=True) == "cpu"
    machine.patch.setenv("TROUPER_DEVICE", "cpu")
    assert choose_device("auto") == "cpu"
    assert choose_device("cuda") == "cuda"


def test_each_cause_is_named(machine):
    def refused(word):
        assert choose_device("auto") == "cpu"
        with pytest.raises(TrouperValidationError, match=word) as caught:
            choose_device("cuda")
        assert caught.value.parameter == "device"

    machine.patch.setattr(ctypes, "CDLL", lambda name: Driver(0))
    refused("shows no device")
    machine.patch.setattr(ctypes, "CDLL", lambda name: Driver(1, status=100))
    refused("driver status 100")
    machine.patch.setattr(ctypes, "CDLL", lambda name: Driver(1, capability=7))
    refused("compute capability is 7")

    def no_library(name):
        raise OSError(name)

    machine.patch.setattr(ctypes, "CDLL", no_library)
    refused("driver is not installed")
    del machine.packages["triton"]
    refused("triton is not installed")
    for file in machine.folder.iterdir():
        file.unlink()
    refused("has no CUDA")
    del machine.packages["torch"]
    refused("torch is not installed")
    assert cuda_problem() == "torch is not installed"


def test_model_that_pools_is_not_for_gpu(machine):
    with pytest.raises(UnsupportedFeatureError, match="pool"):
        choose_device("cuda", pools=True)


def test_an_unknown_device_is_refused():
    with pytest.raises(TrouperValidationError, match="auto, cpu, cuda"):
        resolve(EngineArgs(device="tpu"))


def test_what_the_device_decides_of_a_config(monkeypatch):
    monkeypatch.setattr(devices, "cuda_problem", lambda: None)
    config = resolve(EngineArgs(device="cuda", gpu_memory_utilization=0.5))
    assert (config.device, config.block_size, config.kv_cache_bytes) == ("cuda", 16, None)
    assert (config.graphs, config.gpu_memory_utilization) == ((), 0.5)
    config = resolve(EngineArgs(device="cuda", enforce_eager=True, kv_cache_memory_bytes=7))
    assert (config.graphs, config.kv_cache_bytes) == (None, 7)
    sizes = EngineArgs(device="cuda", cudagraph_capture_sizes=[4, 1, 4])
    assert resolve(sizes).graphs == (1, 4)
    assert resolve(EngineArgs(device="cuda", cudagraph_capture_sizes=[])).graphs is None
    with pytest.raises(TrouperValidationError, match="at least 1"):
        resolve(EngineArgs(device="cuda", cudagraph_capture_sizes=[0]))


def test_batch_invariance_is_of_the_gpu(monkeypatch):
    with pytest.raises(UnsupportedFeatureError, match="batch_invariant"):
        resolve(EngineArgs(device="cpu", batch_invariant=True))
    monkeypatch.setattr(devices, "cuda_problem", lambda: None)
    assert resolve(EngineArgs(device="cuda", batch_invariant=True)).batch_invariant
    assert not resolve(EngineArgs(device="cuda")).batch_invariant
    monkeypatch.setenv("TROUPER_BATCH_INVARIANT", "1")
    assert resolve(EngineArgs(device="cuda")).batch_invariant
