"""What the Detokenizer has yet to be told: one entry for each sequence, however many steps went by."""

import msgspec

from trouper.actors.messages import SequenceId, SequenceTokens, StepTokens


class News:
    """Collects until somebody takes it; a later entry of a sequence continues its earlier one."""

    def __init__(self) -> None:
        self._entries: dict[SequenceId, SequenceTokens] = {}

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
        if not self._entries:
            return None
        message = StepTokens(tuple(self._entries.values()))
        self._entries.clear()
        return message
