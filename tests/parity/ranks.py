"""Tensor-parallel ranks as threads of one process, whose sums torch computes: what any group must do."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from trouper.actors.executor.cpu.runner import CpuRunner
from trouper.actors.executor.models.decoder import ops_config
from trouper.actors.executor.models.registry import decoder_traits
from trouper.kernels.ops import q_and_k
from trouper.kernels.reference.ops import TorchOps, finished_logits

PATIENCE_S = 60.0  # a rank that waits longer waits for ever


class Exchange:
    """Where the parts of all ranks meet."""

    def __init__(self, size):
        self.parts = [None] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)

    def all_parts(self, rank, part):
        """The parts of all ranks, copied before any of them goes on."""
        self.parts[rank] = part
        self.barrier.wait()
        found = [part.clone() for part in self.parts]
        self.barrier.wait()
        return found


class ThreadGroup:
    """`RankGroup` of one rank."""

    def __init__(self, exchange, rank, size, config):
        self.exchange, self.rank, self.size = exchange, rank, size
        self.traits = traits = decoder_traits(config.model.hf_config, config.model.architecture)
        dtype = getattr(torch, config.dtype)
        self.ops = TorchOps(ops_config(traits, dtype, config.block_size))
        self.num_calls = 0

    def all_parts(self, part):
        self.num_calls += 1
        return self.exchange.all_parts(self.rank, part)

    def sum(self, part):
        return sum(x.float() for x in self.all_parts(part))

    def fused_add_rms_norm(self, x_TE, part_TE, weight, post_weight=None):
        y_TE = self.sum(part_TE).to(part_TE.dtype)
        return self.ops.fused_add_rms_norm(x_TE, y_TE, weight, post_weight)

    def all_heads_norm_(self, qkv_TND, q_norm, k_norm):
        """KV heads that several ranks have are added as often, and so counted as often."""
        sides = zip(q_and_k(qkv_TND, q_norm, k_norm), (q_norm, k_norm), strict=True)
        for x_TX, weight in sides:
            squares = self.sum(x_TX.float().square().sum(1, keepdim=True))
            mean = squares / (self.size * x_TX.shape[1])
            x_TX.copy_(x_TX.float() * torch.rsqrt(mean + self.traits.norm_eps) * weight.float())

    def finish_logits(self, product_RW, scale, cap):
        return torch.cat(self.all_parts(finished_logits(product_RW, scale, cap)), dim=1)


class RanksInThreads:
    """All ranks of a model, each in a thread of its own: every plan goes to all of them, and all must say the same."""

    def __init__(self, config, size, stage=None):
        exchange = Exchange(size)
        self.pools = [ThreadPoolExecutor(1) for _ in range(size)]
        self.groups = [ThreadGroup(exchange, rank, size, config) for rank in range(size)]
        self.runners = [CpuRunner(config, stage, group) for group in self.groups]

    def on_each(self, method, *args):
        calls = [
            pool.submit(self.called, runner, method, *args)
            for pool, runner in zip(self.pools, self.runners, strict=True)
        ]
        return [call.result() for call in calls]

    def called(self, runner, method, *args):
        torch.set_num_threads(1)  # it is the thread's own
        return getattr(runner, method)(*args)

    def load(self):
        infos = self.on_each("load")
        return min(infos, key=lambda info: info.num_blocks)

    def load_adapter(self, slot, files):
        self.on_each("load_adapter", slot, files)

    def execute(self, plan):
        answer, *others = self.on_each("execute", plan)
        assert all(other == answer for other in others)
        assert len({group.num_calls for group in self.groups}) == 1
        return answer

    def close(self):
        self.on_each("close")
        for pool in self.pools:
            pool.shutdown()
