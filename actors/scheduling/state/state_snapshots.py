"""Snapshots of recurrent states: rows of the device's state pool, and the rules by which sequences write and read them.

A recurrent mixer keeps one state for all tokens so far, so a cached prefix is only usable where a copy of the state exists.
Row i belongs to request slot i. The rows behind the slots are snapshots: each contains the state at a block boundary and has the
hash of the block that ends there, or it is held for the siblings of one request (a *fork*).

Laws:
1. A row is free, pending (a step in flight or a fetch from the tier writes it), offered under a hash, or a fork.
2. A row is offered only after the step that wrote it was answered, under the hash of the position for which it was planned.
3. A hit consists of the longest run of cached blocks whose last block has a snapshot. Without a snapshot there is no hit.
4. A row that is given back may still be written by a step in flight. Steps run in order, so its next owner writes later.
5. Rows are never a reason to wait: without a row, a state is not saved.
6. While the tier on disk holds a row, nothing writes to it. It may be withdrawn, but it is free only after `release`.

Rows are few and large, so they are written rarely: at the last boundary before the last known token, at the boundary up to which
others have computed the prompt's KV (a *junction*), and else after `interval` tokens. A step writes them while it computes a chunk, so
none of this changes where chunks end.

Which part of a new prompt others will share is unknown. So there are *guesses* too: snapshots inside a prompt, a tenth of the
position apart, from which the second prompt with the same beginning finds nine tenths of it. A guess takes a free row or that of
another guess, never that of another snapshot, until a prompt has begun with it. Guesses of the steps in flight take at most half of
the rows, so that other snapshots find one.

Drafts move a sequence on by a number of tokens that is unknown when a step is planned. But a state can be saved only at a position
that a plan knows: behind the known tokens of a step, before its drafts. So drafts do not reach the boundary where the next snapshot
is due (`next_save`), and a step without drafts in flight ends exactly there.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

from trouper.actors.messages.requests import RequestId
from trouper.actors.scheduling.state.sequence import Request, Sequence, State

# Tokens between two snapshots of one growing sequence.
SNAPSHOT_INTERVAL = 512
# The least number of tokens between two guesses.  Below a hundred rows, reading the weights takes a good part of a step.
GUESS_SPACING = 96
NO_ROW = -1


class SnapshotRows:
    """The rows of snapshots, numbered from `first`.

    It knows neither sequences nor positions: the owner of a taken row offers it or gives it back.
    """

    def __init__(self, first: int, count: int) -> None:
        self.num_rows = count
        self._free = list(reversed(range(first, first + count)))
        # The least recently used first.
        self._offered: OrderedDict[bytes, int] = OrderedDict()
        # Those of them that no prompt has begun with; the oldest first.
        self._guesses: OrderedDict[bytes, None] = OrderedDict()
        # Rows that the tier on disk reads, and those of them that are not offered any more.
        self._held: set[int] = set()
        self._withdrawn: set[int] = set()
        self.num_saves = self.num_evictions = 0

    @property
    def num_offered(self) -> int:
        """Count the snapshots that a prompt may begin with."""
        return len(self._offered)

    @property
    def num_free(self) -> int:
        """Count the rows without an owner."""
        return len(self._free)

    def find(self, hashes: Items[bytes]) -> tuple[int, int]:
        """Return how many of the blocks the longest snapshot covers, and its row; (0, -1) if there is none.

        It changes nothing, because a sequence may look and not start.
        """
        for count in range(len(hashes), 0, -1):
            row = self._offered.get(hashes[count - 1])
            if row is not None:
                return count, row
        return 0, NO_ROW

    def touch(self, name: bytes) -> None:
        """Note that a snapshot is used now, so that others give way before it. It is no guess any more."""
        self._offered.move_to_end(name)
        self._guesses.pop(name, None)

    @property
    def num_taken(self) -> int:
        """Count the rows that are neither free nor offered: pending ones and forks."""
        return self.num_rows - len(self._offered) - len(self._free)

    def take(self, name: bytes | None = None, *, is_guess: bool = False) -> int:
        """Take a row to write to, if necessary that of the oldest guess or of the least recently used snapshot.

        Args:
            name: the hash under which the row will be offered, if it is known yet.
            is_guess: take no row of a snapshot that is not a guess, and leave half of the rows.

        Returns:
            -1 if this snapshot exists already, or if all rows are pending or forks.
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
        """Offer a row that a step has written.

        Two sequences may have computed the same prefix at the same time. Then the second copy is given back.
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
        """Free a row. A step in flight may still write it, before any step that the next owner plans."""
        self._free.append(row)

    def drop(self, name: bytes) -> None:
        """Free the snapshot of a block that the prefix cache has forgotten.

        Without the keys of its last block no sequence can begin there.
        """
        row = self._offered.get(name)
        if row is not None:
            self._forget(name)
            if row in self._held:
                self._withdrawn.add(row)
            else:
                self._free.append(row)

    def hold(self, name: bytes) -> int:
        """Keep the row of an offered snapshot unchanged until `release`. Returns -1 if there is none, or if it is held already."""
        row = self._offered.get(name, NO_ROW)
        if row in self._held:
            return NO_ROW
        if row >= 0:
            self._held.add(row)
        return row

    def release(self, row: int) -> None:
        """Let a held row be written again."""
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
        """Free a row, and return its name, if it is offered. Takes O(rows), and is called after failures only."""
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
    """Decide for each sequence when its state is saved, and from which state it begins.

    Args:
        num_slots: the rows of running sequences, which precede the snapshots.
        num_rows: the rows of snapshots.
        block_size: tokens of a KV block.
        has_cache: whether snapshots are shared as prefixes. Forks are made in any case.
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
        # The states of prompts without their last token, for siblings that have not started.
        self._forks: dict[RequestId, int] = {}
        # Sequences that began with a snapshot, and tokens whose KV was in the cache, but whose state was not.
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

    # Where a sequence begins

    def hit(self, hashes: Items[bytes], num_cached: int) -> StateHit:
        """Find the prefix that a sequence may begin with.

        Args:
            hashes: of its blocks.
            num_cached: the leading blocks whose KV is in the cache.
        """
        count, row = self.rows.find(hashes[:num_cached])
        junction = num_cached * self._block_size if num_cached > count else 0
        return StateHit(count, row, junction)

    def fork_row(self, request: Request) -> int:
        """Return the row with the state of the prompt without its last token; -1 if there is none.

        Siblings compute only the last token, as with keys and values.
        """
        return self._forks.get(request.admit.id, NO_ROW)

    def begin(self, sequence: Sequence, start: int, row: int) -> list[bytes]:
        """Note that a sequence begins at a position, with the state of a row unless it is -1.

        The device copies that row into the slot before the sequence's first step.

        Returns:
            The name of the snapshot, if it is one. It is no guess any more.
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

    # What is saved

    def save(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, int, int]]:
        """Take rows for the states of a planned sequence that are worth one, behind its positions `start` + 1 … `end`.

        Called once the step is final, because a sequence that leaves it would leave its rows behind.

        Returns:
            elements of `StepPlan.saves`.
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
            # The tokens in flight are not known yet.
            is_known = position <= sequence.num_tokens
            take(position, self._name(sequence, position) if is_known else None)
        for position in guesses:
            take(position, self._name(sequence, position), is_guess=True)
        return saves

    def _due(self, sequence: Sequence, start: int, end: int, guesses: Items[int]) -> list[int]:
        """Return the positions of snapshots that are no guesses."""
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
        """Yield the positions of guesses behind `start`, up to `end` and before the last boundary of the prompt.

        The positions do not depend on the sequence, so that prompts with the same beginning save each of them once.
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
        """Return where siblings begin if they wait for this prompt, or 0.

        At a block boundary the snapshot of the prefix cache serves them.
        """
        request, point = sequence.request, sequence.num_prompt - 1
        leads = sequence.index == 0 and bool(request.deferred) and not sequence.output
        is_shared = self._has_cache and point % self._block_size == 0
        if not leads or is_shared or request.admit.id in self._forks:
            return 0
        return point

    def _name(self, sequence: Sequence, end: int) -> bytes:
        return sequence.hash_blocks(end // self._block_size, self._block_size)[-1]

    # What becomes of it

    def land(self, sequence: Sequence, end: int) -> list[bytes]:
        """Note that the step which brought a running sequence to position `end` was answered.

        Its saved states exist now, and all tokens up to `end` are known, so they are offered.

        Returns:
            The names of snapshots that are no guesses.
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
                # The siblings have ended meanwhile.
                self.rows.give_back(row)
        return found

    def undo(self, sequence: Sequence) -> None:
        """Give back the rows that cancelled steps would have written.

        The sequence is planned again from its last answered position, and takes new rows then.
        """
        marks = sequence.marks
        for end in [end for end in marks.saving if end > sequence.num_computed_on_device]:
            self.rows.give_back(marks.saving.pop(end))
        marks.last_saved = min(marks.last_saved, sequence.num_computed_on_device)

    def leave(self, sequence: Sequence) -> None:
        """Give back the pending rows of a sequence that loses its slot."""
        marks = sequence.marks
        for row in marks.saving.values():
            self.rows.give_back(row)
        marks.saving.clear()
        marks.restore = NO_ROW

    def distrust(self, sequence: Sequence) -> bytes | None:
        """Withdraw the snapshot with which a sequence began, because its first step failed, and return its name.

        Otherwise a bad snapshot would fail every sequence that begins with it.
        """
        return self.rows.withdraw(sequence.marks.restore)

    def note_start(self, request: Request) -> None:
        """Give the fork of a request back when its last sibling has started."""
        if request.admit.id in self._forks and not any(
            sibling.state is State.WAITING for sibling in request.sequences
        ):
            self.close(request.admit.id)

    def close(self, id: RequestId) -> None:
        """Give the fork of a request back."""
        row = self._forks.pop(id, NO_ROW)
        if row >= 0:
            self.rows.give_back(row)

    def reset(self) -> None:
        """Forget all snapshots and forks, because the device's memory is lost or the prefix cache is reset."""
        self.rows.reset()
        for id in list(self._forks):
            self.close(id)
