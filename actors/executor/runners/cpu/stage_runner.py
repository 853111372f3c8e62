"""Runs one worker's part of each plan on the CPU: a stage of a pipeline, or a tensor-parallel rank of a stage.

The runner itself computes; this module moves hidden states and tokens between the workers.

Laws, in addition to those of `CpuRunner` and `stages.py`:
  * Every worker receives every plan, in order, and derives from it what to send, what to wait for and what to add up.
  * Only rank 0 of the last stage samples and answers. It sends its tokens to the other workers before it answers.
  * A worker with a failed step is out of step with the others, so all of them are restarted.
"""

import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.mixers import state_specs
from trouper.actors.executor.models.native_decoder import rank_share
from trouper.actors.executor.models.sharding import OPTION, Shard, model_stages, traits_of
from trouper.actors.executor.models.traits import DecoderTraits
from trouper.actors.executor.runners.cpu.models import NativeModel, Share
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.executor.steps.cache_memory import KeptMemory
from trouper.actors.executor.worker_links import (
    Link,
    ModelSizes,
    SharedSizes,
    WorkerPosition,
    group_sizes,
    open_worker_links,
)
from trouper.actors.messages.steps import PoolPlan, StepDone, StepPlan
from trouper.actors.stages import Feedback, sends_tokens
from trouper.config.engine_config import EngineConfig
from trouper.errors import UnsupportedFeatureError
from trouper.kernels.codegen import units
from trouper.kernels.ops import RankGroup


