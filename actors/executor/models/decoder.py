"""The interface between runners and the models that they compute.

A runner batches sequences, owns the memory of their KV cache and samples tokens. It does not depend on the implementation of a
model: trouper's own models (`native_decoder.py`) and those of transformers (`hf_decoder.py`) both implement `Decoder`, which
declares the memory that each layer needs between steps, and computes one step at a time.

Attention stores keys and values of every token (`KVCacheSpec`). A recurrent mixer stores a state of fixed size instead, which
every token changes (`StateSpec`). States are rows of a pool: the sequence in request slot i has row i, and the rows after the request
slots hold copies of states at block boundaries. `StepStates` maps the tokens of a step to rows. For each entry, a mixer must

1. begin with zeros if `starts[entry]` is 0, whatever the row contains (it may be NaN), otherwise with the row;
2. process the tokens in the order of positions, so that the state does not depend on how a prompt is divided into steps;
3. write the state after the last token to the row, and write no other row except those of `saves`.

The last tokens of an entry may be drafts, which count only if they are accepted. A mixer computes their outputs, but writes the
state before them to the row, and stores their inputs. `replay` then advances the state over the accepted drafts.

A state needs every token, so a recurrent mixer in the last layer computes all tokens of a step; `read` selects tokens only after it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from torch import Tensor

from trouper.actors.executor.models.traits import PlanKey
from trouper.kernels.linear import LinearMethod

# This many rows of logits are computed at once: 256 rows of a vocabulary of 152,000 in float32 take 150 MiB.
LOGITS_AT_ONCE = 256


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the keys and values that a group of consecutive layers stores for each token.

    All layers of a group have this shape, share one tensor, and usually share one block table. `keys` contains each distinct key of an
    attention plan once: a window, or a window and a block table if a model has several tables. With several tables, `num_layers` is
    the largest number of layers of one table, the layers of all tables share the tensor, and `places` has the index of each layer
    in it. `windows` has the window of each block table of the whole model.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    keys: tuple[PlanKey, ...]
    places: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = (None,)

    @property
    def token_size(self) -> int:
        """Return how many numbers all layers of one table store for one token.

        Multiplied by the size of a number and of a block, this gives the bytes of a KV block.
        """
        return self.num_layers * 2 * self.num_heads * self.head_dim

    def shape(self, num_slots: int) -> tuple[int, ...]:
        """Return the shape of the group's tensor, [layers, 2, H, S, D] for S slots of one token each."""
        return (self.num_layers, 2, self.num_heads, num_slots, self.head_dim)


class StateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the state that one recurrent mixer stores for each sequence.

    `conv` is [K - 1, C], the last inputs of a convolution with K taps and C channels, in the model's dtype. `matrix` is
    always float32. A mixer has one of them or both. A layer with several mixers numbers them by `index`. `inputs` are the widths
    of the mixer's inputs for one token, which `replay` needs for an accepted draft; () if the mixer cannot replay.
    """

    layer: int
    index: int = 0
    conv: tuple[int, int] | None = None
    matrix: tuple[int, ...] | None = None
    inputs: tuple[int, ...] = ()


class MixerState(NamedTuple):
    """Hold the states of one mixer, for all rows of the pool: `conv` is [rows, K - 1, C] and `matrix` [rows, …].

    `inputs` are the inputs of one step's drafts, [drafts, width] each; () if steps have no drafts.
    """

    conv: Tensor | None
    matrix: Tensor | None
    inputs: tuple[Tensor, ...] = ()


class StepStates(NamedTuple):
    """Describe the states that a step reads and writes. The arrays are int64 and have one element for each entry of the step."""

    # The first token of each entry in the flat batch, and the number of its tokens.
    firsts: np.ndarray
    counts: np.ndarray
    # The row of each entry, and the position of its first token.
    rows: np.ndarray
    starts: np.ndarray
    # The number of tokens of each entry before its drafts, and the row of `MixerState.inputs` for its first draft.
    settled: np.ndarray
    keeps: np.ndarray
    # The copies of states inside the step, see `Entries`.
    saves: np.ndarray
    # By layer and index.
    mixers: Mapping[tuple[int, int], MixerState]


def plan_keys_of(specs: Sequence[KVCacheSpec]) -> tuple[PlanKey, ...]:
    """Return the distinct keys of the attention plans of all layers, in the order in which the layers first use them."""
    return tuple(dict.fromkeys(key for spec in specs for key in spec.keys))


def windows_of(specs: Sequence[KVCacheSpec]) -> tuple[int | None, ...]:
    """Return the window of each block table; one without a window if all layers share a table."""
    return specs[0].windows if specs else (None,)


class LogitsIndices(NamedTuple):
    """Select the tokens of a step that the last layer computes completely.

    For all other tokens it computes only keys and values, so a long prompt costs the last layer little more than one token.
    """

    # [R] int64, positions in the batch.
    tokens_R: Tensor
    # The attention of these tokens by key; each token is an entry of its own.
    plans: Mapping[PlanKey, Any]


class Decoder(Protocol):
    """Compute a causal language model with its weights.

    It has no notion of sequences: a step is a flat batch of T tokens with hidden size E, and plans of its attention.
    """

    @property
    def cache_specs(self) -> tuple[KVCacheSpec, ...]:
        """Describe what the layers store for each token, in layer order. The runner allocates the KV cache accordingly."""
        ...

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """Return the state of each recurrent mixer, in layer order; () if the model stores only keys and values."""
        ...

    @property
    def longest(self) -> int | None:
        """Return the length of the longest sequence that the model's code computes correctly, or None without a limit."""
        ...

    @property
    def is_recordable(self) -> bool:
        """Return whether a step consists only of compiled kernels, which can be recorded and replayed.

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
        """Return the bytes that all weights take in memory, including the embedding.

        It does not change after loading, and determines how much memory remains for the KV cache.
        """
        ...

    def plan(self, *args: Any, **named: Any) -> Any:
        """Plan the attention of a step for one window.

        The arguments are those of the device's operations.  All layers with this window share the plan.
        """
        ...

    def plan_tables(self, tables: Sequence[np.ndarray], *args: Any) -> list[Any]:
        """Plan the attention of a step for layers with one window and several block tables.

        The other arguments are those of `plan`. Only decoders with several tables need it.
        """
        ...

    def forward(
        self,
        tokens: Any,
        plans: Mapping[PlanKey, Any],
        caches: Sequence[Tensor],
        embeds: Sequence[tuple[int, Tensor]] = (),
        read: LogitsIndices | None = None,
        hidden_TE: Tensor | None = None,
        states: StepStates | None = None,
    ) -> Tensor:
        """Compute the hidden states of a step and write its keys and values into the caches.

        Args:
            tokens: ids, positions and cache slots, `HostTokens` or `DeviceTokens`.
            plans: the attention plan of each window, or of each window and block table.
            caches: one tensor [2, H, S, D] for each layer.
            embeds: embeddings that replace those of tokens, as (first token, rows).
            read: the tokens to return states of; all by default.
            hidden_TE: the output of the previous pipeline stage; it is overwritten. Without it the tokens are embedded.
            states: the states of recurrent mixers, which this step advances; None if the model has none.

        Returns:
            [T, E] after the final norm, or the input of the next stage; [R, E] with `read`. Rows of padding are arbitrary.
        """
        ...

    def replay(self, states: StepStates) -> None:
        """Advance recurrent states over accepted drafts, from the inputs that the last step stored.

        Args:
            states: `firsts` and `counts` select rows of the stored inputs, `starts` has the positions of the first drafts.
        """
        ...

    def logits(self, hidden_RE: Tensor, head: LinearMethod | None = None) -> Tensor:
        """Return the logits [R, vocabulary] of hidden states after the last norm: float32 on the CPU, any float on a GPU.

        Args:
            head: replaces the model's own head, for rows of an adapter with its own head.
        """
        ...

    def num_logits(self, num_rows: int) -> int | None:
        """Return how many logits this many rows have. Returns None if a recorded step cannot compute them."""
        ...
