"""The ranks that share out the layers of a model among them, as one of them calls the others.

    y_TE         what a rank's part of o, or of an MLP, makes of all tokens; the sum of all ranks' is the layer's
    x_TE         the residual stream, of which every rank keeps its own copy, the same bits in all
    product_RV   this rank's columns of the logits; all ranks' side by side, [R, V], are finished on rank 0, and anything is on the others
    qkv_TND      this rank's queries and keys, which are normalised over the heads of all ranks together

One mechanism with two kinds of sum: `kernels/cpu/shared_group.py` adds up in memory that the ranks share, `kernels/cuda/collectives.py` by
collective calls between GPUs.

Laws:
  * A group stands beside a rank's operations and has none of its own besides those of `SharedOps`.
  * All ranks make the same calls in the same order, with as many rows; none decides by itself whether to make one.
  * All come to the same bits. On the CPU sums are in float32 and in the order of the ranks; on GPUs NCCL chooses the order, but where
    batches must not change it.
"""

from typing import NamedTuple, Protocol

from trouper.kernels.formats import Norm
from trouper.kernels.ops import SharedOps


class RankShare(NamedTuple):
    """The sizes and constants that the operations of a rank depend on, beside their arguments."""

    vocab_size: int  # of all ranks
    norm_eps: float
    residual_scale: float = 1.0
    first_logit: int = 0  # column of this rank's head
    num_logits: int = 0  # columns of a rank's head, of which the last has no more
    num_kv_copies: int = 1  # ranks that have the same heads of keys, one after the other
    norm: Norm = "rms"


class RankGroup(SharedOps, Protocol):
    """The ranks of a model on the CPU as one of them calls them; they find out by themselves that they differ, and vote."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def begin_step(self, step: int) -> None:
        """Say which step the calls that follow belong to."""
        ...

    def check(self) -> None:
        """Raise if some rank has not made the same calls: then nothing that they gave is of use."""
        ...

    def all_agree(self, value: bool) -> bool:
        """Return whether every rank says yes; all ask at the same time."""
        ...

    def forget_weights(self) -> None:
        """Give back what has been made of weights, none of which is used again."""
        ...
