"""Sums and gathered logits of the ranks on one machine, through memory that all of them have mapped.

    ranks = RankExchange(rank, sizes, memory)   memory: a mapping of `sizes.num_bytes`, initially zero
    ranks.begin_step(7)
    z = ranks.fused_add_norm(x, y, …)           y: this rank's part of a sum; x and z: equal bits on every rank
    ranks.check()

The ranks are processes that inherit a memory file, or threads in tests.  Every operation is one launch and may be
part of a recording, because the launch waits for the other ranks inside the kernel.  `fused/rank_sums.py` explains the
protocol and its laws.  `SharedGroup` offers these operations to a model, as a `RankGroup`.
"""

import mmap

import numpy as np
import torch
from torch import Tensor

from trouper.kernels.codegen.launch import address_in_torch, compiled, float_bits
from trouper.kernels.codegen.units import LANES, kind_of
from trouper.kernels.cpu.exchange_sizes import FLOAT_BYTES, ExchangeSizes, whole_pages
from trouper.kernels.cpu.memory import Float32Copies, num_threads_for, padded
from trouper.kernels.cpu.rank_sums import (
    FAILED,
    LABEL_BITS,
    NUM_DONE,
    OUR_LABEL,
    STATE,
    STEP,
    THEIR_LABEL,
    THEIR_NUMBER,
    num_items,
    shared_columns,
    shared_heads_norm,
    shared_sum,
)
from trouper.kernels.formats import Norm
from trouper.kernels.ops import RankGroup, RankShare, q_and_k


class RanksDisagreeError(RuntimeError):
    """Two ranks of a group made different calls.  Their results are unusable, and the group cannot continue."""


