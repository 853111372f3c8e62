"""Decide which KV blocks are stored in the tier on disk, and which are fetched from it.  Pure: the device does the I/O.

The tier only refills the prefix cache: a fetched block becomes a cached prefix, and sequences start from the cache as usual.
Its view of the disk is a hint: if a file is missing or damaged, the tokens are computed instead.

Laws:
1. The tier holds a reference to each block in an unanswered order, so no plan overwrites it.  `cancel` frees these blocks at once, because
   the device drops its orders before it runs a later plan.
2. Every wait for a fetch has a deadline: at most the time to compute the same tokens.
3. The tier never takes a block from a sequence.  It uses only free blocks beyond a reserve, and returns them when blocks run short.
4. After a failed fetch, a name is not fetched again until the device reports it again.  So the fetches for a sequence come to an end.
5. A recurrent state is stored under a name derived from that of the block before it.  A sequence of a recurrent model waits only for
   blocks up to the last state in memory or on disk, since it cannot start after a later block.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from typing import Any

import msgspec

from trouper.actors.messages.steps import TierAnswer, TierOrder, is_state, state_of
from trouper.actors.scheduling.state.kv_blocks import FIRST_PARENT, KVBlocks
from trouper.actors.scheduling.state.sequence import Sequence, State
from trouper.actors.scheduling.state.state_snapshots import StateSnapshots

# Unanswered store orders.  Each holds one block.  At most one of them holds a state row instead, because rows are scarce.
MAX_STORES = 4
# Names queued to be stored, of about 200 bytes each.  When the queue is full, new names are skipped.
MAX_QUEUED = 4096
# Blocks per fetch.  Only one fetch runs at a time, and its names take 1 kB.
MAX_FETCH = 32
# Sequences with blocks to fetch.  Further sequences compute their prompts at once.
MAX_SOUGHT = 256
# Unanswered touch orders, which only improve the order of eviction on disk.
MAX_TOUCHES = 2
# Suspect states queued for removal.  Further ones stay on the disk, but this engine does not fetch them.
MAX_DISTRUSTED = 256
# All unanswered orders: stores, touches, one removal, one fetch, and one cancel or clear.
MAX_ORDERS = MAX_STORES + MAX_TOUCHES + 3
# The tier leaves a tenth of the free blocks, but at least this many, to sequences.
RESERVE = 2
# The wait for a fetch before the speeds of disk and device are measured, and the minimum wait.
FIRST_DEADLINE_S, LEAST_DEADLINE_S = 2.0, 0.02
# A sequence waits this many times the usual duration of its fetch, which takes four times as long while the device computes.
PATIENCE = 8
# Fetch only if it takes at most this fraction of the time to compute the same tokens.
WORTH = 0.5
# Weight of the newest value in moving averages.  Each skipped fetch multiplies the estimate of the disk's slowness by FORGET, so that
# the disk is tried again; each step does the same to the longest step time.
NEWEST, FORGET = 0.3, 0.95
# A step with at least this many tokens counts as a measurement of prompt speed.
MIN_STEP_TOKENS = 64


class _Sought(msgspec.Struct, eq=False):
    """A sequence with blocks on the disk.  It is parked until they are fetched, or until its deadline."""

    sequence: Sequence
    names: list[bytes]
    is_parked: bool = True
    # None until the first `take_orders`, which supplies the time.
    deadline_s: float | None = None
    # Fetches may start at this block or a later one.
    first: int = 0
    # Blocks `known_from` … `known_to` - 1 were on the disk when `Tier._num_removals` was `seen`.  This cache avoids looking up the
    # thousands of blocks of a long prompt again.
    known_from: int = 0
    known_to: int = 0
    seen: int = -1
    # Blocks and states to fetch, and the blocks whose computation this saves.
    num_blocks: int = 0
    num_states: int = 0
    num_gained: int = 0


class _Fetch(msgspec.Struct, eq=False):
    """The fetch in progress.  It holds the blocks to fill and the blocks of the cached prefix before them.

    The fetch of a recurrent state has a `row` to fill, and no `blocks`.
    """

    number: int
    sought: _Sought
    prefix: list[int]
    blocks: list[int]
    names: tuple[bytes, ...]
    row: int | None = None


class Tier:
    """Track the blocks on one replica's disk, and issue the orders to store and fetch them.

    Args:
        states: the state snapshots of a recurrent model, else None.
    """

    def __init__(self, blocks: KVBlocks, states: StateSnapshots | None = None) -> None:
        self._blocks, self._states = blocks, states
        # No order is issued until the device has reported the files on the disk.
        self.is_open = False
        self._known: set[bytes] = set()
        # Removals from `_known`.  It invalidates `_Sought.known_to`.
        self._num_removals = 0
        # Maps a name to its parent.  The first entry is stored next.
        self._queue: OrderedDict[bytes, bytes] = OrderedDict()
        # Maps an order's number to its block or row, its name and its parent's name.
        self._stores: dict[int, tuple[int, bytes, bytes]] = {}
        self._sought: deque[_Sought] = deque()
        self._fetch: _Fetch | None = None
        self._touched: OrderedDict[bytes, None] = OrderedDict()
        self._touches: set[int] = set()
        # States to remove from the disk.  `_removal` is the number of the unanswered order to remove the first one, else 0.
        self._distrusted: OrderedDict[bytes, None] = OrderedDict()
        self._removal = 0
        # A cancel or clear order to send.
        self._pending: TierOrder | None = None
        # An unanswered cancel or clear order.  Until its answer, no other order is issued.
        self._barrier: TierOrder | None = None
        # Sequences to unpark, until `take_free`.
        self._free: list[Sequence] = []
        self._number = 0
        # Counts device losses.  The device refuses orders of an older epoch.
        self._epoch = 0
        # Moving averages of the time to fetch a block, to fetch a state, and to compute a token.
        self._block_s = self._state_s = self._token_s = 0.0
        # A decaying maximum of step times.
        self._step_s = 0.0
        self.counts: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.num_bytes = self.num_files = 0

    def __repr__(self) -> str:
        return f"<Tier {'open' if self.is_open else 'closed'}, {len(self._known)} known, {len(self._queue)} to store>"

    def statistics(self) -> dict[str, Any]:
        """Describe the tier in the fields of `SchedulerStats`."""
        size = self._blocks.block_size
        return {
            "tier_bytes": self.num_bytes,
            "tier_files": self.num_files,
            "tier_hit_tokens": self.counts["hit"] * size,
            "tier_miss_tokens": self.counts["miss"] * size,
            "tier_stored_tokens": self.counts["stored"] * size,
            "tier_refused": tuple(sorted(self.refused.items())),
            "tier_skipped": tuple(sorted(self.skipped.items())),
        }

    @property
    def deadline_s(self) -> float | None:
        """The time at which the next parked sequence stops waiting, or None."""
        deadlines = (s.deadline_s for s in self._sought if s.is_parked and s.deadline_s is not None)
        return min(deadlines, default=None)

    def take_free(self) -> list[Sequence]:
        """Return and clear the sequences to unpark, because their fetch is complete, late or cancelled."""
        free, self._free = self._free, []
        return free

    # What the policy reports

    def offer(self, name: bytes, parent: bytes) -> None:
        """Queue a newly cached block or state to be stored.

        Args:
            parent: the name of the block before it, or `FIRST_PARENT`. For a state, the name of the block that it follows.
        """
        if name in self._known or name in self._queue or name in self._distrusted:
            return
        if len(self._queue) >= MAX_QUEUED:
            self.skipped["full"] += 1
            return
        self._queue[name] = parent

    def distrust(self, name: bytes) -> None:
        """Remove the state after this block from the disk, because a step that started from it failed.

        Otherwise a corrupt file would fail another request after each restart of the engine.
        """
        state = state_of(name)
        self._remove_known((state,))
        self._queue.pop(state, None)
        if len(self._distrusted) < MAX_DISTRUSTED:
            self._distrusted[state] = None
        else:
            self.skipped["full"] += 1

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step.  Steps with many tokens also update the estimated time per token."""
        self._step_s = max(seconds, FORGET * self._step_s)
        if num_tokens >= MIN_STEP_TOKENS and seconds > 0:
            self._token_s = _average(self._token_s, seconds / num_tokens)

    def seek(self, sequence: Sequence) -> bool:
        """Look up a sequence's blocks on the disk.  Returns True if the caller must park it until they are fetched."""
        if not self._known or len(self._sought) >= MAX_SOUGHT:
            return False
        size = self._blocks.block_size
        names = sequence.hash_blocks((sequence.num_tokens - 1) // size, size)
        sought = _Sought(sequence, names)
        cached, usable, reach = self._reach(sought)
        num_cached = len(cached)
        self.counts["miss"] += len(names) - reach
        if reach:
            last = names[reach - 1]
            self._touch(state_of(last) if state_of(last) in self._known else last)
        sought.first = num_cached
        sought.num_blocks = max(0, reach - num_cached)
        sought.num_states = int(reach > usable and not self._is_ready(names, reach))
        sought.num_gained = reach - usable
        if reach <= usable or not self._is_worth(sought):
            return False
        self._sought.append(sought)
        return True

    def _reach(self, sought: _Sought) -> tuple[list[int], int, int]:
        """Return the cached blocks, the number of blocks that a sequence can skip now, and the number after all fetches."""
        names = sought.names
        cached = self._blocks.match(names)
        num_cached = len(cached)
        reach = self._known_end(sought, num_cached)
        if self._states is None:
            return cached, num_cached, reach
        usable = self._states.hit(names, num_cached).num_blocks
        while (
            reach > usable
            and not self._is_ready(names, reach)
            and state_of(names[reach - 1]) not in self._known
        ):
            reach -= 1
        return cached, usable, reach

    def _is_ready(self, names: list[bytes], count: int) -> bool:
        """Whether a sequence can skip this many blocks once they are in memory, without fetching a recurrent state."""
        return self._states is None or names[count - 1] in self._states.rows

    def _known_end(self, sought: _Sought, start: int) -> int:
        """Return the end of the run of blocks on the disk from `start`.  Continues from the last lookup while that is still valid."""
        names = sought.names
        is_seen = sought.known_from <= start <= sought.known_to
        if sought.seen != self._num_removals or not is_seen:
            sought.seen = self._num_removals
            sought.known_from = sought.known_to = start
        end = sought.known_to
        while end < len(names) and names[end] in self._known:
            end += 1
        sought.known_to = end
        return end

    def _remove_known(self, names: Collection[bytes]) -> None:
        if not self._known.isdisjoint(names):
            self._known.difference_update(names)
            self._num_removals += 1

    def _is_worth(self, sought: _Sought) -> bool:
        """Whether a fetch is clearly faster than computing.  True while the speeds are unmeasured."""
        fetch = self._fetch
        if fetch is not None and not fetch.sought.is_parked:
            # The running fetch missed its deadline: the disk hangs or is slow.
            self.skipped["deadline"] += 1
            return False
        if self._token_s and self._fetch_s(sought) > WORTH * self._compute_s(sought):
            self._block_s *= FORGET
            self._state_s *= FORGET
            self.skipped["slow"] += 1
            return False
        return True

    def _fetch_s(self, sought: _Sought) -> float:
        return self._block_s * sought.num_blocks + self._state_s * sought.num_states

    def _compute_s(self, sought: _Sought) -> float:
        return self._token_s * self._blocks.block_size * sought.num_gained

    def _touch(self, name: bytes) -> None:
        if name in self._known:
            self._touched[name] = None
            self._touched.move_to_end(name)
            if len(self._touched) > MAX_SOUGHT:
                self._touched.popitem(last=False)

    def note(self, answer: TierAnswer) -> None:
        """Apply the device's answer to an order, with the changes to the files on the disk."""
        if answer.is_anew:
            self.is_open = True
            self._remove_known(self._known)
        self._known.update(answer.added)
        self._remove_known(answer.removed)
        self.num_bytes, self.num_files = answer.num_bytes, answer.num_files
        self.refused.update(dict(answer.refused))
        self._touches.discard(answer.number)
        if self._barrier is not None and answer.number == self._barrier.number:
            self._barrier = None
        stored = self._stores.pop(answer.number, None)
        if stored is not None:
            _, name, _ = stored
            self._let_go(*stored[:2])
            if answer.num_done:
                self._known.add(name)
                self.counts["stored"] += not is_state(name)
        if self._removal and answer.number == self._removal:
            self._removal = 0
            self._distrusted.popitem(last=False)
        self._remove_known(self._distrusted)
        fetch = self._fetch
        if fetch is not None and fetch.number == answer.number:
            self._take_in(fetch, answer)

    def _let_go(self, place: int, name: bytes) -> None:
        """Release the block or state row that a store order holds."""
        if is_state(name):
            assert self._states is not None
            self._states.rows.release(place)
        else:
            self._blocks.free([place])

    def _take_in(self, fetch: _Fetch, answer: TierAnswer) -> None:
        """Register fetched blocks in the prefix cache.  The rest of the sequence's blocks are fetched by later orders."""
        self._fetch, count, sought = None, answer.num_done, fetch.sought
        if fetch.row is not None:
            self._take_in_state(fetch, fetch.row, answer)
            return
        for block, name in zip(fetch.blocks[:count], fetch.names, strict=False):
            self._blocks.register(block, name)
        self._blocks.free(fetch.prefix + fetch.blocks)
        self.counts["hit"] += count
        if answer.seconds > 0:
            self._block_s = _average(self._block_s, answer.seconds / max(1, count))
        if count < len(fetch.names):
            # Later blocks may be damaged too.  They are computed and stored again, which checks the files.
            start = len(fetch.prefix) + count
            self._remove_known(sought.names[start:])
            self.counts["miss"] += 1
        sought.first = len(fetch.prefix) + max(1, count)
        self._end_if_ready(sought)

    def _take_in_state(self, fetch: _Fetch, row: int, answer: TierAnswer) -> None:
        """Offer a fetched state as a snapshot.  If its file was missing, look for a state after fewer blocks."""
        states, (state,) = self._states, fetch.names
        assert states is not None
        name = fetch.sought.names[len(fetch.prefix) - 1]
        if answer.num_done and self._blocks.find(name) is not None:
            states.rows.offer(row, name)
        else:
            states.rows.give_back(row)
        self._blocks.free(fetch.prefix)
        if answer.seconds > 0:
            self._state_s = _average(self._state_s, answer.seconds)
        if answer.num_done:
            self._end(fetch.sought)
        else:
            self._remove_known((state,))
            self._end_if_ready(fetch.sought)

    def _end_if_ready(self, sought: _Sought) -> None:
        """Stop fetching for a sequence if no further fetch would let it skip more blocks."""
        _, usable, reach = self._reach(sought)
        if reach <= usable:
            self._end(sought)

    def _end(self, sought: _Sought) -> None:
        """Stop fetching for a sequence, and unpark it."""
        self._sought.remove(sought)
        self._release(sought)

    def _release(self, sought: _Sought) -> None:
        if sought.is_parked:
            sought.is_parked = False
            self._free.append(sought.sequence)

    def expire(self, now: float) -> None:
        """Unpark sequences whose deadline has passed.  Blocks that arrive later still enter the prefix cache."""
        for sought in self._sought:
            if sought.is_parked and sought.deadline_s is not None and sought.deadline_s <= now:
                self.skipped["deadline"] += 1
                self._release(sought)
                fetch = self._fetch
                if fetch is not None and fetch.sought is sought:
                    # The fetch is at least as slow as computing, because it missed its deadline.
                    if fetch.row is None:
                        self._block_s = max(self._block_s, self._token_s * self._blocks.block_size)
                    else:
                        self._state_s = max(self._state_s, self._compute_s(sought))

    # Orders to the device

    def take_orders(self, now: float) -> list[TierOrder]:
        """Return the orders to send before the next plan, and set the deadlines of newly parked sequences."""
        orders = self.take_cancel()
        ahead_s = 0.0
        for sought in self._sought:
            ahead_s += self._fetch_s(sought)
            if sought.deadline_s is None:
                sought.deadline_s = now + self._patience_s(sought, ahead_s)
        if not self.is_open or self._barrier is not None:
            return orders
        if self._distrusted and not self._removal:
            orders.append(order := self._order("remove", (), (next(iter(self._distrusted)),)))
            self._removal = order.number
        orders += self._next_stores()
        while self._touched and len(self._touches) < MAX_TOUCHES:
            name, _ = self._touched.popitem(last=False)
            orders.append(order := self._order("touch", (), (name,)))
            self._touches.add(order.number)
        if self._fetch is None and (order := self._next_fetch()) is not None:
            orders.append(order)
        return orders

    def _next_stores(self) -> list[TierOrder]:
        """Issue store orders up to the limit, and hold the blocks and rows that they read."""
        orders: list[TierOrder] = []
        while self._queue and len(self._stores) < MAX_STORES:
            name, parent = self._queue.popitem(last=False)
            if name in self._known:
                continue
            place = self._hold_state(parent) if is_state(name) else self._hold_block(name)
            if place is None:
                self._queue[name] = parent
                self._queue.move_to_end(name, last=False)
                break
            if place < 0:
                continue
            order = self._order(
                "store", (place,), (name,), b"" if parent == FIRST_PARENT else parent
            )
            self._stores[order.number] = place, name, parent
            orders.append(order)
        return orders

    def _hold_block(self, name: bytes) -> int | None:
        """Hold a block to store it.  Returns -1 if it is no longer cached, and None while too few blocks are free."""
        found = self._blocks.match([name])
        if found and self._blocks.num_idle(found) and not self._num_spare():
            return None
        self._blocks.share(found)
        return found[0] if found else -1

    def _hold_state(self, name: bytes) -> int | None:
        """Hold the row of the state after a block, to store it.

        Returns:
            The row; -1 if the state was evicted or its block is not on the disk; None while another state is being stored.
        """
        under_way = {stored for _, stored, _ in self._stores.values()}
        if any(map(is_state, under_way)):
            return None
        if self._states is None or not (name in self._known or name in under_way):
            return -1
        return self._states.rows.hold(name)

    def _patience_s(self, sought: _Sought, ahead_s: float) -> float:
        """Return how long a sequence may wait for its fetches.

        Args:
            ahead_s: the estimated time of its own fetches and of those queued before them.
        """
        computing_s = self._compute_s(sought) or FIRST_DEADLINE_S
        fetching_s = PATIENCE * ahead_s or computing_s
        # The device runs an order only after the plans in flight.
        fetching_s += 2 * self._step_s
        return max(LEAST_DEADLINE_S, min(fetching_s, computing_s))

    def _order(
        self,
        kind: Any,
        blocks: tuple[int, ...] = (),
        names: tuple[bytes, ...] = (),
        parent: bytes = b"",
    ) -> TierOrder:
        self._number += 1
        return TierOrder(self._number, kind, blocks, names, parent, self._epoch)

    def _next_fetch(self) -> TierOrder | None:
        """Return the next fetch of the first sequence that still needs one, and drop the sequences before it."""
        for sought in list(self._sought):
            if (order := self._fetch_for(sought)) is not None:
                return order
            self._end(sought)
        return None

    def _fetch_for(self, sought: _Sought) -> TierOrder | None:
        """Order the next blocks of a sequence, or the state after them.  Returns None if a fetch is impossible or useless."""
        if sought.sequence.state not in (State.WAITING, State.PREEMPTED):
            return None
        blocks, names = self._blocks, sought.names
        cached, usable, reach = self._reach(sought)
        if reach <= usable:
            return None
        prefix = cached[:reach]
        start = len(prefix)
        if start == reach:
            return self._fetch_state(sought, prefix)
        # A fetched block was evicted already.  Fetching it a second time might never end.
        if start < sought.first:
            return None
        blocks.share(prefix)
        fresh = blocks.allocate(min(MAX_FETCH, reach - start, self._num_spare()))
        if not fresh:
            blocks.free(prefix)
            self.skipped["full"] += 1
            return None
        order = self._order("fetch", tuple(fresh), tuple(names[start : start + len(fresh)]))
        self._fetch = _Fetch(order.number, sought, prefix, fresh, order.names)
        return order

    def _fetch_state(self, sought: _Sought, prefix: list[int]) -> TierOrder | None:
        assert self._states is not None
        name = sought.names[len(prefix) - 1]
        row = self._states.rows.take(name)
        if row < 0:
            self.skipped["full"] += 1
            return None
        self._blocks.share(prefix)
        order = self._order("fetch", (row,), (state_of(name),))
        self._fetch = _Fetch(order.number, sought, prefix, [], order.names, row)
        return order

    def _num_spare(self) -> int:
        free = self._blocks.num_free
        return max(0, free - max(RESERVE, free // 10))

    def take_cancel(self) -> list[TierOrder]:
        """Return the pending cancel or clear order, if any.  It must reach the device before any later plan."""
        pending = self._pending
        if pending is None or self._barrier is not None or not self.is_open:
            return []
        self._pending, self._barrier = None, pending
        return [pending]

    def cancel(self) -> bool:
        """Free all blocks and rows that the tier holds.  Returns False if it held none.

        Unanswered stores are queued again.
        """
        if not self._stores and self._fetch is None:
            return False
        if self._pending is None:
            self._pending = self._order("cancel")
        self._drop()
        return True

    def clear(self) -> None:
        """Remove all files of this model, once the device has listed them."""
        self._drop()
        self._queue.clear()
        self._remove_known(self._known)
        self._distrusted.clear()
        self._pending = self._order("clear")

    def lose(self) -> None:
        """Drop all orders, because the device was lost.  After its restart it reports its files again.

        An unanswered clear order is then repeated.
        """
        self._drop()
        self._epoch += 1
        orders = self._pending, self._barrier
        must_clear = any(order is not None and order.kind == "clear" for order in orders)
        self._pending = self._order("clear") if must_clear else None
        self._barrier = None
        self._touches.clear()
        self._remove_known(self._known)
        self.is_open = False

    def _drop(self) -> None:
        for place, name, parent in reversed(self._stores.values()):
            self._let_go(place, name)
            self._queue[name] = parent
            self._queue.move_to_end(name, last=False)
        self._stores.clear()
        self._removal = 0
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            self._blocks.free(fetch.prefix + fetch.blocks)
            if fetch.row is not None and self._states is not None:
                self._states.rows.give_back(fetch.row)
        for sought in self._sought:
            self._release(sought)
        self._sought.clear()


def _average(old: float, new: float) -> float:
    return new if not old else old + NEWEST * (new - old)
