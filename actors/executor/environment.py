"""The facts that torch tells about itself and its devices, for reports."""

from typing import Any, cast


def torch_facts() -> dict[str, Any]:
    """Return them, or nothing when torch is not installed; `gpus` holds name, memory in bytes and capability of each."""
    try:
        import torch
    except ImportError:
        return {}
    gpus: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            found: Any = cast("Any", torch.cuda).get_device_properties(i)
            gpus.append(
                {
                    "name": found.name,
                    "memory_bytes": found.total_memory,
                    "capability": f"{found.major}.{found.minor}",
                }
            )
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": torch.backends.mkldnn.is_available(),
        "cuda": torch.version.cuda,
        "gpus": gpus,
    }
