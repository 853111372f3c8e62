"""Steps as recordings: one call to the machine in place of some two hundred from Python.

A step of T tokens that are attended one by one is the same for every such step but for its inputs:
the embeddings, positions and slots, which lie where they lay, and the plan of the attention, which the
kernels find through its words.  So is an encoder's pass of one text of T tokens, but for the embeddings.

Law: a graph belongs to the weights and the KV memory that were there when it was recorded.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.batch import Batch
from trouper.actors.executor.models.decoder import Decoder
from trouper.actors.executor.models.encoder import Encoder
from trouper.kernels.recording import Arena, Recording
from trouper.kernels.varlen_attention import Group, tiles_of

# Of more rows, Python is less than a hundredth of the time.  A launch is recorded in about 180 bytes: 50 KiB
# for 28 layers, 16 MiB if every number of rows occurs.
MAX_ROWS = 320
NEWCOMERS = 64  # tokens of short prompts beside those who decode
MAX_TOKENS = 64  # of one text; of more each is recorded anew
# Of a pass whose activations share an arena, which keeps its memory: with 4,096 inputs to a product 8 MiB a tensor.
MAX_PASS = 1024


class _Graph(NamedTuple):
    recording: Recording
    plans: dict[int | None, Any]  # whose words it reads


class DecodeGraphs:
    """Records a step of T rows when it is first asked for one.

    Args:
        caches: of each layer.
        max_rows: of a step.
    """

    def __init__(self, decoder: Decoder, caches: Sequence[Tensor], max_rows: int) -> None:
        self._decoder, self._caches = decoder, caches
        self._max_rows = min(max_rows + NEWCOMERS, MAX_ROWS)
        self._x = torch.empty((self._max_rows, decoder.traits.hidden_size), dtype=decoder.dtype)
        self._positions, self._slots = torch.empty((2, self._max_rows), dtype=torch.int64)
        self._arena = Arena()
        self._graphs: dict[int, _Graph] = {}

    def __repr__(self) -> str:
        return f"<DecodeGraphs of {sorted(self._graphs)} rows in {self._arena!r}>"

    def can_forward(self, batch: Batch) -> bool:
        """Every token is attended alone, and from the vocabulary."""
        is_alone = not (batch.has_long_chunks or batch.embeds)
        return is_alone and len(batch.token_ids) <= self._max_rows

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, E], as the decoder's `forward` gives; valid until the next call.

        Raises:
            NotRecordableError: torch computes in this model's steps.
        """
        num_rows = len(batch.token_ids)
        x_TE, positions_T, slots_T = (
            held[:num_rows] for held in (self._x, self._positions, self._slots)
        )
        graph = self._graphs.get(num_rows)
        if graph is None:
            recording = Recording(
                self._arena,
                (x_TE, positions_T, slots_T),
                lambda: self._decoder.forward_embedded(
                    x_TE, positions_T, slots_T, batch.plans, self._caches
                ),
            )
            graph = self._graphs[num_rows] = _Graph(recording, batch.plans)
        x_TE.copy_(self._decoder.embed(batch.token_ids))
        positions_T.copy_(batch.positions)
        slots_T.copy_(batch.slots)
        for window, plan in graph.plans.items():
            plan.words[:] = batch.plans[window].words
        graph.recording.replay()
        return graph.recording.result


class TextGraphs:
    """Passes of an encoder, by one thread.

    One short text is recorded when its number of tokens is first asked for; its positions are 0 … T - 1 in every one.
    What else comes is recorded, replayed and forgotten: 1.6 ms of Python in one piece, instead of as much between forty
    launches, after each of which a thread waits for the interpreter, up to 5 ms if the event loop has it.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._x = torch.empty((MAX_TOKENS, encoder.hidden_size), dtype=encoder.dtype)
        self._arena = Arena()
        self._graphs: dict[int, tuple[Recording, np.ndarray]] = {}  # and the tiles that it reads

    def __repr__(self) -> str:
        return f"<TextGraphs of {sorted(self._graphs)} tokens in {self._arena!r}>"

    def can_forward(self, num_tokens: int) -> bool:
        return num_tokens <= MAX_PASS

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        type_ids_T: Tensor | None,
        groups: Sequence[Group],
    ) -> Tensor:
        """Hidden states [T, E], as the encoder's `forward` gives; valid until the next call.

        Raises:
            NotRecordableError: torch computes in this model's steps.
        """
        x_TE = self._encoder.embed(token_ids_T, positions_T, type_ids_T)
        is_kept = len(groups) == groups[0].num_sequences == 1 and len(x_TE) <= MAX_TOKENS
        if is_kept:
            recording = self._kept(x_TE, positions_T, groups[0].keys)
        else:
            tiles = tiles_of(groups)  # held until the replay: a recording keeps no input
            recording = self._recorded(x_TE, positions_T, groups, tiles)
        recording.replay()
        return self._encoder.finish(recording.result)

    def _kept(self, x_TE: Tensor, positions_T: Tensor, num_keys: int) -> Recording:
        num_tokens = len(x_TE)
        held_TE = self._x[:num_tokens]
        graph = self._graphs.get(num_tokens)
        if graph is None:
            groups = (Group(0, 1, num_tokens),)
            tiles = tiles_of(groups)
            recording = self._recorded(held_TE, positions_T, groups, tiles)
            graph = self._graphs[num_tokens] = recording, tiles
        held_TE.copy_(x_TE)
        graph[1][:, 1] = num_keys
        return graph[0]

    def _recorded(
        self, x_TE: Tensor, positions_T: Tensor, groups: Sequence[Group], tiles: np.ndarray
    ) -> Recording:
        return Recording(
            self._arena,
            (x_TE,),
            lambda: self._encoder.forward_embedded(x_TE, positions_T, groups, tiles),
        )
