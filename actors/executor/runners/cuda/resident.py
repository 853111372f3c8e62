"""The memory of an engine that is awake, beside the weights: KV cache, request slots, inputs of a step.

The share of a GPU's memory that is left for keys and values.  Pure.
"""

from collections.abc import Iterable, Sequence
from typing import Self

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from trouper.actors.executor.models.decoder import KVCacheSpec
from trouper.actors.executor.models.native_decoder import (
    NativeDecoder,
    kv_cache_specs,
    ops_config,
    rank_share,
)
from trouper.actors.executor.models.sharding import ALONE, ModelPart, Shard
from trouper.actors.executor.runners.cuda.machine import Machine
from trouper.actors.executor.runners.cuda.step_inputs import pack
from trouper.actors.executor.runners.cuda.tables import Layout, TableViews, views
from trouper.actors.executor.steps.kv_memory import KVCache
from trouper.actors.executor.weights.decoder import Wrap, load_decoder
from trouper.actors.messages.steps import NewSequence
from trouper.config.resolve import EngineConfig
from trouper.errors import TrouperValidationError
from trouper.kernels.cuda.collectives import CollectiveSums
from trouper.kernels.cuda.ops import TritonOps


class DeviceModel:
    """A model, or one rank's part of it, whose weights are on a GPU.

    Args:
        machine: the GPU.
        ranks: the tensor-parallel ranks, each on a GPU of its own, if there are several.
    """

    def __init__(
        self, config: EngineConfig, machine: Machine, ranks: dist.ProcessGroup | None
    ) -> None:
        self._config, self._machine, self.ranks = config, machine, ranks
        shard = ALONE if ranks is None else Shard(ranks.rank(), ranks.size())
        self.part = ModelPart.of(config, shard=shard)
        self.cache_specs = kv_cache_specs(self.part.traits)
        # The sums over all ranks, once the weights are loaded.
        self.sums: CollectiveSums | None = None

    def to_host(self, decoder: NativeDecoder[TritonOps]) -> None:
        """Move all weights to pinned memory of the host."""
        decoder.move(self._machine.to_host)

    def to_device(self, decoder: NativeDecoder[TritonOps]) -> None:
        """Move all weights back to the GPU."""
        decoder.move(self._machine.to_device)

    def load(self, wrap: Wrap | None = None) -> NativeDecoder[TritonOps]:
        """Read the weights into the GPU's memory, one parameter at a time.

        Raises:
            TrouperValidationError: the checkpoint does not fit the config.
            UnsupportedFeatureError: the model has layers without kernels for a GPU, such as experts.
        """
        config, part = self._config, self.part
        ops = TritonOps(
            ops_config(part.traits, getattr(torch, config.dtype), config.block_size),
            max_length=config.max_model_len,
            is_invariant=config.batch_invariant,
        )
        if self.ranks is not None:
            share = rank_share(part.whole, part.shard)
            self.sums = CollectiveSums(self.ranks, ops, share, is_invariant=config.batch_invariant)
        return load_decoder(
            config,
            part.whole,
            ops=lambda: ops,
            shared=self.sums,
            device=self._machine.device,
            shard=part.shard,
            wrap=wrap,
        )

    def leave_ranks(self) -> bool:
        """Drop the group of ranks. Returns whether there was one to drop."""
        had_ranks = self.ranks is not None
        self.ranks = self.sums = None
        return had_ranks


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
        num_blocks: int,
        *,
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