class StageRunner:
    """One stage of the config's pipeline, or one rank of a stage.

    Args:
        worker: the number of this worker on its device, `stage * ranks + rank`.
        files: descriptors of the memory that it shares with the other workers. It closes them.
        kept: memory for the KV cache, which outlives this process.
    """

    def __init__(
        self,
        config: EngineConfig,
        worker: int,
        files: Sequence[int],
        kept: KeptMemory | None = None,
    ) -> None:
        traits = decoder_traits(config.model.hf_config, config.model.architecture)
        place = WorkerPosition.of(worker, config)
        stages = model_stages(config, traits)
        stage = stages[place.stage]
        model = ModelSizes(traits.hidden_size, traits.vocab_size)
        self._links = open_worker_links(worker, files, SharedSizes.of(config, model))
        group = None
        if self._links.group is not None:
            group = open_group(config, traits, place, self._links.group)
        hidden_TE: Tensor | None = None
        if not stage.is_first:
            size = config.scheduler.max_num_scheduled_tokens, traits.hidden_size
            hidden_TE = torch.empty(size, dtype=getattr(torch, config.dtype))
        elsewhere = tuple(
            state_specs(traits_of(other, traits)) for other in stages if other is not stage
        )
        self._share = Share(stage.is_last, place.samples(config), group, hidden_TE, elsewhere)
        self.runner = CpuRunner(config, NativeModel(config, stage, group), self._share, kept)
        self._config, self._place, self._stage = config, place, stage
        self._feedback = Feedback()
        self._token_ids = np.zeros(config.scheduler.max_num_seqs, dtype=np.int64)
        # Only plans, profiles and the end concern the other workers; the rest is the runner's own.
        self.load, self.sleep, self.wake = self.runner.load, self.runner.sleep, self.runner.wake
        self.release, self.load_adapter = self.runner.release, self.runner.load_adapter
        self.stop_profile = self.runner.stop_profile

    def __repr__(self) -> str:
        stage, rank = self._stage, self._place.rank
        return f"<StageRunner of layers {stage.first} to {stage.last - 1}, rank {rank}, {self._feedback!r}>"

    @property
    def is_tiny(self) -> bool:
        """Whether one thread computes this worker's part sooner than several."""
        return self.runner.is_tiny

    def close(self) -> None:
        """Give back the memory and the links to the other workers.

        Idempotent.

        Other workers then find their links lost, and end as well. The engine kills any that remain.
        """
        self.runner.close()
        self._links.close()

    def start_profile(self, folder: str, prefix: str) -> None:
        """Begin a trace of this worker, in a file of its own, named after the stage and the rank."""
        config, (stage, rank) = self._config, self._place
        parts = [prefix]
        if config.num_stages > 1:
            parts.append(f"stage-{stage}")
        if config.tensor_parallel_size > 1:
            parts.append(f"rank-{rank}")
        self.runner.profiler.start(folder, "-".join(parts))

    def execute(self, plan: StepPlan | PoolPlan) -> StepDone | None:
        """Run this worker's part of a plan. Returns the answer on the worker that samples, and None on all others."""
        assert isinstance(plan, StepPlan), "stages are of models that generate"
        links = self._links
        if links.tokens_in is not None:
            self._read_tokens(plan, links.tokens_in)
        if links.hidden_in is not None and plan.request_slots:
            self._receive_hidden(plan, links.hidden_in)
        done, hidden_TE = self.runner.compute(plan)
        if self._share.group is not None:
            self._share.group.check()
        if links.hidden_out is not None and hidden_TE is not None:
            links.hidden_out.send(plan.step, _bytes_of(hidden_TE))
        if not self._share.samples:
            return None
        if links.tokens_out and sends_tokens(plan.num_sampled_tokens):
            for entry, token_ids in enumerate(done.token_ids):
                self._token_ids[entry] = token_ids[0] if token_ids else -1
            sent = self._token_ids[: len(done.token_ids)]
            for tokens in links.tokens_out:
                tokens.send(plan.step, sent.view(np.uint8))
        return done

    def _read_tokens(self, plan: StepPlan, tokens: Link) -> None:
        """Write received tokens into their slots, and wait for those that this plan reads."""
        feedback = self._feedback
        starts, counts = plan.num_computed_tokens, plan.num_scheduled_tokens
        feedback.note_plan(
            plan.step,
            new_rows=[new.request_slot for new in plan.new_sequences],
            rows=plan.request_slots,
            ends=[start + count for start, count in zip(starts, counts, strict=True)],
            num_wanted=plan.num_sampled_tokens,
        )
        ids = self._token_ids
        while found := tokens.receive(ids.view(np.uint8), wait=feedback.must_wait(plan.reads)):
            step, num_bytes = found
            for write in feedback.take(step, ids[: num_bytes // ids.itemsize].tolist()):
                self.runner.slots.token_ids[write.row, write.position] = write.token_id

    def _receive_hidden(self, plan: StepPlan, hidden_in: Link) -> None:
        assert self._share.hidden_TE is not None
        rows_TE = self._share.hidden_TE[: sum(plan.num_scheduled_tokens)]
        found = hidden_in.receive(_bytes_of(rows_TE), wait=True)
        if found != (plan.step, rows_TE.nbytes):
            raise RuntimeError(
                f"the previous stage sent (step, bytes) = {found}, but this plan expects "
                f"{(plan.step, rows_TE.nbytes)}"
            )


def open_group(
    config: EngineConfig, traits: DecoderTraits, place: WorkerPosition, file: int
) -> RankGroup:
    """Map the memory that the ranks of a stage share, and close its descriptor.

    Args:
        traits: those of the whole model.
        place: the stage and rank of this worker.

    Raises:
        UnsupportedFeatureError: this machine has no kernels for sums over ranks.
    """
    check_sums(config, traits.hidden_size)
    # Imported here because they need llvmlite.
    from trouper.kernels.cpu.rank_exchange import RankExchange, SharedGroup

    sizes = group_sizes(config, ModelSizes(traits.hidden_size, traits.vocab_size), place.stage)
    try:
        memory = mmap.mmap(file, sizes.num_bytes)
    finally:
        os.close(file)
    share = rank_share(traits, Shard(place.rank, config.tensor_parallel_size))
    exchange = RankExchange(place.rank, sizes, memory)
    return SharedGroup(exchange, share)


def check_sums(config: EngineConfig, hidden_size: int) -> None:
    """Check that this machine has kernels for sums over ranks, before any is imported.

    Raises:
        UnsupportedFeatureError: it has none, or none for rows of this width and dtype.
    """
    if units.row_kind(getattr(torch, config.dtype), hidden_size) is None:
        raise UnsupportedFeatureError(
            f"{OPTION}={config.tensor_parallel_size} needs compiled kernels that add up rows of {hidden_size} "
            f"{config.dtype} numbers, which are not available on this machine",
            parameter=OPTION,
        )


def _bytes_of(x_TE: Tensor) -> np.ndarray:
    """Return the bytes of a tensor, without a copy if it is contiguous."""
    return x_TE.contiguous().view(torch.uint8).view(-1).numpy()
