"""Kernels that combine the results of all ranks of a group in shared memory, together with what follows the sum.

Every operation is one exchange: write this rank's part, publish it, wait for the other ranks, read all parts.

    s = Σ_r y_r               in float32, in the order of the ranks
    s = norm(s) by p          with a post-norm
    x += α · s, z = norm(x) by w    like `fused_add_norm`; without x: z = s

    y_r, x, z [T, D]   D a multiple of 16, rows may be strided; w and p in the form of `norms.py`, or absent

Shared memory, the same for all ranks:

    control [R, 2 lines]   of each rank: the number of exchanges it has written and the labels of the last two; in a line
                           of its own the number of threads that sleep until it has written more
    buffers                what the operations exchange

Memory of one rank, its state: the number of finished exchanges, the step, a detected mismatch, and the numbers of work
items written and read.

Laws:
  * Parts alternate between two buffers.  A rank writes exchange n + 2 after it has read n + 1, which every rank has
    written, and a rank writes n + 1 after it has read n.  So no part is overwritten while another rank reads it
    (`tests/simulation/stages/rank_protocol.py` visits all interleavings).
  * All ranks make the same exchanges in the same order.  Each has a label, made of its step and its size.  A different
    label under the same number, or a rank that is two exchanges ahead, proves a mismatch: from then on nothing waits, and
    `RankExchange.check` raises.
  * A waiting thread spins, then yields its core, then sleeps.

Roofline: e T D (R + 4) bytes, (R + 6) T D FLOPs.
"""

import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.attention.decode import capped
from trouper.kernels.cpu.exchange_sizes import CONTROL, LINE
from trouper.kernels.cpu.norms import row_norm
from trouper.kernels.formats import Norm

NUM_DONE, STEP, FAILED, THEIR_NUMBER, THEIR_LABEL, OUR_LABEL = range(6)  # indices in the state
NUM_WRITTEN, NUM_READ = LINE, 2 * LINE
STATE = 3 * LINE
LABEL_BITS = 24  # bits for the number of rows
# A peer is late by 1 to 30 µs.  A thread that spins or yields longer uses up the time slice that it needs once the part
# arrives: with four busy loops on two cores, steps of 8 rows took twice as long with 200 yields as with 20.
PAUSES, YIELDS = 500, 20
FUTEX, SCHED_YIELD = {"x86_64": (202, 24)}.get(
    platform.machine(),
    (98, 124),
    # The numbers of Linux's system calls.
)
# The operations of a futex, for the threads of all processes.
WAIT, WAKE, ALL_THREADS = 0, 1, 2**30


class Exchange(NamedTuple):
    """The first arguments of every kernel of a group of ranks.

    They give the shared memory, this rank's number and state, and the system call with which ranks wait.
    """

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
    """Write the body of a kernel whose first half of work items writes, and whose second half reads.

    Args:
        write: writes work item i of this rank's part to buffer 0 or 1.
        read: reads work item i of all parts from that buffer.
    """
    state = code.pointer(group.state, "i64")
    own = code.pointer(group.memory, "i64") + group.rank * CONTROL
    own_address = group.memory + group.rank * (8 * CONTROL)
    number = code.fetch(state) + 1
    place = number & 1
    label = (state[STEP] << LABEL_BITS) | num_rows
    half = code.num_items >> 1
    has_waited = code.var(0)
    for item in code.work_items():
        with code.when(item < half):
            write(item, place)
            with code.when(code.fetch_add(state + NUM_WRITTEN, 1) + 1 >= half):
                own[place + 1] = label
                code.fetch_add(own, 1)
                with code.when(code.fetch(own + LINE) > 0):
                    code.call_at(group.syscall, FUTEX, own_address, WAKE, ALL_THREADS, 0, 0, 0)
        with code.when(item >= half):
            with code.when(has_waited < 1):
                for peer in code.loop(0, num_ranks):
                    _wait(code, group, peer, number, label)
                has_waited.set(1)
            read(item - half, place)
            with code.when(code.fetch_add(state + NUM_READ, 1) + 1 >= half):
                state[NUM_WRITTEN], state[NUM_READ] = 0, 0
                code.fetch_add(state, 1)


def _wait(code: KernelBuilder, group: Exchange, peer: Value, number: Value, label: Value) -> None:
    """Wait until a peer has written its part, and compare its label with this rank's."""
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
            # The call returns at once if the peer has written since `before` was read.
            with code.when(before < number):
                code.call_at(group.syscall, FUTEX, address, WAIT, before, 0, 0, 0)
            code.fetch_add(flag + LINE, -1)
        seen.set(code.fetch(flag))
    theirs = (flag + 1)[number & 1]
    differs = (seen > number + 1) | code.compare("!=", theirs, label)
    with code.when(differs & (has_failed < 1)):
        state[THEIR_NUMBER], state[THEIR_LABEL], state[OUR_LABEL] = seen, theirs, label
        state[FAILED] = peer + 1


ROWS = 4  # rows in a work item


