"""Which of the processor's instructions kernels use, by TROUPER_KERNELS; integers have the same bits with all of them."""

import os
import subprocess
import sys

import pytest
import torch

from trouper.errors import TrouperValidationError
from trouper.kernels.codegen import choice, units
from trouper.kernels.cpu.linear.quantization import IntegerWeight
from trouper.kernels.reference.linear import integer_linear_reference

needs_native = pytest.mark.skipif(not units.is_available(), reason="needs native kernels")
SOME = [("int4", 32, True, False), ("int4", 64, False, True), ("int8", 192, False, False)]
PROGRAM = """
import sys, torch
from trouper.kernels.codegen import choice, units
from trouper.kernels.select import make_linear
units.can_decode = lambda: False
cases = torch.load(sys.argv[1], weights_only=False)
torch.save([make_linear(weight).apply(x) for weight, x in cases], sys.argv[2])
"""


def weight_of(fmt, group, has_zeros, has_minima):
    shape, groups, high = (80, 192), (80, 192 // group), 8 if fmt == "int4" else 128
    return IntegerWeight(
        fmt,
        torch.bfloat16,
        torch.randint(-high, high, shape, dtype=torch.int8),
        (torch.randn(groups) / high).bfloat16(),
        torch.randint(-8, 9, groups, dtype=torch.int8) if has_zeros else None,
        torch.randn(groups) if has_minima else None,
    )


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("named", ["avx2", "portable"])
def test_integers_equal_the_formula_with_any_instructions(tmp_path, named):
    if named == "avx2" and not units.can_multiply():
        pytest.skip("needs AVX2")
    torch.manual_seed(0)
    cases = [(weight_of(*case), torch.randn(7, 192).bfloat16()) for case in SOME]
    torch.save(cases, tmp_path / "cases")
    command = [sys.executable, "-c", PROGRAM, tmp_path / "cases", tmp_path / "found"]
    subprocess.run(command, check=True, env={**os.environ, "TROUPER_KERNELS": named})
    for (weight, x), found in zip(cases, torch.load(tmp_path / "found"), strict=True):
        assert torch.equal(found, integer_linear_reference(x, weight))


@needs_native
@pytest.mark.parametrize(
    ("named", "has"),
    [
        ("all", {"avx2", "avx512f", "avxvnni"}),
        ("avx-vnni", {"avx2", "avxvnni"}),
        ("avx2", {"avx2"}),
        ("portable", set()),
    ],
)
def test_a_choice_leaves_out_what_is_beyond_it(monkeypatch, named, has):
    from trouper.kernels.codegen import features

    everything = dict.fromkeys(("avx2", "avx512f", "avx512bf16", "avxvnni", "amx-tile"), True)
    monkeypatch.setattr(features, "_host_features", lambda: everything)
    monkeypatch.setattr(choice, "chosen", lambda: named)
    asked = {name for name in ("avx2", "avx512f", "avxvnni") if features._has(name)}
    assert asked == has
    assert features.has_bf16_dot() == (named == "all")


def test_an_unknown_choice_is_refused(monkeypatch):
    monkeypatch.setenv("TROUPER_KERNELS", "sse9")
    with pytest.raises(TrouperValidationError, match=r"TROUPER_KERNELS: .*portable") as refused:
        choice.chosen.__wrapped__()
    assert refused.value.value == "sse9"


@needs_native
def test_portable_integers_compile_for_another_kind_of_processor(monkeypatch):
    from llvmlite import binding

    from trouper.kernels.codegen.builder import KernelBuilder
    from trouper.kernels.cpu.linear.integer_rows import quantize_rows

    monkeypatch.setattr(choice, "chosen", lambda: "portable")
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    code = KernelBuilder("rows")
    quantize_rows(code, "int4", 32)
    machine = binding.Target.from_triple("aarch64-linux-gnu").create_target_machine(opt=1)
    assembly = machine.emit_assembly(binding.parse_assembly(code.finish()))
    assert "\tbl\t" not in assembly  # nothing that a library would have to bring
