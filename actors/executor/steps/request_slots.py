"""Store the state of each sequence on a device between steps, in numbered slots.

The tables are numpy arrays of fixed size, so that a step gathers its inputs with a constant number of array operations, whatever
the number of entries. Law: the token at position p of a slot is final once the step that sampled it has run. The next step
reads it from here, so the scheduler can plan that step before it receives the token.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.media.encoder import ItemRows, MediaEncoder, WholeItem
from trouper.actors.messages.requests import Embeds
from trouper.actors.messages.steps import NEVER, NewSequence, Sampling, StepPlan


class PromptSpan(NamedTuple):
    """Select the prompt tokens of one entry for which this step computes logprobs.

    `first_token` is the index in the flat batch of the token that predicts the first of them. `num_top` is
    the number of top logprobs, or -1 for the whole vocabulary.
    """

    entry: int
    first_token: int
    token_ids: np.ndarray
    num_top: int


class Axes(NamedTuple):
    """Hold the positions in time, height and width (M-RoPE) of one prompt with images.

    The three are equal for text. An image's positions begin at the next position of the text before it, and the text after it
    continues from the largest position of the image.
    """

    # [3, n] up to the end of the last image.
    positions: np.ndarray
    # The offset to add to later positions.
    delta: int

    @classmethod
    def of(cls, grids: Sequence[tuple[int, int, int, int]]) -> "Axes":
        """Compute the positions from each image's first position, time, height and width, in rows."""
        parts: list[np.ndarray] = []
        place = base = 0
        for first, *grid in grids:
            num_text = first - place
            parts.append(np.repeat(base + np.arange(num_text)[None], 3, 0))
            base += num_text
            parts.append(base + np.indices(grid).reshape(3, -1))
            place, base = first + int(np.prod(grid)), base + max(grid)
        return cls(np.concatenate(parts, 1), base - place)

    def at(self, positions_T: np.ndarray) -> np.ndarray:
        """Return the positions [3, T] of tokens at these places of the sequence."""
        num = self.positions.shape[1]
        inside = self.positions[:, np.minimum(positions_T, num - 1)]
        return np.where(positions_T < num, inside, positions_T + self.delta)


