"""The experts of each token, and their weights, from a router's logits; the formula is that of `kernels/experts.py`."""

# pyright: reportUnknownMemberType=false
# torch leaves the types of some functions open.

from torch import Tensor


def route(
    logits_TX: Tensor, num_experts: int, top_k: int, *, is_normalised: bool
) -> tuple[Tensor, Tensor]:
    """Return each token's experts [T, k] int64, the likeliest first, and their weights [T, k] float32."""
    scores_TX = logits_TX.narrow(1, 0, num_experts).float()
    # stable: of two equal ones the first
    best_TX, ids_TX = scores_TX.sort(dim=1, descending=True, stable=True)
    best_TK, ids_TK = (x.narrow(1, 0, top_k) for x in (best_TX, ids_TX))
    among = best_TK if is_normalised else scores_TX
    return ids_TK, (best_TK - among.logsumexp(dim=1, keepdim=True)).exp()
