"""Hold everything that an engine keeps in the memory of a GPU: weights, adapters, KV cache, tables of request slots, step inputs.

Captured steps read and write fixed addresses, so everything except the activations is allocated once, here. The KV cache
gets the memory that remains: `kv_budget` computes its size.

The adapter of each row is data at a fixed address too, so one CUDA graph serves every mixture of adapters. Steps without
adapters have graphs of their own, which launch nothing for them.
"""

from collections.abc import Iterable, Sequence
from typing import Self

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trouper.actors.executor.models.decoder import KVCacheSpec, StateSpec
from trouper.actors.executor.models.native_decoder import (
    NativeDecoder,
    kv_cache_specs,
    ops_config,
    rank_share,
)
from trouper.actors.executor.models.sharding import ALONE, ModelPart, Shard
from trouper.actors.executor.runners.cuda.machine import Machine
from trouper.actors.executor.runners.cuda.step_inputs import Layout, TableViews, pack, views
from trouper.actors.executor.steps.adapter_slots import AdapterSlots
from trouper.actors.executor.steps.cache_memory import KVCache
from trouper.actors.executor.weights.decoder import Wrap, load_decoder
from trouper.actors.messages.steps import NewSequence, StepPlan
from trouper.config.adapters import LoRAConfig
from trouper.config.engine_config import EngineConfig
from trouper.errors import TrouperValidationError
from trouper.kernels.cuda.collectives import CollectiveSums
from trouper.kernels.cuda.lora import BLOCK_ROWS, DeviceRows, TritonLoRA, max_blocks
from trouper.kernels.cuda.ops import TritonOps
from trouper.kernels.linear import RowTable

# The numbers that describe a block of rows: adapter slot, first row, number of rows.
COLUMNS = 3


