"""Load a generating model on the CPU and compute its batches: by trouper's own code, or by that of the transformers library.

A runner is given one of them and treats both alike. Own code is faster, and it supports pipeline stages, tensor-parallel
ranks, speculation and recorded steps. The library's code supports every other architecture, on the whole model only.

`DecoderPass` computes a batch: it replays a recording if possible, else it calls one operation after the other.  The target model and the
draft model of speculative decoding both use it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.models.decoder import (
    Decoder,
    KVCacheSpec,
    MixerState,
    StateSpec,
    StepStates,
    windows_of,
)
from trouper.actors.executor.models.hf_decoder import HfDecoder
from trouper.actors.executor.models.mixers import state_specs
from trouper.actors.executor.models.native_decoder import NativeDecoder, kv_cache_specs, ops_config
from trouper.actors.executor.models.sharding import ALONE, ModelPart, Shard
from trouper.actors.executor.runners.cpu.recorded_steps import ForwardOutput, RecordedDecoderSteps
from trouper.actors.executor.sampling.sampler import Sampler
from trouper.actors.executor.steps.adapter_slots import AdapterHeads
from trouper.actors.executor.steps.batch import Batch, from_numpy
from trouper.actors.executor.steps.cache_memory import KVCache
from trouper.actors.executor.weights.decoder import Wrap, adapted_parameters, load_decoder
from trouper.config.engine_config import EngineConfig
from trouper.config.parallel import Stage
from trouper.kernels.codegen.recording import Arena, Lender, NotRecordableError
from trouper.kernels.cpu.sample import compile_sample
from trouper.kernels.ops import CpuOps, RankGroup
from trouper.kernels.select import make_ops


class Share(NamedTuple):
    """The share of each step that one worker computes; without other workers it is the whole step."""

    # Whether the last layer, and therefore the logits, are here.
    is_last: bool = True
    # Whether tokens are sampled here. Only one rank of the last stage does.
    samples: bool = True
    # The other ranks of this stage.
    group: RankGroup | None = None
    # [T, E], the memory for the output of the previous stage.
    hidden_TE: Tensor | None = None
    # The states of recurrent mixers in each other stage.
    states_elsewhere: tuple[tuple[StateSpec, ...], ...] = ()


WHOLE_STEP = Share()


class NativeModel:
    """A model, or one worker's part of it, that trouper's own code computes.

    Args:
        config: resolved; `model.path` contains safetensors or is a GGUF file, unless `load_format` is "dummy".
        stage: the pipeline stage of this worker. All layers by default.
        group: the tensor-parallel ranks of the stage, if there are several.
    """

    def __init__(
        self, config: EngineConfig, stage: Stage | None = None, group: RankGroup | None = None
    ) -> None:
        self._config, self._group = config, group
        self._part = ModelPart.of(
            config, stage, ALONE if group is None else Shard(group.rank, group.size)
        )
        self.cache_specs = kv_cache_specs(self._part.traits)
        self.state_specs: tuple[StateSpec, ...] | None = state_specs(self._part.traits)
        # Every stage checks an adapter for all layers, so that all stages accept it or none does.
        self.adapted = tuple(adapted_parameters(self._part.whole))
        traits, stage = self._part.whole, self._part.stage
        # Ranks have a part of the head each, and adapters store it whole.
        self.heads = (
            None
            if group is not None
            else AdapterHeads(
                (traits.vocab_size, traits.hidden_size),
                has_bias=traits.head_bias,
                is_here=stage.is_last,
            )
        )

    @property
    def has_three_positions(self) -> bool:
        """Whether all layers take positions in time, height and width (M-RoPE)."""
        return all(rope.sections for rope in self._part.traits.ropes)

    def load(self, wrap: Wrap | None = None) -> NativeDecoder[CpuOps]:
        """Read the weights, while another thread compiles the kernels.

        Raises:
            TrouperValidationError: the checkpoint does not fit the config.
        """
        config, part = self._config, self._part
        shape = ops_config(part.traits, getattr(torch, config.dtype), config.block_size)
        with ThreadPoolExecutor(1, "trouper-compile") as pool:
            ops = pool.submit(partial(make_ops, shape))
            draw = pool.submit(compile_sample)
            decoder = load_decoder(
                config,
                part.whole,
                ops=ops.result,
                shared=self._group,
                stage=part.stage,
                shard=part.shard,
                wrap=wrap,
            )
            draw.result()
            return decoder


class HfModel:
    """A model that the transformers library's code computes, with this engine's attention and linear layers.

    What its layers keep and which of them adapters may change is known only after its weights have been read.

    Args:
        config: resolved; `model.path` is a folder of safetensors unless `load_format` is "dummy".
    """

    cache_specs = None
    state_specs = None
    adapted = ()
    heads = None

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def load(self, wrap: Wrap | None = None) -> HfDecoder:
        """Build the library's model, read its weights, and compare its logits with the library's own.

        Raises:
            UnsupportedFeatureError: the model cannot be computed this way; the message gives the reason.
            TrouperValidationError: the checkpoint does not fit the model's class.
        """
        # Imported here because it imports transformers, which other models do not need.
        from trouper.actors.executor.weights.hf_model import load_hf_decoder

        return load_hf_decoder(self._config, wrap)


def allocate_kv_cache(
    specs: Sequence[KVCacheSpec],
    num_blocks: int,
    *,
    block_size: int,
    empty: Callable[[tuple[int, ...]], Tensor],
) -> KVCache:
    """Allocate the KV cache in host memory.

    It is not set to zeros: pages that no sequence has touched take no memory. The system provides them on first use.
    """
    return KVCache.allocate(
        specs,
        num_blocks=num_blocks,
        block_size=block_size,
        empty=empty,
    )


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
