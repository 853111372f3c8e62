"""The stages of a pipeline: how many steps they work on, and which layers each has.  Pure.

A model's layers are cut into stages, one process each; `actors/stages.py` has the rules that they work by.

The machines of an engine: which there are, and how their workers are started.

The processors of each worker process, where the environment binds them.  Pure.
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
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid
from trouper.extras import install_hint

PARTITION = "TROUPER_PP_LAYER_PARTITION"  # numbers of layers by stage, as "10,18"


class Stage(msgspec.Struct, frozen=True):
    """One stage of a pipeline: its number, how many there are, and its layers `first` … `last - 1`."""

    index: int
    num_stages: int
    first: int
    last: int

    @property
    def is_first(self) -> bool:
        """Embeds the token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Has the final norm and the head, and samples."""
        return self.index == self.num_stages - 1


def split_layers(
    layer_costs: Sequence[float],
    num_stages: int,
    *,
    head_cost: float = 0.0,
    partition: Sequence[int] | None = None,
) -> tuple[Stage, ...]:
    """Cut the layers into contiguous stages whose dearest is as cheap as possible.

    Args:
        layer_costs: what a layer costs, in any unit: bytes of weights will do.
        head_cost: what the last stage has to do besides, in the same unit.
        partition: the numbers of layers by stage, instead of a search.

    Raises:
        TrouperValidationError: more stages than layers, or a partition that does not fit.
    """
    num_layers = len(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise TrouperValidationError(
            f"{num_layers} layers, {num_stages} stages: each stage needs a layer",
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
    """Read the numbers of layers by stage, as in "10,18".

    Raises:
        TrouperValidationError: it is something else.
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
    """Search by dynamic programming over (stages, layers): the least of the largest stage's cost.

    Ties go to the smaller sum of squares, so that no stage is left with less than its share for nothing.
    """
    num_layers = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: (largest cost, sum of squares, partition) of the first n layers in the stages so far
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
    """Steps under way at once: one a stage, and with planning ahead one that waits for the first stage."""
    return num_stages + plans_ahead


CLUSTER_KEY = "TROUPER_CLUSTER_KEY"
MIN_KEY_LENGTH = 16
RAY_CPUS = "TROUPER_RAY_CPUS_PER_WORKER"
LEAST_RAY = (2, 50)
Backend = Literal["mp", "ray"]
BACKENDS = (None, "mp", "ray")
SUPERVISED_ELSEWHERE = ("external_launcher", "torchrun")


class NodesConfig(msgspec.Struct, frozen=True):
    """The machines of an engine."""

    backend: Backend
    num_nodes: int = 1  # of mp; Ray chooses the places itself
    rank: int = 0  # of this machine; the front's is 0
    address: str = "127.0.0.1"  # of the front, for the hosts of the others
    port: int = 29501
    cpus_per_worker: int = 1  # that Ray is asked for

    def node_of(self, stage: int, num_stages: int) -> int:
        """Return the machine of a stage, of those of all replicas: each machine has as many, one after another."""
        return stage * self.num_nodes // num_stages


