"""The language of the kernels, instruction by instruction, against numpy."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from trouper.kernels.codegen.launch import compiled, float_bits
from trouper.kernels.codegen.units import LANES

machine_code = pytest.importorskip("trouper.kernels.codegen.compiler")


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    """Disable the cache on disk, because the kernels of different tests share names."""
    monkeypatch.setattr(machine_code, "cache_folder", lambda: None)


def run(write, *arrays, num_items=1):
    compiled.__wrapped__(write)(num_items, *(a.ctypes.data for a in arrays))


def test_loops_branches_and_variables():
    def collatz(code):
        (out,) = code.arguments(1)
        out = code.pointer(out, "i64")
        for n in code.work_items():
            x, steps, more = code.var(n), code.var(0), code.var(0)
            more.set(code.select(x > 1, 1, 0))
            for _ in code.while_(code.var(0), more):
                is_odd = (x % 2).equals(1)
                half = x // 2
                with code.when(is_odd):
                    x.set(3 * x + 1)
                x.set(code.select(is_odd, x, half))
                steps.set(steps + 1)
                more.set(code.select(x > 1, 1, 0))
            total = code.var(0)
            for i in code.loop(0, steps, 2):
                total.set(total + i)
            out[2 * n], out[2 * n + 1] = steps, total

    def expected(n):
        steps = 0
        while n > 1:
            n, steps = 3 * n + 1 if n % 2 else n // 2, steps + 1
        return [steps, sum(range(0, steps, 2))]

    found = np.zeros(60, dtype=np.int64)
    run(collatz, found, num_items=30)
    assert found.tolist() == [x for n in range(30) for x in expected(n)]


def test_exp2_over_all_of_its_range():
    def kernel(code):
        x, y = (code.pointer(a, "f32") for a in code.arguments(2))
        for i in code.work_items():
            y.store(i * 16, code.exp2(x.load(i * 16)))

    x = np.linspace(-140, 130, 16 * 500, dtype=np.float32)
    x[:4] = -np.inf, np.inf, np.nan, -126.0
    y = np.empty_like(x)
    run(kernel, x, y, num_items=500)
    assert y[:4].tolist()[:2] == [0.0, 2.0**127]
    assert math.isnan(y[2])
    expected = np.exp2(np.minimum(x[3:].astype(np.float64), 127.0))
    is_small = x[3:] < -126
    np.testing.assert_allclose(y[3:][~is_small], expected[~is_small], rtol=3e-7)
    assert not y[3:][is_small].any()


def test_sums_transposition_and_pairs():
    def kernel(code):
        x, sums, columns, words = (code.pointer(a, "f32") for a in code.arguments(4))
        for _ in code.work_items():
            rows = [x.load(16 * i) for i in range(16)]
            sums.store(0, code.sums8(rows[:8]))
            sums[8], sums[9] = code.reduce_sum(rows[8]), code.reduce_max(rows[8])
            for i, column in enumerate(code.transpose(rows)):
                columns.store(16 * i, column)
            words.of("i32").store(0, code.interleave_bf16(rows[0], rows[1]))

    x = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    sums, columns = np.zeros(16, np.float32), np.zeros((16, 16), np.float32)
    words = np.zeros(16, np.uint32)
    run(kernel, x, sums, columns, words)
    np.testing.assert_allclose(sums[:9], x[:9].sum(-1), atol=1e-5)
    assert sums[9] == x[8].max()
    assert (columns == x.T).all()
    bits = torch.from_numpy(x[:2]).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (words == bits[0] | (bits[1].astype(np.uint32) << 16)).all()


def test_halfwords_are_looked_up_swapped_and_narrowed():
    def kernel(code):
        x, y = (code.pointer(a, "i16") for a in code.arguments(2))
        room = code.array("i32", 16)
        for _ in code.work_items():
            table, indices = x.load_i16x32(), x.load_i16x32(32)
            y.store_i16x32(0, code.permute(table, indices))
            y.store_i16x32(32, code.swap_bytes(indices))
            room.of("i16").store_i16x32(0, code.i16x32(7))
            room[1] = code.truncate(code.sign_extend(x[0]) * 65536, "i32")
            y.store_i16x32(64, code.as_i16x32(room.load()))
            for i, limit in enumerate((table, 32767)):
                with code.when(code.any(indices > limit)):
                    y[96 + i] = 1

    random = np.random.default_rng(0)
    x = random.integers(-(2**15), 2**15, 64, dtype=np.int16)
    y = np.zeros(98, np.int16)
    run(kernel, x, y)
    assert (y[:32] == x[:32][x[32:] % 32]).all()
    assert (y[32:64] == x[32:].byteswap()).all()
    assert y[64:96].tolist() == [7, 7, 0, x[0]] + 28 * [7]
    assert y[96:].tolist() == [1, 0]


def test_bfloat16_rounds_to_even_and_keeps_nan():
    def kernel(code):
        x, y = code.arguments(2)
        for i in code.work_items():
            code.pointer(y, "bf16").store(i * 16, code.pointer(x, "f32").load(i * 16))

    x = torch.randn(16 * 64) * torch.logspace(-30, 30, 16 * 64)
    x[:6] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, torch.inf, -torch.inf, torch.nan, -0.0])
    y = torch.zeros(x.shape, dtype=torch.bfloat16)
    run(kernel, x.numpy(), y.view(torch.int16).numpy(), num_items=64)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
@pytest.mark.parametrize("num_items", [1, 2, 7, 64, 100])
def test_runs_of_items_keep_their_order_on_one_thread(num_items, num_threads):
    def kernel(code):
        order, counters, threads = code.arguments(3)
        order, counters = code.pointer(order, "i64"), code.pointer(counters, "i64")
        for item in code.runs_of_items(threads):
            order[code.fetch_add(counters, 1)] = item

    order, counters = np.full(num_items, -1, np.int64), np.zeros(1, np.int64)
    launched = compiled.__wrapped__(kernel)
    launched(num_items, order.ctypes.data, counters.ctypes.data, num_threads)
    assert order.tolist() == list(range(num_items))
    counters[:] = 0
    launched(num_items, order.ctypes.data, counters.ctypes.data, num_threads, num_threads=2)
    assert counters[0] == num_items
    assert sorted(order.tolist()) == list(range(num_items))


def test_the_kernel_of_the_page_scales_rows():
    page = (Path(__file__).parents[3] / "docs" / "add-a-kernel.md").read_text()
    source = page.split("```python\n")[1].split("```")[0]
    names = {"KernelBuilder": object, "Kind": str, "LANES": LANES}
    exec(compile(source, "add-a-kernel.md", "exec"), names)
    x = np.arange(96, dtype=np.float32)
    y = np.zeros(96, dtype=np.float32)

    def scale(code):
        names["scale"](code, "f32")

    compiled.__wrapped__(scale)(3, x.ctypes.data, y.ctypes.data, 32, float_bits(0.5))
    assert np.array_equal(y, x / 2)
