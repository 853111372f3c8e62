"""Tiny models on one thread: a second one only waits, and on a busy machine for a time slice."""

import pytest
import torch

HAS_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def machines(monkeypatch):
    """Engines of `device="cuda"` run on the GPU if there is one, and otherwise on these, one an engine."""
    made = []
    if not HAS_GPU:
        from trouper.actors.executor.runners.cuda import runner
        from trouper.config import devices

        from .emulated_gpu import EmulatedMachine

        def make():
            made.append(EmulatedMachine())
            return made[-1]

        monkeypatch.setattr(devices, "cuda_problem", lambda: None)
        monkeypatch.setattr(runner, "CudaMachine", make)
    return made


def pytest_collection_modifyitems(items):
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
