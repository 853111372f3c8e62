"""Kernels run on the GPU if there is one, and otherwise in Triton's interpreter, on the same tests.

The interpreter rounds float32 to bfloat16 by cutting bits off; here it rounds as hardware does.
"""

import numpy as np
import pytest
import torch

from tests.support.interpreter import hasten_interpreter

triton = pytest.importorskip("triton", reason="no Triton")

HAS_GPU = torch.cuda.is_available()


@pytest.fixture
def device():
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    if HAS_GPU:
        yield
        return
    hasten_interpreter()
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cut = InterpreterBuilder.cast_impl

    def cast(self, source, target):
        if (source.dtype.scalar, target.scalar) != (
            triton.language.float32,
            triton.language.bfloat16,
        ):
            return cut(self, source, target)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16  # to nearest, ties to even
        rounded = np.where(np.isnan(source.data), 0x7FC0, rounded)
        return TensorHandle(rounded.astype(np.uint16), target.scalar)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)
    monkeypatch.setattr(InterpreterBuilder, "create_fp_trunc", cast)
    with np.errstate(all="ignore"):  # lanes that are masked compute too
        yield


def pytest_collection_modifyitems(items):
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