class DeviceAdapters:
    """The adapter slots on the device, created with the first wrapped layer.

    Args:
        dtype: the dtype of the model, which adapters get too.
        max_rows: the most tokens of a step.
    """

    def __init__(
        self, config: LoRAConfig, dtype: torch.dtype, machine: Machine, max_rows: int
    ) -> None:
        self._config, self._machine = config, machine
        self._table = RowTable(max_rows, BLOCK_ROWS)
        self._max_rows = max_rows
        self._max_blocks = max_blocks(max_rows, config.max_loras)
        self._weights: list[TritonLoRA] = []
        self._is_on_host = False
        self._device: DeviceRows | None = None
        self._are_used = False
        self.slots = AdapterSlots(config, dtype, self, self._make)

    def __repr__(self) -> str:
        return f"<DeviceAdapters of {len(self._weights)} layers>"

    def of(self, num_rows: int) -> DeviceRows | None:
        """Return the rows of the step during its launch, or None if it has no adapters."""
        return self._device if self._are_used else None

    def use(self, *, are_used: bool) -> None:
        """Set whether the following launches add adapters.

        Graphs with and without adapters are captured separately, so steps without any are not slower. It is set for
        each step.
        """
        self._are_used = are_used

    def begin_step(self, plan: StepPlan, slot_of_request: np.ndarray) -> bool:
        """Copy the adapter of each token of a plan to the device.

        Args:
            slot_of_request: the adapter slot of each request slot, or 0 without an adapter.

        Returns:
            Whether any token has an adapter.
        """
        slots = slot_of_request[list(plan.request_slots)]
        if not slots.any():
            return False
        assert self._device is not None
        self._table.fill(slots.repeat(plan.num_scheduled_tokens))
        table, num_blocks = self._table, int(self._table.blocks[0, 0])
        assert num_blocks <= self._max_blocks, f"{num_blocks} blocks of adapters"
        blocks = table.blocks[: num_blocks + 1]
        # The first row of the last block plus its number of rows.
        num_rows = int(blocks[num_blocks, 1:].sum())
        self._upload(self._device, table.order[:num_rows], blocks)
        return True

    def sleep(self) -> None:
        """Move the adapters to host memory, and free the buffers for the rows of a step."""
        self._device = None
        if not self._is_on_host:
            for weights in self._weights:
                weights.move(self._machine.to_host)
        self._is_on_host = True

    def wake_weights(self) -> None:
        """Move the adapters back from host memory to the device.

        Idempotent. They keep their slots, so requests need no change.
        """
        if self._is_on_host:
            for weights in self._weights:
                weights.move(self._machine.to_device)
        self._is_on_host = False

    def allocate(self) -> None:
        """Allocate the buffers for the rows of a step. At first, no row has an adapter."""
        empty = self._machine.empty
        self._device = DeviceRows(
            empty((self._max_rows,), torch.int32),
            empty((self._max_blocks + 1, COLUMNS), torch.int32),
            self._config.max_loras,
        )
        self._upload(self._device, np.zeros(0), np.zeros((1, COLUMNS)))

    def _upload(self, rows: DeviceRows, order: np.ndarray, blocks: np.ndarray) -> None:
        for host, device in ((order, rows.order), (blocks, rows.blocks)):
            if len(host):
                self._machine.upload(host.astype(np.int32), out=device.narrow(0, 0, len(host)))

    def _make(
        self,
        part_sizes: Sequence[int],
        num_in: int,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
    ) -> TritonLoRA:
        weights = TritonLoRA(
            part_sizes, num_in, num_slots, max_rank, empty=self._machine.empty, dtype=dtype
        )
        self._weights.append(weights)
        return weights


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
        self.state_specs: tuple[StateSpec, ...] | None = ()
        # The sums over all ranks, once the weights are loaded.
        self.sums: CollectiveSums | None = None

    def to_host(self, decoder: NativeDecoder[TritonOps]) -> None:
        """Move all weights to pinned memory of the host, for a sleep at level 1.

        The device's memory becomes free for other programs. `to_device` is the reverse.
        """
        decoder.move(self._machine.to_host)

    def to_device(self, decoder: NativeDecoder[TritonOps]) -> None:
        """Move all weights back to the GPU.

        The tensors get new addresses, so captured graphs are not valid any more.
        """
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
    """The step memory: tensors at fixed addresses, which captured steps read and write.

    `views` are the tables within `arena`; `step_inputs.py` describes `inputs`.
    """

    kv: KVCache
    arena: Tensor  # [words] int32
    views: TableViews
    inputs: Tensor  # [6, M + 1] int32

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
        """Allocate the step memory for this many KV blocks, without any sequence."""
        arena = machine.empty((layout.num_words,), torch.int32)
        history = machine.empty((layout.num_slots, layout.vocab_size), torch.int32)
        tables = views(layout, arena, history)
        # After a step with logits that are not finite, the next one reads a token that was never written. It must be valid.
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
        """Count the tokens of a sequence for penalties; `sampling_rows.py` describes the counts.

        Args:
            prompt_spans: the ranges of the prompt with tokens rather than embeddings.
        """
        history = self.views.sampling.history[new.request_slot].zero_()
        tokens = self.views.tokens[new.request_slot].narrow(0, 0, len(new.token_ids))
        outputs = tokens[new.num_prompt :]
        for begin, end in prompt_spans:
            history.index_fill_(0, tokens[begin:end].long(), 1)
        history.index_add_(0, outputs.long(), torch.full_like(outputs, 2))


# What one graph takes in addition to its tensors: its nodes and their arguments.
GRAPH_BYTES = 8 * 2**20


def kv_budget(*, free: int, total: int, utilization: float, reserved: int) -> int:
    """Compute the bytes of the KV cache: the share `utilization` of all memory, minus used and reserved memory.

    Args:
        free: the free bytes while weights and request slots are resident. Memory of other processes counts as used.
        reserved: the bytes for the largest step and for graphs.

    Raises:
        TrouperValidationError: nothing remains; the message lists what uses how much.
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
