"""A device that pools and computes nothing: a result is made of its column's own facts, as `simulated_result` says."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.simulation.simulated_device import ENTRY_BYTES, Conditions, SimulatedSteps
from trouper.actors.executor.device import DeviceInfo
from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.steps import PoolDone, PoolEntry, PoolPlan, StepFailed


class SimulatedEncoder(SimulatedSteps[PoolPlan]):
    """A `Device` that pools: the result of a column is made of its tokens and its task, [size] or [tokens, size].

    `owners` names the sequence of each entry of a plan, which the plan does not; without it every result is finite.
    """

    _kind = PoolPlan

    def __init__(
        self,
        size: int,
        max_steps_in_flight: int,
        conditions: Conditions | None = None,
        owners: Callable[[PoolPlan], tuple[SequenceId, ...]] | None = None,
    ) -> None:
        super().__init__(DeviceInfo(1, 1, "float32", "simulated"), max_steps_in_flight, conditions)
        self._size = size
        self._owners = owners

    def __repr__(self) -> str:
        return f"<SimulatedEncoder {len(self._queue)} steps out>"

    def _run(self, plan: PoolPlan) -> PoolDone | StepFailed:
        lengths = [len(column.token_ids) for column in plan.entries]
        if not lengths or lengths != sorted(lengths) or lengths[0] == 0:
            raise ValueError(f"step {plan.step}: columns of {lengths} tokens")
        if plan.epoch <= self._refused_epoch:
            return StepFailed(plan.step, "an earlier step failed")
        owners = () if self._owners is None else self._owners(plan)
        error = self._conditions.error(plan, owners)
        if error is not None:
            self._refused_epoch = plan.epoch
            return StepFailed(plan.step, error.message)
        arrays = [simulated_result(column, self._size) for column in plan.entries]
        if owners:
            for owner, array, length in zip(owners, arrays, lengths, strict=True):
                if not self._conditions.is_finite(owner, length):
                    array[..., 0] = np.nan
        return PoolDone(plan.step, tuple(arrays))

    def _forget(self) -> None:
        """There is nothing but weights."""


def simulated_result(column: PoolEntry, size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Compute what a `SimulatedEncoder` must yield for an entry in any batch; of a token task a row for each token."""
    is_of_tokens = column.task.startswith("token_")
    facts = (column.token_ids, column.token_type_ids, column.task)
    seed = int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=ENTRY_BYTES).digest())
    shape = (len(column.token_ids), size) if is_of_tokens else (size,)
    return np.random.default_rng(seed).standard_normal(shape, np.float32)
