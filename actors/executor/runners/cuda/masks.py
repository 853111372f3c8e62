"""The masks of requests with a grammar on a GPU: filled on the host, read by the kernels from the tables of request slots.

A mask depends on the token before, which a step in flight may still be sampling. A step with such a request is therefore
launched only after the tokens of earlier steps have arrived on the host. Other steps do not wait.
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
    """Follows the outputs of slots with a grammar, and writes the masks of their next tokens."""

    def __init__(self, slots: RequestSlots, layout: Layout) -> None:
        self._slots, self._layout = slots, layout
        self._masks = GrammarMasks(slots)
        # Launched steps that sample for a grammar and have unread tokens. There are at most max_steps_in_flight of them,
        # because the next such step reads them all.
        self._unread: deque[tuple[StepPlan, Callable[[], StepDone]]] = deque()

    def place(self, new: NewSequence) -> None:
        """Store the grammar of the sequence that took its slot.

        A sequence without a grammar removes that of its predecessor.
        """
        self._masks.place(new.request_slot, new.grammar)

    def clear(self) -> None:
        """Forget all matchers and all unread steps.

        The scheduler sends the sequences again, so their matchers are made anew.
        """
        self._masks.clear()
        self._unread.clear()

    def catch_up(self, plan: StepPlan) -> None:
        """Read the tokens of earlier steps if this plan needs them.

        Must be called before its new sequences take their slots. A matcher must have all tokens before the next mask.
        """
        if plan.new_sequences or self.any_in(plan):
            self._read()

    def any_in(self, plan: StepPlan) -> bool:
        """Whether a sequence of the plan has a grammar."""
        return self._masks.any_in(plan.request_slots)

    def take_work(self) -> GrammarWork | None:
        """Return the work that `changes` did since the last call, or None if there was none."""
        return self._masks.take_work()

    def changes(self, plan: StepPlan) -> tuple[Changes, tuple[int, ...]]:
        """Fill the masks for a step. The tokens of earlier steps must have been read.

        Returns:
            The changes to write after those of the plan's new sequences, and the entries with a failed grammar.
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
        """Remember a launched step that sampled for a grammar. Its result is read from the device only once."""
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
