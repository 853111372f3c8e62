"""Kernels for aarch64: compiled on any machine, and run where qemu and a compiler for it are."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.cpu.linear.integer_rows import words_of_group
from trouper.kernels.cpu.linear.quantization import IntegerWeight, packed
from trouper.kernels.reference.linear import integer_linear_reference
from trouper.kernels.reference.norms import silu_and_mul_reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not units.is_available(), reason="needs llvmlite"),
]
DRIVER = Path(__file__).parents[1] / "aarch64_driver.c"
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
LINE = 64


def compiler():
    """The command of a C compiler for aarch64, or None."""
    if found := shutil.which("aarch64-linux-gnu-gcc"):
        return [found]
    zig = shutil.which("zig") or shutil.which("python-zig")  # the latter of PyPI's ziglang
    return zig and [zig, "cc", "-target", "aarch64-linux-musl"]


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The folder of compiled kernels, and the functions that each calls."""
    folder = tmp_path_factory.mktemp("aarch64")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.aarch64_objects", folder],
        check=True, stdout=subprocess.PIPE, env={**os.environ, "TROUPER_KERNELS": "portable"},
    )  # fmt: skip
    return folder, json.loads(done.stdout)


def test_portable_kernels_compile_for_aarch64_and_call_nothing(objects):
    folder, called = objects
    assert called
    for name, functions in called.items():
        assert functions == [], name
        assert (folder / f"{name}.o").read_bytes()[:20].endswith(b"\xb7\x00"), name  # EM_AARCH64


@pytest.fixture(scope="module")
def run(objects):
    """Run a kernel under qemu; tensors among its arguments are the memory that it reads and writes."""
    if EMULATOR is None or compiler() is None:
        pytest.skip("needs qemu-aarch64 and a compiler for aarch64")
    folder = objects[0]

    def run(name, num_items, *arguments):
        program = folder / name
        if not program.exists():
            flags = ["-O1", "-ffreestanding", "-nostdlib", "-static", f"-DKERNEL={name}"]
            command = [*compiler(), *flags, DRIVER, folder / f"{name}.o", "-o", program]
            subprocess.run(command, check=True, env={**os.environ, "HOME": str(folder)})
        words, memory, places = [], b"", []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                places.append((argument, len(memory)))
                words += 1, len(memory)
                content = argument.contiguous().view(torch.uint8).numpy().tobytes()
                memory += content + bytes(-len(content) % LINE)
            else:
                words += 0, argument
        header = struct.pack(f"<{3 + len(words)}q", num_items, len(arguments), len(memory), *words)
        done = subprocess.run(
            [EMULATOR, program], input=header + memory, check=True, stdout=subprocess.PIPE
        )
        assert len(done.stdout) == len(memory)
        for tensor, place in places:
            content = bytearray(done.stdout[place : place + tensor.nbytes])
            tensor.copy_(torch.frombuffer(content, dtype=tensor.dtype).view(tensor.shape))

    return run


@pytest.mark.parametrize(("fmt", "num_rows"), [("int4", 1), ("int4", 6), ("int8", 1), ("int8", 6)])
def test_integers_on_aarch64_equal_the_formula(run, fmt, num_rows):
    torch.manual_seed(0)
    num_out, num_in, group, high = 80, 192, 32, 8 if fmt == "int4" else 128
    groups = (num_out, num_in // group)
    weight = IntegerWeight(
        fmt,
        torch.bfloat16,
        torch.randint(-high, high, (num_out, num_in), dtype=torch.int8),
        (torch.randn(groups) / high).bfloat16(),
        torch.randint(-8, 9, groups, dtype=torch.int8) if fmt == "int4" else None,
        torch.randn(groups) if fmt == "int8" else None,
    )
    x = torch.randn(num_rows, num_in).bfloat16()
    rows = torch.zeros(num_rows, num_in // group * words_of_group(group), dtype=torch.int32)
    run(f"rows_of_{fmt}", num_rows, x, num_in // 2, rows, num_in // 2)
    numbers, scales, zeros, minima = packed(weight)[:4]
    y = torch.full((num_rows, num_out), torch.nan).bfloat16()
    parts = [0 if part is None else part for part in (zeros, minima)]
    sizes = num_rows, num_in // 2, num_out // 16, num_out // 16, group // 2, 1
    scratch, arguments = torch.zeros_like(rows), (x, num_in // 2, rows, numbers, scales, *parts, 0)
    run(f"matmul_of_{fmt}", -(-num_out // 64), *arguments, y, *sizes, scratch, scratch.nbytes)
    assert torch.equal(y, integer_linear_reference(x, weight))


def test_activations_on_aarch64_equal_the_reference(run):
    torch.manual_seed(0)
    gate_up, y = torch.randn(3, 2 * 48), torch.full((3, 48), torch.nan)
    run("act_and_mul", 3, gate_up, y, 48, 48)
    torch.testing.assert_close(y, silu_and_mul_reference(gate_up), rtol=1e-5, atol=1e-6)
