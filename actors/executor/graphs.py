"""Decode steps as recordings: one call to the machine in place of some two hundred from Python.

A step in which each of T sequences takes one token is the same for every such step but for its inputs:
the embeddings, positions and slots, which lie where they lay, and the plan of the attention, which the
kernels find through its words.

Law: a graph belongs to the weights and the KV memory that were there when it was recorded.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trouper.actors.executor.batch import Batch
from trouper.actors.executor.models.decoder import Decoder
from trouper.kernels.recording import Arena, Recording

# Of more rows, Python is less than a hundredth of the time.  A launch is recorded in about 180 bytes: 50 KiB
# for 28 layers, 13 MiB if every number of rows occurs.
MAX_ROWS = 256


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
        self._max_rows = min(max_rows, MAX_ROWS)
        self._x = torch.empty((self._max_rows, decoder.traits.hidden_size), dtype=decoder.dtype)
        self._positions, self._slots = torch.empty((2, self._max_rows), dtype=torch.int64)
        self._arena = Arena()
        self._graphs: dict[int, _Graph] = {}

    def __repr__(self) -> str:
        return f"<DecodeGraphs of {sorted(self._graphs)} rows in {self._arena!r}>"

    def can_forward(self, batch: Batch) -> bool:
        """Every row is one token, from the vocabulary."""
        return len(batch.token_ids) == len(batch.rows) <= self._max_rows and not batch.embeds

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, E], as the decoder's `forward` gives; valid until the next call.

        Raises:
            NotRecordableError: torch computes in this model's steps.
        """
        num_rows = len(batch.rows)
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
