"""Attention and the small operations of a decoder, both implementations, against measured roofs.

Run:  python -m trouper.bench.kernels [--threads 2] [--json FILE]

The roofs are what torch itself reaches on this machine in this run: the bytes that a sum reads, the
FLOPs of a packed bfloat16 product.  Times are the best of several, of the wall clock.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from trouper.kernels.decoder_ops import Ops, Shape, make_ops
from trouper.kernels.linear import Linear, linear

QWEN3_06B = Shape(
    dtype=torch.bfloat16,
    num_q_heads=16,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=1024,
    intermediate_size=3072,
    block_size=128,
    norm_eps=1e-6,
    residual_scale=1.0,
    activation="silu",
    scale=128**-0.5,
    softcap=None,
)
DECODES = [(1, 128), (1, 1024), (1, 8192), (16, 128), (16, 1024), (64, 1024)]  # rows, context
PREFILLS = [(0, 1024), (1024, 1024), (0, 4096)]  # start, count
ROWS = [1, 16, 64, 1024]


def best(work: Callable[[], object], num: int = 7) -> float:
    work()
    seconds = []
    for _ in range(num):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def roofs() -> tuple[float, float]:
    """(bytes a second, FLOPs a second)."""
    data = torch.ones(2**26)
    x, layer = torch.randn(1024, 1024).bfloat16(), Linear(torch.randn(4096, 1024).bfloat16())
    num_bytes, flops = 4 * data.numel(), 2 * 1024 * 1024 * 4096
    return num_bytes / best(data.sum), flops / best(lambda: linear(x, layer))


def attend_seconds(ops: Ops, columns: list[tuple[int, int]]) -> float:
    shape, size = QWEN3_06B, QWEN3_06B.block_size
    num_blocks = max(-(-(start + count) // size) for start, count in columns)
    ids = torch.randperm(num_blocks * len(columns)).view(len(columns), num_blocks).numpy()
    num_slots = ids.size * size
    cache = torch.randn(2, shape.num_kv_heads, num_slots, shape.head_dim).to(shape.dtype)
    num_heads = shape.num_q_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(sum(c for _, c in columns), num_heads, shape.head_dim).to(shape.dtype)
    starts, counts = zip(*columns, strict=True)
    plan = ops.plan(np.ascontiguousarray(ids), range(len(columns)), starts, counts, None)
    return best(lambda: ops.attend(qkv, cache, plan))


def small_seconds(ops: Ops, num_rows: int) -> dict[str, float]:
    shape = QWEN3_06B
    x, y = torch.randn(2, num_rows, shape.hidden_size).to(shape.dtype)
    weight = torch.ones(shape.hidden_size, dtype=shape.dtype)
    gate_up = torch.randn(num_rows, 2 * shape.intermediate_size).to(shape.dtype)
    num_heads = shape.num_q_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(num_rows, num_heads, shape.head_dim).to(shape.dtype)
    norm = torch.ones(shape.num_q_heads + shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
    cache = torch.zeros(2, shape.num_kv_heads, 64 * 1024, shape.head_dim, dtype=shape.dtype)
    table = torch.randn(1024, 2, shape.head_dim).to(shape.dtype)
    slots = torch.randperm(cache.shape[2])[:num_rows]
    step = ops.begin(slots % 1024, slots, [table])
    return {
        "add_norm": best(lambda: ops.add_norm(x, y, weight)),
        "finish_qkv": best(lambda: ops.finish_qkv(qkv, norm, step, 0, cache)),
        "act_mul": best(lambda: ops.act_mul(gate_up)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels against measured roofs.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    read, multiply = roofs()
    print(
        f"{options.threads} threads: sum {read / 1e9:.1f} GB/s, GEMM {multiply / 1e9:.0f} GFLOP/s"
    )
    found: dict[str, object] = {"threads": options.threads, "read": read, "multiply": multiply}
    shape = QWEN3_06B
    with torch.inference_mode():
        for native in (True, False):
            ops = make_ops(shape, native=native)
            name = repr(ops).strip("<>")
            for rows, context in DECODES:
                seconds = attend_seconds(ops, [(context - 1, 1)] * rows)
                num_bytes = 4 * shape.num_kv_heads * shape.head_dim * context * rows
                speed = num_bytes / seconds
                print(
                    f"{name} decode {rows:3} x {context:5}: {1e6 * seconds:8.0f} µs, "
                    f"{speed / 1e9:5.1f} GB/s = {speed / read:4.0%}"
                )
                found[f"{name} decode {rows} x {context}"] = seconds
            for start, count in PREFILLS:
                seconds = attend_seconds(ops, [(start, count)])
                visible = start * count + count * (count + 1) / 2
                speed = 4 * shape.num_q_heads * shape.head_dim * visible / seconds
                print(
                    f"{name} prefill {start:4} + {count:4}: {1e3 * seconds:8.1f} ms, "
                    f"{speed / 1e9:5.0f} GFLOP/s = {speed / multiply:4.0%}"
                )
                found[f"{name} prefill {start} + {count}"] = seconds
            for rows in ROWS:
                times = small_seconds(ops, rows)
                shown = ", ".join(f"{op} {1e6 * t:6.1f} µs" for op, t in times.items())
                print(f"{name} {rows:4} rows: {shown}")
                found |= {f"{name} {op} {rows}": t for op, t in times.items()}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
