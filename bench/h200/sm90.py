"""Compile the Triton kernels for Hopper without a GPU, and show registers, spills and instructions.

    python -m trouper.bench.h200.sm90 [--kernel NAME] [--case NAME] [--json]

It compiles every row of every table of launch configurations, by calling the launchers with tensors that have a shape
but no memory, and a driver that compiles and disassembles but does not launch. The exit code is 1 if a kernel spills
registers or lacks the expected matrix instruction.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import triton
from triton.backends.compiler import GPUTarget

from trouper.bench.h200.sm90_cases import CASES
from trouper.kernels.cuda.launch import INTERPRETED

# The bytes of shared memory that a block of an H200 may use.
MAX_SHARED = 232_448
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Compiled(msgspec.Struct, frozen=True):
    """A compiled kernel, with its use of registers, memory and instructions.

    Spilled registers or unused matrix units show a bad configuration, even without a GPU.
    """

    kernel: str
    case: str
    config: dict[str, int]
    registers: int
    # Bytes of stack per thread, which hold spilled registers.
    stack: int
    # The number of instructions that load from or store to local memory.
    spills: int
    shared: int  # bytes a block
    # The instructions of the matrix units: wgmma, mma or none.
    instructions: str
    expected: str

    @property
    def is_good(self) -> bool:
        return not self.stack and not self.spills and self.instructions == self.expected


class OfflineDriver:
    """Replaces Triton's driver, with only the methods that a launch uses.

    It keeps the machine code of each launch instead of running it. No CUDA driver is needed.
    """

    def __init__(self) -> None:
        self.loaded: list[tuple[str, bytes, int]] = []  # name, machine code, shared bytes
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED}

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *arguments: None

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, ...]:
        self.loaded.append((name, code, shared))
        return object(), 0, 0, 0, 1024


def compile_all(kernel: str = "", case: str = "") -> Iterator[Compiled]:
    """Compile the cases with these texts in their names, and yield the results.

    Compiling needs no GPU.

    Raises:

        RuntimeError: TRITON_INTERPRET is set, so nothing would be compiled.
    """
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set, so nothing would be compiled; unset it")
    driver = OfflineDriver()
    triton.runtime.driver.set_active(cast("Any", driver))
    wanted = [cases() for name, cases in CASES.items() if kernel in name]
    for one in (one for cases in wanted for one in cases if case in one.label):
        driver.loaded.clear()
        one.launch()
        for position, (name, code, shared) in enumerate(driver.loaded):
            # A case has up to two launches; the second merges the results of the first.
            is_first = position == 0
            yield Compiled(
                kernel=name.strip("_").removesuffix("_kernel"),
                case=one.label,
                config=dict(one.config) if is_first else {},
                shared=shared,
                expected=one.expected if is_first else "none",
                **_disassemble(code),
            )


def _disassemble(code: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text, usage = (
            subprocess.run(
                [TOOLS / "cuobjdump", option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-sass", "--dump-resource-usage")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", text)),
        "instructions": "wgmma" if "HGMMA" in text else "mma" if "HMMA" in text else "none",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for Hopper.")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--case", default="", help="only cases whose label contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    if not options.json:
        print("| kernel | case | configuration | registers | spills | shared, KiB | matrix |")
        print("|---|---|---|---|---|---|---|")
    num_bad = 0
    for found in compile_all(options.kernel, options.case):
        num_bad += not found.is_good
        if options.json:
            print(msgspec.json.encode(found).decode(), flush=True)
            continue
        config = ", ".join(f"{name} {value}" for name, value in found.config.items())
        spills = found.spills or found.stack
        print(
            f"| {found.kernel} | {found.case} | {config} | {found.registers} | {spills} |"
            f" {found.shared / 1024:.0f} | {found.instructions} |"
            + f"  expected {found.expected}"
            * (found.instructions != found.expected),
            flush=True,
        )
    if num_bad:
        sys.exit(f"{num_bad} kernels spill or miss their matrix instructions")


if __name__ == "__main__":
    main()
