"""Play the policy of several models in virtual time: arrivals, transitions that take time or fail, dead workers, leaving clients.

`play(seed)` raises `Broken` at the first law that does not hold.  `bugs` plants faults, each of which some schedule must find.
"""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from trouper.frontends.server.models.policy import (
    AWAKE,
    COLD,
    FAILED,
    ModelMemory,
    ModelRecord,
    ResidencyLimits,
    Transition,
    decide,
    draining,
    next_look,
    unfit,
    used_bytes,
)

TURN_S = 5.0
MOST_TRANSITIONS = 3000


class Broken(Exception):
    """A law does not hold."""


@dataclass
class Asked:
    """One request: the seconds of work that it needs and has got, and how it ended."""

    model: str
    need_s: float
    done_s: float = 0.0
    is_in_engine: bool = False
    is_over: bool = False
    has_left: bool = False
    error: str | None = None


def changed(**how: Callable[[ModelRecord], object]):
    """Return a policy that reads records changed in this way."""

    def policy(records, limits, now):
        copies = [replace(r, **{name: of(r) for name, of in how.items()}) for r in records]
        return decide(copies, limits, now)

    return policy


POLICIES = {
    "budget ignored": lambda records, limits, now: decide(
        records, limits._replace(budget=10**9), now
    ),
    "turn cut short": lambda records, limits, now: decide(records, limits._replace(turn_s=0), now),
    "order of requests": changed(wants_since=lambda r: r.woken_at if r.num_open else -1.0),
    "pin ignored": changed(is_pinned=lambda r: False),
    "frozen requests forgotten": changed(
        num_open=lambda r: 0, num_waiting=lambda r: r.num_open + r.num_waiting
    ),
    "cache of idle models not counted": changed(
        memory=lambda r: r.memory if r.has_work else r.memory._replace(kv=0)
    ),
    "idle never sleeps": changed(keep_alive_s=lambda r: math.inf),
    "places not limited": lambda records, limits, now: decide(
        records, limits._replace(max_loaded=None), now
    ),
}
WORLD_BUGS = (
    "two at a time", "open requests unseen", "failure holds its requests", "failure spreads", "wanting kept over a turn",
    "lost on sleep", "death ends streams", "failure for ever", "stopped while busy",
)  # fmt: skip
PLANTED = (*POLICIES, *WORLD_BUGS)


