"""The choice of an engine's device, made without torch: its import takes a second, which some commands do not need.

`auto` takes a GPU that can be used, and `TROUPER_DEVICE` says what it means instead.
"""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import Literal

from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid
from trouper.extras import install_hint

DeviceKind = Literal["cpu", "cuda"]
DeviceWorker = Literal["inline", "process"]  # the model in a thread of this process, or in its own
CHOICES = ("auto", "cpu", "cuda")
COMPUTE_CAPABILITY_MAJOR = 75  # CUdevice_attribute
LEAST_CAPABILITY = 8  # Ampere: bfloat16, and copies that run beside a kernel's arithmetic


def choose_device(wanted: str, *, pools: bool = False) -> DeviceKind:
    """Choose the device that `wanted` names, or the best one.

    Args:
        pools: whether the model pools, for which there are kernels on the CPU alone.

    Raises:
        TrouperValidationError: no such device, or "cuda" where there is none; it names the cause.
        UnsupportedFeatureError: "cuda" for a model that pools.
    """
    if wanted == "auto":
        wanted = os.environ.get("TROUPER_DEVICE", "auto")
    if wanted not in CHOICES:
        raise TrouperValidationError(
            f"device must be {', '.join(CHOICES)}", parameter="device", value=wanted
        )
    if wanted == "auto":
        return "cpu" if pools or cuda_problem() else "cuda"
    if wanted == "cpu":
        return "cpu"
    if pools:
        raise UnsupportedFeatureError("device='cuda': models that pool run on the CPU")
    if problem := cuda_problem():
        raise TrouperValidationError(
            f"there is no usable CUDA device: {problem}", parameter="device", value=wanted
        )
    return "cuda"


def choose_device_worker(wanted: str, *, can_be_chosen: bool) -> DeviceWorker:
    """Choose where the model runs.

    Args:
        wanted: auto, inline or process.
        can_be_chosen: whether `auto` may be a process.

    Raises:
        UnsupportedFeatureError: "process" on a system without memory files.
    """
    has_memory_files = hasattr(os, "memfd_create")
    if wanted == "process" and not has_memory_files:
        raise UnsupportedFeatureError(
            "device_worker='process': not on this system, which has no memory files",
            parameter="device_worker",
        )
    if wanted == "auto":
        return "process" if can_be_chosen and has_memory_files else "inline"
    return "process" if wanted == "process" else "inline"


def cuda_problem() -> str | None:
    """Tell why a GPU cannot be used; None if one can."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "torch is not installed"
    library = "torch_cuda.dll" if sys.platform == "win32" else "libtorch_cuda.so"
    if not (Path(torch.origin).parent / "lib" / library).exists():
        return "this build of torch has no CUDA: pip install torch from an index with CUDA wheels"
    if importlib.util.find_spec("triton") is None:
        return f"triton is not installed: {install_hint('cuda')}"
    return _driver_problem()


def check_num_devices(name: str, wanted: int) -> None:
    """Check that there is a GPU for each worker.

    Args:
        name: of the option that says how many there are.

    Raises:
        TrouperValidationError: fewer can be seen.
    """
    found = num_devices()
    if wanted > found:
        rule = f"each has a GPU of its own, and {found} can be seen (CUDA_VISIBLE_DEVICES); device='cpu' needs none"
        raise invalid(name, rule, wanted)


def num_devices() -> int:
    """Count the GPUs that this process may use, by the driver."""
    driver = _driver()
    return 0 if driver is None else _count(driver)[0]


def _driver_problem() -> str | None:
    driver = _driver()
    if driver is None:
        return "the NVIDIA driver is not installed"
    count, status = _count(driver)
    if not count:
        return f"the NVIDIA driver shows no device (CUDA_VISIBLE_DEVICES, or error {status})"
    major = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(major), COMPUTE_CAPABILITY_MAJOR, 0)
    if major.value < LEAST_CAPABILITY:
        return f"its compute capability is {major.value}.x, and {LEAST_CAPABILITY}.0 is needed"
    return None


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def _count(driver: ctypes.CDLL) -> tuple[int, int]:
    """Return the number of devices, and the status of the question: 0 if all is well."""
    count = ctypes.c_int()
    status: int = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if status else count.value, status
