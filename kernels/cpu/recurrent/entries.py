"""Work items over the entries of a step, and the elementary functions that the recurrent kernels share.

    firsts, counts, rows, starts, settled, keeps [C], saves [S + 1, 2]    int64, see `reference/recurrent.py`

A work item is a part of one entry: a tile of channels, or a head or a tile of it.  Entries with a negative row have
work items without work, so that a recorded step can have fewer entries than its launches.

Law: a kernel stores the state behind the last settled token, and copies of it in between where the step saves them.  Behind the drafts
that follow, nothing is stored.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value, Var
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.norms import LOG2_E

NUM_ARGUMENTS = 7
# Above this softplus(x) is x in float32.
LINEAR = 20.0


class EntryPart(NamedTuple):
    """One part of an entry: its number, the tokens first … last - 1, the row, whether the state begins with zeros.

    The tokens from `settled` on are drafts, the first of which belongs to row `keep` of kept inputs.
    """

    place: Value
    first: Value
    last: Value
    row: Value
    is_fresh: Value
    settled: Value
    keep: Value
    saves: Pointer


class Saves:
    """The tokens of an entry behind which its state is copied to another row."""

    def __init__(self, code: KernelBuilder, part: EntryPart) -> None:
        self._code, self._saves = code, part.saves
        self._place: Var = code.var(code.i64(0))
        self._end: Var = code.var(part.saves[0])
        # Those of earlier entries precede them.
        for _ in code.while_(self._end, part.first + 1):
            self._advance()

    @contextmanager
    def behind(self, token: Value) -> Generator[Value]:
        """Write code that runs only if the state behind `token` is saved, and yield the row for it."""
        with self._code.when((token + 1).equals(self._end)):
            yield self._saves[self._place + 1]
            self._advance()

    def _advance(self) -> None:
        self._place.set(self._place + 2)
        self._end.set(self._saves[self._place])


def parts(code: KernelBuilder, addresses: list[Value], num_parts: Value) -> Iterator[EntryPart]:
    """Take work items, `num_parts` of each entry, and skip those of padding.

    Args:
        addresses: of the seven arrays of entries.
    """
    firsts, counts, rows, starts, settled, keeps, saves = (
        code.pointer(address, "i64") for address in addresses
    )
    for item in code.work_items():
        entry = item // num_parts
        row = rows[entry]
        with code.when(row >= 0):
            first = firsts[entry]
            is_fresh = starts[entry].equals(0)
            yield EntryPart(
                item % num_parts,
                first,
                first + counts[entry],
                row,
                is_fresh,
                first + settled[entry],
                keeps[entry],
                saves,
            )


def keep_drafts(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments entries, x, its stride, kept rows, columns.  A work item is an entry."""
    *entries, xs, x_stride, kepts, width = code.arguments(NUM_ARGUMENTS + 4)
    whole = width // LANES * LANES
    for part in parts(code, entries, code.i64(1)):
        for t in code.loop(part.settled, part.last):
            x = code.pointer(xs, kind) + t * x_stride
            kept = code.pointer(kepts, kind) + (part.keep + (t - part.settled)) * width
            for d in code.loop(0, whole, LANES):
                kept.store(d, x.load(d))
            words, target = (p.of("i16" if kind == "bf16" else "i32") for p in (x, kept))
            for d in code.loop(whole, width):
                target[d] = words[d]


def load_few(code: KernelBuilder, x: Pointer, count: Value, room: Pointer) -> Value:
    """Load fewer than seventeen elements without reading beyond them; the other lanes are zeros."""
    words = x.of("i16" if x.kind == "bf16" else "i32")
    room.of("i32").store(0, code.i32x16(0))
    target = room.of(words.kind)
    for i in code.loop(0, count):
        target[i] = words[i]
    return room.of(x.kind).load(0)


def store_few(code: KernelBuilder, y: Pointer, x: Value, count: Value, room: Pointer) -> None:
    """Store the first lanes of a vector of float32."""
    room.store(0, x)
    for i in code.loop(0, count):
        y[i] = room[i]


def exp(code: KernelBuilder, x: Value) -> Value:
    return code.exp2(x * LOG2_E)


def sigmoid(code: KernelBuilder, x: Value) -> Value:
    return 1.0 / (1.0 + code.exp2(x * -LOG2_E))


def softplus(code: KernelBuilder, x: Value) -> Value:
    """Return log(1 + e^x), which is accurate for small results too."""
    power = exp(code, x)
    total = power + 1.0
    # What the sum lost by rounding is put back by this factor (Kahan's log1p).
    is_lost = total.equals(1.0)
    kept = code.select(is_lost, code.f32x16(1.0), total - 1.0)
    near = code.select(is_lost, power, code.log(total) * (power / kept))
    return code.select(x > LINEAR, x, near)


def lanes_left(code: KernelBuilder, first: Value, width: Value) -> Value:
    return code.minimum(width - first, LANES)


def address(code: KernelBuilder, x: Pointer) -> Value:
    return Value(code, code.builder.ptrtoint(x.ir, code.i64(0).type))
