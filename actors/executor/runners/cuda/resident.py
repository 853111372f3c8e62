"""The memory of an engine that is awake, beside the weights: KV cache, request slots, inputs of a step.

The share of a GPU's memory that is left for keys and values.  Pure.
"""

from collections.abc import Iterable, Sequence
from typing import Self

import msgspec
import torch
from torch import Tensor

from trouper.actors.executor.runners.cuda.machine import Machine
from trouper.actors.executor.runners.cuda.step_inputs import pack
from trouper.actors.executor.runners.cuda.tables import Layout, TableViews, views
from trouper.actors.executor.steps.kv_memory import KVCache, KVCacheSpec
from trouper.actors.messages.steps import NewSequence
from trouper.errors import TrouperValidationError


class Resident(msgspec.Struct, frozen=True):
    """Tensors at fixed addresses, which captured steps read and write."""

    kv: KVCache
    arena: Tensor  # [words] int32
    views: TableViews
    inputs: Tensor  # [6, M + 1] int32, see step_inputs.py

    @classmethod
    def allocate(
        cls,
        machine: Machine,
        layout: Layout,
        kv_specs: Sequence[KVCacheSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> Self:
        arena = machine.empty((layout.num_words,), torch.int32)
        history = machine.empty((layout.num_slots, layout.vocab_size), torch.int32)
        tables = views(layout, arena, history)
        # The step behind one whose logits are not finite reads a token that was never written: it must be one.
        tables.tokens.zero_()
        return cls(
            kv=KVCache.allocate(
                kv_specs,
                num_blocks=num_blocks,
                block_size=block_size,
                empty=lambda shape: machine.empty(shape, dtype),
            ),
            arena=arena,
            views=tables,
            inputs=machine.upload(pack(None, layout.num_slots + 1)),
        )

    def write_history(self, new: NewSequence, prompt_spans: Iterable[tuple[int, int]]) -> None:
        """Count the tokens of a sequence, as `sampling_rows.py` says; those of its prompt lie in the spans."""
        history = self.views.sampling.history[new.request_slot].zero_()
        tokens = self.views.tokens[new.request_slot].narrow(0, 0, len(new.token_ids))
        outputs = tokens[new.num_prompt :]
        for begin, end in prompt_spans:
            history.index_fill_(0, tokens[begin:end].long(), 1)
        history.index_add_(0, outputs.long(), torch.full_like(outputs, 2))


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