def nodes_config(args: EngineArgs, device: str) -> NodesConfig | None:
    """Check what the options say of several machines; None: all workers are on this one.

    Raises:
        TrouperValidationError: numbers that do not fit each other, or no key; it names the option.
        UnsupportedFeatureError: a launcher that there is not, or not on this device.
    """
    backend, num_nodes, rank = args.distributed_executor_backend, args.nnodes, args.node_rank
    _check_backend(backend)
    if rank >= num_nodes:
        raise invalid("node_rank", f"must be below nnodes, which is {num_nodes}", rank)
    if backend != "ray" and num_nodes == 1:
        return None
    name = "distributed_executor_backend" if backend == "ray" else "nnodes"
    if device != "cpu":
        raise UnsupportedFeatureError(
            f"{name}: not on a GPU yet; device='cpu' has it", parameter=name
        )
    if args.device_worker == "inline":
        raise invalid("device_worker", f"must be auto or process with {name}", args.device_worker)
    if backend == "ray":
        _check_ray()
        if num_nodes > 1:
            raise invalid("nnodes", "must be 1 with Ray, which has machines of its own", num_nodes)
        return NodesConfig("ray", cpus_per_worker=_cpus_per_worker())
    num_stages = args.pipeline_parallel_size * args.data_parallel_size
    if num_stages % num_nodes and num_stages * args.tensor_parallel_size % num_nodes == 0:
        raise UnsupportedFeatureError(
            f"nnodes={num_nodes}: the ranks of tensor_parallel_size={args.tensor_parallel_size} share memory, so they cannot "
            "be on several machines; stages (pipeline_parallel_size) can",
            parameter="tensor_parallel_size",
        )
    if num_stages % num_nodes:
        rule = (
            f"pipeline_parallel_size x data_parallel_size, {num_stages}, must be a multiple of it"
        )
        raise invalid("nnodes", rule, num_nodes)
    if is_every_address(args.master_addr):
        rule = "must be one address of machine 0, by which the others reach it"
        raise invalid("master_addr", rule, args.master_addr)
    cluster_key()
    return NodesConfig("mp", num_nodes, rank, args.master_addr, args.master_port)


def is_every_address(address: str) -> bool:
    """Say whether a numeric address, however it is written, stands for all addresses of a machine."""
    address = address.strip()
    try:
        return not any(socket.inet_aton(address))  # takes 0, 0x0 and 0.0 as well, as `bind` does
    except OSError:
        pass
    try:
        ip = ipaddress.ip_address(address)
        # `bind` takes ::ffff:0.0.0.0 for all as well
        return (getattr(ip, "ipv4_mapped", None) or ip).is_unspecified
    except ValueError:
        return not address


def cluster_key() -> bytes:
    """Read the secret that the machines of an engine have in common.

    Raises:
        TrouperValidationError: there is none, or it is too short.
    """
    key = os.environ.get(CLUSTER_KEY, "")
    if len(key) < MIN_KEY_LENGTH:
        raise TrouperValidationError(
            f"{CLUSTER_KEY}: several machines need a secret of at least {MIN_KEY_LENGTH} characters "
            "in this variable, the same on each: openssl rand -hex 24",
            parameter=CLUSTER_KEY,
        )
    return key.encode()


def _cpus_per_worker() -> int:
    text = os.environ.get(RAY_CPUS, "1")
    if not (text.isdecimal() and 0 < len(text) < 6 and int(text) > 0):
        raise TrouperValidationError(
            f"{RAY_CPUS}: must be a number of processors above 0", parameter=RAY_CPUS, value=text
        )
    return int(text)


def _check_backend(backend: str | None) -> None:
    if backend in SUPERVISED_ELSEWHERE:
        raise UnsupportedFeatureError(
            f"distributed_executor_backend={backend!r}: nothing would start its workers again; use mp or ray",
            parameter="distributed_executor_backend",
        )
    if backend not in BACKENDS:
        raise invalid("distributed_executor_backend", "must be mp or ray", backend)


def _check_ray() -> None:
    """Refuse a machine without Ray, or with one that is too old."""
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


CPU_BIND = "TROUPER_CPU_BIND"  # processors by worker, as "0-15|16-31" or "0,2,4|1,3,5"
MAX_CPUS = 2**16  # a number above is a slip

CpuBind = tuple[tuple[int, ...], ...]


def read_cpu_bind(num_workers: int, *, is_inline: bool) -> CpuBind | None:
    """Read the processors of each worker from the environment; None: it does not bind them.

    Args:
        is_inline: whether the model is in the engine's process, which is not bound.

    Raises:
        TrouperValidationError: they are not of so many workers, or cannot be read.
    """
    text = os.environ.get(CPU_BIND)
    if not text:
        return None
    try:
        bind = tuple(tuple(_cpus(part)) for part in text.split("|"))
    except ValueError:
        raise _problem("must be processors by worker, as in 0-15|16-31", text) from None
    if is_inline:
        raise _problem("binds worker processes, and device_worker is inline", text)
    if len(bind) != num_workers:
        raise _problem(f"has processors of {len(bind)} workers, and there are {num_workers}", text)
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
