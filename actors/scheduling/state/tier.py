"""Decide which KV blocks go to the tier on disk, and which of them come back.  Pure.

The tier fills the prefix cache and does nothing else: a fetched block becomes a cached prefix, and sequences start from the
cache as ever.  What is on the disk is a hint.  A missing or damaged file costs a computation.

Laws:
1. A block is in an order only while it is held, so no plan writes to it.  `cancel` gives all blocks back at once: the device forgets its
   orders before it computes a later plan.
2. No sequence waits without an end.  It waits for a fetch until its deadline: at most the time of computing the same tokens.
3. The tier never takes a block from a sequence.  It takes free blocks down to a reserve, and gives them back when blocks are short.
4. A missing name is not fetched again until the device reports it anew.  So the fetches for a sequence end.
5. A recurrent state is on the disk under the name of the block that it follows.  A sequence that needs one waits only for blocks up to the
   deepest state that is in memory or on the disk, since it cannot begin behind it.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from typing import Any

import msgspec

from trouper.actors.messages.steps import TierAnswer, TierOrder, is_state, state_of
from trouper.actors.scheduling.state.kv_blocks import FIRST_PARENT, KVBlocks
from trouper.actors.scheduling.state.sequence import Sequence, State
from trouper.actors.scheduling.state.state_snapshots import StateSnapshots

# Orders to store without an answer.  Each holds a block, or one of them the row of a state: rows are few.
MAX_STORES = 4
# Names that wait to be stored: 4,096 of 200 bytes.  Later ones are not stored.
MAX_QUEUED = 4096
# Blocks of one fetch.  One fetch is under way at a time, and its names have 1 kB.
MAX_FETCH = 32
# Sequences with a fetch: 256 references.  Others compute at once.
MAX_SOUGHT = 256
# Touches without an answer.  Later ones are dropped, because they only improve the order of removal.
MAX_TOUCHES = 2
# States to remove.  Later ones stay on the disk, but are not fetched by this engine.
MAX_DISTRUSTED = 256
# The orders without an answer: stores, touches, a removal, a fetch, and one to cancel.
MAX_ORDERS = MAX_STORES + MAX_TOUCHES + 3
# A tenth of the free blocks, but at least this many, stays for sequences.
RESERVE = 2
# The deadline of a fetch in seconds while the rates of the disk and of the device are unknown, and its least value.
FIRST_DEADLINE_S, LEAST_DEADLINE_S = 2.0, 0.02
# A sequence waits for this many times the usual time of its fetch: while the device computes, a fetch takes four times as long.
PATIENCE = 8
# A fetch must take at most this share of the time of computing the same tokens.
WORTH = 0.5
# Weight of the newest value in the averages of rates, and the factor by which each skipped fetch forgets a slow disk, and
# each step a long one.
NEWEST, FORGET = 0.3, 0.95
# Tokens of a step from which its time counts as time of computing prompts.
MIN_STEP_TOKENS = 64


class _Sought(msgspec.Struct, eq=False):
    """A sequence with blocks on the disk.  It is parked until its deadline or until they are fetched."""

    sequence: Sequence
    names: list[bytes]
    is_parked: bool = True
    # Unknown until the clock is read for the first time.
    deadline_s: float | None = None
    # Fetches may begin at this block or behind.
    first: int = 0
    # These blocks, from one up to another, were on the disk when `Tier._num_removals` was `seen`.  A long prompt has thousands.
    known_from: int = 0
    known_to: int = 0
    seen: int = -1
    # Blocks and states to fetch, and blocks that need not be computed then.
    num_blocks: int = 0
    num_states: int = 0
    num_gained: int = 0


class _Fetch(msgspec.Struct, eq=False):
    """The fetch under way: its own blocks, and the blocks of the prefix in front of them, held together.

    The fetch of a state has the row to which it is written in place of blocks.
    """

    number: int
    sought: _Sought
    prefix: list[int]
    blocks: list[int]
    names: tuple[bytes, ...]
    row: int | None = None


class Tier:
    """The queues and the orders of one replica, and the names of the blocks on its disk.

    Args:
        states: None if the model keeps only keys and values.
    """

    def __init__(self, blocks: KVBlocks, states: StateSnapshots | None = None) -> None:
        self._blocks, self._states = blocks, states
        # Until the device has found out what is on the disk, nothing is ordered.
        self.is_open = False
        self._known: set[bytes] = set()
        # How often names were removed from it.
        self._num_removals = 0
        # Name to parent, the first one is stored next.
        self._queue: OrderedDict[bytes, bytes] = OrderedDict()
        # By the number of the order: the block or the row, its name and its parent's.
        self._stores: dict[int, tuple[int, bytes, bytes]] = {}
        self._sought: deque[_Sought] = deque()
        self._fetch: _Fetch | None = None
        self._touched: OrderedDict[bytes, None] = OrderedDict()
        self._touches: set[int] = set()
        # States whose files must be removed, until that is answered; and the number of the order for the first one, 0 without it.
        self._distrusted: OrderedDict[bytes, None] = OrderedDict()
        self._removal = 0
        # A cancel or clear, not sent yet.
        self._pending: TierOrder | None = None
        # The one sent last.  Nothing is ordered before its answer.
        self._barrier: TierOrder | None = None
        # Sequences that wait no longer, until `take_free`.
        self._free: list[Sequence] = []
        self._number = 0
        # Counts losses of the device, which refuses orders of an older epoch.
        self._epoch = 0
        # Averages: seconds to fetch a block or a state, and to compute a token.
        self._block_s = self._state_s = self._token_s = 0.0
        # The longest of the latest steps.
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
        """Take the sequences that wait no longer, since the last call."""
        free, self._free = self._free, []
        return free

    # What the policy reports

    def offer(self, name: bytes, parent: bytes) -> None:
        """Queue a new cached prefix, to store it.

        Args:
            parent: the name of the block before it, or `FIRST_PARENT`; of a state, the name of its block.
        """
        if name in self._known or name in self._queue or name in self._distrusted:
            return
        if len(self._queue) >= MAX_QUEUED:
            self.skipped["full"] += 1
            return
        self._queue[name] = parent

    def distrust(self, name: bytes) -> None:
        """Remove the state behind this block, because a step that began with it has failed.

        Otherwise its file would fail a request after each start of the engine.
        """
        state = state_of(name)
        self._remove_known((state,))
        self._queue.pop(state, None)
        if len(self._distrusted) < MAX_DISTRUSTED:
            self._distrusted[state] = None
        else:
            self.skipped["full"] += 1

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """Learn the duration of steps, and from steps with prompts the time of computing a token."""
        self._step_s = max(seconds, FORGET * self._step_s)
        if num_tokens >= MIN_STEP_TOKENS and seconds > 0:
            self._token_s = _average(self._token_s, seconds / num_tokens)

    def seek(self, sequence: Sequence) -> bool:
        """Look for blocks of a new sequence on the disk.  Returns whether it must be parked until they are fetched."""
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
        """Return the cached blocks, behind how many a sequence can begin now, and behind how many after fetches."""
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
        """Whether a sequence can begin behind this many blocks as soon as they are in memory."""
        return self._states is None or names[count - 1] in self._states.rows

    def _known_end(self, sought: _Sought, start: int) -> int:
        """Return the end of the blocks on the disk that follow `start`.  It looks only behind those that it has seen."""
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
        """Whether a fetch is quicker than computing, as far as the rates are known."""
        fetch = self._fetch
        if fetch is not None and not fetch.sought.is_parked:
            # Its deadline has passed: the disk hangs or is slow.
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
        """Take an answer of the device."""
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
        """Release what an order to store holds."""
        if is_state(name):
            assert self._states is not None
            self._states.rows.release(place)
        else:
            self._blocks.free([place])

    def _take_in(self, fetch: _Fetch, answer: TierAnswer) -> None:
        """Offer what was fetched as a prefix, and go on with the rest of the same sequence."""
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
            # The rest of the chain may be damaged as well.  It is computed and stored again, which checks the files.
            start = len(fetch.prefix) + count
            self._remove_known(sought.names[start:])
            self.counts["miss"] += 1
        sought.first = len(fetch.prefix) + max(1, count)
        self._end_if_ready(sought)

    def _take_in_state(self, fetch: _Fetch, row: int, answer: TierAnswer) -> None:
        """Offer a fetched state.  If it was not there, the sequence may begin with one that follows fewer blocks."""
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
        """Look for no more blocks of a sequence if there are none with which it could begin later."""
        _, usable, reach = self._reach(sought)
        if reach <= usable:
            self._end(sought)

    def _end(self, sought: _Sought) -> None:
        """Look for no more blocks of a sequence."""
        self._sought.remove(sought)
        self._release(sought)

    def _release(self, sought: _Sought) -> None:
        if sought.is_parked:
            sought.is_parked = False
            self._free.append(sought.sequence)

    def expire(self, now: float) -> None:
        """Let sequences go at their deadline.  What arrives later still becomes a prefix."""
        for sought in self._sought:
            if sought.is_parked and sought.deadline_s is not None and sought.deadline_s <= now:
                self.skipped["deadline"] += 1
                self._release(sought)
                fetch = self._fetch
                if fetch is not None and fetch.sought is sought:
                    # At least this slow: `expire` is called at the deadline.
                    if fetch.row is None:
                        self._block_s = max(self._block_s, self._token_s * self._blocks.block_size)
                    else:
                        self._state_s = max(self._state_s, self._compute_s(sought))

    # What the device shall do

    def take_orders(self, now: float) -> list[TierOrder]:
        """Return the orders to send before the next plan, and start the clocks of the sequences that wait."""
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
        """Order the queued stores for which there is room, and hold what they read."""
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
        """Hold a block to store it.  Returns -1 if it is not cached any more, and None while too few blocks are free."""
        found = self._blocks.match([name])
        if found and self._blocks.num_idle(found) and not self._num_spare():
            return None
        self._blocks.share(found)
        return found[0] if found else -1

    def _hold_state(self, name: bytes) -> int | None:
        """Hold the row of the state behind a block, to store it.

        Returns:
            -1 if the state is gone, or its block is not on the disk; None while another state is being stored.
        """
        under_way = {stored for _, stored, _ in self._stores.values()}
        if any(map(is_state, under_way)):
            return None
        if self._states is None or not (name in self._known or name in under_way):
            return -1
        return self._states.rows.hold(name)

    def _patience_s(self, sought: _Sought, ahead_s: float) -> float:
        """Return how long a sequence waits for what it looks for.

        Args:
            ahead_s: the time of fetching it and what the sequences in front look for.
        """
        computing_s = self._compute_s(sought) or FIRST_DEADLINE_S
        fetching_s = PATIENCE * ahead_s or computing_s
        # The device takes an order behind the plans in flight.
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
        """Order what is next for the first sequence that still needs something."""
        for sought in list(self._sought):
            if (order := self._fetch_for(sought)) is not None:
                return order
            self._end(sought)
        return None

    def _fetch_for(self, sought: _Sought) -> TierOrder | None:
        """Order the next blocks of a sequence, or the state behind them.  Returns None if that is not possible or has no use."""
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
        # Its blocks may have been reused since; they are not fetched twice.
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
        """Return the order that must reach the device before any later plan, if there is one."""
        pending = self._pending
        if pending is None or self._barrier is not None or not self.is_open:
            return []
        self._pending, self._barrier = None, pending
        return [pending]

    def cancel(self) -> bool:
        """Give back all blocks at once.  Returns False if none was held.

        Stores without an answer are queued again.
        """
        if not self._stores and self._fetch is None:
            return False
        if self._pending is None:
            self._pending = self._order("cancel")
        self._drop()
        return True

    def clear(self) -> None:
        """Remove all files of this model, as soon as the device has found out which they are."""
        self._drop()
        self._queue.clear()
        self._remove_known(self._known)
        self._distrusted.clear()
        self._pending = self._order("clear")

    def lose(self) -> None:
        """Note that the device is lost, and with it all orders.  It reports its files again when it is back.

        An order to clear without an answer is given again then.
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
