"""The operations in which all ranks of a model take part, over memory that all have mapped: a `RankGroup`."""

import torch
from torch import Tensor

from trouper.kernels.cpu.float32_copies import Float32Copies
from trouper.kernels.cpu.rank_exchange import RankExchange
from trouper.kernels.ops import q_and_k
from trouper.kernels.ranks import RankShare


class SharedGroup:
    """The group as one rank calls it.

    Args:
        exchange: with the other ranks.
    """

    def __init__(self, exchange: RankExchange, share: RankShare) -> None:
        self.exchange = exchange
        self.begin_step, self.check = exchange.begin_step, exchange.check
        self.all_agree = exchange.all_agree
        self.rank, self.size = exchange.rank, exchange.num_ranks
        self._share = share
        self._float32 = Float32Copies()

    def __repr__(self) -> str:
        return f"<SharedGroup: {self.exchange!r}>"

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
        """Put the columns of all ranks side by side; more rows than the sheet has are copied from it in turns."""
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
