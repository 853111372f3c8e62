"""The LoRA adapters of a model on a GPU, and the adapter of each token of a step.

Steps without adapters have CUDA graphs of their own, which launch nothing for adapters. In the other graphs, the rows and
their adapters are data at a fixed address, so one graph serves every mixture of adapters.
"""

from collections.abc import Sequence

import numpy as np
import torch

from trouper.actors.executor.runners.cuda.machine import Machine
from trouper.actors.executor.steps.adapter_slots import AdapterSlots
from trouper.actors.messages.steps import StepPlan
from trouper.config.adapters import LoRAConfig
from trouper.kernels.cuda.lora import BLOCK_ROWS, DeviceRows, TritonLoRA, max_blocks
from trouper.kernels.lora import RowTable

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
