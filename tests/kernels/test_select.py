"""Which method a linear layer gets, for every kind of machine."""

import importlib

import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.cpu.linear.by_torch import OneDNNLinear, PlainLinear
from trouper.kernels.cpu.linear.compressed import CompressedLinear
from trouper.kernels.cpu.linear.dense import DenseLinear
from trouper.kernels.cpu.linear.integer import Fp4Linear, Int4Linear, Int8Linear
from trouper.kernels.cpu.linear.split_fp32 import SplitLinear
from trouper.kernels.linear import LinearConfig
from trouper.kernels.select import Processor, WeightSpec, choose_linear

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
NOTHING = Processor(False, False, False, False, frozenset())
OLD = Processor(True, False, False, False, frozenset((FP32,)))
AVX2 = Processor(True, True, False, False, frozenset((FP32, BF16)))
AVX512 = Processor(True, True, True, False, frozenset((FP32, BF16)))
AMX = Processor(True, True, True, True, frozenset((FP32, BF16)))
INT4, INT8 = LinearConfig(quantization="int4"), LinearConfig(quantization="int8")
MANY = LinearConfig(is_for_many_rows=True)
EIGHT_ROWS = LinearConfig(is_compressed=False)


@pytest.mark.parametrize(
    ("machine", "dtype", "config", "method"),
    [
        (AVX512, BF16, LinearConfig(), CompressedLinear),
        (AVX512, BF16, EIGHT_ROWS, DenseLinear),
        (AVX512, BF16, MANY, DenseLinear),
        (AVX512, BF16, INT4, Int4Linear),
        (AVX512, BF16, INT8, Int8Linear),
        (AVX2, BF16, LinearConfig(), DenseLinear),
        (AVX2, BF16, INT4, Int4Linear),
        (OLD, BF16, INT8, Int8Linear),
        (NOTHING, BF16, INT4, PlainLinear),
        (OLD, BF16, LinearConfig(), PlainLinear),
        (AMX, FP32, MANY, SplitLinear),
        (AMX, FP32, LinearConfig(), DenseLinear),
        (AVX512, FP32, MANY, DenseLinear),
        (AVX512, FP32, INT4, DenseLinear),
        (OLD, FP32, LinearConfig(), OneDNNLinear),
        (NOTHING, FP32, LinearConfig(), PlainLinear),
        (AMX, FP16, LinearConfig(), PlainLinear),
        (AMX, BF16, LinearConfig(device="cuda"), PlainLinear),
    ],
)
def test_the_method_depends_on_dtype_machine_and_config(machine, dtype, config, method):
    assert choose_linear(WeightSpec(64, 64, dtype), machine, config) is method


@pytest.mark.parametrize(
    ("is_wide", "bf16_unit", "has_tiles", "unit"),
    [
        (True, "dots", True, "bytes"),
        (True, "tiles", True, "tiles"),
        (True, "tiles", False, "bytes"),
        (False, "dots", True, "dots"),
    ],
)
def test_integers_use_tiles_or_bytes(is_wide, bf16_unit, has_tiles, unit, monkeypatch):
    features = importlib.import_module("trouper.kernels.codegen.features")
    monkeypatch.setattr(units, "can_decode", lambda: True)
    monkeypatch.setattr(units, "bf16_unit", lambda: bf16_unit)
    monkeypatch.setattr(features, "has_wide_byte_dots", lambda: is_wide)
    assert units.integer_unit(has_tiles=has_tiles) == unit


def test_checkpoint_integers_stay_integers_if_possible():
    spec = WeightSpec(64, 64, BF16, fmt="int4")
    for machine in (AVX512, AVX2, OLD):
        assert choose_linear(spec, machine, LinearConfig()) is Int4Linear
    assert choose_linear(spec, NOTHING, LinearConfig()) is PlainLinear
    assert choose_linear(spec._replace(fmt="fp4"), AVX2, LinearConfig()) is Fp4Linear
    assert choose_linear(spec._replace(fmt="fp8"), OLD, LinearConfig()) is PlainLinear


@pytest.mark.parametrize(
    ("num_out", "num_in", "dtype"),
    [(63, 64, BF16), (64, 48, BF16), (64, 40, FP32), (8, 64, FP32)],
)
def test_incomplete_panels_use_onednn(num_out, num_in, dtype):
    assert choose_linear(WeightSpec(num_out, num_in, dtype), AMX, LinearConfig()) is OneDNNLinear


def test_a_weight_without_numbers_is_plain():
    assert choose_linear(WeightSpec(0, 64, FP32), AMX, LinearConfig()) is PlainLinear
