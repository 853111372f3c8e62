"""The plan of a step's attention on the CPU: the work items of the kernels in `decode.py` and `prefill.py`.

A step mixes prompts with sequences that decode.  A prompt's queries are cut into tiles, which attend together.  The
keys of a decoding token are cut into spans at fixed positions, so that many threads can read one long sequence; what
each span yields is merged afterwards.  Cuts depend only on positions, so a token gets the same bits in every batch.
"""

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import msgspec
import numpy as np
import torch

from trouper.kernels.cpu.attention import decode, prefill
from trouper.kernels.ops import Integers, OpsConfig, Spans

UNLIMITED = 2**62
# Each thread gets this many work items on average, so that threads which finish early take over work of others.
ITEMS_PER_THREAD = 4
# The columns of a token with its keys in one span; the first four depend on the token.
ONE_SPAN = (0, 0, 0, 0, -1, 1, 1, 0)
NO_MERGES, NO_TILES = np.empty((0, 3), np.int64), np.empty((0, 6), np.int64)


class NativePlan(msgspec.Struct, frozen=True, dict=True):
    """The arrays that the attention kernels read in one step.

    A launch can merge only a limited number of tokens, so `later` holds the plans of further launches for the spans
    beyond that.  A recorded step has none.
    """

    block_ids: np.ndarray
    spans: np.ndarray  # [., 8], see decode.py
    merges: np.ndarray  # [., 3], see decode.py
    partials: np.ndarray  # [., N, D + 2] float32
    heads: int  # KV heads in one work item
    tiles: np.ndarray  # [., 6], see prefill.py
    later: "tuple[NativePlan, ...]" = ()

    def with_blocks(self, block_ids: np.ndarray) -> Self:
        """Return the plan of the same step for layers with another block table. All other arrays are shared."""
        later = tuple(plan.with_blocks(block_ids) for plan in self.later)
        twin = msgspec.structs.replace(self, block_ids=block_ids, later=later)
        words = self.words.copy()
        words[0] = block_ids.ctypes.data
        vars(twin)["words"] = words
        return twin

    @functools.cached_property
    def words(self) -> np.ndarray:
        """The addresses and sizes of the arrays, in the order in which the decode kernels read them.

        A recording keeps the address of these words and overwrites them with those of each later step.
        """
        arrays = self.block_ids, self.spans, self.partials, self.merges
        tables, spans, partials, merges = (x.ctypes.data for x in arrays)
        return np.array((
            tables, self.block_ids.shape[1], spans, len(self.spans), self.heads, partials, merges, len(self.merges),
        ))  # fmt: skip


class _Spans:
    """The spans, merges and partial results that one launch collects."""

    def __init__(self) -> None:
        self.spans: list[np.ndarray] = []
        self.merges: list[tuple[int, int, int]] = []
        self.num_partials = 0

    def add(self, first: int, row: int, cuts: np.ndarray, end: int, num_tokens: int) -> None:
        """Add the spans of `num_tokens` tokens that follow `first` and read the keys cuts[0] … end - 1."""
        num = len(cuts)
        own = np.empty((num, 8), dtype=np.int64)
        own[:] = first, row, 0, end, 0, num_tokens, 0, num
        own[:, 2], own[:-1, 3], own[-1, 6] = cuts, cuts[1:], 1
        own[:, 4] = np.arange(self.num_partials, self.num_partials + num)
        self.spans.append(own)
        self.merges += [(first + t, self.num_partials + t * num, num) for t in range(num_tokens)]
        self.num_partials += num_tokens * num


