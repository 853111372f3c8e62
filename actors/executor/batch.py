"""The permanent rows of the sequences on the device, and the flat batch of one step.

Rows are numpy arrays sized once: a step gathers from them with array operations, whatever the number
of its columns.  Law: the token at position p of a row is final once the step that sampled it has run;
later plans read it from here, so that they can be made before it is known to the scheduler.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.models.decoder import LogitsIndices
from trouper.actors.messages.embeds import Embeds
from trouper.actors.messages.plans import NewSequence, Sampling, StepPlan
from trouper.kernels.ops import StepTokens


class Rows:
    """What the device knows of each sequence between steps."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # one more column: a step in flight may sample a token that exceeds the length, and is dropped
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        max_blocks = -(-max_model_len // block_size)
        self.block_ids = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.sampling: list[Sampling] = [Sampling()] * max_num_seqs
        self.tell_prompts: set[int] = set()  # rows that want logprobs of their prompts
        # by row: the position of a part's first row, and the part [rows, E], which stands for tokens
        self.embeds: dict[int, tuple[tuple[int, Tensor], ...]] = {}

    def place(self, new: NewSequence) -> None:
        """Give a row to a sequence; whatever was in it is forgotten."""
        self.token_ids[new.request_slot, : len(new.token_ids)] = new.token_ids
        self.num_prompt[new.request_slot] = new.num_prompt
        self.num_blocks[new.request_slot] = 0
        self.add_blocks(new.request_slot, new.block_ids)
        self.sampling[new.request_slot] = new.sampling
        self.tell_prompts.discard(new.request_slot)
        if new.sampling.prompt_logprobs is not None:
            self.tell_prompts.add(new.request_slot)
        self.embeds.pop(new.request_slot, None)
        if new.embeds:
            self.embeds[new.request_slot] = tuple(
                (part.first, _matrix(part)) for part in new.embeds
            )

    def add_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        first = self.num_blocks[row]
        self.block_ids[row, first : first + len(block_ids)] = block_ids
        self.num_blocks[row] = first + len(block_ids)

    def token_spans(self, row: int) -> Iterator[tuple[int, int]]:
        """Begin and end of what is tokens in a prompt of which nothing has been computed yet."""
        begin = 0
        for first, matrix in self.embeds.get(row, ()):
            yield begin, first
            begin = first + len(matrix)
        yield begin, int(self.num_prompt[row])

    def outputs_of(self, row: int, end: int) -> np.ndarray:
        """The generated tokens before position `end`."""
        return self.token_ids[row, self.num_prompt[row] : end]


# A chunk that is so short is attended token by token, as generated ones are: such a step can be a recording.  Whatever
# else is in the step, so that a prompt's keys do not depend on its company.
SHORT_CHUNK = 8


class Batch(msgspec.Struct, frozen=True):
    """One step as the decoder wants it: C columns, T tokens."""

    rows: np.ndarray  # [C]
    starts: np.ndarray  # [C]
    ends: np.ndarray  # [C], the position that a sample of the column will take
    firsts: np.ndarray  # [C], first token of the column in the flat batch
    lasts: np.ndarray  # [C], the last
    tokens: StepTokens
    plans: dict[int | None, Any]  # attention, by window, as the decoder's ops make them
    has_long_chunks: bool = True  # else every token is attended alone
    embeds: tuple[tuple[int, Tensor], ...] = ()  # first token in the flat batch, rows from there on
    read: LogitsIndices | None = (
        None  # the last tokens of the columns that sample; None: all tokens
    )


def make_batch(
    plan: StepPlan,
    rows: Rows,
    windows: Sequence[int | None],
    plan_attention: Callable[..., Any],
) -> Batch:
    columns = np.array(plan.request_slots, dtype=np.int64)
    starts = np.array(plan.num_computed_tokens, dtype=np.int64)
    counts = np.array(plan.num_scheduled_tokens, dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    rows_T = np.repeat(columns, counts)
    positions_T = np.arange(counts.sum()) - np.repeat(firsts - starts, counts)
    attended = _attended(columns, starts, counts)
    size = rows.block_size
    slots_T = rows.block_ids[rows_T, positions_T // size] * size + positions_T % size
    lasts = firsts + counts - 1
    has_long_chunks = bool((counts > SHORT_CHUNK).any())
    read = None
    if has_long_chunks and rows.tell_prompts.isdisjoint(plan.request_slots):
        samples = np.flatnonzero(plan.num_sampled_tokens)
        lone = columns[samples], (starts + counts)[samples] - 1, np.ones_like(samples)
        read = LogitsIndices(
            torch.from_numpy(lasts[samples]),
            {window: plan_attention(rows.block_ids, *lone, window) for window in windows},
        )
    return Batch(
        rows=columns,
        starts=starts,
        ends=starts + counts,
        firsts=firsts,
        lasts=lasts,
        tokens=StepTokens(
            torch.from_numpy(rows.token_ids[rows_T, positions_T]),
            torch.from_numpy(positions_T),
            torch.from_numpy(slots_T),
        ),
        plans={window: plan_attention(rows.block_ids, *attended, window) for window in windows},
        has_long_chunks=has_long_chunks,
        embeds=embeds_of(plan, rows, firsts),
        read=read,
    )


def _attended(
    rows: np.ndarray, starts: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, starts and counts of the columns as attention takes them."""
    times = np.where(counts <= SHORT_CHUNK, counts, 1)
    firsts = np.cumsum(times) - times
    offsets = np.arange(times.sum()) - firsts.repeat(times)
    lengths = np.where(counts <= SHORT_CHUNK, 1, counts)
    return rows.repeat(times), starts.repeat(times) + offsets, lengths.repeat(times)


def embeds_of(plan: StepPlan, rows: Rows, firsts: np.ndarray) -> tuple[tuple[int, Tensor], ...]:
    """What of the embeddings this step computes, by its place in the flat batch; then they are forgotten."""
    found: list[tuple[int, Tensor]] = []
    if rows.embeds.keys().isdisjoint(plan.request_slots):
        return ()
    for row, start, count, place in zip(
        plan.request_slots, plan.num_computed_tokens, plan.num_scheduled_tokens, firsts, strict=True
    ):
        parts, later = rows.embeds.pop(row, ()), list[tuple[int, Tensor]]()
        for first, matrix in parts:
            begin, end = max(start, first), min(start + count, first + len(matrix))
            if begin < end:
                found.append((int(place) + begin - start, matrix[begin - first : end - first]))
            if first + len(matrix) > start + count:
                later.append((first, matrix))
        if later:
            rows.embeds[row] = tuple(later)
    return tuple(found)


def _matrix(embeds: Embeds) -> Tensor:
    dtype: torch.dtype = getattr(torch, embeds.dtype)
    # Read-only bytes are copied: torch has no tensors that must not be written.
    data = bytearray(embeds.data) if embeds.data.readonly else embeds.data
    return torch.frombuffer(data, dtype=dtype).view(embeds.num_rows, embeds.num_columns)
