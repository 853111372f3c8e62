"""The shared operations of the GPUs of a model, as collective calls by NCCL (or gloo, in tests).

    T  tokens    E  hidden size    R  rows of logits    V  vocabulary, or the columns of a rank

Laws:
  * Each operation makes the same calls with the same sizes on every rank, whatever the tensors contain.  So a step can be
    captured: NCCL's calls become nodes of the graph, and the replays of one graph meet on all ranks.
  * A sum has the same bits on all ranks, because NCCL adds each number in one place and distributes the sum.  The order of
    the addition depends on the size of the message, and with NVLink SHARP on the call.  For batch invariance the parts are
    gathered instead, and every rank adds them in float32 in the order of the ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from trouper.kernels.cuda.norms import norm_by_sum_, sum_of_squares_
from trouper.kernels.cuda.ops import TritonOps
from trouper.kernels.ops import RankShare, SharedOps, q_and_k


class CollectiveSums(SharedOps):
    """The group from the view of one rank.

    Args:
        group: the process group of all ranks, on the devices of their tensors.
        ops: this rank's operations, for the work that follows a sum.
        share: this rank's sizes and constants.
        is_invariant: whether a row's sum must not depend on the number of rows.
    """

    def __init__(
        self, group: dist.ProcessGroup, ops: TritonOps, share: RankShare, *, is_invariant: bool
    ) -> None:
        self._group, self._ops, self._share = group, ops, share
        self._is_invariant = is_invariant
        self.rank, self.size = group.rank(), group.size()

    def __repr__(self) -> str:
        return f"<CollectiveSums: {self.rank} of {self.size}>"

    def fused_add_norm(
        self,
        x_TE: Tensor,
        y_TE: Tensor,
        weight: Tensor | None,
        post_weight: Tensor | None = None,
    ) -> Tensor:
        return self._ops.fused_add_norm(x_TE, self._sum(y_TE), weight, post_weight)

    def all_heads_norm_(self, qkv_TND: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """Implement `SharedOps.all_heads_norm_`.

        Ranks that share keys add them equally often to the sum and to the number of summands, so the mean is right.
        """
        both = q_and_k(qkv_TND, q_norm, k_norm)
        sums_2T = torch.empty(2, len(qkv_TND), dtype=torch.float32, device=qkv_TND.device)
        for part_TX, sums_T in zip(both, sums_2T, strict=True):
            sum_of_squares_(part_TX, sums_T)
        sums_2T = self._sum(sums_2T)
        for part_TX, sums_T, weight in zip(both, sums_2T, (q_norm, k_norm), strict=True):
            num = part_TX.shape[1] * self.size
            norm_by_sum_(part_TX, sums_T, weight, num=num, eps=self._share.norm_eps)

    def finish_logits(self, product_RV: Tensor, scale: float, cap: float | None) -> Tensor:
        """Gather the columns of all ranks on the first rank.  The others keep their own."""
        num_rows, width = product_RV.shape
        most = self._share.num_logits
        if width < most:
            product_RV = torch.nn.functional.pad(product_RV, (0, most - width))
        parts = None
        if self.rank == 0:
            parts = list(product_RV.new_empty(self.size, num_rows, most).unbind(0))
        dist.gather(product_RV, parts, dst=0, group=self._group)
        if parts is None:
            return product_RV
        logits_RV = torch.cat(parts, 1)[:, : self._share.vocab_size].contiguous()
        return self._ops.finish_logits(logits_RV, scale, cap)

    def tell(self, sampled_C: Tensor) -> None:
        """Send the ids that the first rank has sampled to all ranks."""
        dist.broadcast(sampled_C, src=0, group=self._group)

    def _sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts.  It may overwrite this rank's part."""
        if not self._is_invariant:
            dist.all_reduce(part, group=self._group)
            return part
        parts = list(part.new_empty(self.size, *part.shape).unbind(0))
        dist.all_gather(parts, part, group=self._group)
        total = parts[0].float()
        for other in parts[1:]:
            total += other
        return total.to(part.dtype)
