"""Outputs on their way to the detokenizer, merged to one entry for each sequence.

A slow detokenizer must not make this grow: several steps of a sequence become one entry, so it is bounded by the unfinished sequences
and their new tokens.
"""

import msgspec

from trouper.actors.messages.outputs import SequenceTokens, StepTokens
from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.sinks import Promise
from trouper.actors.messages.steps import TokenLogprobs
from trouper.actors.scheduling.state.sequence import Sequence
from trouper.outputs import FinishReason


class SchedulerOutputs:
    """Collect outputs until they are taken.  A later entry of a sequence is appended to its earlier one.

    Its size is bounded by the number of sequences, however long the detokenizer takes.
    """

    def __init__(self) -> None:
        self._entries: dict[SequenceId, SequenceTokens] = {}
        self._started: list[SequenceId] = []

    def add_start(self, id: SequenceId) -> None:
        """Note that a sequence has started: for the first time or after a preemption.

        The detokenizer uses it for the times of the request only.
        """
        self._started.append(id)

    def add_tokens(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        end: tuple[FinishReason, int | str | None] | None,
        logprobs: tuple[TokenLogprobs, ...],
    ) -> None:
        """Add sampled tokens.  With the first ones go the prompt's logprobs and its number of cached tokens.

        `end` is the finish reason with the stop token or string, or None while the sequence continues.
        """
        finish_reason, stop_reason = end if end is not None else (None, None)
        is_first = len(sequence.output) == len(token_ids)
        entry = SequenceTokens(
            sequence.id,
            token_ids,
            finish_reason,
            stop_reason,
            logprobs,
            tuple(sequence.prompt_logprobs) if is_first else (),
            sequence.num_cached if is_first else None,
            num_preemptions=sequence.num_preemptions,
            replica=sequence.request.replica,
        )
        if is_first:
            sequence.prompt_logprobs.clear()
        self.add(entry)

    def add(self, entry: SequenceTokens) -> None:
        """Add an entry, appended to the earlier entry of its sequence if there is one.

        A reason to finish of the later entry is kept.
        """
        earlier = self._entries.get(entry.id)
        if earlier is not None:
            entry = msgspec.structs.replace(
                entry,
                token_ids=earlier.token_ids + entry.token_ids,
                logprobs=earlier.logprobs + entry.logprobs,
                prompt_logprobs=earlier.prompt_logprobs + entry.prompt_logprobs,
                num_cached_tokens=earlier.num_cached_tokens
                if entry.num_cached_tokens is None
                else entry.num_cached_tokens,
            )
        self._entries[entry.id] = entry

    def withdraw(self, id: SequenceId) -> None:
        """Drop the entry of a sequence, if it has one.

        A sequence ended by a stop string must have no further output.
        """
        self._entries.pop(id, None)

    def take(self, answers: tuple[Promise[None], ...] = ()) -> StepTokens | None:
        """Take all outputs as one message with `answers`.  Returns None if there are neither outputs nor answers."""
        if not (self._entries or self._started or answers):
            return None
        message = StepTokens(tuple(self._entries.values()), tuple(self._started), answers)
        self._entries.clear()
        self._started.clear()
        return message
