"""Decide when to snapshot recurrent states, and which snapshot a sequence restores.  Rows are those of the device's state pool.

A recurrent mixer summarizes all tokens so far in one state, so a cached prefix is usable only up to a position with a copy of the state.
Row i of the pool is the working state of request slot i. The remaining rows are snapshots. A snapshot contains the state at a block
boundary, under the hash of the block that ends there, or the state for the siblings of one request (a *fork*).

Laws:
1. A row is free, pending (a step in flight or a fetch from the tier writes it), offered under a hash, or a fork.
2. A row is offered only after the device has answered the step that wrote it, under the hash of the position for which it was planned.
3. A hit is the longest run of cached blocks whose last block has a snapshot. Without a snapshot there is no hit.
4. A step in flight may still write a freed row. This is harmless: steps run in order, so the row's next owner writes later.
5. No sequence waits for a row: if none can be taken, the state is not saved.
6. While the tier on disk holds a row, nothing writes to it. It may be withdrawn, but it becomes free only after `release`.

Rows are few and large, so snapshots are taken rarely: at the last boundary before the last known token, at the boundary up to which
other prompts have computed the same KV (a *junction*), and otherwise every `interval` tokens. A step saves states in the middle of a
chunk, so snapshots do not change chunk sizes.

Which part of a new prompt later prompts will share is unknown. So the policy also saves *guesses*: snapshots inside a prompt at
intervals of a tenth of the position, so the next prompt with the same beginning can reuse at least nine tenths of it. A guess takes
a free row or evicts another guess, but never a proven snapshot. It is proven once a prompt has started from it. Guesses of the steps in
flight take at most half of the rows, so that rows remain for other snapshots.

How many draft tokens a step accepts is unknown when it is planned, but a state can be saved only at a planned position: after the
known tokens of a step, before its drafts. So drafts stop before the boundary where the next snapshot is due (`next_save`), and a
step without drafts in flight ends exactly there.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

from trouper.actors.messages.requests import RequestId
from trouper.actors.scheduling.state.sequence import Request, Sequence, State

# Tokens between two snapshots of one growing sequence.
SNAPSHOT_INTERVAL = 512
# Minimum tokens between two guesses.  Finer ones save little time: much of a step under a hundred tokens is reading the weights.
GUESS_SPACING = 96
NO_ROW = -1


class SnapshotRows:
    """Allocate the snapshot rows, numbered from `first`, and evict the least recently used.

    Independent of sequences and positions: the caller that takes a row later offers it or gives it back.
    """

    def __init__(self, first: int, count: int) -> None:
        self.num_rows = count
        self._free = list(reversed(range(first, first + count)))
        # The least recently used first.
        self._offered: OrderedDict[bytes, int] = OrderedDict()
        # Offered snapshots from which no prompt has started yet.  The oldest first.
        self._guesses: OrderedDict[bytes, None] = OrderedDict()
        # Rows that the tier on disk is reading.  The withdrawn ones become free when it has finished.
        self._held: set[int] = set()
        self._withdrawn: set[int] = set()
        self.num_saves = self.num_evictions = 0

    @property
    def num_offered(self) -> int:
        """Count the snapshots from which a prompt may start."""
        return len(self._offered)

    @property
    def num_free(self) -> int:
        """Count the rows without an owner."""
        return len(self._free)

    def find(self, hashes: Items[bytes]) -> tuple[int, int]:
        """Return the number of leading blocks that the longest snapshot covers, and its row; (0, -1) without a snapshot.

        Does not count as a use, because the sequence may fail to start.
        """
        for count in range(len(hashes), 0, -1):
            row = self._offered.get(hashes[count - 1])
            if row is not None:
                return count, row
        return 0, NO_ROW

    def touch(self, name: bytes) -> None:
        """Mark a snapshot as just used, so that it is evicted last.  It no longer counts as a guess."""
        self._offered.move_to_end(name)
        self._guesses.pop(name, None)

    @property
    def num_taken(self) -> int:
        """Count the rows that are neither free nor offered: pending ones and forks."""
        return self.num_rows - len(self._offered) - len(self._free)

    def take(self, name: bytes | None = None, *, is_guess: bool = False) -> int:
        """Take a row to write.  If no row is free, evict the oldest guess, else the least recently used snapshot.

        Args:
            name: the hash under which the row will be offered, if it is already known.
            is_guess: evict guesses only, and leave half of the rows to other snapshots.

        Returns:
            The row; -1 if this snapshot exists already, or if no row may be evicted.
        """
        if name is not None and name in self._offered:
            if not is_guess:
                self.touch(name)
            return NO_ROW
        if is_guess and self.num_taken >= self.num_rows // 2:
            return NO_ROW
        if self._free:
            row = self._free.pop()
        else:
            oldest = self._oldest(self._guesses)
            if oldest is None and not is_guess:
                oldest = self._oldest(self._offered)
            if oldest is None:
                return NO_ROW
            row = self._offered[oldest]
            self._forget(oldest)
            self.num_evictions += 1
        return row

    def _oldest(self, names: Iterable[bytes]) -> bytes | None:
        return next((name for name in names if self._offered[name] not in self._held), None)

    def offer(self, row: int, name: bytes, *, is_guess: bool = False) -> None:
        """Make a written row available to new sequences under this name.

        If another sequence has offered the same prefix meanwhile, the second copy is freed.
        """
        if name in self._offered:
            self._free.append(row)
            if not is_guess:
                self._guesses.pop(name, None)
            return
        self._offered[name] = row
        if is_guess:
            self._guesses[name] = None

    def give_back(self, row: int) -> None:
        """Free a taken row.  A step in flight may still write it, but before any step of the next owner."""
        self._free.append(row)

    def drop(self, name: bytes) -> None:
        """Free the snapshot of a block that the prefix cache has evicted.

        No sequence can start there without the keys of the block.
        """
        row = self._offered.get(name)
        if row is not None:
            self._forget(name)
            if row in self._held:
                self._withdrawn.add(row)
            else:
                self._free.append(row)

    def hold(self, name: bytes) -> int:
        """Protect the row of an offered snapshot until `release`.  Returns the row, or -1 if it does not exist or is held already."""
        row = self._offered.get(name, NO_ROW)
        if row in self._held:
            return NO_ROW
        if row >= 0:
            self._held.add(row)
        return row

    def release(self, row: int) -> None:
        """End the protection of a held row.  It becomes free if it was withdrawn meanwhile."""
        self._held.remove(row)
        if row in self._withdrawn:
            self._withdrawn.remove(row)
            self._free.append(row)

    def __contains__(self, name: bytes) -> bool:
        return name in self._offered

    def _forget(self, name: bytes) -> None:
        del self._offered[name]
        self._guesses.pop(name, None)

    def withdraw(self, row: int) -> bytes | None:
        """Free an offered row and return its name; None if it is not offered.  Takes O(rows), and is called only after failures."""
        name = next((name for name, offered in self._offered.items() if offered == row), None)
        if name is not None:
            self.drop(name)
        return name

    def reset(self) -> None:
        """Free all snapshots."""
        for name in list(self._offered):
            self.drop(name)


class StateHit(NamedTuple):
    """The cached prefix of a sequence: its number of blocks, the row of its state, and the position of the junction."""

    num_blocks: int
    row: int
    junction: int


class StateSnapshots:
    """Decide for each sequence when its state is saved, and from which state it starts.

    Args:
        num_slots: the number of request slots.  Their rows precede the snapshot rows.
        num_rows: the number of snapshot rows.
        block_size: tokens per KV block.
        has_cache: whether other requests may start from snapshots.  Forks are made in any case.
        interval: tokens between two snapshots of one growing sequence.
        spacing: minimum tokens between two guesses.
    """

    def __init__(
        self,
        num_slots: int,
        num_rows: int,
        block_size: int,
        *,
        has_cache: bool,
        interval: int = SNAPSHOT_INTERVAL,
        spacing: int = GUESS_SPACING,
    ) -> None:
        self.rows = SnapshotRows(num_slots, num_rows)
        self._spacing = max(block_size, spacing // block_size * block_size)
        self._block_size, self._has_cache, self._interval = block_size, has_cache, interval
        # Rows with the state before the last prompt token, for siblings that have not started.
        self._forks: dict[RequestId, int] = {}
        # Sequences started from a snapshot, and tokens recomputed because only their KV was cached, not the state.
        self.num_hits = self.num_state_misses = 0

    def __repr__(self) -> str:
        rows = self.rows
        return f"<StateSnapshots: {rows.num_offered} offered, {len(self._forks)} forks, {rows.num_free} free>"

    def statistics(self) -> dict[str, Any]:
        """Describe the snapshots in the fields of `SchedulerStats`."""
        rows = self.rows
        return {
            "num_state_snapshots": rows.num_offered,
            "num_state_rows_pending": rows.num_taken,
            "num_state_rows_free": rows.num_free,
            "num_state_hits": self.num_hits,
            "num_state_saves": rows.num_saves,
            "num_state_evictions": rows.num_evictions,
            "num_state_misses": self.num_state_misses,
        }

    # Start

    def hit(self, hashes: Items[bytes], num_cached: int) -> StateHit:
        """Find the longest cached prefix from which a sequence may start.

        Args:
            hashes: the hashes of its blocks.
            num_cached: the number of leading blocks with cached KV.
        """
        count, row = self.rows.find(hashes[:num_cached])
        junction = num_cached * self._block_size if num_cached > count else 0
        return StateHit(count, row, junction)

    def fork_row(self, request: Request) -> int:
        """Return the row with the state before the last prompt token, or -1.

        Siblings that start from it compute only the last prompt token.
        """
        return self._forks.get(request.admit.id, NO_ROW)

    def begin(self, sequence: Sequence, start: int, row: int) -> list[bytes]:
        """Start a sequence at a position, from the state in a row (-1: from the empty state).

        The device copies the row into the sequence's slot before its first step.

        Returns:
            The name of the snapshot, if the row is one.  It no longer counts as a guess.
        """
        marks = sequence.marks
        marks.restore, marks.last_saved = row, start
        if marks.junction:
            self.num_state_misses += marks.junction - start
        if row >= 0 and start % self._block_size == 0 and row != self.fork_row(sequence.request):
            self.num_hits += 1
            name = sequence.hashes[start // self._block_size - 1]
            self.rows.touch(name)
            return [name]
        return []

    # Save

    def save(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, int, int]]:
        """Choose the positions in `start` + 1 … `end` after which a step saves the sequence's state, and take their rows.

        Called once the step is final, because rows of a sequence that is removed from the step would leak.

        Returns:
            The elements of `StepPlan.saves`.
        """
        saves: list[tuple[int, int, int]] = []

        def take(position: int, name: bytes | None = None, *, is_guess: bool = False) -> None:
            row = self.rows.take(name, is_guess=is_guess)
            if row >= 0:
                self.rows.num_saves += 1
                sequence.marks.saving[position] = row
                saves.append((sequence.request_slot, row, position))

        fork = self._fork_point(sequence)
        if start < fork <= end:
            take(fork)
        if not self._has_cache or start // self._block_size == end // self._block_size:
            return saves
        guesses = [*self._guesses(sequence, start, end)]
        for position in self._due(sequence, start, end, guesses):
            # The hash of tokens in flight is unknown.
            is_known = position <= sequence.num_tokens
            take(position, self._name(sequence, position) if is_known else None)
        for position in guesses:
            take(position, self._name(sequence, position), is_guess=True)
        return saves

    def _due(self, sequence: Sequence, start: int, end: int, guesses: Items[int]) -> list[int]:
        """Return the positions of snapshots other than guesses."""
        marks = sequence.marks
        points = sorted({marks.junction, self._last_boundary(sequence)})
        due = [point for point in points if start < point <= end]
        marks.last_saved = max(marks.last_saved, *due, *guesses, 0)
        boundary = end // self._block_size * self._block_size
        if boundary - marks.last_saved >= self._interval:
            due.append(boundary)
            marks.last_saved = boundary
        return due

    def next_save(self, sequence: Sequence) -> int | None:
        """Return the position where the next snapshot of a decoding sequence is due, or None if none will be saved."""
        if not self._has_cache:
            return None
        size = self._block_size
        return -(-(sequence.marks.last_saved + self._interval) // size) * size

    def _guesses(self, sequence: Sequence, start: int, end: int) -> Iterator[int]:
        """Yield the positions of guesses after `start`, up to `end` and before the last boundary of the prompt.

        All prompts use the same positions, so prompts with the same beginning save each state only once.
        """
        size, point = self._block_size, 0
        last = min(end, (sequence.num_prompt - 1) // size * size - 1)
        while start < last and point <= last:
            if point > start and point != sequence.marks.junction:
                yield point
            point += max(self._spacing, point // 10 // size * size)

    def _is_guess(self, sequence: Sequence, position: int) -> bool:
        return position in self._guesses(sequence, position - 1, position)

    def _last_boundary(self, sequence: Sequence) -> int:
        return (sequence.num_tokens - 1) // self._block_size * self._block_size

    def _fork_point(self, sequence: Sequence) -> int:
        """Return the position at which siblings of this sequence start, or 0 if it needs no fork.

        At a block boundary they start from an ordinary snapshot.
        """
        request, point = sequence.request, sequence.num_prompt - 1
        leads = sequence.index == 0 and bool(request.deferred) and not sequence.output
        is_shared = self._has_cache and point % self._block_size == 0
        if not leads or is_shared or request.admit.id in self._forks:
            return 0
        return point

    def _name(self, sequence: Sequence, end: int) -> bytes:
        return sequence.hash_blocks(end // self._block_size, self._block_size)[-1]

    # After the step

    def land(self, sequence: Sequence, end: int) -> list[bytes]:
        """Offer the states saved up to position `end`, because the device has answered the step that wrote them.

        Returns:
            The names of the new snapshots other than guesses.
        """
        marks, found = sequence.marks, list[bytes]()
        marks.restore = NO_ROW
        if not marks.saving:
            return found
        for position in [position for position in marks.saving if position <= end]:
            row = marks.saving.pop(position)
            if position == self._fork_point(sequence):
                self._forks[sequence.request.admit.id] = row
            elif self._has_cache and position % self._block_size == 0:
                name, is_guess = self._name(sequence, position), self._is_guess(sequence, position)
                self.rows.offer(row, name, is_guess=is_guess)
                if not is_guess:
                    found.append(name)
            else:
                # A fork point whose siblings have ended meanwhile.
                self.rows.give_back(row)
        return found

    def undo(self, sequence: Sequence) -> None:
        """Free the rows that cancelled steps would have written.

        The sequence is planned again from its last answered position, and then takes new rows.
        """
        marks = sequence.marks
        for end in [end for end in marks.saving if end > sequence.num_computed_on_device]:
            self.rows.give_back(marks.saving.pop(end))
        marks.last_saved = min(marks.last_saved, sequence.num_computed_on_device)

    def leave(self, sequence: Sequence) -> None:
        """Free the pending rows of a sequence that loses its slot."""
        marks = sequence.marks
        for row in marks.saving.values():
            self.rows.give_back(row)
        marks.saving.clear()
        marks.restore = NO_ROW

    def distrust(self, sequence: Sequence) -> bytes | None:
        """Withdraw the snapshot from which a sequence started, because its first step failed, and return its name.

        Otherwise a corrupt snapshot would fail every sequence that starts from it.
        """
        return self.rows.withdraw(sequence.marks.restore)

    def note_start(self, request: Request) -> None:
        """Free the fork of a request once its last sibling has started."""
        if request.admit.id in self._forks and not any(
            sibling.state is State.WAITING for sibling in request.sequences
        ):
            self.close(request.admit.id)

    def close(self, id: RequestId) -> None:
        """Free the fork of a request, if it has one."""
        row = self._forks.pop(id, NO_ROW)
        if row >= 0:
            self.rows.give_back(row)

    def reset(self) -> None:
        """Free all snapshots and forks, because the device's memory was lost or the prefix cache is reset."""
        self.rows.reset()
        for id in list(self._forks):
            self.close(id)
