"""Background task: four times a second it updates the overload level and the GC policy; it measures event-loop lag."""

import anyio

from trouper.frontends.server.admission.overload import Level
from trouper.frontends.server.gc_control import Heap
from trouper.frontends.server.service import Service

PERIOD_S = 0.01
NUM_PERIODS = 25  # between two updates: a quarter of a second


async def watch(service: Service, heap: Heap) -> None:
    """Update overload level and garbage collector, and record the lag of the event loop, until cancelled."""
    worst_s = 0.0
    while True:
        due = anyio.current_time() + PERIOD_S  # the update itself is part of the lag
        service.look(worst_s)
        is_busy, is_tight = service.gate.admission.num_requests > 0, service.gate.level > Level.CALM
        heap.look(due, is_busy=is_busy, is_tight=is_tight)
        worst_s = 0.0
        for _ in range(NUM_PERIODS):
            await anyio.sleep_until(due)
            now = anyio.current_time()
            service.metrics.note_gap(now - due)
            worst_s = max(worst_s, now - due)
            due = now + PERIOD_S
