"""What the Detokenizer has yet to be told: one entry for each sequence, however many steps went by."""

import msgspec

from trouper.actors.messages.identifiers import SequenceId
from trouper.actors.messages.outputs import SequenceTokens, StepTokens
from trouper.actors.messages.results import TokenLogprobs
from trouper.actors.scheduling.sequences import Sequence
from trouper.outputs import FinishReason


class News:
    """Collects until somebody takes it; a later entry of a sequence continues its earlier one."""

    def __init__(self) -> None:
        self._entries: dict[SequenceId, SequenceTokens] = {}
        self._started: list[SequenceId] = []

    def tell_start(self, id: SequenceId) -> None:
        """It takes a device row, for the first time or after a preemption."""
        self._started.append(id)

    def tell_tokens(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        end: tuple[FinishReason, int | str | None] | None,
        logprobs: tuple[TokenLogprobs, ...],
    ) -> None:
        """Add sampled tokens; the first ones bring along what is known of the prompt."""
        finish_reason, stop_reason = end if end is not None else (None, None)
        is_first = sequence.num_output == len(token_ids)
        entry = SequenceTokens(
            sequence.id,
            token_ids,
            finish_reason,
            stop_reason,
            logprobs,
            tuple(sequence.prompt_logprobs) if is_first else (),
            sequence.num_cached if is_first else None,
            num_preemptions=sequence.num_preemptions,
        )
        if is_first:
            sequence.prompt_logprobs.clear()
        self.tell(entry)

    def tell(self, entry: SequenceTokens) -> None:
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
        """Nobody wants to hear of it any more."""
        self._entries.pop(id, None)

    def take(self) -> StepTokens | None:
        if not self._entries and not self._started:
            return None
        message = StepTokens(tuple(self._entries.values()), tuple(self._started))
        self._entries.clear()
        self._started.clear()
        return message
