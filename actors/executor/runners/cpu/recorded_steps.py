"""Steps as recordings: one call to the machine in place of some two hundred from Python.

A step of T tokens that are attended one by one is the same for every such step but for its inputs:
the tokens, positions and slots, which lie where they lay, and the plan of the attention, which the
kernels find through its words.  So is an encoder's pass of T tokens, but for the tiles of its attention.

Law: a recorded step belongs to the weights and the KV memory that were there when it was recorded.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.models.decoder import Decoder
from trouper.actors.executor.models.encoder import Encoder
from trouper.actors.executor.sampling.sampler import Sampler
from trouper.actors.executor.steps.arrays import from_numpy
from trouper.actors.executor.steps.batch import Batch
from trouper.kernels.codegen.arena import Arena
from trouper.kernels.codegen.recording import Recording
from trouper.kernels.cpu.attention.varlen import Group, tiles_of
from trouper.kernels.ops import CpuOps, HostTokens

# Of more rows, Python is less than a hundredth of the time.  A launch is recorded in about 180 bytes: 50 KiB
# for 28 layers, 16 MiB if every number of rows occurs, 32 if each does drawn and not.
MAX_ROWS = 320
# The logits of a recorded step are in the arena, which keeps the memory of each power of two: at most 64 MiB, and half
# as much for the product of bfloat16 that they are made of.
MAX_LOGITS = 2**23
NEWCOMERS = 64  # tokens of short prompts beside the sequences that decode
MAX_TOKENS = 64  # of one text that has a recording of its own
# What a pass is rounded up to: rows are multiplied sixteen at a time anyway, and a tile of no queries takes 0.3 µs a head.
ROW_STEP, TILE_STEP = 16, 8
MAX_PASSES = 512  # kept, of some 10 KiB each; texts of one kind need a tenth of them
# Of a pass whose activations share an arena, which keeps its memory: with 4,096 inputs to a product 8 MiB a tensor.
MAX_PASS = 1024


class ForwardOutput(NamedTuple):
    """The output of a step's pass; valid until the next one."""

    hidden_TE: Tensor
    logits_TV: Tensor | None = None  # of all tokens, if they are there at no cost
    token_R: np.ndarray | None = None  # drawn after each of the batch's samples


class _RecordedStep(NamedTuple):
    """A recording, and what it reads beside its inputs."""

    recording: Recording[tuple[Tensor, Tensor | None]]
    plans: dict[int | None, Any]  # whose words it reads


class _RecordedPass(NamedTuple):
    """A recording, and what it reads beside its inputs."""

    recording: Recording[Tensor]
    tiles: np.ndarray  # that it reads


class RecordedDecoderSteps:
    """Records a step of T tokens when it is first asked for one; with the draw, if its requests need no more than that.

    Args:
        caches: of each layer.
        max_rows: of a step.
        arena: for the activations.
        hidden_TE: where the output of the stage before lies; None = tokens are embedded here.
        draws: whether tokens are drawn here, and not by another rank.
    """

    def __init__(
        self,
        decoder: Decoder[CpuOps],
        caches: Sequence[Tensor],
        sampler: Sampler,
        max_rows: int,
        arena: Arena,
        hidden_TE: Tensor | None = None,
        *,
        draws: bool = True,
    ) -> None:
        self._hidden_TE, self._draws_here = hidden_TE, draws
        self._decoder, self._caches, self._sampler, self._arena = decoder, caches, sampler, arena
        self._max_rows = min(max_rows + NEWCOMERS, MAX_ROWS)
        self._inputs = np.zeros((3, self._max_rows), dtype=np.int64)  # ids, positions, slots
        self._draws = np.zeros((4, self._max_rows), dtype=np.int64)  # picked, slots, ends, tokens
        self._steps: dict[
            tuple[int, bool], _RecordedStep
        ] = {}  # by rows, and whether they are drawn

    def __repr__(self) -> str:
        return f"<RecordedDecoderSteps of {sorted(self._steps)} in {self._arena!r}>"

    def can_forward(self, batch: Batch) -> bool:
        """Whether every token is attended alone, and from the vocabulary."""
        is_alone = batch.can_be_recorded and not batch.embeds
        return is_alone and len(batch.tokens.ids_T) <= self._max_rows

    def record(self, batch: Batch) -> None:
        """Record such a step if none has been; nothing is computed.

        Raises:
            NotRecordableError: torch computes in this model's steps.
        """
        assert self.can_forward(batch)
        self._step_for(batch)

    def forward(self, batch: Batch) -> ForwardOutput:
        """Compute what the decoder's `forward` would, and the logits or tokens that come at no cost.

        Raises:
            NotRecordableError: torch computes in this model's steps.
        """
        samples = batch.samples
        num_rows, num_drawn = len(batch.tokens.ids_T), len(samples.entries)
        step, is_drawn = self._step_for(batch)
        # numpy's copies: each call of torch lets go of the interpreter, and a busy loop keeps it for a while
        for held, now in zip(self._inputs, batch.tokens, strict=True):
            held[:num_rows] = now.numpy()
        picked, slots, ends, tokens = self._draws
        picked[:num_drawn], picked[num_drawn:num_rows] = samples.tokens, -1
        slots[:num_drawn] = samples.slots
        ends[:num_drawn] = samples.ends
        for window, plan in step.plans.items():
            plan.words[:] = batch.plans[window].words
        step.recording.replay()
        return ForwardOutput(*step.recording.result, tokens[:num_drawn] if is_drawn else None)

    def _step_for(self, batch: Batch) -> tuple[_RecordedStep, bool]:
        """Return the recording for a batch, and whether it draws."""
        samples, num_rows = batch.samples, len(batch.tokens.ids_T)
        is_drawn = (
            self._draws_here
            and self._has_logits(num_rows)
            and self._sampler.is_plain(batch.request_slots.tolist(), samples.slots)
        )
        if is_drawn:
            self._sampler.prepare(samples.slots, samples.ends)
        step = self._steps.get((num_rows, is_drawn))
        if step is None:
            step = self._recorded(num_rows, is_drawn, batch)
            self._steps[num_rows, is_drawn] = step
        return step, is_drawn

    def _has_logits(self, num_rows: int) -> bool:
        num = self._decoder.num_logits(num_rows)
        return num is not None and num <= MAX_LOGITS

    def _recorded(self, num_rows: int, is_drawn: bool, batch: Batch) -> _RecordedStep:
        decoder = self._decoder
        inputs = HostTokens(*(from_numpy(held[:num_rows]) for held in self._inputs))
        *draws, tokens = (held[:num_rows] for held in self._draws)
        hidden_TE = None if self._hidden_TE is None else self._hidden_TE[:num_rows]

        def step() -> tuple[Tensor, Tensor | None]:
            states_TE = decoder.forward(inputs, batch.plans, self._caches, hidden_TE=hidden_TE)
            if not self._has_logits(num_rows):
                return states_TE, None
            logits_TV = decoder.logits(states_TE)
            if is_drawn:
                self._sampler.draw(logits_TV, *draws, out=tokens)
            return states_TE, logits_TV

        held = inputs if hidden_TE is None else (*inputs, hidden_TE)
        return _RecordedStep(Recording(self._arena, held, step), batch.plans)


