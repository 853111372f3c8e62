"""Decide which models of a server are in memory.  Pure: a decision reads the records and returns at most one transition.

    COLD ─▶ AWAKE ⇄ DOZING ─▶ ASLEEP ─▶ AWAKE        load, wake, sleep at level 1, sleep at level 2
    COLD ◀─ ASLEEP                                   stop
    COLD, DOZING, ASLEEP ─▶ FAILED ─▶ COLD           a failed load or wake, and the end of its pause

Laws:
L1. The memory of all models fits the budget before, during and after each transition.
L2. Only one transition runs at a time.
L3. Every model with requests is woken eventually.  If each of the n models fits together with the worker processes of all others, it waits
    for at most n - 1 wakes of others; otherwise it may also wait until open requests of others have ended.
L4. No transition aborts a request.
L5. A model with requests stays awake for its turn.
L6. A pinned model is never put to sleep.
L7. A failed model takes neither memory nor a turn until its pause ends.
L8. A model is put to sleep only for another one with requests, or because it was idle for its keep-alive time.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class ModelState(Enum):
    """Name how much of a model is in memory.  Replies and metrics contain the values."""

    # No process.
    COLD = "cold"
    # Weights and KV cache.
    AWAKE = "awake"
    # Weights but no KV cache.
    DOZING = "dozing"
    # Only the worker process.
    ASLEEP = "asleep"
    FAILED = "failed"


COLD, AWAKE, DOZING = ModelState.COLD, ModelState.AWAKE, ModelState.DOZING
ASLEEP, FAILED = ModelState.ASLEEP, ModelState.FAILED
LOWER = {AWAKE: DOZING, DOZING: ASLEEP, ASLEEP: COLD}
# The idle time before each step down, as a multiple of the keep-alive time.
PATIENCE = {AWAKE: 1, DOZING: 2, ASLEEP: 6}


class ModelMemory(NamedTuple):
    """Hold the memory of a model's parts in bytes.  `process` is its worker processes without weights."""

    process: int
    weights: int
    kv: int

    def bytes_in(self, state: ModelState) -> int:
        """Return the largest memory use of the model in a state, in bytes.

        An awake model counts with its whole KV cache, because any page of it can be written at any time.
        """
        match state:
            case ModelState.AWAKE:
                return sum(self)
            case ModelState.DOZING:
                return self.process + self.weights
            case ModelState.ASLEEP:
                return self.process
            case _:
                return 0


@dataclass
class ModelRecord:
    """Hold the facts about one model that determine its transitions.  Times are seconds of the event loop's clock.

    Attributes:
        is_held: whether the policy must not move the model, because an administrator has paused it.
        is_leaving: whether to unload the model as soon as it has no requests, as an administrator has asked.
        num_waiting: the number of requests that wait until the model is awake.
        num_open: the number of requests in the engine, running or frozen.
        wants_since: the time since which its requests have been waiting for it to be awake.  The end of a turn resets it.
        work: the number of recent requests, with exponential decay; models with less work are evicted first.
    """

    name: str
    memory: ModelMemory
    state: ModelState = COLD
    is_pinned: bool = False
    is_held: bool = False
    is_leaving: bool = False
    num_waiting: int = 0
    num_open: int = 0
    wants_since: float = math.inf
    woken_at: float = -math.inf
    idle_since: float = 0.0
    keep_alive_s: float = 300.0
    retry_at: float = -math.inf
    work: float = 0.0

    @property
    def bytes(self) -> int:
        return self.memory.bytes_in(self.state)

    @property
    def has_work(self) -> bool:
        return self.num_waiting + self.num_open > 0

    @property
    def has_weights(self) -> bool:
        return self.state in (AWAKE, DOZING)

    @property
    def wants(self) -> bool:
        """Whether it waits to be woken: it has requests, and is neither awake nor failed nor held."""
        return self.has_work and self.state not in (AWAKE, FAILED) and not self.is_held

    @property
    def stays(self) -> bool:
        """Whether it may not be put to sleep for another model."""
        return self.is_pinned or self.is_held

    @property
    def least_bytes(self) -> int:
        """The memory that other models can never reclaim from it at present, in bytes.

        A model with open requests keeps its worker process, because the requests live in the engine.
        """
        if self.stays and self.state is not COLD:
            return self.memory.bytes_in(self.state if self.is_held else AWAKE)
        is_stoppable = self.state in (COLD, FAILED) or self.num_open == 0
        return 0 if is_stoppable else self.memory.process


class Transition(NamedTuple):
    """Name a model and its next state."""

    name: str
    to: ModelState


class ResidencyLimits(NamedTuple):
    """Hold the limits of a server with several models.

    Attributes:
        budget: the memory for all models together, in bytes.
        turn_s: how long a model with requests stays awake although another one needs its memory, in seconds.
        max_loaded: the limit of models with weights in memory at once, or None for no limit.
    """

    budget: int
    turn_s: float = 5.0
    max_loaded: int | None = None


def used_bytes(records: Iterable[ModelRecord], transition: Transition | None = None) -> int:
    """Return the memory of all models in bytes.  During a transition, a model counts with the larger of its two states."""
    total = 0
    for record in records:
        moves = transition is not None and transition.name == record.name
        after = record.memory.bytes_in(transition.to) if moves and transition else 0
        total += max(record.bytes, after)
    return total


