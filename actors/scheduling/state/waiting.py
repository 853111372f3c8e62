"""The queues of the sequences without a request slot, the best first.

There are two queues: for new sequences and for those that ran before.  A pause may close only the first one, and under fcfs the
second one goes first.  A queue is a heap with lazy deletion: `discard` only marks an entry, and the heap is rebuilt when half of its
entries are marked.  So push, pop and discard take O(log n) amortised, and memory is O(live entries).
"""

from collections.abc import Set
from heapq import heapify, heappop, heappush

from trouper.actors.messages.requests import SequenceId
from trouper.actors.scheduling.state.sequence import Order, Sequence


class Queue:
    """A priority queue of sequences by their unique `order`.

    Removed sequences stay in the heap until they reach its head, so removing one takes O(1).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Sequence]] = []
        self._live: set[SequenceId] = set()
        # If set, each pushed sequence is appended to this list, which its owner empties.
        self.arrivals: list[Sequence] | None = None

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, id: SequenceId) -> bool:
        return id in self._live

    def push(self, sequence: Sequence) -> None:
        """Add a sequence.  It must not be in the queue.

        Its `order` must not change while it is in the queue.
        """
        self._live.add(sequence.id)
        heappush(self._heap, (sequence.order, sequence))
        if self.arrivals is not None:
            self.arrivals.append(sequence)

    def head(self) -> Sequence | None:
        """Return the best sequence without removing it.  Returns None if the queue is empty.

        Entries of removed sequences are dropped on the way.
        """
        heap = self._heap
        while heap and heap[0][1].id not in self._live:
            heappop(heap)
        return heap[0][1] if heap else None

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is in the queue.

        Only the head may be pushed again later, because it leaves the heap at once.  Any other sequence leaves a dead entry.
        """
        self._live.discard(sequence.id)
        if self._heap and self._heap[0][1] is sequence:
            heappop(self._heap)
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if entry[1].id in self._live]
            heapify(self._heap)

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence anywhere in the queue, so that it may be pushed again.  Takes O(n), for rare cases."""
        if sequence.id in self._live:
            self._live.discard(sequence.id)
            self._heap = [entry for entry in self._heap if entry[1] is not sequence]
            heapify(self._heap)

    def take_all(self, ids: Set[SequenceId]) -> None:
        """Remove many sequences that may be pushed again, in one pass.

        One pass is faster than single removals, for example when a replica is lost.
        """
        self._live -= ids
        self._heap = [entry for entry in self._heap if entry[1].id in self._live]
        heapify(self._heap)

    def live(self) -> list[Sequence]:
        """Return all sequences in the order of service.  Takes O(n log n), for tests and debugging."""
        return [sequence for _, sequence in sorted(self._heap) if sequence.id in self._live]


class Waiting:
    """The queued sequences: `fresh` ones have never run; `returning` ones, or a sibling, have.

    A sequence without a ready grammar is parked when its turn comes.  It goes back to its queue when the grammar is ready.
    A sequence whose blocks are fetched from the tier is parked, too.
    """

    def __init__(self, *, is_fcfs: bool) -> None:
        self._is_fcfs = is_fcfs
        self._parked: dict[SequenceId, tuple[Queue, Sequence]] = {}
        self.fresh = Queue()
        self.returning = Queue()

    def __len__(self) -> int:
        return len(self.fresh) + len(self.returning)

    @property
    def num_fresh(self) -> int:
        """Count the sequences that never ran.

        Parked ones are included: a pause does not wait for them.
        """
        return len(self.fresh) + sum(queue is self.fresh for queue, _ in self._parked.values())

    def park(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue until its grammar is ready.  Parking it again changes nothing."""
        if sequence.id in self._parked:
            return
        queue = self.returning if sequence.id in self.returning else self.fresh
        queue.take(sequence)
        self._parked[sequence.id] = queue, sequence

    def unpark(self, key: bytes) -> None:
        """Queue the sequences again that wait for a grammar.

        Each returns to the queue from which it was parked, at its old place.
        """
        for queue, sequence in list(self._parked.values()):
            grammar = sequence.request.admit.grammar
            if grammar is not None and grammar.key == key:
                del self._parked[sequence.id]
                queue.push(sequence)

    def is_parked(self, sequence: Sequence) -> bool:
        """Whether a sequence has been taken out of its queue for a while."""
        return sequence.id in self._parked

    def unpark_one(self, sequence: Sequence) -> None:
        """Queue a sequence again that waited for blocks of the tier.  Nothing happens if it has left."""
        if (parked := self._parked.pop(sequence.id, None)) is not None:
            parked[0].push(sequence)

    @property
    def ids(self) -> tuple[SequenceId, ...]:
        """List the queued sequences in the order of service, for tests and debugging.

        Parked sequences are not included, because they cannot be served until their grammar is ready.
        """
        return tuple(sequence.id for sequence in self._in_order())

    def head(self, *, only_returning: bool) -> Sequence | None:
        """Return the sequence to start next without removing it.  Returns None if the queues are empty.

        Returning sequences go first with `fcfs`; otherwise the better order decides.
        """
        returning = self.returning.head()
        if only_returning or (returning is not None and self._is_fcfs):
            return returning
        fresh = self.fresh.head()
        if returning is None or fresh is None:
            return returning or fresh
        return min(returning, fresh, key=lambda sequence: sequence.order)

    def keep_arrivals(self) -> list[Sequence]:
        """Return a list to which every newly queued sequence is appended.  The caller empties it.

        The owner of the fluid reads it, so arrivals need not be searched for in the queues.
        """
        self.fresh.arrivals = self.returning.arrivals = arrivals = list[Sequence]()
        return arrivals

    def best(self, count: int) -> list[Sequence]:
        """Return the first `count` sequences in the order of service.  Takes O(n log n).

        The policy predicts the start of a new sequence from them.
        """
        return self._in_order()[:count]

    def _in_order(self) -> list[Sequence]:
        waiting = [*self.returning.live(), *self.fresh.live()]
        if not self._is_fcfs:
            waiting.sort(key=lambda sequence: sequence.order)
        return waiting

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence anywhere in the queues, so that it may be queued again.

        It is also unparked if it was parked.  Takes O(n), for rare cases.
        """
        self._parked.pop(sequence.id, None)
        self.fresh.take(sequence)
        self.returning.take(sequence)

    def take_all(self, ids: Set[SequenceId]) -> None:
        """Remove many sequences that may come back.

        Takes one pass over the queues, for all of them together.
        """
        self._parked = {id: parked for id, parked in self._parked.items() if id not in ids}
        self.fresh.take_all(ids)
        self.returning.take_all(ids)

    def set_aside(self, head: Sequence) -> tuple[Queue, Sequence]:
        """Remove the sequence that `head` returns.  Returns its queue, to push it back, and the sequence."""
        queue = self.returning if self.returning.head() is head else self.fresh
        queue.discard(head)
        return queue, head

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue, if it is queued.

        Used for ended sequences; they never come back.
        """
        self._parked.pop(sequence.id, None)
        self.fresh.discard(sequence)
        self.returning.discard(sequence)
