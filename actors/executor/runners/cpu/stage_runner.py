"""Runs the part of each plan that one of several workers computes on the CPU: a stage of a pipeline, or a rank of one.

Laws, beside those of `CpuRunner` and of `stages.py`:
  * Every worker is given every plan, in order, and comes by itself to what it sends, awaits and adds up.
  * Rank 0 of the last stage alone samples and answers, and passes its tokens on before it does.
  * A worker whose step fails has lost its place among the others; all of them are started again.
"""

import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.links.worker_links import (
    Link,
    ModelSizes,
    SharedSizes,
    WorkerPosition,
    group_sizes,
    open_worker_links,
)
from trouper.actors.executor.models.decoder import rank_share
from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.sharding import OPTION, Shard, model_stages
from trouper.actors.executor.models.traits import DecoderTraits
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.messages.steps import PoolPlan, StepDone, StepPlan
from trouper.actors.stages import Feedback, sends_tokens
from trouper.config.resolve import EngineConfig
from trouper.errors import UnsupportedFeatureError
from trouper.kernels.codegen import units
from trouper.kernels.ops import RankGroup


class StageRunner(CpuRunner):
    """One stage of the config's pipeline, or one rank of it.

    Args:
        worker: its number among those of the device, `stage * ranks + rank`.
        files: descriptors of what it shares with the others.
    """

    def __init__(self, config: EngineConfig, worker: int, files: Sequence[int]) -> None:
        traits = decoder_traits(config.model.hf_config, config.model.architecture)
        place = WorkerPosition.of(worker, config)
        stage = model_stages(config, traits)[place.stage]
        model = ModelSizes(traits.hidden_size, traits.vocab_size)
        self._links = open_worker_links(worker, files, SharedSizes.of(config, model))
        group = None
        if self._links.group is not None:
            group = open_group(config, traits, place, self._links.group)
        super().__init__(config, stage, group)
        self._samples = place.samples(config)
        self._place = place
        self._feedback = Feedback()
        self.start_profile = self._start_profile
        self._token_ids = np.zeros(config.scheduler.max_num_seqs, dtype=np.int64)
        if not stage.is_first:
            size = config.scheduler.max_num_scheduled_tokens, traits.hidden_size
            self._hidden_TE = torch.empty(size, dtype=self._dtype)

    def __repr__(self) -> str:
        stage, rank = self._stage, self._place.rank
        return f"<StageRunner of layers {stage.first} to {stage.last - 1}, rank {rank}, {self._feedback!r}>"

    def close(self) -> None:
        super().close()
        self._links.close()

    def _start_profile(self, folder: str, prefix: str) -> None:
        """Trace this worker to a file of its own."""
        config, (stage, rank) = self._config, self._place
        parts = [prefix]
        if config.num_stages > 1:
            parts.append(f"stage-{stage}")
        if config.tensor_parallel_size > 1:
            parts.append(f"rank-{rank}")
        self._profiler.start(folder, "-".join(parts))

    def execute(self, plan: StepPlan | PoolPlan) -> StepDone | None:
        """Run this worker's part of a plan; the one that samples returns the answer, the others None."""
        assert isinstance(plan, StepPlan), "stages are of models that generate"
        links = self._links
        if links.tokens_in is not None:
            self._read_tokens(plan, links.tokens_in)
        if links.hidden_in is not None and plan.request_slots:
            self._receive_hidden(plan, links.hidden_in)
        done, hidden_TE = self._run(plan)
        if self._group is not None:
            self._group.check()
        if links.hidden_out is not None and hidden_TE is not None:
            links.hidden_out.send(plan.step, _bytes_of(hidden_TE))
        if not self._samples:
            return None
        if links.tokens_out and sends_tokens(plan.num_sampled_tokens):
            for entry, token_ids in enumerate(done.token_ids):
                self._token_ids[entry] = token_ids[0] if token_ids else -1
            sent = self._token_ids[: len(done.token_ids)]
            for tokens in links.tokens_out:
                tokens.send(plan.step, sent.view(np.uint8))
        return done

    def _read_tokens(self, plan: StepPlan, tokens: Link) -> None:
        """Write the tokens that have come to their rows, and wait for those that this plan reads."""
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
                self._slots.token_ids[write.row, write.position] = write.token_id

    def _receive_hidden(self, plan: StepPlan, hidden_in: Link) -> None:
        assert self._hidden_TE is not None
        rows_TE = self._hidden_TE[: sum(plan.num_scheduled_tokens)]
        found = hidden_in.receive(_bytes_of(rows_TE), wait=True)
        if found != (plan.step, rows_TE.nbytes):
            raise RuntimeError(f"hidden states {found}, but step {plan.step} of {rows_TE.nbytes}")


def open_group(
    config: EngineConfig, traits: DecoderTraits, place: WorkerPosition, file: int
) -> RankGroup:
    """Map the memory of the ranks of a stage, and close its descriptor.

    Args:
        traits: of the whole model.

    Raises:
        UnsupportedFeatureError: there are no kernels for the sums.
    """
    check_sums(config, traits.hidden_size)
    from trouper.kernels.cpu.rank_exchange import (
        RankExchange,  # they need llvmlite
        SharedGroup,
    )

    sizes = group_sizes(config, ModelSizes(traits.hidden_size, traits.vocab_size), place.stage)
    try:
        memory = mmap.mmap(file, sizes.num_bytes)
    finally:
        os.close(file)
    share = rank_share(traits, Shard(place.rank, config.tensor_parallel_size))
    exchange = RankExchange(place.rank, sizes, memory)
    return SharedGroup(exchange, share)


def check_sums(config: EngineConfig, hidden_size: int) -> None:
    """Check that there are kernels for the sums of ranks, before any is imported.

    Raises:
        UnsupportedFeatureError: this machine has none, or none of such rows.
    """
    if units.row_kind(getattr(torch, config.dtype), hidden_size) is None:
        raise UnsupportedFeatureError(
            f"{OPTION}={config.tensor_parallel_size}: the sums are compiled kernels, and there are none of "
            f"{config.dtype} rows of {hidden_size} here",
            parameter=OPTION,
        )


def _bytes_of(x_TE: Tensor) -> np.ndarray:
    """Return the bytes of a tensor: its memory, if its rows are contiguous."""
    return x_TE.contiguous().view(torch.uint8).view(-1).numpy()
