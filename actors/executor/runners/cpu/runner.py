"""Runs plans on the CPU: request slots, batch, forward pass, sampler.  Synchronous, no scheduling state.

Laws:
  * Plans run in the order of the calls; a plan's sequences, blocks and copies take effect before its pass.
  * The sampled token is written into its slot before `execute` returns, so a plan that was made without
    knowing it finds it there.
  * An entry with logits that are not finite fails alone.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.device import DeviceInfo
from trouper.actors.executor.models.decoder import Decoder, ops_config
from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.sharding import (
    ALONE,
    Shard,
    check_shards,
    shard_traits,
    traits_of,
)
from trouper.actors.executor.runners.cpu.draft_model import DraftModel
from trouper.actors.executor.runners.cpu.process_resources import give_back_free_memory
from trouper.actors.executor.runners.cpu.recorded_steps import ForwardOutput, RecordedDecoderSteps
from trouper.actors.executor.runners.model_runner import Profiler
from trouper.actors.executor.sampling.results import make_step_done, with_grammar_work
from trouper.actors.executor.sampling.sampler import Sampled, Sampler, prompt_logprobs
from trouper.actors.executor.speculation.drafter import Drafter
from trouper.actors.executor.steps.adapter_slots import AdapterSlots
from trouper.actors.executor.steps.arrays import from_numpy
from trouper.actors.executor.steps.batch import Batch, make_batch
from trouper.actors.executor.steps.kv_memory import KVCache, kv_cache_specs, num_kv_blocks
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.executor.weights.decoder import adapted_parameters, load_decoder
from trouper.actors.messages.steps import PoolPlan, StepDone, StepPlan, TokenLogprobs
from trouper.config.adapters import AdapterFiles
from trouper.config.parallel import Stage
from trouper.config.resolve import EngineConfig
from trouper.kernels.codegen.arena import Arena, Lender
from trouper.kernels.codegen.recording import NotRecordableError
from trouper.kernels.cpu.sampling.sample import compile_sample
from trouper.kernels.lora import AdapterRows
from trouper.kernels.ops import CpuOps, RankGroup
from trouper.kernels.select import make_ops

logger = logging.getLogger(__name__)

# Weights that one core streams from its cache in about a millisecond: a second one gains nothing alone,
# and on a busy machine every barrier with it costs a time slice.
TINY_BYTES = 32 * 2**20
NOTHING = Sampled([], [])


class CpuRunner:
    """The model, its KV memory and the request slots.  Belongs to the thread that calls `load`.

    Args:
        config: resolved; `model.path` holds safetensors unless `load_format` is "dummy".
        stage: the part of the model that this is; None = all of it.
        group: the ranks that share out its layers, of which this is one; None = there is no other.
    """

    def __init__(
        self, config: EngineConfig, stage: Stage | None = None, group: RankGroup | None = None
    ) -> None:
        self._config = config
        traits = decoder_traits(config.model.hf_config, config.model.architecture)
        self._model_traits = traits
        self._stage = stage or Stage(0, 1, 0, len(traits.layers))
        self._group = group
        self._shard = ALONE if group is None else Shard(group.rank, group.size)
        check_shards(traits, self._shard.size, quantization=config.quantization)
        # of the layers that are here, or of the part of them that is
        self._traits = shard_traits(traits_of(self._stage, traits), self._shard)
        self._hidden_TE: Tensor | None = None  # where the stage before this one puts its output
        self._samples = self._stage.is_last  # of the ranks of a stage one alone does
        self._has_agreed = group is None  # that steps are recorded, or that none is
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._slots = RequestSlots(
            config.scheduler.max_num_seqs, config.max_model_len, config.block_size
        )
        self._sampler = Sampler(self._slots)
        speculation, draft_model = config.speculation, config.draft_model
        self._draft_model = (
            None
            if draft_model is None
            else DraftModel(config, draft_model, self._slots, self._sampler)
        )
        self._drafter = (
            None
            if speculation is None
            else Drafter(speculation, self._slots, self._sampler.grammars, self._draft_model)
        )
        self._decoder: Decoder[CpuOps] | None = None
        self._kv_specs = kv_cache_specs(self._traits)
        self._kv: KVCache | None = None
        self._recorded_steps: RecordedDecoderSteps | None = None
        self._arena = Arena()  # of activations; of all steps, since each is read before the next
        self._adapters: AdapterSlots | None = None
        self._adapter_rows: AdapterRows | None = None
        if config.lora is not None:
            self._adapter_rows = AdapterRows(config.scheduler.max_num_scheduled_tokens)
            self._adapters = AdapterSlots(config.lora, self._dtype, self._adapter_rows)
            for parameter in adapted_parameters(traits):
                self._adapters.know(parameter)
        self._num_blocks = 0
        self._profiler = Profiler()
        self.start_profile, self.stop_profile = self._profiler.start, self._profiler.stop

    def load(self) -> DeviceInfo:
        """Read the weights and set KV memory aside.

        Raises:
            TrouperValidationError: the checkpoint does not fit the config, or one sequence of
                `max_model_len` does not fit the KV memory.
        """
        config = self._config
        specs, draft_model = self._kv_specs, self._draft_model
        if draft_model is not None:
            specs += draft_model.kv_specs
        self._num_blocks = num_kv_blocks(config, specs, self._dtype.itemsize)
        self.wake(frozenset({"weights", "kv_cache"}))
        return DeviceInfo(
            num_blocks=self._num_blocks,
            block_size=config.block_size,
            dtype=config.dtype,
            name="cpu",
            num_weight_bytes=sum(
                each.num_weight_bytes for each in (self._decoder, draft_model) if each is not None
            ),
        )

    def sleep(self, level: int) -> None:
        """Discard KV memory, and at level 2 the weights too: those are in host memory already."""
        if level >= 1:
            self._kv = self._recorded_steps = None
            self._sampler.clear()
            self._arena = Arena()
        if level >= 2:
            self._decoder = None
            if self._group is not None:
                self._group.forget_weights()
        if self._draft_model is not None:
            self._draft_model.sleep(level)
        self.release()

    def release(self) -> None:
        """Give free memory back to the system."""
        give_back_free_memory()

    def wake(self, tags: frozenset[str]) -> None:
        """Make `weights` and `kv_cache` resident, as far as `tags` names them and they are not."""
        with torch.inference_mode():
            if "weights" in tags and self._decoder is None:
                self._decoder = self._load_decoder()
            if "kv_cache" in tags and self._kv is None:
                # empty, not zeros: pages that no sequence has touched take no memory
                self._kv = KVCache.allocate(
                    self._kv_specs,
                    num_blocks=self._num_blocks,
                    block_size=self._config.block_size,
                    empty=partial(torch.empty, dtype=self._dtype),
                )
            if self._draft_model is not None:
                num_blocks = None if self._kv is None else self._num_blocks
                self._draft_model.wake(num_blocks, model=self._decoder)
            if self._decoder is None or self._kv is None or self._config.enforce_eager:
                return
            if self._recorded_steps is None:
                self._has_agreed = self._group is None
                self._recorded_steps = RecordedDecoderSteps(
                    self._decoder,
                    self._kv.layers,
                    self._sampler,
                    self._config.scheduler.max_num_seqs,
                    self._arena,
                    self._hidden_TE,
                    draws=self._samples,
                )
                if self._drafter is not None:
                    self._record_drafts(self._recorded_steps, self._decoder)

    def _record_drafts(self, steps: RecordedDecoderSteps, decoder: Decoder[CpuOps]) -> None:
        """Record the steps of one sequence with its drafts: each takes 10 ms, as long as three steps, when it is first needed."""
        assert self._config.speculation is not None
        plan = StepPlan(0, 0, (0,), (0,), (1,), (1,))
        lengths = self._slots.num_prompt
        held = lengths[0]  # of a prompt from before a sleep, whose positions are not recorded
        lengths[0] = 0
        try:
            for num_drafts in range(self._config.speculation.num_speculative_tokens + 1):
                steps.record(self._make_batch(plan, decoder, np.array([num_drafts])))
        except NotRecordableError as error:
            logger.info("steps are not recorded: %s", error)
            self._recorded_steps = None
        finally:
            lengths[0] = held

    def _load_decoder(self) -> Decoder[CpuOps]:
        config = self._config
        with ThreadPoolExecutor(1, "trouper-compile") as pool:
            ops = pool.submit(self._make_ops)
            draw = pool.submit(compile_sample)
            wrap = None if self._adapters is None else self._adapters.wrap
            decoder = load_decoder(
                config,
                self._model_traits,
                ops=ops.result,
                shared=self._group,
                stage=self._stage,
                shard=self._shard,
                wrap=wrap,
            )
            draw.result()
            return decoder

    def _make_ops(self) -> CpuOps:
        return make_ops(ops_config(self._traits, self._dtype, self._config.block_size))

    def load_adapter(self, slot: int, files: AdapterFiles) -> None:
        """Put an adapter into a slot, from 1 on; raises as `AdapterSlots.load` does, and the slot is as it was."""
        if self._adapters is None:
            raise RuntimeError("an adapter without enable_lora")
        with torch.inference_mode():
            self._adapters.load(slot, files)

    @property
    def is_tiny(self) -> bool:
        return self._decoder is not None and self._decoder.num_bytes < TINY_BYTES

    def close(self) -> None:
        """Give back the memory.  Idempotent."""
        self.sleep(2)

    def execute(self, plan: StepPlan | PoolPlan) -> StepDone | None:
        """Run one plan.  After an exception its sequences must be given again."""
        assert isinstance(plan, StepPlan), "this model generates"
        return self._run(plan)[0]

    def _run(self, plan: StepPlan) -> tuple[StepDone, Tensor | None]:
        """Run a plan as far as the layers go that are here.

        Returns:
            The answer, which only the last stage fills in, and what the layers have made of all tokens, if there are any.
        """
        if self._decoder is None or self._kv is None:
            raise RuntimeError("a step while weights or KV memory are absent")
        if self._group is not None:
            self._group.begin_step(plan.step)
        with torch.inference_mode():
            self._apply_changes(plan, self._kv)
            if not plan.request_slots:
                return StepDone(plan.step, ()), None
            drafter, num_drafts = self._drafter, None
            if drafter is not None:
                plan = drafter.settled(plan)
                num_drafts = drafter.propose(plan)
            batch = self._make_batch(plan, self._decoder, num_drafts)
            output = self._forward(batch, self._decoder, self._kv)
            if not self._stage.is_last:
                return StepDone(plan.step, ()), output.hidden_TE
            # in this order: logits are valid until the next are computed
            sampled = self._sample(output, batch)
            prompt_logprobs = self._prompt_logprobs(plan, output.hidden_TE, batch, self._decoder)
            if not self._samples:
                return StepDone(plan.step, ()), None
            if drafter is not None and num_drafts is not None:
                done = drafter.verify(plan, sampled, prompt_logprobs)
            else:
                num_entries = len(plan.request_slots)
                token_ids, logprobs = sampled.by_entry(batch.samples.entries, num_entries)
                done = make_step_done(plan, token_ids, logprobs, prompt_logprobs)
            return with_grammar_work(done, self._sampler.take_grammar_work()), output.hidden_TE

    def _apply_changes(self, plan: StepPlan, kv: KVCache) -> None:
        for new in plan.new_sequences:
            if self._drafter is not None:
                self._drafter.leave(new.request_slot)
            self._slots.place(new)
            self._sampler.place(new.request_slot, new.grammar if self._samples else None)
            if self._drafter is not None:
                has_grammar = new.grammar is not None
                self._drafter.place(new.request_slot, new.family, has_grammar=has_grammar)
        for slot, block_ids in plan.new_blocks:
            self._slots.add_blocks(slot, block_ids)
        kv.copy_blocks(plan.copies)
        if self._draft_model is not None:
            self._draft_model.copy_blocks(plan.copies)

    def _make_batch(
        self, plan: StepPlan, decoder: Decoder[CpuOps], num_drafts: np.ndarray | None
    ) -> Batch:
        batch = make_batch(
            plan,
            self._slots,
            self._traits.windows,
            decoder.ops.plan,
            num_drafts,
            reads_some=self._stage.is_last,
        )
        if self._adapter_rows is not None:
            read = None if batch.read is None else batch.read.tokens_R.numpy()
            self._adapter_rows.begin_step(batch.adapters, read)
        return batch

    def _forward(self, batch: Batch, decoder: Decoder[CpuOps], kv: KVCache) -> ForwardOutput:
        if self._recorded_steps is not None and self._recorded_steps.can_forward(batch):
            try:
                self._record(self._recorded_steps, batch)
                return self._recorded_steps.forward(batch)
            except NotRecordableError as error:
                logger.info("steps are not recorded: %s", error)
                self._recorded_steps = None
        with Lender(self._arena):
            hidden_TE = self._hidden_TE
            if hidden_TE is not None:
                hidden_TE = hidden_TE[: len(batch.tokens.ids_T)]
            hidden = decoder.forward(
                batch.tokens, batch.plans, kv.layers, batch.embeds, batch.read, hidden_TE
            )
            return ForwardOutput(hidden)

    def _record(self, steps: RecordedDecoderSteps, batch: Batch) -> None:
        """Record the first step, which the ranks do only if all of them can: a recorded step reads other rows of logits.

        Raises:
            NotRecordableError: this rank cannot, or another.
        """
        if self._group is None or self._has_agreed:
            return
        problem = None
        try:
            steps.record(batch)
        except NotRecordableError as error:
            problem = error
        self._has_agreed = True
        if not self._group.all_agree(problem is None):
            raise problem or NotRecordableError("another rank cannot")

    def _sample(self, output: ForwardOutput, batch: Batch) -> Sampled:
        """Draw a token after each of the batch's samples; a rank that does not sample has none."""
        _, tokens, slots, ends = batch.samples
        if output.token_R is not None:
            assert output.logits_TV is not None
            drawn = output.logits_TV, tokens, slots, ends, output.token_R
            return Sampled(self._sampler.settled(*drawn), [])
        if not len(tokens):
            return NOTHING
        assert self._decoder is not None
        hidden, logits = output.hidden_TE, output.logits_TV
        if logits is not None:
            return self._sampler.sample(logits, slots, ends, tokens) if self._samples else NOTHING
        if batch.read is None and len(tokens) < len(hidden):
            hidden = hidden.index_select(0, from_numpy(tokens))
        logits = self._decoder.logits(hidden)
        return self._sampler.sample(logits, slots, ends) if self._samples else NOTHING

    def _prompt_logprobs(
        self, plan: StepPlan, hidden_TE: Tensor, batch: Batch, decoder: Decoder[CpuOps]
    ) -> tuple[tuple[int, tuple[TokenLogprobs, ...]], ...]:
        """Compute those of the prompt tokens that follow the positions of this step, where they are asked for.

        A rank that does not sample computes its part of the logits.
        """
        spans = self._slots.prompt_spans(plan, batch.first_tokens)
        return prompt_logprobs(spans, hidden_TE, decoder.logits, keeps=self._samples)
