"""The share of a GPU's memory that is left for keys and values.  Pure."""

from trouper.errors import TrouperValidationError

GRAPH_BYTES = 8 * 2**20  # of one graph beside its tensors: its nodes and their arguments


def kv_budget(*, free: int, total: int, utilization: float, reserved: int) -> int:
    """Compute the bytes of the cache: the share `utilization` of all memory, less what is taken and what is `reserved`.

    Args:
        free: with weights and rows resident; what other processes took counts as taken.
        reserved: for the largest step, and for graphs.

    Raises:
        TrouperValidationError: nothing is left; it says what takes how much.
    """
    taken = total - free
    budget = int(total * utilization) - taken - reserved
    if budget <= 0:
        gib = 2**30
        raise TrouperValidationError(
            f"no memory is left for the KV cache: of {total / gib:.1f} GiB {taken / gib:.1f} are taken and "
            f"{reserved / gib:.1f} are needed by a step; raise gpu_memory_utilization, or lower "
            "max_num_batched_tokens or max_num_seqs",
            parameter="gpu_memory_utilization",
            value=utilization,
        )
    return budget
