"""Compile kernels for aarch64 on any machine: `python -m tests.kernels.aarch64_objects FOLDER`, with TROUPER_KERNELS=portable.

A process of its own, since modules ask for the processor's features when they are imported. Writes NAME.o for each kernel, and prints the
functions that each calls, in JSON.
"""

# ruff: noqa: E402

import json
import platform
import re
import sys
from pathlib import Path

platform.machine = lambda: "aarch64"  # before a module asks

from llvmlite import binding

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.replay import replay
from trouper.kernels.cpu.attention.decode import decode_attention, merge_partials
from trouper.kernels.cpu.attention.prefill import prefill_attention, whole_attention
from trouper.kernels.cpu.linear.integer_bytes import byte_matmul
from trouper.kernels.cpu.linear.integer_panels import quantize_panels
from trouper.kernels.cpu.linear.integer_rows import quantize_rows
from trouper.kernels.cpu.norms import (
    act_and_mul,
    activate,
    center_norm,
    embed,
    finish_logits,
    fused_add_norm,
    mean_of_spans,
    qk_norm_rope_kv_write,
)
from trouper.kernels.cpu.recurrences import delta_gates, gated_delta, ssd, ssd_gates
from trouper.kernels.cpu.recurrent_entries import causal_conv, gated_norm, mul_sigmoid
from trouper.kernels.cpu.sample_rows import sample_rows

# What a processor without AVX2 is given: attention and norms of float32, weights of few bits, sampling.
KERNELS = {
    "replay": (replay,),
    "decode_attention": (decode_attention, "f32", "floats"),
    "merge_partials": (merge_partials, "f32"),
    "prefill_attention": (prefill_attention, "f32", "dots"),
    "whole_attention": (whole_attention, "f32", "dots"),
    "act_and_mul": (act_and_mul, "f32", "silu"),
    "activate": (activate, "f32", "gelu"),
    "causal_conv": (causal_conv, "f32", 4, True, "plain", 2),
    "short_conv": (causal_conv, "f32", 3, False, "gates", 1),
    "delta_gates": (delta_gates, "f32"),
    "gated_delta": (gated_delta, "f32", 16, False, True),
    "gated_norm": (gated_norm, "f32", False),
    "mul_sigmoid": (mul_sigmoid, "f32"),
    "ssd": (ssd, "f32"),
    "ssd_gates": (ssd_gates, "f32"),
    "center_norm": (center_norm, "f32"),
    "embed": (embed, "f32"),
    "finish_logits": (finish_logits, "f32"),
    "fused_add_norm": (fused_add_norm, "f32", "rms"),
    "fused_add_norm_layer": (fused_add_norm, "f32", "layer"),
    "mean_of_spans": (mean_of_spans, "f32"),
    "qk_norm_rope_kv_write": (qk_norm_rope_kv_write, "f32", "rms"),
    "rows_of_int4": (quantize_rows, "int4", 32),
    "rows_of_int8": (quantize_rows, "int8", 32),
    "matmul_of_int4": (byte_matmul, "int4", "bf16", True, None, 32),
    "matmul_of_int8": (byte_matmul, "int8", "bf16", False, "f32", 32),
    "panels_of_int4": (quantize_panels, "int4"),
    "panels_of_int8": (quantize_panels, "int8"),
    "sample_rows": (sample_rows,),
}


def main() -> None:
    folder = Path(sys.argv[1])
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("aarch64-linux-gnu")
    machine = target.create_target_machine(cpu="generic", opt=2, reloc="pic")
    called = {}
    for name, (write, *options) in KERNELS.items():
        code = KernelBuilder(name)
        write(code, *options)
        module = binding.parse_assembly(code.finish())
        module.verify()
        assembly = machine.emit_assembly(module)
        called[name] = sorted(set(re.findall(r"^\tbl?\t([A-Za-z_]\w*)$", assembly, re.MULTILINE)))
        (folder / f"{name}.o").write_bytes(machine.emit_object(module))
    print(json.dumps(called))


if __name__ == "__main__":
    main()