class AttentionPlanner:
    """Makes the attention plans of all steps of a model.

    It has no state besides the model's sizes, so any thread may use it.
    """

    def __init__(self, config: OpsConfig) -> None:
        self._config = config
        self._span = decode.SPAN
        self._tile = prefill.SIDE // (config.num_q_heads // config.num_kv_heads)

    def plan(
        self,
        block_ids: np.ndarray,
        rows: Integers,
        starts: Integers,
        counts: Integers,
        window: int | None,
        are_prompts: np.ndarray | None = None,
        spans: Spans | None = None,
    ) -> NativePlan:
        """Implement `CpuOps.plan`."""
        rows_C, starts_C, counts_C = (np.asarray(x, np.int64) for x in (rows, starts, counts))
        if are_prompts is None and self._are_single(rows_C, starts_C, counts_C):
            return self._of_single(block_ids, rows_C, starts_C, window)
        firsts_C, ends_C = np.cumsum(counts_C) - counts_C, starts_C + 1
        begins_C = np.zeros_like(ends_C) if window is None else np.maximum(0, ends_C - window)
        is_lone_C = counts_C == 1 if are_prompts is None else ~are_prompts
        tile = self._tile * self._tiles_per_item(counts_C[~is_lone_C])
        sizes_C = self._tokens_of_spans(is_lone_C, rows_C, starts_C, begins_C)
        is_one_span_C = is_lone_C & (begins_C // self._span == starts_C // self._span)
        columns = firsts_C, rows_C, begins_C, ends_C
        zeros_C = np.zeros_like(ends_C)
        lone = *columns, zeros_C - 1, sizes_C, zeros_C + 1, zeros_C
        found, later = _Spans(), list[NativePlan]()
        found.spans.append(np.stack(lone, axis=1)[is_one_span_C & (sizes_C > 0)])
        tiles: list[tuple[int, int, int, int, int, int]] = []
        reach = UNLIMITED if window is None else window
        for i in np.flatnonzero(~is_one_span_C & (sizes_C > 0)).tolist():
            first, row, begin, end = (int(x[i]) for x in columns)
            if is_lone_C[i]:
                cuts = np.arange(begin // self._span, -(-end // self._span)) * self._span
                cuts[0] = begin
                found.add(first, row, cuts, end, int(sizes_C[i]))
                if len(found.merges) > decode.ROUND - decode.MOST_TOKENS:
                    later.append(self._plan_of(block_ids, found))
                    found = _Spans()
            else:
                start, count = int(starts_C[i]), int(counts_C[i])
                span_end = 0 if spans is None else int(spans.ends_C[i])
                sees_all = spans is not None and spans.ignore_window and span_end
                seen = span_end, UNLIMITED if sees_all else reach
                # The last tile sees the most keys, so it starts first.
                tiles += [
                    (first + offset, min(tile, count - offset), row, start + offset, *seen)
                    for offset in reversed(range(0, count, tile))
                ]
        return self._plan_of(block_ids, found, tiles, later)

    def _are_single(self, rows_C: np.ndarray, starts_C: np.ndarray, counts_C: np.ndarray) -> bool:
        """Test whether each entry is one token of another sequence, with its keys in one span."""
        if counts_C.max(initial=0) > 1 or starts_C.max(initial=0) >= self._span:
            return False
        return len(set(rows_C.tolist())) == len(rows_C)

    def _of_single(
        self, block_ids: np.ndarray, rows_C: np.ndarray, starts_C: np.ndarray, window: int | None
    ) -> NativePlan:
        """Make the plan of such entries, the same as `plan` in fewer array operations."""
        spans = np.empty((len(rows_C), 8), np.int64)
        spans[:] = ONE_SPAN
        spans[:, 0] = np.arange(len(rows_C))
        spans[:, 1] = rows_C
        if window is not None:
            spans[:, 2] = np.maximum(0, starts_C + 1 - window)
        spans[:, 3] = starts_C + 1
        return NativePlan(
            block_ids,
            spans,
            NO_MERGES,
            np.empty((0, self._config.num_q_heads, self._config.head_dim + 2), np.float32),
            self._heads_per_item(len(spans)),
            NO_TILES,
        )

    def _plan_of(
        self,
        block_ids: np.ndarray,
        found: _Spans,
        tiles: Sequence[tuple[int, int, int, int, int, int]] = (),
        later: Sequence[NativePlan] = (),
    ) -> NativePlan:
        spans_P = np.concatenate((np.empty((0, 8), np.int64), *found.spans))
        num_heads, width = self._config.num_q_heads, self._config.head_dim
        return NativePlan(
            block_ids,
            spans_P,
            np.array(found.merges, dtype=np.int64).reshape(-1, 3),
            np.empty((found.num_partials, num_heads, width + 2), np.float32),
            self._heads_per_item(len(spans_P)),
            np.array(tiles, dtype=np.int64).reshape(-1, 6),
            tuple(later),
        )

    def _tokens_of_spans(
        self, is_lone_C: np.ndarray, rows_C: np.ndarray, starts_C: np.ndarray, begins_C: np.ndarray
    ) -> np.ndarray:
        """Return for each entry the number of tokens that its spans serve, or 0 if an earlier entry's spans serve it.

        The tokens that verify drafts follow each other in one sequence.  They read the same keys, so one pass over
        the keys serves several of them, unless one token sees a span more.  No result depends on the grouping.
        """
        sizes_C = np.ones_like(starts_C)
        last_spans_C = starts_C // self._span
        follows = is_lone_C[1:] & is_lone_C[:-1] & (rows_C[1:] == rows_C[:-1])
        follows &= (starts_C[1:] == starts_C[:-1] + 1) & (begins_C[1:] == begins_C[:-1])
        follows &= last_spans_C[1:] == last_spans_C[:-1]
        if not follows.any():
            return sizes_C
        firsts = np.append(np.flatnonzero(np.append(True, ~follows)), len(starts_C))
        num_heads, num_kv = self._config.num_q_heads, self._config.num_kv_heads
        most = decode.tokens_of_span(num_heads // num_kv)
        few_heads = num_kv < ITEMS_PER_THREAD * torch.get_num_threads()
        for first, stop in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
            num = stop - first
            if num > 1:
                num_spans = max(-(-num // most), 2 if few_heads else 1)
                sizes_C[first:stop] = 0
                cuts = [first + num * i // num_spans for i in range(num_spans + 1)]
                for begin, end in pairwise(cuts):
                    sizes_C[begin] = end - begin
        return sizes_C

    def _tiles_per_item(self, counts: np.ndarray) -> int:
        """Return how many query tiles one work item has.  No result depends on it."""
        num_tiles = int((-(-counts // self._tile)).sum())
        num_items = ITEMS_PER_THREAD * torch.get_num_threads()
        return max(1, min(num_tiles * self._config.num_kv_heads // num_items, prefill.PARTS))

    def _heads_per_item(self, num_spans: int) -> int:
        """Return how many KV heads one work item has.  No result depends on it.

        More heads are faster: a thread prefetches the keys of the next head while it processes one.
        """
        num_threads = torch.get_num_threads()
        heads = num_kv_heads = self._config.num_kv_heads
        if num_threads == 1:
            return heads
        while heads % 2 == 0 and num_spans * num_kv_heads < ITEMS_PER_THREAD * heads * num_threads:
            heads //= 2
        return heads
