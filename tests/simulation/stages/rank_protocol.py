"""Check the exchange of tensor-parallel ranks over all interleavings: no part is read that is being written, none waits for ever.

    python -m tests.simulation.stages.rank_protocol            # 2 to 4 ranks
    python -m tests.simulation.stages.rank_protocol --faults   # and that known mistakes are found

The moves are those of `kernels/cpu/rank_sums.py`: a rank writes its part into one of two places, stores the label, counts, waits for
each peer, compares labels, and reads all parts, one after the other.  Breadth first over the states of all ranks.
"""

import argparse
import itertools
import time
from collections import deque
from typing import NamedTuple

WRITING = -1  # of a part: neither what was there nor what will be
WRITE, TELL, WAIT, READ, DONE, STOPPED = range(6)


class Protocol(NamedTuple):
    """The rules under test; the defaults are those of the kernels."""

    num_ranks: int
    num_places: int = 2
    tells_first: bool = False  # a mistake: a part is counted before it is there
    waits_for_all: bool = True  # False is a mistake: the last peer is not waited for
    compares_labels: bool = True


class Rank(NamedTuple):
    """The state of one rank, and what it has put into shared memory."""

    phase: int = WRITE
    done: int = 0  # exchanges
    peer: int = 0  # that is waited for, or whose part is read
    written: int = 0  # the counter that all see
    labels: tuple[int, ...] = ()  # of the last exchanges, by place of two
    parts: tuple[int, ...] = ()  # the exchange whose numbers are in each place


State = tuple[Rank, ...]
Plan = tuple[tuple[int, ...], ...]  # labels of the exchanges of each rank


class Deadlock(Exception):
    """None can go on, and not all are done."""


class WrongPart(Exception):
    """A part is read that is of another exchange, or half of it."""


class Unnoticed(Exception):
    """Ranks have done different things, and none has found out."""


def check(protocol: Protocol, plan: Plan) -> int:
    """Visit every state; returns how many there are.

    Raises:
        Deadlock, WrongPart, Unnoticed: as they say.
    """
    rank = Rank(labels=(0, 0), parts=(0,) * protocol.num_places)
    start: State = (rank,) * protocol.num_ranks
    seen, queue = {start}, deque([start])
    while queue:
        state = queue.popleft()
        following = list(moves(protocol, plan, state))
        if not following:
            check_end(protocol, plan, state)
        for after in following:
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return len(seen)


def check_end(protocol: Protocol, plan: Plan, state: State) -> None:
    phases = {rank.phase for rank in state}
    if STOPPED in phases:
        return  # its process exits, and all are started again
    if phases != {DONE}:
        raise Deadlock(f"{protocol}, {plan}: {state}")
    if len(set(plan)) > 1:
        raise Unnoticed(f"{protocol}, {plan}: {state}")


def moves(protocol: Protocol, plan: Plan, state: State):
    for number, rank in enumerate(state):
        after = move(protocol, plan[number], state, number)
        if after is not None and after != rank:
            yield (*state[:number], after, *state[number + 1 :])


def move(protocol: Protocol, labels: tuple[int, ...], state: State, number: int) -> Rank | None:
    """The next move of a rank; None where it has to wait, or is at its end."""
    rank = state[number]
    if rank.phase in (DONE, STOPPED):
        return None
    if rank.done == len(labels):
        return rank._replace(phase=DONE)
    n, label = rank.done + 1, labels[rank.done]
    place = n % protocol.num_places
    match rank.phase:
        case 0 if rank.parts[place] != WRITING:  # WRITE
            begun = rank._replace(parts=replaced(rank.parts, place, WRITING))
            return told(begun, n, label) if protocol.tells_first else begun
        case 0:
            there = rank._replace(parts=replaced(rank.parts, place, n))
            return there._replace(phase=WAIT if protocol.tells_first else TELL, peer=0)
        case 1:  # TELL
            return told(rank, n, label)._replace(phase=WAIT, peer=0)
        case 2:  # WAIT
            return waited(protocol, state, rank, n, label)
        case _:  # READ
            return read(protocol, state, rank, n, place)