def shared_sum(code: KernelBuilder, kind: Kind, num_ranks: int, norm: Norm) -> None:
    """Write the kernel with the arguments of the group, address and bytes of a part, y, its stride, x or 0, its stride,
    p or 0, w or 0, z, its stride, T, D, α, ε.
    """
    *group, parts, part_bytes, ys, y_stride, xs, x_stride, post, weights, zs, z_stride, length, width, alpha, eps = code.arguments(18)  # fmt: skip
    group = Exchange(*group)
    alpha, eps = code.f32_argument(alpha), code.f32_argument(eps)
    weight, post_weight = code.pointer(weights, "f32"), code.pointer(post, "f32")

    def write(item: Value, place: Value) -> None:
        part = code.pointer(parts + (place * num_ranks + group.rank) * part_bytes, kind)
        for row in _rows(code, item, length):
            y, target = code.pointer(ys, kind) + row * y_stride, part + row * width
            for d in code.loop(0, width, LANES):
                target.store(d, y.load(d))

    def read(item: Value, place: Value) -> None:
        first = parts + place * num_ranks * part_bytes
        for row in _rows(code, item, length):
            y = [code.pointer(first + r * part_bytes, kind) + row * width for r in range(num_ranks)]
            z = code.pointer(zs, kind) + row * z_stride
            total = partial(_total, y)

            with code.when(xs < 1):
                for d in code.loop(0, width, LANES):
                    z.store(d, total(d))
            with code.when(xs > 0):
                x = code.pointer(xs, kind) + row * x_stride
                with code.when(post < 1):
                    for d in code.loop(0, width, LANES):
                        x.store(d, code.fma(alpha, total(d), x.load(d)))
                with code.when(post > 0):
                    normed = row_norm(code, total, width, post_weight, eps, norm)
                    for d in code.loop(0, width, LANES):
                        x.store(d, code.fma(alpha, normed(d), x.load(d)))
                with code.when(weights > 0):
                    normed = row_norm(code, x.load, width, weight, eps, norm)
                    for d in code.loop(0, width, LANES):
                        z.store(d, normed(d))

    exchange(code, group, num_ranks, length, write, read)


def shared_heads_norm(code: KernelBuilder, kind: Kind, num_ranks: int, num_copies: int) -> None:
    """Write the kernel that normalises q and k in place, each over the heads of all ranks.

    Its arguments are those of the group, address and bytes of a part, qkv, its stride, the widths of q and k on this rank,
    the widths on all ranks together, the weights of q and k for this rank, T, ε.

    Args:
        num_copies: number of consecutive ranks that hold the same keys.
    """
    *group, parts, part_bytes, xs, x_stride, q_width, k_width, q_size, k_size, q_weights, k_weights, length, eps = code.arguments(16)  # fmt: skip
    group = Exchange(*group)
    eps = code.f32_argument(eps)
    # For q and k: start in a row, width here, width on all ranks, weights, column of the sums, ranks to add.
    sides = (
        (code.i64(0), q_width, q_size, q_weights, 0, range(num_ranks)),
        (q_width, k_width, k_size, k_weights, 1, range(0, num_ranks, num_copies)),
    )

    def write(item: Value, place: Value) -> None:
        part = code.pointer(parts + (place * num_ranks + group.rank) * part_bytes, "f32")
        for row in _rows(code, item, length):
            for start, width, _, _, column, _ in sides:
                x = code.pointer(xs, kind) + row * x_stride + start
                squares = code.var(code.f32x16(0.0))
                for d in code.loop(0, width, LANES):
                    value = x.load(d)
                    squares.set(code.fma(value, value, squares))
                part[row * 2 + column] = code.reduce_sum(squares)

    def read(item: Value, place: Value) -> None:
        first = parts + place * num_ranks * part_bytes
        for row in _rows(code, item, length):
            for start, width, size, weights, column, ranks in sides:
                squares = code.f32(0.0)
                for r in ranks:
                    part = code.pointer(first + r * part_bytes, "f32")
                    squares = squares + part[row * 2 + column]
                inverse = 1.0 / code.sqrt(squares / code.f32(size) + eps)
                x, weight = code.pointer(xs, kind) + row * x_stride + start, code.pointer(weights, "f32")  # fmt: skip
                for d in code.loop(0, width, LANES):
                    x.store(d, x.load(d) * inverse * weight.load(d))

    exchange(code, group, num_ranks, length, write, read)


def shared_columns(code: KernelBuilder, kind: Kind, num_ranks: int) -> None:
    """Write the kernel that puts each rank's columns of the logits into a sheet [R, V] float32, finished like `finish_logits`.

    Its arguments are those of the group, product [R, W], its stride, the address of its first column, V, R, W (at least 16,
    or 0), scale, cap or 0.
    """
    *group, xs, x_stride, ys, y_stride, length, width, scale, cap = code.arguments(12)
    group = Exchange(*group)
    scale, cap = code.f32_argument(scale), code.f32_argument(cap)

    # There is only one sheet, so the buffer number is not used.
    def write(item: Value, place: Value) -> None:
        for row in _rows(code, item, length):
            x, y = code.pointer(xs, kind) + row * x_stride, code.pointer(ys, "f32") + row * y_stride
            for start in code.loop(0, width, LANES):
                # The last vector overlaps the one before it.
                d = code.minimum(start, width - LANES)
                y.store(d, capped(code, x.load(d) * scale, cap))

    exchange(code, group, num_ranks, length, write, lambda item, place: None)


def num_items(num_rows: int) -> int:
    """Return the number of work items of a launch: every row is written once and read once."""
    return 2 * -(-num_rows // ROWS)


def _total(parts: Sequence[Pointer], d: Value) -> Value:
    """Return sixteen sums from column d on, added in the order of the parts."""
    found = parts[0].load(d)
    for part in parts[1:]:
        found = found + part.load(d)
    return found


def _rows(code: KernelBuilder, item: Value, length: Value) -> Iterator[Value]:
    first = item * ROWS
    return code.loop(first, code.minimum(first + ROWS, length))
