"""The machines of an engine: which there are, and how their workers are started."""

import importlib.metadata
import importlib.util
import ipaddress
import os
import re
import socket
from typing import Literal

import msgspec

from trouper.config.args import EngineArgs
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid
from trouper.extras import install_hint

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
