"""Tensor-parallel ranks as threads of one process: each has its part of the model, and reaches the others by shared memory."""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import pytest
import torch

from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.native_decoder import rank_share
from trouper.actors.executor.models.sharding import Shard
from trouper.actors.executor.runners.cpu.models import NativeModel, Share
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.executor.runners.cpu.stage_runner import StageRunner
from trouper.actors.executor.worker_links import ModelSizes, SharedSizes, create_shared_files
from trouper.kernels.codegen import units
from trouper.kernels.cpu.exchange_sizes import ExchangeSizes
from trouper.kernels.cpu.rank_exchange import RankExchange, SharedGroup


def groups_of(config, size):
    """The group as each of its ranks has it."""
    traits = decoder_traits(config.model.hf_config, config.model.architecture)
    dtype = getattr(torch, config.dtype)
    num_rows = config.scheduler.max_num_scheduled_tokens
    part_bytes = num_rows * traits.hidden_size * dtype.itemsize
    sizes = ExchangeSizes(size, part_bytes, num_rows * traits.vocab_size)
    memory = mmap.mmap(-1, sizes.num_bytes)
    for rank in range(size):
        share = rank_share(traits, Shard(rank, size))
        exchange = RankExchange(rank, sizes, memory)
        yield SharedGroup(exchange, share)


class RanksInThreads:
    """All ranks of a model, each in a thread of its own: every plan goes to all of them, and all must say the same."""

    def __init__(self, config, size, stage=None):
        self.pools = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(size)]
        self.groups = list(groups_of(config, size))
        self.runners = [
            CpuRunner(config, NativeModel(config, stage, group), Share(group=group))
            for group in self.groups
        ]

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
    if not units.can_multiply():
        pytest.skip("sums of ranks are compiled kernels")
    runner = RanksInThreads(*args)
    try:
        yield runner
    finally:
        runner.close()


class WorkersInThreads(RanksInThreads):
    """The workers that an engine has as processes, each in a thread: their own group, rings and recorded steps."""

    def __init__(self, config, num_ranks, num_stages=1):
        scheduler = msgspec.structs.replace(config.scheduler, num_stages=num_stages)
        config = msgspec.structs.replace(
            config, scheduler=scheduler, tensor_parallel_size=num_ranks
        )
        traits = decoder_traits(config.model.hf_config, config.model.architecture)
        files = create_shared_files(
            SharedSizes.of(config, ModelSizes(traits.hidden_size, traits.vocab_size))
        )
        self.pools = [ThreadPoolExecutor(1) for _ in files]
        # each worker closes its own, as if it had inherited them
        self.runners = [
            StageRunner(config, worker, [os.dup(file) for file in mine])
            for worker, mine in enumerate(files)
        ]
        for file in {file for mine in files for file in mine}:
            os.close(file)

    def execute(self, plan):
        (answer,) = [found for found in self.on_each("execute", plan) if found is not None]
        return answer
