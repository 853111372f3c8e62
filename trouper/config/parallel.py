"""Decide how a model is distributed over processes and machines.  Pure.

stages      how the layers are divided into pipeline stages, one process each
machines    which machines an engine uses, and how their workers are started
processors  which processors each worker process may use, if the environment binds them
"""

import importlib.metadata
import importlib.util
import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from typing import Literal

import msgspec

from trouper.config.args import EngineArgs
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.config.devices import DeviceKind
from trouper.config.model import ModelConfig
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid
from trouper.extras import install_hint

SEVERAL_WORKERS = "pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size"
ON_GPUS = ("tensor_parallel_size",)
PARTITION = "TROUPER_PP_LAYER_PARTITION"  # numbers of layers by stage, as "10,18"


class Stage(msgspec.Struct, frozen=True):
    """One stage of a pipeline: its number, the number of stages, and its layers `first` … `last - 1`.

    A model without a pipeline is one stage, both first and last.
    """

    index: int
    num_stages: int
    first: int
    last: int

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds the token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the final norm and the head, and samples."""
        return self.index == self.num_stages - 1


def split_layers(
    layer_costs: Sequence[float],
    num_stages: int,
    *,
    head_cost: float = 0.0,
    partition: Sequence[int] | None = None,
) -> tuple[Stage, ...]:
    """Cut the layers into contiguous stages, so that the most expensive stage is as cheap as possible.

    Args:
        layer_costs: the cost of each layer, in any unit, such as bytes of weights.
        head_cost: the additional cost of the last stage, in the same unit.
        partition: numbers of layers by stage, instead of a search.

    Raises:
        TrouperValidationError: there are more stages than layers, or the partition does not match them.
    """
    num_layers = len(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise TrouperValidationError(
            f"the model has {num_layers} layers, too few for {num_stages} stages; each stage needs at least one",
            parameter="pipeline_parallel_size",
            value=num_stages,
        )
    if partition is None:
        partition = _cheapest_partition(layer_costs, num_stages, head_cost)
    elif len(partition) != num_stages or sum(partition) != num_layers or min(partition) < 1:
        raise TrouperValidationError(
            f"must be {num_stages} positive numbers whose sum is {num_layers}",
            parameter=PARTITION,
            value=",".join(map(str, partition)),
        )
    stages: list[Stage] = []
    first = 0
    for index, count in enumerate(partition):
        stages.append(Stage(index, num_stages, first, first + count))
        first += count
    return tuple(stages)


def read_partition(text: str) -> tuple[int, ...]:
    """Parse the numbers of layers by stage, as in "10,18".

    `split_layers` checks that their sum is the number of the model's layers.

    Raises:

        TrouperValidationError: the text is not a list of numbers with commas.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 10 for part in parts):
        raise TrouperValidationError(
            'must be numbers of layers by stage, as in "10,18"', parameter=PARTITION, value=text
        )
    return tuple(int(part) for part in parts)


def _cheapest_partition(
    costs: Sequence[float], num_stages: int, head_cost: float
) -> tuple[int, ...]:
    """Minimise the cost of the most expensive stage by dynamic programming over (stages, layers).

    Among equal maxima the smallest sum of squares wins, which keeps the other stages balanced, too.
    """
    num_layers = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: (largest cost, sum of squares, partition) of the first n layers in the stages so far.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (largest, squares, partition) in best.items():
            ends = (num_layers,) if is_last else range(start + 1, num_layers)
            for end in ends:
                if end == start:
                    continue
                cost = sums[end] - sums[start] + (head_cost if is_last else 0.0)
                found = max(largest, cost), squares + cost * cost, (*partition, end - start)
                if end not in longer or found < longer[end]:
                    longer[end] = found
        best = longer
    return best[num_layers][2]


def max_steps_in_flight(num_stages: int, *, plans_ahead: bool) -> int:
    """Return the number of steps in flight: one for each stage, and one queued for the first stage if plans are made ahead."""
    return num_stages + plans_ahead


CLUSTER_KEY = "TROUPER_CLUSTER_KEY"
MIN_KEY_LENGTH = 16
RAY_CPUS = "TROUPER_RAY_CPUS_PER_WORKER"
LEAST_RAY = (2, 50)
Backend = Literal["mp", "ray"]
BACKENDS = (None, "mp", "ray")
SUPERVISED_ELSEWHERE = ("external_launcher", "torchrun")


