"""Runs plans on the CPU: request slots, batch, forward pass, sampler. It is synchronous and schedules nothing.

Laws:
  * Plans run in the order of the calls. The sequences, blocks and copies of a plan take effect before its forward pass.
  * A sampled token is written into its slot before `execute` returns. A plan made before the token was known
    therefore finds it there.
  * If the logits of one entry are not finite, only that entry fails.
  * A plan restores states of recurrent mixers before its forward pass, and saves them in it or behind it.
"""

from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.device import DeviceInfo
from trouper.actors.executor.media.encoder import MediaEncoder
from trouper.actors.executor.media.tower import ADVICE
from trouper.actors.executor.models.decoder import Decoder, plan_keys_of, windows_of
from trouper.actors.executor.models.families.registry import PREFIX_MODELS
from trouper.actors.executor.runners.cpu.draft_model import DraftModel
from trouper.actors.executor.runners.cpu.models import (
    WHOLE_STEP,
    DecoderPass,
    HfModel,
    NativeModel,
    Share,
    allocate_kv_cache,
)
from trouper.actors.executor.runners.cpu.process_resources import give_back_free_memory
from trouper.actors.executor.runners.cpu.recorded_steps import ForwardOutput
from trouper.actors.executor.runners.resident_model import Profiler, ResidentModel
from trouper.actors.executor.sampling.drafter import Drafter
from trouper.actors.executor.sampling.sampler import (
    Sampled,
    Sampler,
    make_step_done,
    prompt_logprobs,
    with_grammar_work,
)
from trouper.actors.executor.steps.adapter_slots import AdapterSlots
from trouper.actors.executor.steps.batch import Batch, make_batch
from trouper.actors.executor.steps.cache_memory import (
    KeptMemory,
    KVCache,
    StateBudget,
    StatePool,
    kv_layout,
    num_kv_blocks,
    num_state_rows,
)
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.executor.weights.tower import load_tower
from trouper.actors.messages.steps import PoolPlan, StepDone, StepPlan
from trouper.config.adapters import AdapterFiles
from trouper.config.engine_config import EngineConfig
from trouper.config.speculation import MAX_VERIFIED
from trouper.errors import UnsupportedFeatureError
from trouper.kernels.linear import AdapterRows

# One core streams this many bytes of weights from its cache in about a millisecond. A second core gains nothing then,
# and on a busy machine every barrier between the two costs a time slice.
TINY_BYTES = 32 * 2**20
NOTHING_SAMPLED = Sampled([], [])


