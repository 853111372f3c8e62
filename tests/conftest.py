"""One async runner per test: anyio for both backends, pytest-trio for trio alone."""

import gc
import inspect
import os
import sys
from pathlib import Path

import hypothesis
import pytest

import trouper.bench
from tests.support.time_limit import (  # noqa: F401  these are hooks
    pytest_handlecrashitem,
    pytest_runtest_call,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    pytest_timeout_set_timer,
)
from trouper.config.devices import cuda_problem

# An installed package has no studies: they come from the checkout, which also holds these tests.
trouper.bench.__path__.append(str(Path(__file__).parents[1] / "bench"))

# Some hundred processes of tests import the source. Where the environment forbids bytecode files, as in many containers, each would
# compile it again: a second of the five that a server needs to start, and half of the time of pytest's collection.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The models are tiny: a second thread has nothing to do, and on a busy machine each barrier with it
# costs a time slice.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `auto` is the CPU in tests, also where there is a GPU: what is meant for it says so.
os.environ.setdefault("TROUPER_DEVICE", "cpu")

# A deadline is a wall clock: on a busy machine any example may miss it.  The examples are the same in every run, so that a commit
# passes or fails; `--hypothesis-profile=random` draws others.
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.register_profile("trouper", deadline=None, derandomize=True)
hypothesis.settings.load_profile("trouper")

# Before anything imports Triton, which reads it when a function is decorated.  The question is asked without torch, whose
# import would take most of the time of a pure test file.
HAS_GPU = cuda_problem() is None
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers():
    """`-n logical`: a process a processor, and four at most, since each comes to hold 1.3 GB."""
    return min(4, (yield))


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


def pytest_collection_modifyitems(items):
    for item in items:
        function = getattr(item, "function", None)
        body = getattr(getattr(function, "hypothesis", None), "inner_test", function)
        marks = [name for name in ("anyio", "trio") if item.get_closest_marker(name)]
        if inspect.iscoroutinefunction(body) and len(marks) != 1:
            raise pytest.UsageError(f"{item.nodeid}: needs exactly one of anyio, trio; has {marks}")


@pytest.fixture
def ordered_dots(monkeypatch):
    """Make Triton's interpreter add in one fixed order, like a GPU; the order of numpy's sums depends on the row's position."""
    if HAS_GPU:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, *_):
        total = d.data.copy()
        left, right = (x.data.astype(total.dtype) for x in (a, b))
        for i in range(left.shape[-1]):
            total += left[..., i : i + 1] * right[..., i : i + 1, :]
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory):
    """Write a tokenizer folder: `make_folder("bytes", chat_template=…)`."""
    # Imported here, since most test files need no tokenizer and should start quickly.
    from tests.support.tokenizers import write_folder

    return lambda kind="bytes", **config: write_folder(
        tmp_path_factory.mktemp("tokenizer"), kind, config
    )


@pytest.fixture(scope="session")
def byte_tokenizer(make_folder):
    from trouper.actors.rendering.tokenizer import Tokenizer

    return Tokenizer.load(make_folder("bytes"))


@pytest.fixture(scope="session")
def metaspace_tokenizer(make_folder):
    from trouper.actors.rendering.tokenizer import Tokenizer

    return Tokenizer.load(make_folder("metaspace"))


def pytest_collection_finish():
    """Keep the tests themselves and all that they import away from the garbage collector.

    They live until the end, and every full collection would visit their millions of objects.
    """
    gc.freeze()
