"""The running sequences and their resources: request slots, KV blocks, shared prefixes.

When KV memory is short, a running sequence is preempted so that a better one can grow.  Two sequences must not preempt each other
for ever, so evictions are bounded.

Laws:
1. A sequence holds blocks exactly while it holds a slot.  It gets both or none (`start`), and gives both back at once (`preempt`,
   `leave`), whatever is in flight, because plans run in order.
2. A sequence is evicted for the growth of another at most MAX_EVICTIONS times.  Each time the number of free blocks that it needs to
   start again doubles, until it starts only if no other sequence runs.  From then on it is never evicted.  So at most one such
   sequence runs, and it runs to its end.
"""

from collections.abc import Iterable
from typing import NamedTuple

from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.steps import state_of
from trouper.actors.scheduling.state.kv_blocks import FIRST_PARENT, KVBlocks
from trouper.actors.scheduling.state.sequence import Sequence, State
from trouper.actors.scheduling.state.state_snapshots import NO_ROW, StateSnapshots
from trouper.actors.scheduling.state.step_builder import StepBuilder
from trouper.actors.scheduling.state.tier import Tier
from trouper.actors.scheduling.state.waiting import Queue
from trouper.actors.scheduling.state.windows import Windows
from trouper.config.engine_config import SchedulerConfig

MAX_EVICTIONS = 8