def decide(
    records: Sequence[ModelRecord], limits: ResidencyLimits, now: float
) -> Transition | None:
    """Return the next transition, or None if none is due before the next event or `next_look`.

    Models with requests are woken in the order in which they began to wait.  Others are evicted only for the first of them, so that small
    models cannot starve a large one.  A model that would not fit even after all possible evictions is skipped until requests of others
    have ended.
    """
    for first in _wanting(records):
        if not is_reachable(first, records, limits.budget):
            continue
        transition = Transition(first.name, AWAKE)
        has_bytes = used_bytes(records, transition) <= limits.budget
        has_place = first.has_weights or not _is_full(records, limits)
        if has_bytes and has_place:
            return transition
        victim = _victim(first, records, limits, now, must_have_weights=not has_place)
        return None if victim is None else Transition(victim.name, LOWER[victim.state])
    return _idle_transition(records, now)


def _wanting(records: Iterable[ModelRecord]) -> list[ModelRecord]:
    return sorted((r for r in records if r.wants), key=lambda r: (r.wants_since, r.name))


def draining(records: Sequence[ModelRecord], limits: ResidencyLimits, now: float) -> frozenset[str]:
    """Return the models that must hold back new requests, because a waiting model needs the memory of their processes.

    Otherwise that model could starve: the others would get new requests before their last ones have ended.
    """
    wanting = _wanting(records)
    if not wanting or now < wanting[0].wants_since + limits.turn_s:
        return frozenset()
    first = wanting[0]
    if is_reachable(first, records, limits.budget):
        return frozenset()
    return frozenset(r.name for r in records if r is not first and not r.stays)


def is_reachable(record: ModelRecord, records: Iterable[ModelRecord], budget: int) -> bool:
    """Return whether a model would fit if all others released as much memory as they can at present."""
    others = sum(other.least_bytes for other in records if other is not record)
    return record.memory.bytes_in(AWAKE) + others <= budget


def _is_full(records: Iterable[ModelRecord], limits: ResidencyLimits) -> bool:
    num_loaded = sum(record.has_weights for record in records)
    return limits.max_loaded is not None and num_loaded >= limits.max_loaded


def _victim(
    first: ModelRecord,
    records: Iterable[ModelRecord],
    limits: ResidencyLimits,
    now: float,
    *,
    must_have_weights: bool,
) -> ModelRecord | None:
    """Choose the model to evict: idle models first, then models after their turn; among these, the one with the least work per byte.

    Worker processes are stopped last, because starting one takes seconds.
    """
    able = [
        record
        for record in records
        if record is not first
        and record.state in LOWER
        and not record.stays
        and (record.has_weights or (record.num_open == 0 and not must_have_weights))
    ]
    idle = [record for record in able if not record.has_work]
    over = [
        record
        for record in able
        if record.has_work and (record.state is not AWAKE or now >= record.woken_at + limits.turn_s)
    ]
    for group in (idle, over):
        if group:
            return min(group, key=_cost)
    return None


def _cost(record: ModelRecord) -> tuple[bool, float, float, str]:
    per_byte = record.work / max(record.bytes, 1)
    return record.state is ASLEEP, per_byte, record.idle_since, record.name


def _idle_transition(records: Iterable[ModelRecord], now: float) -> Transition | None:
    for record in records:
        if record.state in LOWER and not record.has_work and now >= _rests_at(record):
            return Transition(record.name, LOWER[record.state])
    return None


def _rests_at(record: ModelRecord) -> float:
    """Return the time at which an idle model moves down by one state.  Infinity means never."""
    if record.is_leaving:
        return -math.inf
    if record.stays or record.keep_alive_s == math.inf:
        return math.inf
    idle_since = max(record.idle_since, record.woken_at)
    return idle_since + record.keep_alive_s * PATIENCE[record.state]


def next_look(records: Iterable[ModelRecord], limits: ResidencyLimits, now: float) -> float:
    """Return the time of the next decision that depends only on the clock.

    This is the earliest end of a turn, of a keep-alive time or of a pause after a failure.  Infinity if there is none.
    """
    times = [math.inf]
    wanting = _wanting(records)
    if wanting:
        times.append(wanting[0].wants_since + limits.turn_s)
    for record in records:
        if record.state is FAILED:
            times.append(record.retry_at)
        elif record.state is AWAKE and record.has_work:
            times.append(record.woken_at + limits.turn_s)
        elif record.state in LOWER and not record.has_work:
            times.append(_rests_at(record))
    return min(time for time in times if time > now)


def unfit(records: Sequence[ModelRecord], budget: int) -> list[tuple[ModelRecord, int]]:
    """Return the models that do not fit into the budget next to the pinned ones, each with the memory of those pinned ones."""
    found: list[tuple[ModelRecord, int]] = []
    for record in records:
        pinned = sum(r.memory.bytes_in(AWAKE) for r in records if r.is_pinned and r is not record)
        if record.memory.bytes_in(AWAKE) + pinned > budget:
            found.append((record, pinned))
    return found