def told(rank: Rank, n: int, label: int) -> Rank:
    return rank._replace(labels=replaced(rank.labels, n % 2, label), written=n)


def waited(protocol: Protocol, state: State, rank: Rank, n: int, label: int) -> Rank | None:
    num_peers = protocol.num_ranks - (0 if protocol.waits_for_all else 1)
    if rank.peer == num_peers:
        return rank._replace(phase=READ, peer=0)
    peer = state[rank.peer]
    if peer.written < n:
        return None
    differs = peer.written > n + 1 or peer.labels[n % 2] != label
    if differs and protocol.compares_labels:
        return rank._replace(phase=STOPPED)
    return rank._replace(peer=rank.peer + 1)


def read(protocol: Protocol, state: State, rank: Rank, n: int, place: int) -> Rank:
    if rank.peer == protocol.num_ranks:
        return rank._replace(phase=WRITE, done=n, peer=0)
    found = state[rank.peer].parts[place]
    if found != n:
        raise WrongPart(f"{protocol}: exchange {n} reads {found} of rank {rank.peer}: {state}")
    return rank._replace(peer=rank.peer + 1)


def replaced(items: tuple, index: int, item: object) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


def same(num_ranks: int, num_exchanges: int) -> Plan:
    """All ranks do the same."""
    return (tuple(range(1, num_exchanges + 1)),) * num_ranks


def different(num_ranks: int, num_exchanges: int):
    """Plans in which one rank leaves an exchange out, does one more, or does one with another number of rows."""
    labels = tuple(range(1, num_exchanges + 1))
    changed = [
        *(labels[:i] + labels[i + 1 :] for i in range(num_exchanges - 1)),
        *((*labels[:i], 99, *labels[i:]) for i in range(num_exchanges)),
        *((*labels[:i], 99, *labels[i + 1 :]) for i in range(num_exchanges)),
    ]
    for rank, other in itertools.product(range(num_ranks), changed):
        # the next step comes to all, so none is left without a peer
        yield tuple((other if r == rank else labels) + (100, 101) for r in range(num_ranks))


def check_all(max_ranks: int, num_exchanges: int) -> tuple[int, int]:
    """Check ranks that do the same, and that those who do not find out; returns (runs, states)."""
    num_runs = num_states = 0
    for num_ranks in range(2, max_ranks + 1):
        plans = [same(num_ranks, num_exchanges)]
        if num_ranks < 4:  # of four, one run is some hundred thousand states
            plans += different(num_ranks, min(num_exchanges, 3))
        for plan in plans:
            num_states += check(Protocol(num_ranks), plan)
            num_runs += 1
    return num_runs, num_states


FAULTS = {  # what is wrong with each; all are found
    "one place for the parts of all exchanges": Protocol(2, num_places=1),
    "a part that is counted before it is there": Protocol(2, tells_first=True),
    "a peer that is not waited for": Protocol(2, waits_for_all=False),
    "labels that are not compared": Protocol(2, compares_labels=False),
}


def find(name: str) -> str:
    """What a fault leads to; "" if nothing is found."""
    protocol = FAULTS[name]
    for plan in (same(2, 4), *different(2, 3)):
        try:
            check(protocol, plan)
        except (Deadlock, WrongPart, Unnoticed) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-ranks", type=int, default=4)
    parser.add_argument("--exchanges", type=int, default=4)
    parser.add_argument("--faults", action="store_true", help="look for known mistakes, too")
    args = parser.parse_args()
    started = time.perf_counter()
    num_runs, num_states = check_all(args.max_ranks, args.exchanges)
    seconds = time.perf_counter() - started
    print(f"{num_runs} runs, {num_states} states, every part is right ({seconds:.0f} s)")
    for name in FAULTS if args.faults else ():
        print(f"{name}: {find(name) or 'NOT FOUND'}")


if __name__ == "__main__":
    main()
