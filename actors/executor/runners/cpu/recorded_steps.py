"""Steps as recordings: one native call replaces some two hundred calls from Python.

All decode steps of T tokens launch the same kernels on the same addresses. Only their inputs differ: tokens, positions and
slots, copied into fixed arrays, and the attention plan, which kernels read through pointers. The same holds for
the passes of an encoder over T tokens, except for the tiles of its attention. So the launches are recorded once and replayed.

Law: a recorded step is valid only for the weights and the KV memory with which it was recorded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.models.decoder import Decoder, MixerState, StepStates
from trouper.actors.executor.models.encoder import Encoder
from trouper.actors.executor.models.traits import PlanKey
from trouper.actors.executor.sampling.sampler import Sampler
from trouper.actors.executor.steps.batch import Batch, from_numpy
from trouper.config.speculation import MAX_VERIFIED
from trouper.kernels.codegen.recording import Arena, Recording
from trouper.kernels.cpu.attention.varlen import Group, tiles_of
from trouper.kernels.ops import HostTokens
from trouper.kernels.reference.recurrent import NO_SAVES

# In larger steps Python takes less than a hundredth of the time. A recorded launch takes about 180 bytes, so a step of
# 28 layers takes 50 KiB: 16 MiB if every number of rows occurs, and 32 MiB if each occurs with and without sampling.
MAX_ROWS = 320
# The logits of recorded steps share an arena, which keeps one block for each power of two: at most 64 MiB, and half as
# much for the bfloat16 product from which they are converted.
MAX_LOGITS = 2**23
# A step may contain this many tokens of short prompts in addition to the decoding sequences.
NEWCOMERS = 64
# A single text of at most this many tokens has a recording of its own.
MAX_TOKENS = 64
# Passes are rounded up to multiples of these. Rows are multiplied sixteen at a time anyway, and an empty tile takes 0.3 µs
# for each head.
ROW_STEP, TILE_STEP = 16, 8
# At most this many recorded passes are kept, of about 10 KiB each; texts of one kind need a tenth of them.
MAX_PASSES = 512
# Larger passes are not recorded, because the arena keeps their activations: 8 MiB for a tensor of 4,096 columns.
MAX_PASS = 1024


class ForwardOutput(NamedTuple):
    """The output of one forward pass, valid until the next one."""

    hidden_TE: Tensor
    # The logits of all tokens, if the recorded step contains their product.
    logits_TV: Tensor | None = None
    # The token after each of the batch's samples, if the recorded step contains sampling.
    token_R: np.ndarray | None = None


class _RecordedStep(NamedTuple):
    """A recording of a decoder's step, and the attention plans by key, whose pointers it reads."""

    recording: Recording[tuple[Tensor, Tensor | None]]
    plans: dict[PlanKey, Any]


class _RecordedPass(NamedTuple):
    """A recording of an encoder's pass, and the attention tiles that it reads."""

    recording: Recording[Tensor]
    tiles: np.ndarray