class RankExchange:
    """The group from the view of one rank.  One thread of each rank calls it.

    Args:
        rank: number of this rank, from 0.
        sizes: the layout of the memory, equal on all ranks.
        memory: the mapping that all ranks write.
    """

    def __init__(self, rank: int, sizes: ExchangeSizes, memory: mmap.mmap) -> None:
        self.rank, self.num_ranks = rank, sizes.num_ranks
        self._sizes = sizes
        self._bytes = np.frombuffer(memory, dtype=np.uint8)
        assert len(self._bytes) >= sizes.num_bytes, "a mapping of all that the group shares"
        self._state = np.zeros(STATE + 8, dtype=np.int64)
        # The state begins at a cache line.
        first = -(self._state.ctypes.data // 8) % 8
        self._state = self._state[first:]
        address = self._bytes.ctypes.data
        self._own = address, rank, self._state.ctypes.data, address_in_torch("syscall")
        self._parts = address + sizes.parts_offset, whole_pages(sizes.part_bytes)
        sheet = self._bytes[sizes.sheet_offset :][: sizes.sheet_numbers * FLOAT_BYTES]
        self._sheet = torch.from_numpy(sheet.view(np.float32))  # pyright: ignore[reportUnknownMemberType]

    def __repr__(self) -> str:
        return f"<RankExchange: {self.rank} of {self.num_ranks}, {self._state[NUM_DONE]} exchanges>"

    def begin_step(self, step: int) -> None:
        """Set the number of the step to which the following exchanges belong.

        Ranks compare it, so a rank that missed a step is detected.
        """
        self._state[STEP] = step

    def check(self) -> None:
        """Check that all exchanges so far were the same on all ranks.

        Raises:
            RanksDisagreeError: they were not, so all their results are unusable.
        """
        state = self._state
        if state[FAILED]:
            peer, number = int(state[FAILED]) - 1, int(state[NUM_DONE])
            raise RanksDisagreeError(
                f"rank {self.rank} was in {_described(int(state[OUR_LABEL]))}, "
                f"rank {peer} in {_described(int(state[THEIR_LABEL]))} "
                f"(exchange {int(state[THEIR_NUMBER])}; {number} are done here)"
            )

    def fused_add_norm(
        self,
        x_TE: Tensor | None,
        y_TE: Tensor,
        weight: Tensor | None = None,
        post_weight: Tensor | None = None,
        *,
        alpha: float = 1.0,
        eps: float = 0.0,
        norm: Norm = "rms",
    ) -> Tensor:
        """Add α times the sum of all ranks' y to x in place.  Returns the norm of x, or x itself without a weight.

        Args:
            x_TE: the residual stream; without it only the sum is returned.
            weight: [E] float32, or [2, E] for a layer norm.
            post_weight: weights of a norm that is applied to the sum first, in the same form.

        Raises:
            ValueError: y is larger than the shared buffer.
        """
        length, width = y_TE.shape
        self._check_part(length * width * y_TE.itemsize)
        z_TE = padded(length, width, y_TE.dtype) if x_TE is None or weight is not None else x_TE
        if length:
            compiled(shared_sum, kind_of(y_TE.dtype), self.num_ranks, norm)(
                num_items(length),
                *self._own,
                *self._parts,
                y_TE.data_ptr(),
                y_TE.stride(0),
                0 if x_TE is None else x_TE.data_ptr(),
                0 if x_TE is None else x_TE.stride(0),
                0 if post_weight is None else post_weight.data_ptr(),
                0 if weight is None else weight.data_ptr(),
                z_TE.data_ptr(),
                z_TE.stride(0),
                length,
                width,
                float_bits(alpha),
                float_bits(eps),
                num_threads=num_threads_for(length),
            )
        return z_TE

    def sum(self, y_TE: Tensor) -> Tensor:
        """Return the sum of all ranks' y.

        Ranks add in the same order, so all of them get the same bits. It waits for all other ranks.
        """
        return self.fused_add_norm(None, y_TE)

    def norm_heads_(
        self,
        q_TX: Tensor,
        k_TX: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        *,
        num_copies: int = 1,
        eps: float,
    ) -> None:
        """Normalise this rank's q and k in place, each over the heads of all ranks (OLMo-2).

        Args:
            q_TX: the beginning of rows that contain k directly behind q.
            k_TX: the keys in the same rows.
            q_weight: float32 weights for this rank's q.
            k_weight: float32 weights for this rank's k.
            num_copies: number of consecutive ranks that hold the same keys.
        """
        length, (q_width, k_width) = len(q_TX), (len(q_weight), len(k_weight))
        assert k_TX.data_ptr() == q_TX.data_ptr() + q_width * q_TX.itemsize, "one row holds both"
        self._check_part(length * 2 * FLOAT_BYTES)
        if length:
            kernel = compiled(shared_heads_norm, kind_of(q_TX.dtype), self.num_ranks, num_copies)
            kernel(
                num_items(length),
                *self._own,
                *self._parts,
                q_TX.data_ptr(),
                q_TX.stride(0),
                q_width,
                k_width,
                q_width * self.num_ranks,
                k_width * self.num_ranks // num_copies,
                q_weight.data_ptr(),
                k_weight.data_ptr(),
                length,
                float_bits(eps),
                num_threads=num_threads_for(length),
            )

    def max_logits_rows(self, vocab_size: int) -> int:
        """Return how many rows of logits the shared sheet can hold. More rows are gathered in several exchanges."""
        return self._sizes.sheet_numbers // vocab_size

    def gather_logits(
        self, product_RW: Tensor, first: int, vocab_size: int, scale: float, cap: float | None
    ) -> Tensor:
        """Return the logits [R, vocabulary] of all ranks' columns, finished like `Ops.finish_logits`.

        The result is in the shared memory, and a rank may read it until its next call.

        Args:
            product_RW: the product for this rank's columns: at least 16 of them, or none.
            first: the index of this rank's first column.

        Raises:
            ValueError: the sheet cannot hold this many rows.
        """
        length, width = product_RW.shape
        if length * vocab_size > self._sizes.sheet_numbers:
            raise ValueError(
                f"{length} rows of logits exceed the sheet of {self._sizes.sheet_numbers} numbers"
            )
        assert width >= LANES or not width
        sheet_RV = self._sheet[: length * vocab_size].view(length, vocab_size)
        if length:
            kernel = compiled(shared_columns, kind_of(product_RW.dtype), self.num_ranks)
            product, numbers = (product_RW.data_ptr(), product_RW.stride(0)), (float_bits(scale), float_bits(cap or 0.0))  # fmt: skip
            target = sheet_RV.data_ptr() + first * FLOAT_BYTES, vocab_size
            # This exchange writes nothing: when it ends, all ranks have finished reading the previous sheet.
            kernel(num_items(1), *self._own, *product, *target, length, 0, *numbers)
            threads = num_threads_for(length)
            kernel(num_items(length), *self._own, *product, *target, length, width, *numbers, num_threads=threads)  # fmt: skip
        return sheet_RV

    def all_agree(self, value: bool) -> bool:
        """Return whether every rank passed True; all ranks must call this at the same point."""
        votes = torch.full((1, LANES), float(value))
        return self.sum(votes)[0, 0].item() == self.num_ranks

    def _check_part(self, num_bytes: int) -> None:
        if num_bytes > self._sizes.part_bytes:
            raise ValueError(
                f"a part of {num_bytes} bytes exceeds the shared buffer of {self._sizes.part_bytes} bytes"
            )


def _described(label: int) -> str:
    return f"step {label >> LABEL_BITS} with {label & (1 << LABEL_BITS) - 1} rows"


class SharedGroup(RankGroup):
    """The group of ranks as a model uses it.

    Args:
        exchange: the connection with the other ranks.
        share: this rank's sizes and constants.
    """

    def __init__(self, exchange: RankExchange, share: RankShare) -> None:
        self.exchange = exchange
        self.rank, self.size = exchange.rank, exchange.num_ranks
        self._share = share
        self._float32 = Float32Copies()

    def __repr__(self) -> str:
        return f"<SharedGroup: {self.exchange!r}>"

    def begin_step(self, step: int) -> None:
        self.exchange.begin_step(step)

    def check(self) -> None:
        self.exchange.check()

    def all_agree(self, value: bool) -> bool:
        return self.exchange.all_agree(value)

    def forget_weights(self) -> None:
        self._float32.clear()

    def fused_add_norm(
        self,
        x_TE: Tensor,
        y_TE: Tensor,
        weight: Tensor | None,
        post_weight: Tensor | None = None,
    ) -> Tensor:
        return self.exchange.fused_add_norm(
            x_TE,
            y_TE,
            None if weight is None else self._float32.of(weight),
            None if post_weight is None else self._float32.of(post_weight),
            alpha=self._share.residual_scale,
            eps=self._share.norm_eps,
            norm=self._share.norm,
        )

    def all_heads_norm_(self, qkv_TND: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        q_TX, k_TX = q_and_k(qkv_TND, q_norm, k_norm)
        self.exchange.norm_heads_(
            q_TX,
            k_TX,
            self._float32.of(q_norm).view(-1),
            self._float32.of(k_norm).view(-1),
            num_copies=self._share.num_kv_copies,
            eps=self._share.norm_eps,
        )

    def finish_logits(self, product_RV: Tensor, scale: float, cap: float | None) -> Tensor:
        """Gather the columns of all ranks.  If there are more rows than the sheet can hold, they are copied from it in batches."""
        first, vocab_size = self._share.first_logit, self._share.vocab_size
        length, at_once = len(product_RV), self.exchange.max_logits_rows(vocab_size)
        if length <= at_once:
            return self.exchange.gather_logits(product_RV, first, vocab_size, scale, cap)
        logits_RV = torch.empty((length, vocab_size), dtype=torch.float32)
        for begin in range(0, length, at_once):
            rows = product_RV[begin : begin + at_once]
            part_RV = self.exchange.gather_logits(rows, first, vocab_size, scale, cap)
            logits_RV[begin : begin + len(rows)] = part_RV
        return logits_RV
