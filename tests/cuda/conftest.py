"""Whole engines on `device="cuda"`: on the GPU if there is one, and otherwise on one that is emulated."""

import pytest
import torch

pytest.importorskip("triton", reason="no Triton: pip install 'trouper[cuda]'")

HAS_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def machines(monkeypatch):
    """The machines that engines of this test have made; empty on a real GPU."""
    made = []
    if not HAS_GPU:
        from trouper import devices
        from trouper.actors.executor.cuda import runner

        from .emulated import EmulatedMachine

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
