"""Somebody who looks after the house, and how late the event loop is when he wants to."""

import anyio

from trouper.frontends.server.service import Service

PERIOD_S = 0.01
NUM_PERIODS = 25  # between two looks: a quarter of a second


async def watch(service: Service) -> None:
    """Until cancelled."""
    while True:
        worst_s = 0.0
        for _ in range(NUM_PERIODS):
            due = anyio.current_time() + PERIOD_S
            await anyio.sleep_until(due)
            gap_s = anyio.current_time() - due
            service.metrics.note_gap(gap_s)
            worst_s = max(worst_s, gap_s)
        service.look(worst_s)
