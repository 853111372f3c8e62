"""The masks of the requests that have a grammar, on a GPU: filled on the host, read by the kernels from the slots' tables.

What is allowed next depends on the token before, which a step in flight may still be sampling: a step with such a request
is launched when the tokens of the steps before it are here.  Steps without one wait for nothing.
"""

from collections import deque
from collections.abc import Callable
from functools import cache

import numpy as np

from trouper.actors.executor.device import PendingResult
from trouper.actors.executor.runners.cuda.tables import Changes, Layout, allowed_bits
from trouper.actors.executor.sampling.grammar import GrammarMasks
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.requests import GrammarWork
from trouper.actors.messages.steps import NewSequence, StepDone, StepPlan


class DeviceMasks:
    """Follows the outputs of the slots with a grammar, and writes what they may draw next."""

    def __init__(self, slots: RequestSlots, layout: Layout) -> None:
        self._slots, self._layout = slots, layout
        self._masks = GrammarMasks(slots)
        # Launched steps that sample for a grammar, and whose tokens were not read: at most max_steps_in_flight, since
        # the next such step reads them all.
        self._unread: deque[tuple[StepPlan, Callable[[], StepDone]]] = deque()

    def place(self, new: NewSequence) -> None:
        """Take the grammar of a sequence that took its slot."""
        self._masks.place(new.request_slot, new.grammar)

    def clear(self) -> None:
        """Forget all matchers, and the steps that were not read."""
        self._masks.clear()
        self._unread.clear()

    def catch_up(self, plan: StepPlan) -> None:
        """Read the tokens of the steps before, if this plan needs them.  Call before its sequences take slots of others."""
        if plan.new_sequences or self.any_in(plan):
            self._read()

    def any_in(self, plan: StepPlan) -> bool:
        """Whether a sequence of the plan has a grammar."""
        return self._masks.any_in(plan.request_slots)

    def take_work(self) -> GrammarWork | None:
        """Return what `changes` has done since the last time; None: nothing."""
        return self._masks.take_work()

    def changes(self, plan: StepPlan) -> tuple[Changes, tuple[int, ...]]:
        """Write what the sequences of a step may draw; the steps before it have been read.

        Returns:
            The words to be written behind those of the plan's new sequences, and the entries whose grammars have failed.
        """
        changes = Changes(self._layout)
        entries = [
            entry
            for entry, (slot, num) in enumerate(
                zip(plan.request_slots, plan.num_sampled_tokens, strict=True)
            )
            if num and self._masks.any_in((slot,))
        ]
        slots = [plan.request_slots[entry] for entry in entries]
        ends = [plan.num_computed_tokens[e] + plan.num_scheduled_tokens[e] for e in entries]
        broken = self._masks.fill(np.array(slots, dtype=np.int64), np.array(ends, dtype=np.int64))
        num_words = -(-self._layout.vocab_size // 32)
        for slot in slots:
            words, s = self._masks.words(slot)[:num_words], self._slots.sampling[slot]
            if s.allowed_token_ids:
                words = words & allowed_bits(s.allowed_token_ids, self._layout.vocab_size)
            changes.put("mask", slot, words.copy())
            if self._masks.can_only_end(slot):
                changes.lift_min_tokens(slot, s, int(self._slots.num_prompt[slot]))
        return changes, tuple(entries[i] for i in broken)

    def follow(self, plan: StepPlan, result: PendingResult[StepDone]) -> PendingResult[StepDone]:
        """Remember a launched step whose tokens a grammar will read; its result is read from the device once."""
        finish = cache(result.finish)
        self._unread.append((plan, finish))
        return result._replace(finish=finish)

    def _read(self) -> None:
        while self._unread:
            plan, finish = self._unread.popleft()
            for entry, tokens in enumerate(finish().token_ids):
                if tokens:
                    end = plan.num_computed_tokens[entry] + plan.num_scheduled_tokens[entry]
                    self._slots.token_ids[plan.request_slots[entry], end] = tokens[0]
