"""What a process holds, told apart."""

import argparse
import mmap
import sys

import pytest
import torch

from trouper.bench.studies.models.memory import measure, resident
from trouper.config.model import DEMO_MODEL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's page map")


def test_only_pages_that_were_touched_are_resident():
    # Fresh pages; torch may reuse memory that an earlier test has touched.
    memory = torch.frombuffer(mmap.mmap(-1, 2**26), dtype=torch.uint8)
    before = resident(memory.data_ptr(), memory.nbytes)
    memory[: 2**25] = 1
    assert before < 2**24
    assert 0 <= resident(memory.data_ptr(), memory.nbytes) - 2**25 < 2**23  # pages may be large


def test_the_parts_are_the_whole():
    given = argparse.Namespace(
        model=str(DEMO_MODEL), dtype="bfloat16", quantization=None,
        num_prompts=2, input_len=8, output_len=4,
    )  # fmt: skip
    found = measure(given)
    assert found["weights"] > 5
    assert 0 < found["kv"] < 64
    parts = found["weights"] + found["kv"] + found["else"]
    assert parts == pytest.approx(found["resident"], abs=0.3)