class NodesConfig(msgspec.Struct, frozen=True):
    """The machines of an engine, each with the same number of stages.

    The coordinator (rank 0) schedules and serves; the others only host workers.
    """

    backend: Backend
    # The number of machines for mp.  Ray chooses the machines itself.
    num_nodes: int = 1
    # The number of this machine; the coordinator's is 0.
    rank: int = 0
    # The address of the coordinator, for the hosts of the other machines.
    address: str = "127.0.0.1"
    port: int = 29501
    # The number of CPUs to request from Ray.
    cpus_per_worker: int = 1

    def node_of(self, stage: int, num_stages: int) -> int:
        """Return the machine that runs a stage.  Stages are numbered over all replicas; each machine runs consecutive ones."""
        return stage * self.num_nodes // num_stages


def nodes_config(args: EngineArgs, device: str) -> NodesConfig | None:
    """Check the options about several machines.  Returns None if all workers are on this one.

    Raises:
        TrouperValidationError: two options contradict each other, or the shared secret is missing; the message names the option.
        UnsupportedFeatureError: the launcher is unknown, or the device does not support it.
    """
    backend, num_nodes, rank = args.distributed_executor_backend, args.nnodes, args.node_rank
    _check_backend(backend)
    if rank >= num_nodes:
        raise invalid("node_rank", f"must be below nnodes ({num_nodes})", rank)
    if backend != "ray" and num_nodes == 1:
        return None
    name = "distributed_executor_backend" if backend == "ray" else "nnodes"
    if device != "cpu":
        raise UnsupportedFeatureError(
            f"{name} is not supported on a GPU yet; use device='cpu'", parameter=name
        )
    if args.device_worker == "inline":
        raise invalid("device_worker", f"must be auto or process with {name}", args.device_worker)
    if backend == "ray":
        _check_ray()
        if num_nodes > 1:
            raise invalid(
                "nnodes", "must be 1 with Ray, which chooses the machines itself", num_nodes
            )
        return NodesConfig("ray", cpus_per_worker=_cpus_per_worker())
    num_stages = args.pipeline_parallel_size * args.data_parallel_size
    if num_stages % num_nodes and num_stages * args.tensor_parallel_size % num_nodes == 0:
        raise UnsupportedFeatureError(
            f"nnodes={num_nodes}: the ranks of tensor_parallel_size={args.tensor_parallel_size} share memory, so they must be "
            "on one machine; use pipeline_parallel_size across machines",
            parameter="tensor_parallel_size",
        )
    if num_stages % num_nodes:
        rule = f"must divide pipeline_parallel_size x data_parallel_size, which is {num_stages}"
        raise invalid("nnodes", rule, num_nodes)
    if is_every_address(args.master_addr):
        rule = "must be the address at which the other machines reach machine 0"
        raise invalid("master_addr", rule, args.master_addr)
    cluster_key()
    return NodesConfig("mp", num_nodes, rank, args.master_addr, args.master_port)


def is_every_address(address: str) -> bool:
    """Return whether an address is the unspecified address (0.0.0.0 or ::), in any notation."""
    address = address.strip()
    try:
        # This parser also accepts 0, 0x0 and 0.0, like `bind`.
        return not any(socket.inet_aton(address))
    except OSError:
        pass
    try:
        ip = ipaddress.ip_address(address)
        # `bind` also treats ::ffff:0.0.0.0 as all addresses.
        return (getattr(ip, "ipv4_mapped", None) or ip).is_unspecified
    except ValueError:
        return not address


def cluster_key() -> bytes:
    """Read the shared secret of the machines of an engine.

    Raises:
        TrouperValidationError: the secret is missing or too short.
    """
    key = os.environ.get(CLUSTER_KEY, "")
    if len(key) < MIN_KEY_LENGTH:
        raise TrouperValidationError(
            f"{CLUSTER_KEY}: set this variable to the same secret of at least {MIN_KEY_LENGTH} characters "
            "on each machine, for example from `openssl rand -hex 24`",
            parameter=CLUSTER_KEY,
        )
    return key.encode()


