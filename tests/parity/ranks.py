"""Tensor-parallel ranks as threads of one process: each has its part of the model, and reaches the others by shared memory."""

import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from trouper.actors.executor.cpu.runner import CpuRunner
from trouper.actors.executor.models.registry import decoder_traits
from trouper.actors.executor.models.sharding import Shard
from trouper.kernels.cpu.rank_exchange import ExchangeSizes, RankExchange
from trouper.kernels.cpu.shared_group import RankShare, SharedGroup


def groups_of(config, size):
    """The group as each of its ranks has it."""
    traits = decoder_traits(config.model.hf_config, config.model.architecture)
    dtype = getattr(torch, config.dtype)
    num_rows = config.scheduler.max_num_scheduled_tokens
    part_bytes = num_rows * traits.hidden_size * dtype.itemsize
    sizes = ExchangeSizes(size, part_bytes, num_rows * traits.vocab_size)
    memory = mmap.mmap(-1, sizes.num_bytes)
    for rank in range(size):
        share = RankShare(
            traits.vocab_size,
            traits.norm_eps,
            traits.residual_scale,
            Shard(rank, size).vocabulary(traits.vocab_size)[0],
            max(1, size // traits.num_kv_heads),
        )
        exchange = RankExchange(rank, sizes, memory)
        yield SharedGroup(exchange, share, dtype, traits.hidden_size)


class RanksInThreads:
    """All ranks of a model, each in a thread of its own: every plan goes to all of them, and all must say the same."""

    def __init__(self, config, size, stage=None):
        self.pools = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(size)]
        self.groups = list(groups_of(config, size))
        self.runners = [CpuRunner(config, stage, group) for group in self.groups]

    def on_each(self, method, *args):
        calls = [
            pool.submit(self.called, rank, method, *args) for rank, pool in enumerate(self.pools)
        ]
        return [call.result() for call in calls]

    def called(self, rank, method, *args):
        torch.set_num_threads(1)  # it is the thread's own
        return getattr(self.runners[rank], method)(*args)

    def load(self):
        return min(self.on_each("load"), key=lambda info: info.num_blocks)

    def execute(self, plan):
        for group in self.groups:
            group.exchange.begin_step(plan.step)
        answer, *others = self.on_each("execute", plan)
        for group in self.groups:
            group.exchange.check()
        assert all(other == answer for other in others)
        return answer

    def close(self):
        self.on_each("close")
        for pool in self.pools:
            pool.shutdown()


@contextmanager
def ranks_in_threads(*args):
    runner = RanksInThreads(*args)
    try:
        yield runner
    finally:
        runner.close()
