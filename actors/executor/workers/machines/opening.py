"""The choice between our own hosts and Ray, which start the workers of an engine elsewhere."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from trouper.actors.executor.workers.launching import WorkersLauncher
from trouper.actors.executor.workers.machines.launch_hosts import open_nodes
from trouper.actors.executor.workers.machines.launch_ray import open_ray
from trouper.config.parallel import NodesConfig
from trouper.config.resolve import EngineConfig
from trouper.errors import invalid


@asynccontextmanager
async def open_workers(
    config: EngineConfig, nodes: NodesConfig
) -> AsyncGenerator[Callable[[int], WorkersLauncher]]:
    """Be there for other machines while the block runs; yields what starts the workers of a replica.

    Raises:
        TrouperValidationError: this machine is not the front's, or its address or port cannot be had.
    """
    if nodes.rank > 0:
        rule = "must be 0 where an engine runs; trouper serve runs the other machines"
        raise invalid("node_rank", rule, nodes.rank)
    opened = open_ray if nodes.backend == "ray" else open_nodes
    async with opened(config, nodes) as launcher_of:
        yield launcher_of
