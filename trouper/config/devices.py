"""Choose an engine's device without torch: importing torch takes a second, and some commands do not need it.

`auto` uses a GPU if it can.  The environment variable `TROUPER_DEVICE` overrides the meaning of `auto`.
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
# Run the model in a thread of this process, or in a process of its own.
DeviceWorker = Literal["inline", "process"]
CHOICES = ("auto", "cpu", "cuda")
COMPUTE_CAPABILITY_MAJOR = 75  # CUdevice_attribute
# Ampere: it has bfloat16, and copies that run during a kernel.
LEAST_CAPABILITY = 8


def choose_device(wanted: str, *, pools: bool = False) -> DeviceKind:
    """Return the device named by `wanted`; for `auto` a usable GPU, else the CPU.

    Args:
        pools: whether the model pools, which only the CPU supports.

    Raises:
        TrouperValidationError: the device does not exist, or there is no usable GPU; the message names the cause.
        UnsupportedFeatureError: "cuda" for a pooling model.
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
        raise UnsupportedFeatureError(
            "device='cuda': pooling models run on the CPU only; use device='cpu'"
        )
    if problem := cuda_problem():
        raise TrouperValidationError(
            f"there is no usable CUDA device: {problem}", parameter="device", value=wanted
        )
    return "cuda"


def choose_device_worker(wanted: str, *, can_be_chosen: bool) -> DeviceWorker:
    """Choose whether the model runs in this process or in a worker process.

    Args:
        wanted: auto, inline or process.
        can_be_chosen: whether `auto` may choose a process.

    Raises:
        UnsupportedFeatureError: "process" on a system without `memfd_create`.
    """
    has_memory_files = hasattr(os, "memfd_create")
    if wanted == "process" and not has_memory_files:
        raise UnsupportedFeatureError(
            "device_worker='process': this system has no shared memory files (memfd_create); use 'inline'",
            parameter="device_worker",
        )
    if wanted == "auto":
        return "process" if can_be_chosen and has_memory_files else "inline"
    return "process" if wanted == "process" else "inline"


def cuda_problem() -> str | None:
    """Return the reason why no GPU can be used, or None if one can.

    Checks torch's build, Triton and the driver without importing torch.  The reason is a clause for error messages, with a
    command that solves the problem if one exists.
    """
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
        name: the option that sets the number of workers.

    Raises:
        TrouperValidationError: fewer GPUs are visible.
    """
    found = num_devices()
    if wanted > found:
        rule = f"needs a GPU for each, but {found} are visible (see CUDA_VISIBLE_DEVICES); device='cpu' needs none"
        raise invalid(name, rule, wanted)


def num_devices() -> int:
    """Count the GPUs that this process may use, by asking the driver.

    Respects `CUDA_VISIBLE_DEVICES`, like the driver itself.  Returns 0 without a driver.  torch is
    not imported.
    """
    driver = _driver()
    return 0 if driver is None else _count(driver)[0]


def _driver_problem() -> str | None:
    driver = _driver()
    if driver is None:
        return "the NVIDIA driver is not installed"
    count, status = _count(driver)
    if not count:
        return (
            f"the NVIDIA driver shows no device (see CUDA_VISIBLE_DEVICES; driver status {status})"
        )
    major = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(major), COMPUTE_CAPABILITY_MAJOR, 0)
    if major.value < LEAST_CAPABILITY:
        return f"its compute capability is {major.value}.x, but {LEAST_CAPABILITY}.0 is needed"
    return None


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def _count(driver: ctypes.CDLL) -> tuple[int, int]:
    """Return the number of devices, and the driver's status code, 0 for success."""
    count = ctypes.c_int()
    status: int = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if status else count.value, status