class CpuRunner:
    """The request slots, the sampler and the resident model of one worker. It belongs to the thread that calls `load`.

    Args:
        config: resolved.
        model: how the model is computed; by trouper's own code by default.
        share: the part of each step that this worker computes; all of it by default.
        kept: memory that outlives this process, for the KV cache and the states.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: NativeModel | HfModel | None = None,
        share: Share = WHOLE_STEP,
        kept: KeptMemory | None = None,
    ) -> None:
        self._config, self._share, self._kept = config, share, kept
        empty = torch.empty if kept is None else kept.empty
        dtype: torch.dtype = getattr(torch, config.dtype)
        self._dtype = dtype
        model = model or NativeModel(config)
        self._encoder = _encoder_of(config, model)
        # Only own code has layers with block tables of their own.
        windows = windows_of(model.cache_specs or ())
        self.slots = RequestSlots(
            config.scheduler.max_num_seqs,
            config.max_model_len,
            config.block_size,
            self._encoder,
            spans_ignore_window=config.media is not None and config.media.family.spans == "prompt",
            num_tables=len(windows),
        )
        self._sampler = Sampler(self.slots)
        self._draft_model: DraftModel | None = None
        if config.draft_model is not None:
            self._draft_model = DraftModel(
                config, config.draft_model, self.slots, self._sampler, empty
            )
        self._drafter: Drafter | None = None
        if config.speculation is not None:
            self._drafter = Drafter(
                config.speculation, self.slots, self._sampler.grammars, self._draft_model
            )
        adapters: AdapterSlots | None = None
        self._adapter_rows: AdapterRows | None = None
        if config.lora is not None:
            self._adapter_rows = AdapterRows(config.scheduler.max_num_scheduled_tokens)
            adapters = AdapterSlots(
                config.lora,
                dtype,
                self._adapter_rows,
                heads=model.heads,
                has_tower=config.media is not None,
            )
            for parameter in model.adapted:
                adapters.know(parameter)
        self._heads = None if adapters is None else adapters.heads
        allocate = partial(
            allocate_kv_cache, block_size=config.block_size, empty=partial(empty, dtype=dtype)
        )
        self.model = ResidentModel[Decoder, KVCache](model, allocate, adapters)
        # The states of recurrent mixers, if the model has any. Allocated and dropped with the KV cache.
        self.states: StatePool | None = None
        self._state_rows = StateBudget()
        # Made of the weights and the KV cache, and dropped with either.
        self.steps: DecoderPass | None = None
        self.profiler = Profiler()
        self.start_profile, self.stop_profile = self.profiler.start, self.profiler.stop

    def load(self) -> DeviceInfo:
        """Read the weights and set KV memory aside.

        Raises:
            TrouperValidationError: the checkpoint does not fit the config, or one sequence of
                `max_model_len` does not fit the KV memory.
            UnsupportedFeatureError: the model cannot be computed on the CPU.
        """
        config, draft_model = self._config, self._draft_model
        specs = self.model.cache_specs
        if draft_model is not None:
            specs += draft_model.cache_specs
        # Computed before own weights are read, so that a length that does not fit is refused at once.
        rows = self._state_rows = num_state_rows(
            config, self.model.state_specs, self._dtype, self._share.states_elsewhere
        )
        self.model.num_blocks = num_kv_blocks(config, specs, self._dtype.itemsize, rows.num_bytes)
        self.wake(frozenset({"weights", "kv_cache"}))
        decoder, _ = self.model.resident()
        longest = decoder.longest
        return DeviceInfo(
            num_blocks=self.model.num_blocks,
            block_size=config.block_size,
            dtype=config.dtype,
            name="cpu",
            num_weight_bytes=decoder.num_weight_bytes
            + (0 if draft_model is None else draft_model.num_weight_bytes)
            + (0 if self._encoder is None else self._encoder.num_weight_bytes),
            longest=longest if longest is not None and longest < config.max_model_len else None,
            num_state_rows=rows.num_live,
            num_snapshots=rows.num_snapshots,
            state_bytes=rows.row_bytes,
            layout=kv_layout(config, specs, self._dtype.itemsize),
        )

    def sleep(self, level: int) -> None:
        """Discard KV memory at level 1, and the weights too at level 2.

        Weights at level 1 stay: they are in host memory. Waking then needs no file.
        """
        if level >= 1:
            self.steps = self.states = None
            self._sampler.clear()
        self.model.sleep(level)
        if self._encoder is not None:
            self._encoder.sleep(level)
        if level >= 2 and self._share.group is not None:
            self._share.group.forget_weights()
        if self._draft_model is not None:
            self._draft_model.sleep(level)
        if level >= 1 and self._kept is not None:
            self._kept.drop()
        self.release()

    def wake(self, tags: frozenset[str]) -> None:
        """Make `weights` and `kv_cache` resident, as far as `tags` names them and they are absent.

        Steps are recorded again as needed once both are resident.
        """
        self.model.wake(tags)
        if self._encoder is not None and "weights" in tags:
            self._encoder.load()
        if self._draft_model is not None:
            self._draft_model.wake(self.model)
        if self.steps is None and self.model.is_resident:
            decoder, kv = self.model.resident()
            rows = self._state_rows
            if rows.row_bytes:
                num_rows = rows.num_live + rows.num_snapshots
                self.states = StatePool(
                    self.model.state_specs,
                    num_rows,
                    self._dtype,
                    self._kept,
                    num_drafts=0 if self._drafter is None else MAX_VERIFIED,
                )
                # A predecessor may have died while it wrote them.  Its snapshots are whole.
                self.states.spoil(np.arange(rows.num_live))
            self.steps = DecoderPass(
                decoder,
                kv.layers,
                self._sampler,
                self._config.scheduler.max_num_seqs,
                is_eager=self._config.enforce_eager,
                heads=self._heads,
                share=self._share,
                mixers=None if self.states is None else self.states.mixers,
            )
            if self._drafter is not None and self.steps.recorded is not None:
                with torch.inference_mode():
                    self._record_drafts(self.steps)

    def release(self) -> None:
        """Give free memory back to the system.

        Freed memory would otherwise stay in the allocator's cache.
        """
        give_back_free_memory()

    def close(self) -> None:
        """Give back the memory. Idempotent."""
        self.sleep(2)
        self.model.close()

    def load_adapter(self, slot: int, files: AdapterFiles) -> None:
        """Put an adapter into a slot; see `ResidentModel.load_adapter`."""
        self.model.load_adapter(slot, files)

    @property
    def kv_caches(self) -> list[KVCache]:
        """The KV cache and the draft model's, for the tier on disk. Empty while they are not in memory.

        Without the draft model's keys, no draft behind a fetched prefix would be right.
        """
        if not self.model.is_resident:
            return []
        draft = [] if self._draft_model is None else [self._draft_model.kv_cache]
        return [self.model.resident()[1], *draft]

    @property
    def is_tiny(self) -> bool:
        """Whether one thread computes the model sooner than several.

        Several threads would wait for each other longer than they compute.
        """
        decoder = self.model.decoder
        return decoder is not None and decoder.is_recordable and decoder.num_bytes < TINY_BYTES

    def _record_drafts(self, steps: DecoderPass) -> None:
        """Record the steps of one sequence with each number of drafts.

        Otherwise the first step of each size would take 10 ms longer, as long as three steps.
        """
        assert self._config.speculation is not None
        plan = StepPlan(0, 0, (0,), (0,), (1,), (1,))
        lengths = self.slots.num_prompt
        # The slot may keep a sequence from before a sleep. Steps within a long prompt would not be recorded.
        held, lengths[0] = int(lengths[0]), 0
        try:
            for num_drafts in range(self._config.speculation.num_speculative_tokens + 1):
                steps.record(self._make_batch(plan, steps.decoder, np.array([num_drafts])))
        finally:
            lengths[0] = held

    def execute(self, plan: StepPlan | PoolPlan) -> StepDone:
        """Run one plan.

        After an exception the scheduler must send its sequences again.

        The device's state is then undefined for these sequences only. Others may continue.
        """
        assert isinstance(plan, StepPlan), "this model generates"
        return self.compute(plan)[0]

    def compute(self, plan: StepPlan) -> tuple[StepDone, Tensor | None]:
        """Run this worker's share of a plan.

        Returns:
            The answer, complete only on the worker that samples, and the hidden states of all tokens for the next stage.
        """
        decoder, kv = self.model.resident()
        steps = self.steps
        assert steps is not None
        if self._share.group is not None:
            self._share.group.begin_step(plan.step)
        with torch.inference_mode():
            self._apply_changes(plan, kv)
            encoded = self.slots.encode(plan.encodes, plan.encode_s) if plan.encodes else ()
            if not plan.request_slots:
                return StepDone(plan.step, (), encoded=encoded), None
            num_drafts = None
            if self._drafter is not None:
                plan = self._drafter.settled(plan)
                num_drafts = self._drafter.propose(plan)
            batch = self._make_batch(plan, decoder, num_drafts)
            states = self.states
            if states is not None:
                states.begin(batch.request_slots, batch.starts, plan.saves)
            output = steps.forward(batch)
            if states is not None:
                states.finish(batch.request_slots, batch.starts + batch.settled, plan.saves)
            if not self._share.is_last:
                return StepDone(plan.step, ()), output.hidden_TE
            done = self._answer(plan, batch, output, steps, has_drafts=num_drafts is not None)
            if encoded:
                done = msgspec.structs.replace(done, encoded=encoded)
            return done, output.hidden_TE

    def _answer(
        self,
        plan: StepPlan,
        batch: Batch,
        output: ForwardOutput,
        steps: DecoderPass,
        *,
        has_drafts: bool,
    ) -> StepDone:
        """Sample, and collect what the plan's requests asked for. A rank that does not sample computes its part of the logits."""
        samples = self._share.samples
        # Logits are valid until the next ones are computed, so sampling comes before the logprobs of prompts.
        sampled = self._sample(output, batch, steps)
        spans = self.slots.prompt_spans(plan, batch.first_tokens)
        of_prompts = prompt_logprobs(
            spans,
            output.hidden_TE,
            lambda hidden_RE, token: steps.logits_of(hidden_RE, int(batch.adapters[token])),
            keeps=samples,
        )
        if not samples:
            return StepDone(plan.step, ())
        if self._drafter is not None and has_drafts:
            done = self._drafter.verify(plan, sampled, of_prompts)
            if self.states is not None:
                self._replay_drafts(self.states, batch, done, steps)
        else:
            token_ids, logprobs = sampled.by_entry(batch.samples.entries, len(plan.request_slots))
            done = make_step_done(plan, token_ids, logprobs, of_prompts)
        return with_grammar_work(done, self._sampler.take_grammar_work())

    def _replay_drafts(
        self, states: StatePool, batch: Batch, done: StepDone, steps: DecoderPass
    ) -> None:
        """Move states forward over the drafts that equal the sampled tokens.

        The pass has left each state behind the last known token, so rejected drafts were never part of it.
        """
        num_right = np.array([max(0, len(token_ids) - 1) for token_ids in done.token_ids])
        if not num_right.any():
            return
        columns = batch.replayed(num_right)
        _, counts, rows, starts, *_ = columns
        states.begin(rows, starts)
        steps.replay(columns)
        states.finish(rows, starts + counts)

    def _apply_changes(self, plan: StepPlan, kv: KVCache) -> None:
        for new in plan.new_sequences:
            slot = new.request_slot
            if self._drafter is not None:
                self._drafter.leave(slot)
            self.slots.place(new)
            self._sampler.place(slot, new.grammar if self._share.samples else None)
            if self.states is not None and new.state_row >= 0:
                self.states.copy(new.state_row, slot)
            if self._drafter is not None:
                self._drafter.place(slot, new.family, has_grammar=new.grammar is not None)
        for slot, block_ids in plan.new_blocks:
            self.slots.add_blocks(slot, block_ids)
        kv.copy_blocks(plan.copies)
        if self._draft_model is not None:
            self._draft_model.copy_blocks(plan.copies)

    def _make_batch(self, plan: StepPlan, decoder: Decoder, num_drafts: np.ndarray | None) -> Batch:
        batch = make_batch(
            plan,
            self.slots,
            plan_keys_of(self.model.cache_specs),
            decoder.plan,
            num_drafts,
            reads_some=self._share.is_last,
            plan_tables=decoder.plan_tables,
        )
        if self._adapter_rows is not None:
            read = None if batch.read is None else batch.read.tokens_R.numpy()
            self._adapter_rows.begin_step(batch.adapters, read)
        return batch

    def _sample(self, output: ForwardOutput, batch: Batch, steps: DecoderPass) -> Sampled:
        """Draw a token after each of the batch's samples; only logits are computed on a rank that does not sample."""
        _, tokens, slots, ends = batch.samples
        if output.token_R is not None:
            assert output.logits_TV is not None
            drawn = output.logits_TV, tokens, slots, ends, output.token_R
            return Sampled(self._sampler.settled(*drawn), [])
        if not len(tokens):
            return NOTHING_SAMPLED
        logits, rows = steps.logits(output, batch)
        if not self._share.samples:
            return NOTHING_SAMPLED
        return self._sampler.sample(logits, slots, ends, rows)


def _encoder_of(config: EngineConfig, model: NativeModel | HfModel) -> MediaEncoder | None:
    """Return the encoder of the images that the config's model takes, if it takes any.

    Raises:
        UnsupportedFeatureError: the text model has no positions in three dimensions, and its images need them.
    """
    media = config.media
    if media is None:
        if config.model.architecture in PREFIX_MODELS:
            rule = f"{config.model.architecture} needs bidirectional attention within prompts, which only prompts with images have"
            raise UnsupportedFeatureError(f"{rule}: {config.no_media}", parameter="model")
        return None
    if media.family.spans and isinstance(model, HfModel):
        rule = f"images of {media.model_type} see later parts of themselves, which needs trouper's own code of the text model"
        raise UnsupportedFeatureError(f"{rule}; {ADVICE}", parameter="model")
    if media.family.has_grids and (isinstance(model, HfModel) or not model.has_three_positions):
        rule = f"images of {media.model_type} need trouper's own code of the text model, and mrope_section in config.json"
        raise UnsupportedFeatureError(f"{rule}; {ADVICE}", parameter="model")
    load = partial(load_tower, config, media)
    return MediaEncoder(load, media.encoder_cache_bytes, give_back_free_memory)