class RecordedDecoderSteps:
    """Records a step of T tokens the first time that one is needed, and replays it afterwards.

    The recording includes sampling if the requests of the step need nothing beyond it, such as penalties or logprobs.

    Args:
        caches: the KV cache of each layer.
        max_rows: the most sequences of a step.
        arena: provides the memory of activations.
        hidden_TE: the buffer with the output of the previous pipeline stage. Without it tokens are embedded here.
        mixers: the states of recurrent mixers, by layer and index; None if the model has none.
        num_tables: the number of block tables.
        draws: whether tokens are sampled here rather than on another rank.
    """

    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[Tensor],
        sampler: Sampler,
        max_rows: int,
        arena: Arena,
        hidden_TE: Tensor | None = None,
        *,
        draws: bool = True,
        mixers: Mapping[tuple[int, int], MixerState] | None = None,
        num_tables: int = 1,
    ) -> None:
        self._mixers = mixers
        self._hidden_TE, self._draws_here = hidden_TE, draws
        self._decoder, self._caches, self._sampler, self._arena = decoder, caches, sampler, arena
        self._max_rows = min(max_rows + NEWCOMERS, MAX_ROWS)
        # Token ids and positions, and the cache slots of each block table.
        self._inputs = np.zeros((2, self._max_rows), dtype=np.int64)
        self._slots = np.zeros((num_tables, self._max_rows), dtype=np.int64)
        # The columns of `StepStates` in a step, and in a replay of drafts.  Neither saves a state in the middle of an entry.
        self._entries = np.zeros((6, self._max_rows), dtype=np.int64)
        self._replayed = np.zeros((6, MAX_VERIFIED), dtype=np.int64)
        self._replay: Recording[None] | None = None
        # Of each sample: row of logits, request slot, position, sampled token.
        self._draws = np.zeros((4, self._max_rows), dtype=np.int64)
        # By the number of rows and whether the step samples.
        self._steps: dict[tuple[int, bool], _RecordedStep] = {}

    def __repr__(self) -> str:
        return f"<RecordedDecoderSteps of {sorted(self._steps)} in {self._arena!r}>"

    def can_forward(self, batch: Batch) -> bool:
        """Whether every token attends separately and has an id, and the step is not too large."""
        has_single_tokens = batch.can_be_recorded and not batch.embeds
        return has_single_tokens and batch.num_tokens <= self._max_rows

    def record(self, batch: Batch) -> None:
        """Record a step of this size unless one is recorded already.

        Nothing is computed.  Later steps of the size only replay it.

        Raises:
            NotRecordableError: torch computes some operation of this model.
        """
        assert self.can_forward(batch)
        self._step_for(batch)

    def forward(self, batch: Batch, *, may_draw: bool = True) -> ForwardOutput:
        """Compute the hidden states of a batch, and the logits and tokens that the recording contains.

        Args:
            may_draw: whether the recording may sample.  It may not if logits are replaced before.

        Raises:
            NotRecordableError: torch computes some operation of this model.
        """
        samples = batch.samples
        num_rows, num_drawn = batch.num_tokens, len(samples.entries)
        step, is_drawn = self._step_for(batch, may_draw=may_draw)
        *inputs, kv_slots = batch.inputs
        for held, now in zip(self._inputs, inputs, strict=True):
            held[:num_rows] = now
        self._slots[:, :num_rows] = kv_slots
        if self._mixers is not None:
            self._set_entries(batch, num_rows)
        picked, slots, ends, tokens = self._draws
        picked[:num_drawn], picked[num_drawn:num_rows] = samples.tokens, -1
        slots[:num_drawn] = samples.slots
        ends[:num_drawn] = samples.ends
        for key, plan in step.plans.items():
            plan.words[:] = batch.plans[key].words
        step.recording.replay()
        return ForwardOutput(*step.recording.result, tokens[:num_drawn] if is_drawn else None)

    def _set_entries(self, batch: Batch, num_rows: int) -> None:
        """Copy the entries of a step. A step of as many tokens may have fewer; the others have no row and compute nothing."""
        for held, now in zip(self._entries, batch.entries[:-1], strict=True):
            held[: len(now)] = now
        self._entries[2, len(batch.request_slots) : num_rows] = -1

    def replay(self, columns: tuple[np.ndarray, ...]) -> None:
        """Move recurrent states forward over drafts that turned out right; see `DecoderPass.replay`.

        Raises:
            NotRecordableError: torch computes some operation of this model.
        """
        for held, now in zip(self._replayed, columns[:-1], strict=True):
            held[: len(now)] = now
        self._replayed[2, len(columns[0]) :] = -1
        if self._replay is None:
            assert self._mixers is not None
            arrays = [*self._replayed, NO_SAVES]
            states = StepStates(*arrays, mixers=self._mixers)
            kept = [x for mixer in self._mixers.values() for x in mixer.inputs]
            inputs = [*map(from_numpy, arrays), *kept]
            self._replay = Recording(self._arena, inputs, lambda: self._decoder.replay(states))
        self._replay.replay()

    def _step_for(self, batch: Batch, *, may_draw: bool = True) -> tuple[_RecordedStep, bool]:
        """Return the recording for a batch, and whether it includes sampling."""
        samples, num_rows = batch.samples, batch.num_tokens
        is_drawn = (
            may_draw
            and self._draws_here
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
        held_slots = self._slots if len(self._slots) > 1 else self._slots[0]
        ids_T, positions_T = (from_numpy(held[:num_rows]) for held in self._inputs)
        inputs = HostTokens(ids_T, positions_T, from_numpy(held_slots[..., :num_rows]))
        *draws, tokens = (held[:num_rows] for held in self._draws)
        hidden_TE = None if self._hidden_TE is None else self._hidden_TE[:num_rows]
        states, entries = None, list[np.ndarray]()
        if self._mixers is not None:
            entries = [*(held[:num_rows] for held in self._entries), NO_SAVES]
            states = StepStates(*entries, mixers=self._mixers)

        def step() -> tuple[Tensor, Tensor | None]:
            states_TE = decoder.forward(
                inputs, batch.plans, self._caches, hidden_TE=hidden_TE, states=states
            )
            if not self._has_logits(num_rows):
                return states_TE, None
            logits_TV = decoder.logits(states_TE)
            if is_drawn:
                self._sampler.draw(logits_TV, *draws, out=tokens)
            return states_TE, logits_TV

        held = [*inputs[:3], *map(from_numpy, entries)]
        held += [] if hidden_TE is None else [hidden_TE]
        return _RecordedStep(Recording(self._arena, held, step), batch.plans)


class RecordedEncoderSteps:
    """Records the passes of an encoder in one thread.

    A pass over one short text is recorded for each number of tokens, since its positions are always 0 … T - 1. Other passes
    are rounded up with empty rows and empty tiles, so that few recordings serve all of them. Recording takes 1.6 ms if no
    other thread needs the GIL and 17 ms next to a busy event loop, because torch releases the GIL at every call and the loop
    keeps it for a millisecond.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        # Token ids, token types and positions.
        self._inputs = np.zeros((3, MAX_PASS), dtype=np.int64)
        # The positions of a single text.
        self._counted = torch.arange(MAX_TOKENS)
        self._arena = Arena()
        # By the number of tokens.
        self._short: dict[int, _RecordedPass] = {}
        # By the numbers of rows and tiles, oldest first.
        self._passes: dict[tuple[int, int], _RecordedPass] = {}

    def __repr__(self) -> str:
        passes = f"{len(self._passes)} passes"
        return f"<RecordedEncoderSteps of {sorted(self._short)} tokens and {passes} in {self._arena!r}>"

    def can_forward(self, num_tokens: int) -> bool:
        """Whether a pass of this size may be recorded.

        Larger passes gain nothing, because the products dominate their time.
        """
        return num_tokens <= MAX_PASS

    def forward(
        self, token_ids: np.ndarray, type_ids: np.ndarray | None, groups: Sequence[Group]
    ) -> Tensor:
        """Compute the hidden states [T, E] of whole texts. They are valid until the next call.

        Args:
            token_ids: [T] int64, the texts one after another.
            type_ids: [T] int64, segment ids; 0 by default.
            groups: consecutive texts of one length.

        Raises:
            NotRecordableError: torch computes some operation of this model.
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