def _cpus_per_worker() -> int:
    text = os.environ.get(RAY_CPUS, "1")
    if not (text.isdecimal() and 0 < len(text) < 6 and int(text) > 0):
        raise TrouperValidationError(
            f"{RAY_CPUS}: must be a positive number of processors", parameter=RAY_CPUS, value=text
        )
    return int(text)


def _check_backend(backend: str | None) -> None:
    if backend in SUPERVISED_ELSEWHERE:
        raise UnsupportedFeatureError(
            f"distributed_executor_backend={backend!r} is not supported, because lost workers could not be restarted; use mp or ray",
            parameter="distributed_executor_backend",
        )
    if backend not in BACKENDS:
        raise invalid("distributed_executor_backend", "must be mp or ray", backend)


def _check_ray() -> None:
    """Check that this machine has Ray in a supported version."""
    least = ".".join(map(str, LEAST_RAY))
    hint = f"needs the extra `ray`: {install_hint('ray')}"
    if importlib.util.find_spec("ray") is None:
        raise UnsupportedFeatureError(
            f"distributed_executor_backend='ray' {hint}", parameter="distributed_executor_backend"
        )
    version = importlib.metadata.version("ray")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < LEAST_RAY:
        raise UnsupportedFeatureError(
            f"distributed_executor_backend='ray': Ray {version} is older than {least}; {hint}",
            parameter="distributed_executor_backend",
        )


CPU_BIND = "TROUPER_CPU_BIND"  # example: "0-15|16-31" or "0,2,4|1,3,5"
# A larger number is a typing error.
MAX_CPUS = 2**16

CpuBind = tuple[tuple[int, ...], ...]


def read_cpu_bind(num_workers: int, *, is_inline: bool) -> CpuBind | None:
    """Read the processors of each worker from the environment.  Returns None if it does not bind them.

    Args:
        is_inline: whether the model is in the engine's process, which is not bound.

    Raises:
        TrouperValidationError: the text is malformed, or does not match the number of workers.
    """
    text = os.environ.get(CPU_BIND)
    if not text:
        return None
    try:
        bind = tuple(tuple(_cpus(part)) for part in text.split("|"))
    except ValueError:
        raise _problem("must list the processors of each worker, as in 0-15|16-31", text) from None
    if is_inline:
        raise _problem("has no effect with device_worker='inline'; it binds worker processes", text)
    if len(bind) != num_workers:
        rule = f"lists the processors of {len(bind)} workers, but there are {num_workers}"
        raise _problem(rule, text)
    return bind


def _cpus(part: str) -> list[int]:
    found: list[int] = []
    for piece in part.split(","):
        first, _, last = piece.partition("-")
        begin, end = int(first), int(last or first)
        if not 0 <= begin <= end < MAX_CPUS:
            raise ValueError
        found += range(begin, end + 1)
    return found


def _problem(rule: str, text: str) -> TrouperValidationError:
    return TrouperValidationError(f"{CPU_BIND}: {rule}", parameter=CPU_BIND, value=text)


def check_workers(
    args: EngineArgs, name: str, device: DeviceKind, pooler: PoolerSpec | None
) -> int:
    """Return the value of an option that distributes a model over worker processes, after checking that this is possible."""
    number = getattr(args, name)
    if number == 1:
        return number
    missing = (
        "not supported for pooling models" if pooler is not None and name != "data_parallel_size"
        else "not supported on a GPU yet; use device='cpu'" if device == "cuda" and name not in ON_GPUS
        else "this system has no shared memory files (memfd_create)" if not hasattr(os, "memfd_create")
        else None
    )  # fmt: skip
    if missing is not None:
        raise UnsupportedFeatureError(f"{name}={number}: {missing}", parameter=name)
    if args.device_worker == "inline":
        rule = f"must be auto or process with {name}={number}"
        raise invalid("device_worker", rule, args.device_worker)
    return number


def layer_partition(args: EngineArgs, model: ModelConfig) -> tuple[int, ...] | None:
    """Check that the model has layers for all stages.  Returns the partition of the environment variable, or None."""
    num_stages = args.pipeline_parallel_size
    if num_stages == 1:
        return None
    text = os.environ.get(PARTITION)
    partition = None if text is None else read_partition(text)
    num_layers = model.hf_config.get("num_hidden_layers")
    if isinstance(num_layers, int):
        split_layers([1.0] * num_layers, num_stages, partition=partition)
    return partition
