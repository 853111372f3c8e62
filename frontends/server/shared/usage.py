"""Count tokens and times for replies and errors, in the formats of OpenAI and vLLM."""

import msgspec
from msgspec import UNSET, UnsetType

from trouper.outputs import RequestOutput, RequestStateStats


class CachedTokens(msgspec.Struct):
    cached_tokens: int
    # Tokens that later requests will find in the cache.
    created_cache_tokens: int = 0


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


class UsageCounter:
    """Count the tokens of one reply while it is generated.

    Args:
        cache_block_size: tokens of a block of the prefix cache, which keeps only whole blocks; 0 if there is no cache.
    """

    def __init__(self, num_prompts: int, *, shows_cached: bool, cache_block_size: int = 0) -> None:
        self._block_size = cache_block_size
        self._num_prompt = [0] * num_prompts
        self._num_cached = [0] * num_prompts
        self._shows_cached = shows_cached
        self._num_completion = 0
        # None unless reasoning is counted.
        self._num_reasoning: int | None = None

    def add(self, i: int, output: RequestOutput) -> None:
        """Count an output of prompt `i`.  Its tokens must be new since the last output.

        Prompts count once even with several choices, as in OpenAI's usage.
        """
        self._num_prompt[i] = len(output.prompt_token_ids)
        self._num_cached[i] = output.num_cached_tokens or self._num_cached[i]
        self._num_completion += sum(len(choice.token_ids) for choice in output.outputs)

    def add_reasoning(self, num_tokens: int | None) -> None:
        """Count the reasoning tokens among those of the completion.  None means that reasoning is not detected.

        The sum appears in the details of the completion's tokens.
        """
        if num_tokens is not None:
            self._num_reasoning = (self._num_reasoning or 0) + num_tokens

    @property
    def _num_created(self) -> int:
        if not self._block_size:
            return 0
        pairs = zip(self._num_prompt, self._num_cached, strict=True)
        return sum(max(0, num - num % self._block_size - cached) for num, cached in pairs)

    @property
    def usage(self) -> Usage:
        num_prompt = sum(self._num_prompt)
        usage = Usage(num_prompt, self._num_completion, num_prompt + self._num_completion)
        if self._shows_cached:
            usage.prompt_tokens_details = CachedTokens(sum(self._num_cached), self._num_created)
        if self._num_reasoning is not None:
            usage.completion_tokens_details = ReasoningUsage(self._num_reasoning)
        return usage