class RecordedEncoderSteps:
    """Records passes of an encoder, for one thread.

    One short text is recorded when its number of tokens is first asked for; its positions are 0 … T - 1 in every one.
    Other passes are rounded up, to rows of no text and tiles of no queries, so that few recordings serve them all.
    To record takes 1.6 ms of Python if no other thread wants the interpreter, and 17 beside a busy event loop: torch gives
    it away at each of its calls, and the loop keeps it for a millisecond.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._inputs = np.zeros((3, MAX_PASS), dtype=np.int64)  # ids, token types, positions
        self._counted = torch.arange(MAX_TOKENS)  # positions of a text alone
        self._arena = Arena()
        self._short: dict[int, _RecordedPass] = {}  # by tokens
        self._passes: dict[
            tuple[int, int], _RecordedPass
        ] = {}  # by rows and tiles, the oldest first

    def __repr__(self) -> str:
        passes = f"{len(self._passes)} passes"
        return f"<RecordedEncoderSteps of {sorted(self._short)} tokens and {passes} in {self._arena!r}>"

    def can_forward(self, num_tokens: int) -> bool:
        return num_tokens <= MAX_PASS

    def forward(
        self, token_ids: np.ndarray, type_ids: np.ndarray | None, groups: Sequence[Group]
    ) -> Tensor:
        """Compute the hidden states [T, E] of the encoder's `forward`; valid until the next call.

        Args:
            token_ids: [T] int64.
            type_ids: likewise; None = all are 0.

        Raises:
            NotRecordableError: torch computes in this model's steps.
        """
        num_tokens = len(token_ids)
        ids, types, positions = self._inputs
        ids[:num_tokens] = token_ids
        types[:num_tokens] = 0 if type_ids is None else type_ids
        is_text = len(groups) == groups[0].num_sequences == 1 and num_tokens <= MAX_TOKENS
        if is_text and not self._encoder.has_padding(token_ids):
            step = self._of_text(groups[0])
        else:
            positions[:num_tokens] = self._encoder.positions(token_ids, groups)
            step = self._of_pass(num_tokens, groups)
        step.recording.replay()
        return step.recording.result[:num_tokens]

    def _of_text(self, group: Group) -> _RecordedPass:
        step = self._short.get(group.length)
        if step is None:
            positions_T = self._counted[: group.length]
            step = self._short[group.length] = self._recorded(positions_T, tiles_of((group,)))
        step.tiles[:, 1] = group.keys
        return step

    def _of_pass(self, num_tokens: int, groups: Sequence[Group]) -> _RecordedPass:
        tiles = tiles_of(groups)
        size = _rounded(num_tokens, ROW_STEP), _rounded(len(tiles), TILE_STEP)
        step = self._passes.get(size)
        if step is None:
            if len(self._passes) >= MAX_PASSES:
                del self._passes[next(iter(self._passes))]
            held = np.zeros((size[1], tiles.shape[1]), tiles.dtype)
            positions_T = from_numpy(self._inputs[2, : size[0]])
            step = self._passes[size] = self._recorded(positions_T, held)
        step.tiles[: len(tiles)] = tiles
        step.tiles[len(tiles) :] = 0
        return step

    def _recorded(self, positions_T: Tensor, tiles: np.ndarray) -> _RecordedPass:
        num_rows = len(positions_T)
        ids_T, types_T = (from_numpy(held[:num_rows]) for held in self._inputs[:2])
        recording = Recording(
            self._arena,
            (ids_T, types_T, positions_T),
            lambda: self._encoder.forward_padded(ids_T, positions_T, types_T, (), tiles),
        )
        return _RecordedPass(recording, tiles)


def _rounded(number: int, step: int) -> int:
    return -(-number // step) * step
