"""The interface between runners and the models that they compute.

A runner batches sequences, keeps their blocks and samples tokens. It never assumes how a model is built: trouper's own
models (`native_decoder.py`) and those of the transformers library (`hf_decoder.py`) both implement `Decoder`, which
declares what each layer keeps between steps and computes one step at a time.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from torch import Tensor

# This many rows of logits are computed at once: 256 rows of a vocabulary of 152,000 in float32 take 150 MiB.
LOGITS_AT_ONCE = 256


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the keys and values that a group of consecutive layers keeps of each token.

    All layers of a group have this shape, share one tensor, and find their blocks through the same block table.
    `windows` contains each distinct attention window of the group once; a step plans its attention once for each.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    windows: tuple[int | None, ...]

    @property
    def token_size(self) -> int:
        """Return how many numbers all layers of the group keep for one token.

        Multiplied by the size of a number and of a block, this gives the bytes of a KV block.
        """
        return self.num_layers * 2 * self.num_heads * self.head_dim

    def shape(self, num_slots: int) -> tuple[int, ...]:
        """Return the shape of the group's tensor, [layers, 2, H, S, D] for S slots of one token each."""
        return (self.num_layers, 2, self.num_heads, num_slots, self.head_dim)


def windows_of(specs: Sequence[KVCacheSpec]) -> tuple[int | None, ...]:
    """Return the distinct attention windows of all layers, in the order in which the layers first use them."""
    return tuple(dict.fromkeys(window for spec in specs for window in spec.windows))


class LogitsIndices(NamedTuple):
    """The tokens of a step whose hidden states are needed.

    The last layer computes only keys and values for all other tokens, so a long prompt costs it little more than one token.
    """

    # [R] int64, positions in the batch.
    tokens_R: Tensor
    # The attention of these tokens by window; each token is an entry of its own.
    plans: Mapping[int | None, Any]


class Decoder(Protocol):
    """A causal language model with its weights.

    It knows nothing of sequences: a step is a flat batch of T tokens of E numbers, with plans of its attention.
    """

    @property
    def cache_specs(self) -> tuple[KVCacheSpec, ...]:
        """Describe what the layers keep of each token, in the order of the layers.

        The runner allocates the KV cache from it before the first step.
        """
        ...

    @property
    def longest(self) -> int | None:
        """Return the length of the longest sequence that the model's code computes correctly, or None without a limit."""
        ...

    @property
    def is_recordable(self) -> bool:
        """Whether a step consists only of compiled kernels, which can be recorded and replayed.

        Steps with other code are called from Python each time.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Return the bytes of weights that a step of many tokens reads.

        The embedding is not included, because a step reads only a few of its rows.
        """
        ...

    @property
    def num_weight_bytes(self) -> int:
        """Return the bytes that all weights take in memory, the embedding included.

        The memory for the KV cache is computed from it.
        """
        ...

    def plan(self, *args: Any, **named: Any) -> Any:
        """Plan the attention of a step for one window.

        The arguments are those of the device's operations.  All layers with this window share the plan.
        """
        ...

    def forward(
        self,
        tokens: Any,
        plans: Mapping[int | None, Any],
        caches: Sequence[Tensor],
        embeds: Sequence[tuple[int, Tensor]] = (),
        read: LogitsIndices | None = None,
        hidden_TE: Tensor | None = None,
    ) -> Tensor:
        """Compute the hidden states of a step and write its keys and values into the caches.

        Args:
            tokens: ids, positions and cache slots, `HostTokens` or `DeviceTokens`.
            plans: the attention plan of each window.
            caches: one tensor [2, H, S, D] for each layer.
            embeds: embeddings that replace those of tokens, as (first token, rows).
            read: the tokens to return states of; all by default.
            hidden_TE: the output of the previous pipeline stage; it is overwritten. Without it the tokens are embedded.

        Returns:
            [T, E] after the last norm, or as the next stage needs it; [R, E] with `read`. Rows of padding are arbitrary.
        """
        ...

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Return the logits [R, vocabulary] of hidden states after the last norm: float32 on the CPU, any float on a GPU."""
        ...

    def num_logits(self, num_rows: int) -> int | None:
        """Return how many logits this many rows have. Returns None if their product cannot be part of a recorded step."""
        ...