class RequestSlots:
    """The running sequences by slot. The runner that owns it may change it, between steps.

    Args:
        max_num_seqs: number of slots.
        block_size: tokens of a KV block.
        num_tables: block tables of a sequence, one for each group of layers.
        encoder: computes the rows of images, if the model takes any.
        spans_ignore_window: tokens that see each other do so in layers with a window, however far apart they are.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        encoder: MediaEncoder | None = None,
        *,
        num_tables: int = 1,
        spans_ignore_window: bool = False,
    ) -> None:
        self.block_size = block_size
        self.spans_ignore_window = spans_ignore_window
        self._encoder = encoder
        # One extra position: a step in flight may sample a token beyond the maximum length, which is dropped
        # later.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        max_blocks = -(-max_model_len // block_size)
        self.tables = np.zeros((num_tables, max_num_seqs, max_blocks), dtype=np.int64)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        # Adapter slots; 0 means no adapter.
        self.adapters = np.zeros(max_num_seqs, dtype=np.int64)
        self.sampling: list[Sampling] = [Sampling()] * max_num_seqs
        # Slots of requests with prompt logprobs.
        self.with_prompt_logprobs: set[int] = set()
        # By slot: embeddings that replace prompt tokens, as the position of the first row and the rows [rows,
        # E].
        self._embeds: dict[int, tuple[tuple[int, Tensor | ItemRows], ...]] = {}
        # Likewise, the rows of images. They do replace tokens, which count for penalties as those of a text.
        self._images: dict[int, tuple[tuple[int, Tensor | ItemRows], ...]] = {}
        # By slot: the images themselves.
        self._items: dict[int, list[WholeItem]] = {}
        # By slot: positions in three dimensions up to the end of the last image.
        self._axes: dict[int, Axes] = {}
        # By slot: the runs of prompt tokens that see each other, as begins and ends in order.
        self.spans: dict[int, tuple[tuple[int, int], ...]] = {}

    @property
    def block_ids(self) -> np.ndarray:
        """Return the first block table of each slot, [slots, blocks]; the only one if all layers share it."""
        return self.tables[0]

    def blocks_at(self, slots: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Return the ids of blocks of slots, with a row for each table if there are several."""
        if len(self.tables) == 1:
            return self.tables[0, slots, blocks]
        # Kernels read each row as an array.
        return np.ascontiguousarray(self.tables[:, slots, blocks])

    def place(self, new: NewSequence) -> None:
        """Assign a slot to a sequence and forget its previous content."""
        slot = new.request_slot
        self.token_ids[slot, : len(new.token_ids)] = new.token_ids
        self.num_prompt[slot] = new.num_prompt
        self.num_blocks[slot] = 0
        self.add_blocks(slot, new.block_ids)
        self.sampling[slot] = new.sampling
        self.adapters[slot] = new.adapter_slot
        self.with_prompt_logprobs.discard(slot)
        if new.sampling.prompt_logprobs is not None:
            self.with_prompt_logprobs.add(slot)
        self._embeds.pop(slot, None)
        self._images.pop(slot, None)
        self._items.pop(slot, None)
        self._axes.pop(slot, None)
        self.spans.pop(slot, None)
        if new.spans:
            self.spans[slot] = new.spans
        if new.grids:
            self._axes[slot] = Axes.of(new.grids)
        if new.media:
            assert self._encoder is not None, "the renderer refuses images without an encoder"
            wholes = [WholeItem(item, self._encoder) for item in new.media]
            self._items[slot] = wholes
            self._images[slot] = tuple(run for whole in wholes for run in whole.runs())
        if new.embeds:
            self._embeds[slot] = tuple((part.first, _matrix(part)) for part in new.embeds)

    def encode(self, slots: Sequence[int], seconds: float) -> tuple[int, ...]:
        """Encode the images of these slots in order, for about this time.

        Returns:
            For each slot the position of the first row that is still missing, or a position beyond all of them.
        """
        assert self._encoder is not None
        items = [(slot, whole) for slot in slots for whole in self._items.get(slot, ())]
        num_ready = self._encoder.advance([whole for _, whole in items], seconds)
        missing = dict[int, int]()
        for slot, whole in items[num_ready:]:
            if not whole.is_ready():
                missing.setdefault(slot, whole.item.first + whole.item.runs[0][0])
        return tuple(missing.get(slot, NEVER) for slot in slots)

    def add_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        """Append blocks to the block tables of a slot, given block by block: one id for each table.

        The scheduler sends only the new blocks of a sequence. A block that it takes back stays in the table, because it is not read again.
        """
        first, num_tables = self.num_blocks[slot], len(self.tables)
        end = first + len(block_ids) // num_tables
        self.tables[:, slot, first:end] = np.reshape(block_ids, (-1, num_tables)).T
        self.num_blocks[slot] = end

    @property
    def are_plain(self) -> bool:
        """Whether no sequence has images, embeddings, spans or logprobs of its prompt."""
        special = self._axes or self._embeds or self._images or self.spans
        return not (special or self.with_prompt_logprobs)

    def has_embeds(self, slot: int) -> bool:
        """Whether embeddings replace tokens of the slot's prompt not computed yet."""
        return slot in self._embeds

    def has_spans(self, plan: StepPlan) -> bool:
        """Whether a token of this step may see later ones.  The spans of sequences that are behind them are forgotten."""
        if not self.spans:
            return False
        found = False
        for slot, start in zip(plan.request_slots, plan.num_computed_tokens, strict=True):
            if slot in self.spans:
                is_behind = start >= self.spans[slot][-1][1]
                found = found or not is_behind
                if is_behind:
                    del self.spans[slot]
        return found

    def token_spans(self, slot: int) -> Iterator[tuple[int, int]]:
        """Yield the begin and end of each run of tokens in an entirely uncomputed prompt."""
        begin = 0
        for first, matrix in self._embeds.get(slot, ()):
            yield begin, first
            begin = first + len(matrix)
        yield begin, int(self.num_prompt[slot])

    def outputs_of(self, slot: int, end: int) -> np.ndarray:
        """Return the generated tokens before position `end`.

        The array is a view; it changes when the slot gets another sequence.
        """
        return self.token_ids[slot, self.num_prompt[slot] : end]

    def axes(self, slots_T: np.ndarray, positions_T: np.ndarray) -> np.ndarray | None:
        """Return the positions [3, T] of tokens in time, height and width, or None if no sequence of them has images."""
        found = [slot for slot in set(slots_T.tolist()) if slot in self._axes]
        if not found:
            return None
        axes_3T = np.repeat(positions_T[None], 3, 0)
        for slot in found:
            places = np.flatnonzero(slots_T == slot)
            axes_3T[:, places] = self._axes[slot].at(positions_T[places])
        return axes_3T

    def take_embeds(
        self, plan: StepPlan, first_tokens: np.ndarray
    ) -> tuple[tuple[int, Tensor], ...]:
        """Return the embeddings that this step computes, each with its index in the flat batch, and forget them.

        Images whose first row is among them are computed now.

        Args:
            first_tokens: index of each entry's first token in the flat batch.
        """
        found: list[tuple[int, Tensor]] = []
        for sources in (self._embeds, self._images):
            if sources.keys().isdisjoint(plan.request_slots):
                continue
            entries = plan.request_slots, plan.num_computed_tokens, plan.num_scheduled_tokens
            for slot, start, count, place in zip(*entries, first_tokens.tolist(), strict=True):
                parts, later = sources.pop(slot, ()), list[tuple[int, Tensor | ItemRows]]()
                for first, matrix in parts:
                    begin, end = max(start, first), min(start + count, first + len(matrix))
                    if begin < end:
                        found.append((place + begin - start, matrix[begin - first : end - first]))
                    if first + len(matrix) > start + count:
                        later.append((first, matrix))
                if later:
                    sources[slot] = tuple(later)
                elif sources is self._images:
                    self._items.pop(slot, None)
        return tuple(found)

    def prompt_spans(self, plan: StepPlan, first_tokens: np.ndarray) -> Iterator[PromptSpan]:
        """Yield the prompt tokens after the positions of this step with requested logprobs."""
        if self.with_prompt_logprobs.isdisjoint(plan.request_slots):
            return
        for entry, slot in enumerate(plan.request_slots):
            num_top = self.sampling[slot].prompt_logprobs
            start = plan.num_computed_tokens[entry]
            last = min(start + plan.num_scheduled_tokens[entry], int(self.num_prompt[slot]) - 1)
            if num_top is not None and start < last:
                token_ids = self.token_ids[slot, start + 1 : last + 1]
                yield PromptSpan(entry, int(first_tokens[entry]), token_ids, num_top)


def _matrix(embeds: Embeds) -> Tensor:
    dtype: torch.dtype = getattr(torch, embeds.dtype)
    # Read-only bytes are copied, since torch has no read-only tensors.
    data = bytearray(embeds.data) if embeds.data.readonly else embeds.data
    return torch.frombuffer(data, dtype=dtype).view(embeds.num_rows, embeds.num_columns)