class Running:
    """The running sequences in the order in which they started.

    They hold all request slots and KV blocks in use, so resources are accounted for in this class only.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: KVBlocks,
        returning: Queue,
        states: StateSnapshots | None = None,
        tier: Tier | None = None,
    ) -> None:
        self._config = config
        self._blocks = blocks
        # None without a tier on disk.
        self._tier = tier
        # None if the model keeps only keys and values.
        self.states = states
        # None if all layers see all tokens.
        self.windows = Windows(blocks) if blocks.layout.has_windows else None
        self._num_groups = len(blocks.layout.windows)
        # The queue of preempted sequences.
        self._returning = returning
        self._is_fcfs = config.policy == "fcfs"
        self._watermark = int(config.watermark * blocks.num_usable)
        self._free_slots = list(reversed(range(config.max_num_seqs)))
        self._sequences: dict[SequenceId, Sequence] = {}
        self.num_preemptions = 0
        # Lookups in the prefix cache, in tokens: first starts, and starts after a preemption.
        self.num_queries = self.num_hits = 0
        self.num_recompute_queries = self.num_recompute_hits = 0
        # Tokens with KV lost with the device.
        self.num_lost_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, id: SequenceId) -> bool:
        return id in self._sequences

    @property
    def free_slots(self) -> tuple[int, ...]:
        """List the free request slots.

        A slot is the row of a sequence in the device's tables.
        """
        return tuple(self._free_slots)

    @property
    def ids(self) -> tuple[SequenceId, ...]:
        """List the ids in the order in which the sequences started.

        With the policy fcfs, the last one is preempted first.
        """
        return tuple(self._sequences)

    def kv_bytes(self) -> dict[str, int]:
        """Return the bytes of the held blocks by kind, in the fields of `SchedulerStats`."""
        blocks, windowed = self._blocks, 0
        if self.windows is not None:
            windowed = self.windows.num_held(self._sequences.values())
        full = blocks.num_usable - blocks.num_free - windowed
        size = blocks.layout.block_bytes
        return {"num_full_kv_bytes": full * size, "num_window_kv_bytes": windowed * size}

    def snapshot(self) -> list[Sequence]:
        """Copy the sequences to a list, so that a caller can preempt some of them while it iterates."""
        return list(self._sequences.values())

    def has_adapter_room(self, sequence: Sequence) -> bool:
        """Whether this sequence can run without more different adapters than `max_loras`.

        The device computes a limited number of different adapters in one step.
        """
        most, adapter = self._config.max_loras, sequence.request.admit.adapter
        if most is None or adapter is None:
            return True
        used = {other.request.admit.adapter for other in self._sequences.values()} - {None}
        return adapter in used or len(used) < most

    def start(self, sequence: Sequence, builder: StepBuilder) -> bool:
        """Give a sequence a slot, blocks and its first tokens of a step.

        A cached prefix is shared instead of computed.  Returns False, and changes nothing, if the sequence must wait.
        """
        config, blocks = self._config, self._blocks
        prefix = self._prefix(sequence)
        shared, start = prefix.blocks, prefix.start
        count = min(sequence.num_tokens - start, builder.max_count)
        # Chunked prefill off: no prompt is split to fit.  (What exceeds a whole step is; it would never run.)
        if not config.enable_chunked_prefill and builder.budget < count <= builder.capacity:
            return False
        count = min(count, builder.budget)
        sequence.seen_until = 0
        count = builder.cut(sequence, start, count)
        if count is None:
            return False
        if self.states is not None:
            # The junction of this start counts, not that of an earlier one.
            sequence.marks.junction = prefix.junction
        if self.windows is not None:
            count = self._shortened(sequence, builder, shared, start, count)
        if not self._can_start(sequence, shared, start + count):
            # If only the tier holds blocks, the sequence fits without them.
            return self._has_cancelled_tier() and self.start(sequence, builder)
        blocks.share(shared)
        fresh = blocks.allocate(blocks.num_for(start + count) - len(shared))
        assert fresh is not None  # counted above
        # The first fresh blocks of a fork follow the shared ones.
        builder.copies.extend(
            (source, target)
            for source, target in zip(prefix.sources, fresh, strict=False)
            if source
        )
        if self.states is not None:
            self._keep_states(sequence, self.states.begin(sequence, start, prefix.row))
        num_shared = len(shared) // self._num_groups
        if self.windows is not None:
            self.windows.begin(sequence, num_shared, prefix.junction)
        sequence.blocks = [*shared, *fresh]
        sequence.num_registered = num_shared
        sequence.num_computed_on_device = num_shared * blocks.block_size
        sequence.num_computed = start
        sequence.request_slot = self._free_slots.pop()
        sequence.is_slot_stale = True
        self._count_lookup(sequence, start)
        self.num_lost_tokens += max(0, sequence.num_lost - start)
        sequence.num_lost = 0
        sequence.state = State.RUNNING
        self._sequences[sequence.id] = sequence
        if self.states is not None:
            self.states.note_start(sequence.request)
        if count:
            builder.add(sequence, count)
        else:
            builder.encodes.append(sequence)
        return True

    def schedule(self, builder: StepBuilder, sequences: list[Sequence]) -> None:
        """Add the next tokens of running sequences to a step, within its budget.

        Sequences without enough blocks preempt others, from the end of the order.
        """
        max_count = builder.max_count
        for sequence in sequences:
            if builder.budget <= 0:
                break
            known = sequence.num_tokens + sequence.num_in_flight
            if sequence.request_slot < 0 or known >= sequence.limit:
                continue  # preempted a moment ago; or sure to end with what is in flight
            count = min(known - sequence.num_computed, builder.budget, max_count)
            count = builder.cut(sequence, sequence.num_computed, count)
            if not count:
                builder.wait(sequence, count)
                continue
            if self.windows is not None:
                start = sequence.num_computed
                count = self._shortened(sequence, builder, sequence.blocks, start, count)
            end = sequence.num_computed + count
            if builder.unknown and (unknown := builder.unknown.get(sequence.id)):
                # As far as its drafts may take it, and at no other's expense; else it waits for the answer.
                if (
                    known + unknown >= sequence.limit
                    or self._may_miss_save(sequence, end + unknown)
                    or not self._reach(sequence, end + unknown, builder)
                ):
                    continue
                end += unknown
            if end <= self._end_of_blocks(sequence) or self.grow(sequence, end, builder):
                lookahead = self._lookahead(sequence, end, builder) if builder.max_lookahead else 0
                builder.add(sequence, count, lookahead)
            elif self._is_fcfs:
                break  # it was the last, and the victim itself

    def grow(self, sequence: Sequence, num_tokens: int, builder: StepBuilder) -> bool:
        """Extend the blocks of a sequence to `num_tokens`, preempting others if necessary.

        Returns False if the sequence was preempted itself, or if it gets blocks back with the answers to its steps in flight.
        """
        missing = self._blocks.num_for(num_tokens) - len(sequence.blocks)
        while (blocks := self._blocks.allocate(missing)) is None:
            if self._tier is not None and self._tier.cancel():
                continue
            if self.windows is not None and self.windows.are_coming(sequence):
                return False
            victim = self._victim()
            builder.drop(victim)
            victim.num_evictions += 1
            self.preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += blocks
        if not sequence.is_slot_stale:
            builder.new_blocks.append((sequence.request_slot, tuple(blocks)))
        return True

    def _lookahead(self, sequence: Sequence, end: int, builder: StepBuilder) -> int:
        """Count the drafts that a step may verify behind position `end`.  Only free blocks are used: no sequence is preempted."""
        # Tokens up to the limit, without the sampled one.
        rest = sequence.limit - end - 1
        known = sequence.num_tokens + sequence.num_in_flight
        is_decoding = known == sequence.num_computed + 1
        count = min(builder.max_lookahead, sequence.request.max_drafts, rest)
        if self.states is not None:
            due = self.states.next_save(sequence)
            if due is not None and end < due:
                count = min(count, due - end - 1)
        if count <= 0 or not is_decoding:
            return 0
        if not self._reach(sequence, end + count, builder):
            return self._end_of_blocks(sequence) - end
        return count

    def _end_of_blocks(self, sequence: Sequence) -> int:
        """Return the position behind the last one that the blocks of a sequence hold."""
        return len(sequence.blocks) // self._num_groups * self._blocks.block_size

    def _has_cancelled_tier(self) -> bool:
        return not self._sequences and self._tier is not None and self._tier.cancel()

    def _shortened(
        self, sequence: Sequence, builder: StepBuilder, table: list[int], start: int, count: int
    ) -> int:
        """Return how many of `count` tokens to compute: fewer if blocks are short, as the layout expects."""
        blocks, most = self._blocks, self._blocks.layout.num_step_tokens
        if count <= most:
            return count
        missing = blocks.num_for(start + count) - len(table) + blocks.num_idle(table)
        if missing <= blocks.num_free:
            return count
        # The layout expects that this many tokens contain an image.
        return builder.cut(sequence, start, most) or count

    def _can_start(self, sequence: Sequence, shared: list[int], end: int) -> bool:
        """Whether the free blocks suffice for a sequence that begins with shared ones and whose first step ends at position `end`."""
        blocks = self._blocks
        wanted = sequence.num_tokens if self._config.reserve_full_isl else end
        if self.windows is None:
            needed = blocks.num_for(wanted) - len(shared) + blocks.num_idle(shared)
        else:
            needed = self.windows.num_needed(shared, end, wanted)
        spare = self._spare(sequence) if self._sequences else 0
        return needed + spare <= blocks.num_free

    def _may_miss_save(self, sequence: Sequence, end: int) -> bool:
        """Whether drafts in flight may take a sequence to `end`, where a snapshot is due, or not so far.

        A snapshot needs a known position.
        """
        due = None if self.states is None else self.states.next_save(sequence)
        return due is not None and end >= due

    def _reach(self, sequence: Sequence, end: int, builder: StepBuilder) -> bool:
        """Extend the blocks of a sequence to `end` with free blocks.  Returns False, and changes nothing, if too few are free."""
        missing = self._blocks.num_for(end) - len(sequence.blocks)
        return missing <= 0 or (
            missing <= self._blocks.num_free and self.grow(sequence, end, builder)
        )

    def preempt(self, sequence: Sequence, *, drop_results: bool = False) -> None:
        """Take the slot and the blocks of a sequence.  It is recomputed later, after its results in flight have arrived."""
        self.leave(sequence)
        sequence.state = State.PREEMPTED
        sequence.preemption_epoch += 1
        sequence.num_computed = sequence.num_computed_on_device = sequence.num_registered = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if drop_results:
            sequence.valid_from_epoch = sequence.preemption_epoch
            sequence.num_in_flight = 0
        if sequence.num_in_flight == 0:
            self._returning.push(sequence)

    def preempt_all(self) -> None:
        """Preempt every sequence.

        They keep their outputs, and are computed again when they return.
        """
        for sequence in self.snapshot():
            self.preempt(sequence)

    def lose_all(self) -> None:
        """Preempt every sequence, because the device is lost.

        When it starts again, the tokens that it must compute a second time are counted as lost: all, unless the device's memory has
        outlived it.
        """
        for sequence in self._sequences.values():
            sequence.num_lost = sequence.num_computed_on_device
        self.preempt_all()

    def leave(self, sequence: Sequence) -> None:
        """Give the slot and the blocks of a sequence back at once.

        The blocks may be reused by the next plan, because the device executes plans in order.
        """
        del self._sequences[sequence.id]
        self._free_slots.append(sequence.request_slot)
        sequence.request_slot = -1
        if self.states is not None:
            self.states.leave(sequence)
        self._blocks.free(sequence.blocks)
        sequence.blocks = []

    def land(self, sequence: Sequence, end: int) -> None:
        """Offer what a sequence has computed up to position `end`: its full blocks and its saved states."""
        self.register(sequence)
        if self.states is not None:
            self._keep_states(sequence, self.states.land(sequence, end))

    def _keep_states(self, sequence: Sequence, names: Iterable[bytes]) -> None:
        """Offer states to the tier by the names of their blocks.  Guesses are written when a prompt has begun with one."""
        if self._tier is not None and _has_lasting_names(sequence):
            for name in names:
                self._tier.offer(state_of(name), name)

    def register(self, sequence: Sequence) -> None:
        """Offer the full and computed blocks of a sequence as a prefix.

        Only blocks with received results count, because a failed step leaves wrong contents.
        """
        blocks = self._blocks
        count = sequence.num_computed_on_device // blocks.block_size
        if count > sequence.num_registered and blocks.enable_prefix_caching:
            hashes, first = sequence.hash_blocks(count, blocks.block_size), sequence.num_registered
            if self.windows is None:
                self._offer(sequence, hashes, first, count)
            else:
                for place, name in self.windows.names(hashes, first, count):
                    blocks.register(sequence.blocks[place], name)
            sequence.num_registered = count
        if self.windows is not None:
            self.windows.give_back(sequence)

    def _offer(self, sequence: Sequence, hashes: list[bytes], first: int, end: int) -> None:
        for i in range(first, end):
            self._blocks.register(sequence.blocks[i], hashes[i])
            if self._tier is not None and _has_lasting_names(sequence):
                self._tier.offer(hashes[i], hashes[i - 1] if i else FIRST_PARENT)

    def seek(self, sequence: Sequence) -> bool:
        """Whether blocks of a queued sequence are fetched from the tier, so that it should wait for them."""
        if self._tier is None or not self._tier.is_open or sequence.index:
            return False
        if _skips_cache(sequence) or not _has_lasting_names(sequence):
            return False
        return self._tier.seek(sequence)

    def expected_start(self, sequence: Sequence) -> int:
        """Return the first position that a queued sequence would compute if it started now.

        It is the length of its cached prefix, at this moment.
        """
        return self._prefix(sequence).start

    def has_longer_prefix(self, sequence: Sequence, start: int) -> bool:
        """Whether the cache has the block behind position `start` of a queued sequence.  Takes O(1) after its blocks are hashed."""
        blocks = self._blocks
        end = start // blocks.block_size + 1
        if not blocks.enable_prefix_caching or _skips_cache(sequence):
            return False
        if self.states is not None or self.windows is not None:
            return self.expected_start(sequence) > start
        if start % blocks.block_size or end * blocks.block_size >= sequence.num_tokens:
            return False
        return bool(blocks.match(sequence.hash_blocks(end, blocks.block_size)[-1:]))

    def _spare(self, sequence: Sequence) -> int:
        """Count the blocks that must stay free when the sequence starts while others run."""
        if sequence.num_evictions == 0:
            return self._watermark
        return self._blocks.num_usable >> (MAX_EVICTIONS - sequence.num_evictions)

    def _victim(self) -> Sequence:
        """Choose the sequence to preempt: the last one under fcfs, else the one with the lowest priority and the latest arrival."""
        if self._is_fcfs:
            return self._sequences[next(reversed(self._sequences))]
        return max(
            self._sequences.values(),
            key=lambda sequence: (sequence.num_evictions < MAX_EVICTIONS, sequence.order),
        )

    def _prefix(self, sequence: Sequence) -> "_Prefix":
        """Find the part of a sequence that is computed already, without changing anything.

        A fork computes only the last prompt token.  The leader continues to write to its last, partly filled prompt block, so the
        fork gets a copy of it.  The prefix cache shares only whole blocks.
        """
        blocks, states, windows = self._blocks, self.states, self.windows
        leader, start = _fork_leader(sequence), sequence.num_prompt - 1
        row = NO_ROW if states is None else states.fork_row(sequence.request)
        if leader is not None and (states is None or row >= 0 or start == 0):
            num_shared, rest = divmod(start, blocks.block_size)
            num, end = self._num_groups, num_shared + (rest > 0)
            shared: list[int] | None = leader.blocks[: num_shared * num]
            if windows is not None:
                shared = windows.fork(leader, num_shared, copies_next=rest > 0)
            if shared is not None:
                sources = tuple(leader.blocks[num_shared * num : end * num])
                return _Prefix(shared, start, sources, row)
        if not blocks.enable_prefix_caching or _skips_cache(sequence):
            return _Prefix([], 0)
        longest = (sequence.num_tokens - 1) // blocks.block_size
        hashes = sequence.hash_blocks(longest, blocks.block_size)
        if windows is not None:
            found = windows.find(hashes)
            start = found.num_blocks * blocks.block_size
            return _Prefix(found.table, start, junction=found.junction)
        cached = blocks.match(hashes)
        if states is None:
            return _Prefix(cached, len(cached) * blocks.block_size)
        hit = states.hit(hashes, len(cached))
        start = hit.num_blocks * blocks.block_size
        return _Prefix(cached[: hit.num_blocks], start, (), hit.row, hit.junction)

    def _count_lookup(self, sequence: Sequence, num_cached: int) -> None:
        """Count a prefix lookup once for each sequence.  Lookups after a preemption have their own counters."""
        leader = _fork_leader(sequence)
        if leader is not None:
            sequence.num_cached = leader.num_cached
        elif sequence.state is State.PREEMPTED:
            self.num_recompute_queries += sequence.num_tokens
            self.num_recompute_hits += num_cached
        elif self._blocks.enable_prefix_caching and not _skips_cache(sequence):
            sequence.num_cached = num_cached
            self.num_queries += sequence.num_tokens
            self.num_hits += num_cached


class _Prefix(NamedTuple):
    """The part of a sequence that is computed already."""

    # The blocks to share.
    blocks: list[int]
    # The first position to compute.
    start: int
    # The blocks to copy for a fork.
    sources: tuple[int, ...] = ()
    # The row of the recurrent state at `start`.
    row: int = NO_ROW
    # The position up to which KV is cached without a state; with windows the number of blocks.
    junction: int = 0


def _fork_leader(sequence: Sequence) -> Sequence | None:
    """Find the leader with which a sibling shares a prompt, if it still runs and its prompt is computed."""
    if sequence.index == 0 or sequence.output:
        return None
    leader = sequence.request.sequences[0]
    return (
        leader
        if leader.request_slot >= 0 and leader.num_computed_on_device >= leader.num_prompt
        else None
    )


def _has_lasting_names(sequence: Sequence) -> bool:
    """Whether the names of the blocks mean the same in another process.

    A client may give another image the same name later, so such prompts stay in memory.
    """
    return not any(item.is_named for item in sequence.request.admit.media)


def _skips_cache(sequence: Sequence) -> bool:
    return bool(sequence.request.admit.params.skip_reading_prefix_cache)
