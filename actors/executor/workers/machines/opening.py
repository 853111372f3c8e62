"""Chooses between our own hosts and Ray, the two ways to start workers of an engine on other machines."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from trouper.actors.executor.workers.launching import WorkersLauncher
from trouper.actors.executor.workers.machines.launch_hosts import open_nodes
from trouper.actors.executor.workers.machines.launch_ray import open_ray
from trouper.config.engine_config import EngineConfig
from trouper.config.parallel import NodesConfig
from trouper.errors import invalid


@asynccontextmanager
async def open_workers(
    config: EngineConfig, nodes: NodesConfig
) -> AsyncGenerator[Callable[[int], WorkersLauncher]]:
    """Connect to other machines while the block runs. Yields a function that returns the launcher of a replica's
    workers.

    Raises:
        TrouperValidationError: this machine is not the coordinator, or its address or port cannot be used.
    """
    if nodes.rank > 0:
        rule = "must be 0 in the process of the engine; run `trouper serve` on the other machines"
        raise invalid("node_rank", rule, nodes.rank)
    opened = open_ray if nodes.backend == "ray" else open_nodes
    async with opened(config, nodes) as launcher_of:
        yield launcher_of
