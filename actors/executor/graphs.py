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
from trouper.kernels.arena import Arena
from trouper.kernels.recording import Recording
from trouper.kernels.varlen_attention import Group, tiles_of

# Of more rows, Python is less than a hundredth of the time.  A launch is recorded in about 180 bytes: 50 KiB
# for 28 layers, 16 MiB if every number of rows occurs.
MAX_ROWS = 320
NEWCOMERS = 64  # tokens of short prompts beside those who decode
MAX_TOKENS = 64  # of one text that has a recording of its own
# What a pass is rounded up to: rows are multiplied sixteen at a time anyway, and a tile of no queries takes 0.3 µs a head.
ROW_STEP, TILE_STEP = 16, 8
MAX_PASSES = 512  # kept, of some 10 KiB each; texts of one kind need a tenth of them
# Of a pass whose activations share an arena, which keeps its memory: with 4,096 inputs to a product 8 MiB a tensor.
MAX_PASS = 1024


class _Graph(NamedTuple):
    recording: Recording
    plans: dict[int | None, Any]  # whose words it reads


class _TextGraph(NamedTuple):
    recording: Recording
    tiles: np.ndarray  # that it reads


class DecodeGraphs:
    """Records a step of T rows when it is first asked for one.

    Args:
        caches: of each layer.
        max_rows: of a step.
        arena: for the activations.
    """

    def __init__(
        self, decoder: Decoder, caches: Sequence[Tensor], max_rows: int, arena: Arena
    ) -> None:
        self._decoder, self._caches, self._arena = decoder, caches, arena
        self._max_rows = min(max_rows + NEWCOMERS, MAX_ROWS)
        self._x = torch.empty((self._max_rows, decoder.traits.hidden_size), dtype=decoder.dtype)
        self._positions, self._slots = np.empty((2, self._max_rows), dtype=np.int64)
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
        x_TE = self._x[:num_rows]
        graph = self._graphs.get(num_rows)
        if graph is None:
            positions_T, slots_T = (
                torch.from_numpy(held[:num_rows]) for held in (self._positions, self._slots)
            )
            recording = Recording(
                self._arena,
                (x_TE, positions_T, slots_T),
                lambda: self._decoder.forward_embedded(
                    x_TE, positions_T, slots_T, batch.plans, self._caches
                ),
            )
            graph = self._graphs[num_rows] = _Graph(recording, batch.plans)
        # numpy's copies: each call of torch lets go of the interpreter, and a busy loop keeps it for a while
        self._decoder.embed(batch.token_ids, out=x_TE)
        self._positions[:num_rows] = batch.positions.numpy()
        self._slots[:num_rows] = batch.slots.numpy()
        for window, plan in graph.plans.items():
            plan.words[:] = batch.plans[window].words
        graph.recording.replay()
        return graph.recording.result


class TextGraphs:
    """Passes of an encoder, by one thread.

    One short text is recorded when its number of tokens is first asked for; its positions are 0 … T - 1 in every one.
    Other passes are rounded up, to rows of no text and tiles of no queries, so that few recordings serve them all.
    To record takes 1.6 ms of Python if nobody else wants the interpreter, and 17 beside a busy event loop: torch gives
    it away at each of its calls, and the loop keeps it for a millisecond.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._x = torch.zeros((MAX_PASS, encoder.hidden_size), dtype=encoder.dtype)
        # They are in the embeddings: who needs them again rotates, which is torch's, and is refused.
        self._positions = torch.zeros(MAX_PASS, dtype=torch.int64)
        self._arena = Arena()
        self._short: dict[int, _TextGraph] = {}  # by tokens
        self._passes: dict[tuple[int, int], _TextGraph] = {}  # by rows and tiles, the eldest first

    def __repr__(self) -> str:
        passes = f"{len(self._passes)} passes"
        return f"<TextGraphs of {sorted(self._short)} tokens and {passes} in {self._arena!r}>"

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
        num_tokens = len(token_ids_T)
        is_short = len(groups) == groups[0].num_sequences == 1 and num_tokens <= MAX_TOKENS
        graph = self._of_text(groups[0]) if is_short else self._of_pass(num_tokens, groups)
        self._x[:num_tokens] = self._encoder.embed(token_ids_T, positions_T, type_ids_T)
        graph.recording.replay()
        return self._encoder.finish(graph.recording.result[:num_tokens])

    def _of_text(self, group: Group) -> _TextGraph:
        graph = self._short.get(group.length)
        if graph is None:
            graph = self._short[group.length] = self._recorded(group.length, tiles_of((group,)))
        graph.tiles[:, 1] = group.keys
        return graph

    def _of_pass(self, num_tokens: int, groups: Sequence[Group]) -> _TextGraph:
        tiles = tiles_of(groups)
        size = _rounded(num_tokens, ROW_STEP), _rounded(len(tiles), TILE_STEP)
        graph = self._passes.get(size)
        if graph is None:
            if len(self._passes) >= MAX_PASSES:
                del self._passes[next(iter(self._passes))]
            held = np.zeros((size[1], tiles.shape[1]), tiles.dtype)
            graph = self._passes[size] = self._recorded(size[0], held)
        graph.tiles[: len(tiles)] = tiles
        graph.tiles[len(tiles) :] = 0
        return graph

    def _recorded(self, num_rows: int, tiles: np.ndarray) -> _TextGraph:
        x_TE, positions_T = self._x[:num_rows], self._positions[:num_rows]
        recording = Recording(
            self._arena,
            (x_TE, positions_T),
            lambda: self._encoder.forward_embedded(x_TE, positions_T, (), tiles),
        )
        return _TextGraph(recording, tiles)


def _rounded(number: int, step: int) -> int:
    return -(-number // step) * step
