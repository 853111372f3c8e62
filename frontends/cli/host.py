"""`trouper serve --node-rank N` with N ≥ 1: run workers for a server on another machine.

This is a separate module, because importing it loads the code of the workers, which an ordinary server does not need.
"""

import signal

import anyio

from trouper.actors.executor.workers.machines.host import Host
from trouper.actors.executor.workers.model_files import MachineFacts
from trouper.config.engine_config import EngineConfig
from trouper.config.parallel import NodesConfig, cluster_key


async def run_host(config: EngineConfig, nodes: NodesConfig) -> None:
    """Run workers for one front after another, until a signal comes.

    Raises:
        TrouperValidationError: the coordinator refuses this machine; the message has the reason.
    """
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_at_signal, tasks.cancel_scope)
        await Host(nodes, cluster_key(), MachineFacts.of(config)).serve()


async def _cancel_at_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
