"""State of the scheduler at one moment, as plain data."""

import msgspec

from trouper.actors.messages.controls import Pause


class PolicySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Places of all unfinished sequences; in an engine that pools, of requests.  Ids are in the order of service."""

    # With a request slot; of a pooling engine: in a plan that is in flight.
    running: tuple[int, ...]
    waiting: tuple[int, ...]  # for a request slot or for blocks
    # Preempted with a result in flight, or waiting for a leader's prompt; in no order.
    other: tuple[int, ...]
    # Eldest first: number of the step, and whose.
    in_flight: tuple[tuple[int, tuple[int, ...]], ...]
    suspects: tuple[int, ...]  # of a fault that a search is looking for
    pause: Pause
    is_device_lost: bool


class SchedulerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the scheduler: its policies', and what it has been asked and not answered yet."""

    policies: tuple[PolicySnapshot, ...]  # of each replica
    num_plans_due: int  # of a stepped engine: plans that were requested and not made
    num_pauses: int  # that are not in full effect yet
