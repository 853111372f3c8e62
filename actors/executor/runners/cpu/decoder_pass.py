"""The forward pass of a decoder over its KV cache: replayed from a recording if possible, else called operation by operation.

The target model and the draft model of speculative decoding compute their batches the same way, so both use this class.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from trouper.actors.executor.models.decoder import Decoder, MixerState, StepStates, windows_of
from trouper.actors.executor.runners.cpu.models import WHOLE_STEP, Share
from trouper.actors.executor.runners.cpu.recorded_steps import ForwardOutput, RecordedDecoderSteps
from trouper.actors.executor.sampling.sampler import Sampler
from trouper.actors.executor.steps.adapter_heads import AdapterHeads
from trouper.actors.executor.steps.batch import Batch, from_numpy
from trouper.kernels.codegen.recording import Arena, Lender, NotRecordableError

logger = logging.getLogger(__name__)


class DecoderPass:
    """Computes batches with one decoder and its caches.

    It belongs to the weights and the memory that it was made of: the runner drops it, with the memory of the activations,
    as soon as it drops either.

    Args:
        caches: the KV cache of each layer.
        sampler: draws tokens within recorded steps.
        max_rows: the most sequences of a step.
        is_eager: never record steps.
        heads: the heads of adapters that replace the model's.
        share: the part of each step that this worker computes.
        mixers: the states of recurrent mixers, by layer and index; None if the model has none.
    """

    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[Tensor],
        sampler: Sampler,
        max_rows: int,
        *,
        is_eager: bool,
        heads: AdapterHeads | None = None,
        share: Share = WHOLE_STEP,
        mixers: Mapping[tuple[int, int], MixerState] | None = None,
    ) -> None:
        self.decoder, self._caches, self._share = decoder, caches, share
        self._mixers = mixers
        self._heads = heads
        # All steps use the same memory for their activations, since each is read before the next begins.
        self._arena = Arena()
        self.recorded: RecordedDecoderSteps | None = None
        if decoder.is_recordable and not is_eager:
            self.recorded = RecordedDecoderSteps(
                decoder,
                caches,
                sampler,
                max_rows,
                self._arena,
                share.hidden_TE,
                draws=share.samples,
                mixers=mixers,
                num_tables=len(windows_of(decoder.cache_specs)),
            )
        # Whether all ranks know that every one of them can record steps.
        self._has_agreed = share.group is None

    def forward(self, batch: Batch) -> ForwardOutput:
        """Compute a batch; its hidden states, and its logits or tokens if a recorded step contains them.

        The output is valid until the next call.
        """
        if self.recorded is not None and self.recorded.can_forward(batch):
            try:
                self._agree(self.recorded, batch)
                return self.recorded.forward(batch, may_draw=not self._has_heads(batch))
            except NotRecordableError as error:
                self._stop_recording(error)
        hidden_TE = self._share.hidden_TE
        if hidden_TE is not None:
            hidden_TE = hidden_TE[: batch.num_tokens]
        states = None
        if self._mixers is not None:
            states = StepStates(*batch.entries, mixers=self._mixers)
        with Lender(self._arena):
            return ForwardOutput(
                self.decoder.forward(
                    batch.tokens,
                    batch.plans,
                    self._caches,
                    batch.embeds,
                    batch.read,
                    hidden_TE,
                    states,
                )
            )

    def replay(self, columns: tuple[np.ndarray, ...]) -> None:
        """Move recurrent states forward over drafts that turned out right.

        Args:
            columns: of `StepStates`, for the rows of the inputs that the last step kept.
        """
        assert self._mixers is not None
        if self.recorded is not None:
            try:
                self.recorded.replay(columns)
                return
            except NotRecordableError as error:
                self._stop_recording(error)
        with Lender(self._arena):
            self.decoder.replay(StepStates(*columns, mixers=self._mixers))

    def logits(self, output: ForwardOutput, batch: Batch) -> tuple[Tensor, np.ndarray]:
        """Return logits of a batch, and the row in them of each of its samples.

        They are valid until the next call. A recorded step has already computed them for all tokens.
        """
        tokens = batch.samples.tokens
        hidden, logits = output.hidden_TE, output.logits_TV
        if logits is not None:
            self._replace(logits, hidden, batch.adapters)
            return logits, tokens
        if batch.read is None and len(tokens) < len(hidden):
            hidden = hidden.index_select(0, from_numpy(tokens))
        logits = self.decoder.logits(hidden)
        self._replace(logits, hidden, batch.adapters[tokens])
        return logits, np.arange(len(tokens))

    def logits_of(self, hidden_RE: Tensor, adapter: int) -> Tensor:
        """Return the logits of hidden states that belong to one adapter; 0 is none."""
        return self.decoder.logits(
            hidden_RE, None if self._heads is None else self._heads.of(adapter)
        )

    def _has_heads(self, batch: Batch) -> bool:
        return self._heads is not None and self._heads.are_used(batch.adapters)

    def _replace(self, logits_RV: Tensor, hidden_RE: Tensor, adapters_R: np.ndarray) -> None:
        if self._heads is not None and self._heads.are_used(adapters_R):
            self._heads.replace(logits_RV, hidden_RE, adapters_R, self.decoder.logits)

    def record(self, batch: Batch) -> None:
        """Record a step like this one without computing it, if steps are recorded at all.

        If an operation cannot be recorded, no more steps are recorded for this model.
        """
        if self.recorded is not None:
            try:
                self.recorded.record(batch)
            except NotRecordableError as error:
                self._stop_recording(error)

    def _agree(self, steps: RecordedDecoderSteps, batch: Batch) -> None:
        """Let all ranks record steps, or no rank: the logits of recorded steps have other rows.

        Raises:
            NotRecordableError: this rank or another one cannot record this step.
        """
        if self._has_agreed:
            return
        assert self._share.group is not None
        problem = None
        try:
            steps.record(batch)
        except NotRecordableError as error:
            problem = error
        self._has_agreed = True
        if not self._share.group.all_agree(problem is None):
            raise problem or NotRecordableError("another rank cannot record this step")

    def _stop_recording(self, error: NotRecordableError) -> None:
        logger.info("steps are not recorded: %s", error)
        self.recorded = None
