"""The seam between the executor actor and whatever computes: a thread, processes, or a simulation.

The facts that torch tells about itself and its devices, for reports.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec

from trouper.actors.messages.controls import DeviceAction
from trouper.actors.messages.requests import GrammarReady, PrepareGrammar
from trouper.actors.messages.steps import (
    DeviceBack,
    DeviceLost,
    PoolDone,
    PoolPlan,
    StepDone,
    StepFailed,
    StepPlan,
)

Result_co = TypeVar("Result_co", covariant=True)
StepResult = StepDone | PoolDone | StepFailed
DeviceEvent = StepResult | GrammarReady | DeviceLost | DeviceBack


class PendingResult(NamedTuple, Generic[Result_co]):
    """The result of work that is launched and still running; meanwhile the next can be launched."""

    is_ready: Callable[[], bool]
    finish: Callable[[], Result_co]  # waits if it is not ready
    # Calls back once it is ready, from any thread.  None: there is no call, so `is_ready` must be polled.
    when_ready: Callable[[Callable[[], None]], None] | None = None


class DeviceInfo(msgspec.Struct, frozen=True):
    """Facts about a device that are known only after loading."""

    num_blocks: int  # KV blocks in all, the null block 0 included
    block_size: int  # tokens a block
    dtype: str
    name: str  # for people: "cpu", "NVIDIA H200", …
    num_weight_bytes: int = 0  # in memory; 0: not counted
    longest: int | None = (
        None  # tokens of a sequence that the model's code can compute; None: any number
    )


def timed(result: StepResult, seconds: float) -> StepResult:
    """Say in the result of a plan how long it was the eldest; one that has failed says nothing."""
    if isinstance(result, StepFailed):
        return result
    return msgspec.structs.replace(result, seconds=seconds)


class Device(Protocol):
    """Runs plans one after another, in the order in which they were submitted.

    Submitting is synchronous and separate from waiting, so the order of plans never depends on the order in
    which tasks happen to be resumed.  One task receives.
    """

    async def load(self) -> DeviceInfo:
        """Load weights, take KV memory, record graphs: everything that can fail at start."""
        ...

    def submit(self, plan: StepPlan | PoolPlan) -> None:
        """Queue a plan of the kind that the model is for.  At most `max_steps_in_flight` are out, so there is always room."""
        ...

    def prepare(self, order: PrepareGrammar) -> None:
        """Have a grammar compiled while steps go on; `receive` says when it is ready.  One at a time is out.

        The device keeps it until an order releases it, when the plans before that order are done, or until it is lost.
        """
        ...

    async def receive(self) -> DeviceEvent:
        """Wait for the next result, in the order of the plans, or for a grammar.  A wait that is cancelled loses none.

        After `DeviceLost` no plan before it is answered, and none is taken until `DeviceBack`.

        `StepFailed` is an error that the device caught and survived.  After one, every plan of the same
        epoch yields `StepFailed` without having run.

        Raises:
            Exception: the device is broken; the engine cannot go on.
        """
        ...

    async def call(self, action: DeviceAction) -> object:
        """Perform an action after the plans already submitted.

        Raises:
            Exception: the action failed; the device is unchanged.
        """
        ...

    async def aclose(self) -> None:
        """Give back memory and threads; a step under way ends first.  Idempotent."""
        ...


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
