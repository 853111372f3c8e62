"""Compile kernels for aarch64 on any machine: `python -m tests.kernels.aarch64_objects FOLDER`, with TROUPER_KERNELS=portable.

A process of its own, since modules ask for the processor's features when they are imported. Writes NAME.o for each kernel, and prints the
functions that each calls, in JSON.
"""

import json
import platform
import re
import sys
from pathlib import Path

platform.machine = lambda: "aarch64"  # before a module asks

from llvmlite import binding  # noqa: E402

from trouper.kernels.codegen.builder import KernelBuilder  # noqa: E402
from trouper.kernels.codegen.replay import replay  # noqa: E402
from trouper.kernels.cpu.attention.decode import decode_attention, merge_partials  # noqa: E402
from trouper.kernels.cpu.attention.prefill import prefill_attention  # noqa: E402
from trouper.kernels.cpu.attention.unpaged import whole_attention  # noqa: E402
from trouper.kernels.cpu.fused.act_and_mul import act_and_mul  # noqa: E402
from trouper.kernels.cpu.fused.activate import activate  # noqa: E402
from trouper.kernels.cpu.fused.center_norm import center_norm  # noqa: E402
from trouper.kernels.cpu.fused.embed import embed  # noqa: E402
from trouper.kernels.cpu.fused.finish_logits import finish_logits  # noqa: E402
from trouper.kernels.cpu.fused.fused_add_norm import fused_add_norm  # noqa: E402
from trouper.kernels.cpu.fused.mean_pool import mean_of_spans  # noqa: E402
from trouper.kernels.cpu.fused.qk_norm_rope_kv_write import qk_norm_rope_kv_write  # noqa: E402
from trouper.kernels.cpu.linear.integer_bytes import byte_matmul  # noqa: E402
from trouper.kernels.cpu.linear.integer_rows import quantize_rows  # noqa: E402
from trouper.kernels.cpu.linear.pack_integer import quantize_panels  # noqa: E402
from trouper.kernels.cpu.sampling.sample_rows import sample_rows  # noqa: E402

# What a processor without AVX2 is given: attention and norms of float32, weights of few bits, sampling.
KERNELS = {
    "replay": (replay,),
    "decode_attention": (decode_attention, "f32", "floats"),
    "merge_partials": (merge_partials, "f32"),
    "prefill_attention": (prefill_attention, "f32", "dots"),
    "whole_attention": (whole_attention, "f32", "dots"),
    "act_and_mul": (act_and_mul, "f32", "silu"),
    "activate": (activate, "f32", "gelu"),
    "center_norm": (center_norm, "f32"),
    "embed": (embed, "f32"),
    "finish_logits": (finish_logits, "f32"),
    "fused_add_norm": (fused_add_norm, "f32", "rms"),
    "fused_add_norm_layer": (fused_add_norm, "f32", "layer"),
    "mean_of_spans": (mean_of_spans, "f32"),
    "qk_norm_rope_kv_write": (qk_norm_rope_kv_write, "f32", "rms"),
    "rows_of_int4": (quantize_rows, "int4", 32),
    "rows_of_int8": (quantize_rows, "int8", 32),
    "matmul_of_int4": (byte_matmul, "int4", "bf16", True, False, 32),
    "matmul_of_int8": (byte_matmul, "int8", "bf16", False, True, 32),
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