@dataclass
class World:
    seed: int
    bugs: frozenset[str] = frozenset()
    now: float = 0.0
    num_transitions: int = 0
    asked: dict[int, Asked] = field(default_factory=dict)
    flight: Transition | None = None

    def __post_init__(self):
        rng = self.rng = random.Random(self.seed)
        num = rng.randint(2, 6)
        self.records = [
            ModelRecord(
                f"m{i}",
                ModelMemory(rng.randint(1, 3), rng.randint(2, 30), rng.randint(1, 12)),
                keep_alive_s=rng.choice((2.0, 20.0, 1e9)),
                is_pinned=rng.random() < 0.15,
            )
            for i in range(num)
        ]
        big = max(r.memory.bytes_in(AWAKE) for r in self.records)
        kept = sum(sum(r.memory) if r.is_pinned else r.memory.process for r in self.records)
        num_pinned = sum(r.is_pinned for r in self.records)
        max_loaded = rng.choice((None, None, num_pinned + 1, num_pinned + 2))
        budget = kept + rng.randint(big, int(2.2 * big) + 1)
        # With less memory, processes of others can leave a model no room.
        self.is_tight = rng.random() < 0.4
        if self.is_tight:
            pinned = sum(sum(r.memory) for r in self.records if r.is_pinned)
            budget = pinned + big + rng.randint(0, big // 4)
        self.limits = ResidencyLimits(budget, TURN_S, max_loaded)
        assert not unfit(self.records, budget)
        self.by_name = {r.name: r for r in self.records}
        # The wakes of others that each waiting model has seen.
        self.seen = {r.name: 0 for r in self.records}
        self.idle_since = dict.fromkeys(self.by_name, 0.0)
        self.events: list = []
        self.draw()

    def draw(self):
        rng = self.rng
        num_named = rng.randint(1, len(self.records))
        for i in range(rng.randint(10, 60)):
            name = rng.choice(self.records[:num_named]).name
            asked = Asked(name, rng.choice((0.1, 0.5, 2.0, 9.0)))
            self.push(rng.uniform(0, 60), self.arrive, i, asked)
        for _ in range(rng.randint(0, 3)):
            self.push(rng.uniform(0, 60), self.die)
        for _ in range(rng.randint(0, 3)):
            self.push(rng.uniform(0, 60), self.leave, rng.randrange(60))
        failing = [r.name for r in self.records if rng.random() < 0.2]
        self.failures_left = {name: rng.randint(1, 3) for name in failing}

    def push(self, at, act, *what):
        heapq.heappush(self.events, (at, len(self.events) + 1e6 * self.num_transitions, act, what))

    def of(self, name):
        return [a for a in self.asked.values() if a.model == name and not a.is_over]

    def is_moving(self, record):
        return self.flight is not None and self.flight.name == record.name

    # Events

    def arrive(self, number, asked):
        self.asked[number] = asked
        is_held = "failure holds its requests" in self.bugs
        if self.by_name[asked.model].state is FAILED and not is_held:
            asked.is_over, asked.error = True, "failed to load"

    def leave(self, number):
        if number in self.asked and not self.asked[number].is_over:
            self.asked[number].is_over = self.asked[number].has_left = True

    def die(self):
        """Let a worker die.  Its supervisor brings it back in the same state, so requests go on."""
        if "death ends streams" in self.bugs:
            self.end(lambda a: a.is_in_engine, "worker died")

    def end(self, which, why):
        for asked in self.asked.values():
            if not asked.is_over and which(asked):
                asked.is_over, asked.error = True, why

    def land(self, transition, is_ok):
        record, self.flight = self.by_name[transition.name], None

        def mine(asked):
            return asked.model == record.name

        if not is_ok:
            pause_s = 1e9 if "failure for ever" in self.bugs else 5.0
            record.state, record.retry_at = FAILED, self.now + pause_s
            if "failure holds its requests" not in self.bugs:
                self.end(mine, "failed to load")
            if "failure spreads" in self.bugs:
                self.end(lambda a: True, "another's failure")
            return
        if record.state is AWAKE and "lost on sleep" in self.bugs:
            self.end(lambda a: mine(a) and a.is_in_engine, "swapped out")
        record.state = transition.to
        if transition.to is AWAKE:
            record.woken_at = self.now
            for other in self.records:
                if other is not record and other.wants:
                    self.seen[other.name] += 1
            self.seen[record.name] = 0

    # The clock

    def serve(self, to):
        """Let awake models serve their open requests, one after another, up to a time."""
        for record in self.records:
            if record.state is not AWAKE or self.is_moving(record):
                continue
            left = to - self.now
            for asked in self.of(record.name):
                if asked.is_in_engine and left > 0:
                    part = min(left, asked.need_s - asked.done_s)
                    asked.done_s += part
                    left -= part
                    record.work += part
                    asked.is_over = asked.done_s >= asked.need_s - 1e-9
        self.now = to

    def count(self):
        self.drained = draining(self.records, self.limits, self.now)
        for record in self.records:
            mine, had_work = self.of(record.name), record.has_work
            is_open = record.state is AWAKE and record.name not in self.drained
            if is_open and not self.is_moving(record):
                for asked in mine:
                    asked.is_in_engine = True
            sees_open = "open requests unseen" not in self.bugs or record.state is AWAKE
            record.num_open = sum(a.is_in_engine for a in mine) if sees_open else 0
            record.num_waiting = sum(not a.is_in_engine for a in mine)
            if had_work and not record.has_work:
                record.idle_since = self.idle_since[record.name] = self.now
                self.seen[record.name] = 0
            if record.wants:
                record.wants_since = min(record.wants_since, self.now)
            elif not ("wanting kept over a turn" in self.bugs and record.has_work):
                record.wants_since = math.inf
            if record.state is FAILED and self.now >= record.retry_at:
                record.state = COLD

    def next_event(self):
        """Advance to the next event and let it happen."""
        looks_at = math.inf
        if self.flight is None:
            looks_at = next_look(self.records, self.limits, self.now)
        ends = [
            self.now + a.need_s - a.done_s
            for a in self.asked.values()
            if a.is_in_engine and not a.is_over and self.by_name[a.model].state is AWAKE
        ]
        due = self.events[0][0] if self.events else math.inf
        at = min(due, looks_at, max(min(ends, default=math.inf), self.now))
        if at == math.inf:
            raise Broken("requests wait, and nothing will happen")
        self.serve(max(at, self.now))
        if due <= at:
            _, _, act, what = heapq.heappop(self.events)
            act(*what)
        self.count()

    def play(self):
        while self.events or any(not a.is_over for a in self.asked.values()):
            if self.num_transitions > MOST_TRANSITIONS or self.now > 1e5:
                raise Broken(
                    "no end: models are moved without requests, or a request waits for ever"
                )
            self.next_event()
            self.check()
            if self.flight is None or "two at a time" in self.bugs:
                self.begin(self.choose())
        return self.num_transitions

    def choose(self):
        policy = decide
        for bug in self.bugs & POLICIES.keys():
            policy = POLICIES[bug]
        transition = policy(self.records, self.limits, self.now)
        if "stopped while busy" in self.bugs and transition is None and self.rng.random() < 0.05:
            busy = [r for r in self.records if r.has_work and r.state is AWAKE]
            return Transition(busy[0].name, COLD) if busy else None
        return transition

    def begin(self, transition):
        if transition is None:
            return
        self.check_transition(transition)
        self.num_transitions += 1
        record, name = self.by_name[transition.name], transition.name
        fails = transition.to is AWAKE and record.state is COLD and self.failures_left.get(name, 0)
        if fails:
            self.failures_left[name] -= 1
        self.flight = transition
        took_s = self.rng.choice((0.01, 0.1, 1.5, 4.0))
        self.push(self.now + took_s, self.land, transition, not fails)

    # The laws

    def check(self):
        if used_bytes(self.records) > self.limits.budget:
            raise Broken("L1: more bytes than the budget")
        for record in self.records:
            self.check_record(record)
        for asked in self.asked.values():
            if asked.error not in (None, "failed to load"):
                raise Broken(f"L4: a stream was broken: {asked.error}")
            is_short = asked.done_s < asked.need_s - 1e-6
            if asked.is_over and is_short and not (asked.has_left or asked.error):
                raise Broken("L4: an answer is too short")

    def check_record(self, record):
        if self.seen[record.name] > len(self.records) - 1 and not self.is_tight:
            raise Broken(f"L3: {record.name} waited for {self.seen[record.name]} wakes")
        idle_s = self.now - max(self.idle_since[record.name], record.woken_at)
        is_quiet = record.state is AWAKE and not record.has_work and not record.is_pinned
        if is_quiet and self.flight is None and idle_s > record.keep_alive_s + 12:
            raise Broken("an idle model is awake long after its keep-alive time")
        if record.state is FAILED and self.of(record.name):
            raise Broken("L7: a request of a failed model is not answered")
        if record.state is FAILED and record.retry_at > self.now + 1e6:
            raise Broken("L7: a failed model is never tried again")

    def check_transition(self, transition):
        record = self.by_name[transition.name]
        if self.flight is not None:
            raise Broken("L2: two transitions at a time")
        if used_bytes(self.records, transition) > self.limits.budget:
            raise Broken("L1: a transition exceeds the budget")
        loaded = sum(r.has_weights for r in self.records if r is not record)
        most = self.limits.max_loaded
        if transition.to is AWAKE and most is not None and loaded >= most:
            raise Broken("more models are loaded than allowed")
        if transition.to is COLD and record.num_open:
            raise Broken("L4: stopped with open requests")
        if record.state is AWAKE and transition.to is not AWAKE:
            if record.is_pinned:
                raise Broken("L6: a pinned model was put to sleep")
            if record.has_work and self.now - record.woken_at < TURN_S - 1e-9:
                raise Broken("L5: a turn was cut short")
            is_wanted = any(other.wants for other in self.records)
            is_over = self.now >= record.idle_since + record.keep_alive_s - 1e-9
            if not is_wanted and not is_over:
                raise Broken("L8: put to sleep for no reason")


def play(seed, bugs=frozenset()):
    """Play one schedule.  Returns the number of transitions."""
    return World(seed, frozenset(bugs)).play()
