"""Declare tokens and times of replies and errors, in the formats of OpenAI and vLLM."""

import msgspec
from msgspec import UNSET, UnsetType

from trouper.outputs import RequestStateStats


class CachedTokens(msgspec.Struct):
    cached_tokens: int
    # Tokens that later requests will find in the cache.
    created_cache_tokens: int = 0
    # Tokens in the places of images and of recordings, if the prompt has any.
    image_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET


class ReasoningUsage(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType | None = UNSET
    completion_tokens_details: ReasoningUsage | UnsetType | None = UNSET

    def without_details(self) -> "Usage":
        """Return the usage for a chunk of a stream, without details.

        Clients add up chunks, and vLLM's chunks have only the three totals.
        """
        return Usage(self.prompt_tokens, self.completion_tokens, self.total_tokens)

    def with_nulls(self) -> "Usage":
        """Return the usage in the form for a whole reply, in which missing details are null."""
        return Usage(
            self.prompt_tokens,
            self.completion_tokens,
            self.total_tokens,
            self.prompt_tokens_details or None,
            self.completion_tokens_details or None,
        )


class RequestMetrics(msgspec.Struct):
    """Times of one request under vLLM's names.  A time is null if its event did not happen.

    They are in milliseconds and measured inside the engine.
    """

    time_to_first_token_ms: float | None = None  # from the first step on
    generation_time_ms: float | None = None  # from the first token to the last
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None  # from the first step to the last token
    speculative_decoding: None = None

    @classmethod
    def of(cls, stats: RequestStateStats | None) -> "RequestMetrics":
        if stats is None:
            return cls()
        inference_s = stats.inference_s
        return cls(
            _ms(stats.prefill_s),
            _ms(stats.decode_s),
            _ms(stats.queue_s),
            _ms(stats.time_per_output_token_s),
            stats.num_generation_tokens / inference_s if inference_s else None,
        )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
