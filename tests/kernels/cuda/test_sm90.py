"""Hopper's compiler yields no spills and the intended matrix instructions for every launch configuration."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trouper.kernels.cuda
from trouper.bench.h200.sm90_cases import CASES
from trouper.kernels.cuda.launch import config_of


def compiled(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "trouper.bench.h200.sm90", "--json", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_good(kernels):
    for kernel in kernels:
        assert kernel["spills"] == kernel["stack"] == 0, kernel
        assert kernel["instructions"] == kernel["expected"], kernel


def test_attention_uses_matrix_units_without_spills():
    found = compiled("--kernel", "attention", "--case", "32/8 × 128 bfloat16, blocks of 16")
    assert_good(found)
    assert [(kernel["kernel"], kernel["instructions"]) for kernel in found] == [
        ("decode", "mma"),
        ("combine", "none"),
        ("prefill", "wgmma"),
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernel", CASES)
def test_no_configuration_spills(kernel):
    assert_good(compiled("--kernel", kernel))


def test_every_row_of_every_table_has_a_case():
    rows = set()
    folder = trouper.kernels.cuda
    for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
        kernel = vars(importlib.import_module(module.name))
        for name in kernel:
            if name == "BLOCKS" or name.endswith("CONFIGS"):
                rows |= {id(config) for _, config in kernel[name].get("sm_90", ())}
    assert rows == {id(case.config) for cases in CASES.values() for case in cases()}
    assert len(rows) > 15


def test_the_docs_table_has_every_case():
    text = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text()
    _, table = text.split("| kernel | case | configuration |")
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    shown = {(row[1], row[2]) for row in rows if row[2].strip()}  # parts are merged without one
    known = {
        (case.label, ", ".join(f"{name} {value}" for name, value in case.config.items()))
        for cases in CASES.values()
        for case in cases()
    }
    assert shown == known


def test_a_size_beyond_the_table_is_named():
    table = {"sm_90": ((64, {"num_warps": 1}), (128, {"num_warps": 2}))}
    device = torch.device("cpu")
    assert config_of(table, device, 65)["num_warps"] == 2
    with pytest.raises(ValueError, match="size 129: the largest is 128"):
        config_of(table, device, 129)
