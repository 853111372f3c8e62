"""The exchange that every operation over the ranks of a group is made of: write a part, tell, wait for the others, read all.

Shared memory, the same for all ranks:

    control [R, 2 lines]   of each rank: exchanges it has written, the labels of the last two, and in a line of its own how many
                           threads sleep until it has written more
    then whatever the operations exchange

Memory of one rank alone, the state: exchanges that are done, the step, what was found wrong; written and read pieces.

Laws:
  * Parts lie in two places in turn. A rank writes exchange n + 2 when it has read n + 1, for which every rank has written,
    and a rank writes n + 1 when it has read n: so no part is overwritten that is still read (`tests/simulation/rank_protocol.py` visits all interleavings).
  * All ranks do the same exchanges in the same order. Each has a label, made of its step and its size. Another label under
    the same number, or a rank that is two exchanges ahead, is the proof that they do not: then nothing is waited for any more, and the
    group says what it found (`RankExchange.check`).
  * A thread that waits spins, then lets others have the core, then sleeps.
"""

import platform
from collections.abc import Callable
from typing import NamedTuple

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Value
from trouper.kernels.cpu.exchange_sizes import CONTROL, LINE

NUM_DONE, STEP, FAILED, THEIR_NUMBER, THEIR_LABEL, OUR_LABEL = range(6)  # of the state
NUM_WRITTEN, NUM_READ = LINE, 2 * LINE
STATE = 3 * LINE
LABEL_BITS = 24  # of the number of rows
# A peer is late by 1 to 30 µs.  A thread that spins or yields longer spends the share of the processor that it needs when the part is
# there: beside four busy loops on two cores, the demo model's steps of 8 rows took twice as long with 200 yields as with 20.
PAUSES, YIELDS = 500, 20
FUTEX, SCHED_YIELD = {"x86_64": (202, 24)}.get(platform.machine(), (98, 124))  # Linux's numbers
WAIT, WAKE, ALL_THREADS = 0, 1, 2**30  # among the threads of all processes


class Exchange(NamedTuple):
    """The arguments that every kernel of a group begins with."""

    memory: Value
    rank: Value
    state: Value
    syscall: Value


def exchange(
    code: KernelBuilder,
    group: Exchange,
    num_ranks: int,
    num_rows: Value,
    write: Callable[[Value, Value], None],
    read: Callable[[Value, Value], None],
) -> None:
    """Write the body of a kernel whose pieces are half of them written, half of them read.

    Args:
        write: writes piece i of this rank's part to place 0 or 1.
        read: reads piece i of all parts from there.
    """
    state = code.pointer(group.state, "i64")
    own = code.pointer(group.memory, "i64") + group.rank * CONTROL
    own_address = group.memory + group.rank * (8 * CONTROL)
    number = code.fetch(state) + 1
    place = number & 1
    label = (state[STEP] << LABEL_BITS) | num_rows
    half = code.num_pieces >> 1
    has_waited = code.var(0)
    for piece in code.pieces():
        with code.when(piece < half):
            write(piece, place)
            with code.when(code.fetch_add(state + NUM_WRITTEN, 1) + 1 >= half):
                own[place + 1] = label
                code.fetch_add(own, 1)
                with code.when(code.fetch(own + LINE) > 0):
                    code.call_at(group.syscall, FUTEX, own_address, WAKE, ALL_THREADS, 0, 0, 0)
        with code.when(piece >= half):
            with code.when(has_waited < 1):
                for peer in code.loop(0, num_ranks):
                    _wait(code, group, peer, number, label)
                has_waited.set(1)
            read(piece - half, place)
            with code.when(code.fetch_add(state + NUM_READ, 1) + 1 >= half):
                state[NUM_WRITTEN], state[NUM_READ] = 0, 0
                code.fetch_add(state, 1)


def _wait(code: KernelBuilder, group: Exchange, peer: Value, number: Value, label: Value) -> None:
    """Wait until a peer has written its part, and compare its label."""
    state = code.pointer(group.state, "i64")
    address = group.memory + peer * (8 * CONTROL)
    flag = code.pointer(address, "i64")
    seen, num_waits = code.var(code.fetch(flag)), code.var(0)
    has_failed = code.fetch(state + FAILED)
    wanted = code.select(has_failed > 0, 0, number)
    for _ in code.while_(seen, wanted):
        num_waits.set(num_waits + 1)
        with code.when(num_waits <= PAUSES):
            code.pause()
        with code.when((num_waits > PAUSES) & (num_waits <= PAUSES + YIELDS)):
            code.call_at(group.syscall, SCHED_YIELD)
        with code.when(num_waits > PAUSES + YIELDS):
            code.fetch_add(flag + LINE, 1)
            before = code.fetch(flag)
            with code.when(before < number):  # returns at once if the peer has written since
                code.call_at(group.syscall, FUTEX, address, WAIT, before, 0, 0, 0)
            code.fetch_add(flag + LINE, -1)
        seen.set(code.fetch(flag))
    theirs = (flag + 1)[number & 1]
    differs = (seen > number + 1) | code.compare("!=", theirs, label)
    with code.when(differs & (has_failed < 1)):
        state[THEIR_NUMBER], state[THEIR_LABEL], state[OUR_LABEL] = seen, theirs, label
        state[FAILED] = peer + 1
