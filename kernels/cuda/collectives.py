"""The operations in which the GPUs of a model take part, as collective calls: `SharedOps` by NCCL (or gloo, in tests).

    T  tokens    E  hidden size    R  rows of logits    V  vocabulary, or the columns of a rank

Laws:
  * Each operation makes the same calls with the same sizes on every rank, whatever is in the tensors, so a step can be captured: NCCL's
    calls become nodes of the graph, and a replay on one rank meets the replays of the same graph on the others.
  * A sum has the same bits on all ranks: NCCL adds each number up in one place, and hands the sum on.  Which order that
    is depends on the size of the message, and with NVLink SHARP on the call; so where batches must not change bits the parts are
    gathered, and every rank adds them up in float32 in the order of the ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from trouper.kernels.cuda.norms import norm_by_sum_, sum_of_squares_
from trouper.kernels.cuda.ops import TritonOps
from trouper.kernels.ops import RankShare, SharedOps, q_and_k


class CollectiveSums(SharedOps):
    """The group as one rank calls it.

    Args:
        group: of all ranks, on the devices of their tensors.
        ops: of this rank, for what follows a sum.
        is_invariant: a sum of a row does not depend on how many rows there are.
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
        """Normalise as `Ops` does.  Keys that several ranks have count as often in the sum as in the number of its summands."""
        both = q_and_k(qkv_TND, q_norm, k_norm)
        sums_2T = torch.empty(2, len(qkv_TND), dtype=torch.float32, device=qkv_TND.device)
        for part_TX, sums_T in zip(both, sums_2T, strict=True):
            sum_of_squares_(part_TX, sums_T)
        sums_2T = self._sum(sums_2T)
        for part_TX, sums_T, weight in zip(both, sums_2T, (q_norm, k_norm), strict=True):
            num = part_TX.shape[1] * self.size
            norm_by_sum_(part_TX, sums_T, weight, num=num, eps=self._share.norm_eps)

    def finish_logits(self, product_RV: Tensor, scale: float, cap: float | None) -> Tensor:
        """Gather the columns of all ranks on the first; the others keep their own."""
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
        """Give all ranks the ids that the first has sampled."""
        dist.broadcast(sampled_C, src=0, group=self._group)

    def _sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, which overwrites this one or not."""
        if not self._is_invariant:
            dist.all_reduce(part, group=self._group)
            return part
        parts = list(part.new_empty(self.size, *part.shape).unbind(0))
        dist.all_gather(parts, part, group=self._group)
        total = parts[0].float()
        for other in parts[1:]:
            total += other
        return total.to(part.dtype)
