"""Runs the plans of one pipeline stage on the CPU.

Laws, beside those of `CpuRunner` and of `stages.py`:
  * Every stage is given every plan, in order, and comes by itself to what it sends and awaits.
  * The last stage alone answers, and passes its tokens on before it does.
  * A stage whose step fails has lost its place among the others; all of them are started again.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.cpu.runner import CpuRunner
from trouper.actors.executor.models.layer_split import model_stages
from trouper.actors.executor.models.registry import decoder_traits
from trouper.actors.executor.parallel.links import Link, RingSizes, open_links
from trouper.actors.messages.plans import PoolPlan, StepPlan
from trouper.actors.messages.results import StepDone
from trouper.actors.stages import Feedback, sends_tokens
from trouper.config.resolve import EngineConfig


class StageRunner(CpuRunner):
    """One stage of the config's pipeline.

    Args:
        index: of the stage.
        files: descriptors of its links.
    """

    def __init__(self, config: EngineConfig, index: int, files: Sequence[int]) -> None:
        traits = decoder_traits(config.model.hf_config, config.model.architecture)
        stage = model_stages(config, traits)[index]
        super().__init__(config, stage)
        self._index = index
        self._links = open_links(index, files, RingSizes.of(config, traits.hidden_size))
        self._feedback = Feedback()
        self.start_profile = self._start_profile
        self._token_ids = np.zeros(config.scheduler.max_num_seqs, dtype=np.int64)
        if not stage.is_first:
            size = config.scheduler.max_num_scheduled_tokens, traits.hidden_size
            self._hidden_TE = torch.empty(size, dtype=self._dtype)

    def __repr__(self) -> str:
        stage = self._stage
        return f"<StageRunner of layers {stage.first} to {stage.last - 1}, {self._feedback!r}>"

    def close(self) -> None:
        super().close()
        self._links.close()

    def _start_profile(self, folder: str, prefix: str) -> None:
        """Trace this stage to a file of its own."""
        self._profiler.start(folder, f"{prefix}-stage-{self._index}")

    def execute(self, plan: StepPlan | PoolPlan) -> StepDone | None:
        """Run this stage's part of a plan; the last stage returns the answer, the others None."""
        assert isinstance(plan, StepPlan), "stages are of models that generate"
        links = self._links
        if self._stage.is_first and links.tokens is not None:
            self._read_tokens(plan, links.tokens)
        if links.hidden_in is not None and plan.request_slots:
            self._receive_hidden(plan, links.hidden_in)
        done, hidden_TE = self._run(plan)
        if links.hidden_out is not None:
            if hidden_TE is not None:
                links.hidden_out.send(plan.step, _bytes_of(hidden_TE))
            return None
        if links.tokens is not None and sends_tokens(plan.num_sampled_tokens):
            for entry, token_ids in enumerate(done.token_ids):
                self._token_ids[entry] = token_ids[0] if token_ids else -1
            sent = self._token_ids[: len(done.token_ids)]
            links.tokens.send(plan.step, sent.view(np.uint8))
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


def _bytes_of(x_TE: Tensor) -> np.ndarray:
    """Return the bytes of a tensor: its memory, if its rows are contiguous."""
    return x_TE.contiguous().view(torch.uint8).view(-1).numpy()
