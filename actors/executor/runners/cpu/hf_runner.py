"""Runs plans of a model of the transformers library on the CPU.  Synchronous, no scheduling state.

It keeps the laws of `runner.py`.  Its steps are never recorded: the library's code computes them, between calls of
this engine's attention and products.
"""

from functools import partial

import torch

from trouper.actors.executor.device import DeviceInfo
from trouper.actors.executor.models.hf_decoder import HfDecoder
from trouper.actors.executor.runners.cpu.process_resources import give_back_free_memory
from trouper.actors.executor.runners.model_runner import Profiler
from trouper.actors.executor.sampling.results import make_step_done, with_grammar_work
from trouper.actors.executor.sampling.sampler import Sampled, Sampler, prompt_logprobs
from trouper.actors.executor.steps.adapter_slots import AdapterSlots
from trouper.actors.executor.steps.batch import make_batch
from trouper.actors.executor.steps.kv_memory import KVCache, layer_cache_specs, num_kv_blocks
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.executor.weights.hf_model import load_hf_decoder
from trouper.actors.messages.steps import PoolPlan, StepDone, StepPlan
from trouper.config.adapters import AdapterFiles
from trouper.config.resolve import EngineConfig
from trouper.kernels.lora import AdapterRows


class HfRunner:
    """The model, its KV memory and the request slots.  Belongs to the thread that calls `load`.

    Args:
        config: resolved; `model.path` is a folder of safetensors unless `load_format` is "dummy".
    """

    is_tiny = False

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._slots = RequestSlots(
            config.scheduler.max_num_seqs, config.max_model_len, config.block_size
        )
        self._sampler = Sampler(self._slots)
        self._adapters: AdapterSlots | None = None
        self._adapter_rows: AdapterRows | None = None
        if config.lora is not None:
            self._adapter_rows = AdapterRows(config.scheduler.max_num_scheduled_tokens)
            self._adapters = AdapterSlots(config.lora, self._dtype, self._adapter_rows)
        self._decoder: HfDecoder | None = None
        self._kv: KVCache | None = None
        self._num_blocks = 0
        self._profiler = Profiler()
        self.start_profile, self.stop_profile = self._profiler.start, self._profiler.stop

    def load(self) -> DeviceInfo:
        """Read the weights, learn from the model what its layers keep, and set KV memory aside.

        Raises:
            UnsupportedFeatureError: the model cannot be served by way of transformers.
            TrouperValidationError: the checkpoint does not fit the model, or one sequence of `max_model_len` does
                not fit the KV memory.
        """
        config = self._config
        self.wake(frozenset({"weights"}))
        assert self._decoder is not None
        specs, longest = layer_cache_specs(self._decoder.layers), self._decoder.longest
        self._num_blocks = num_kv_blocks(config, specs, self._dtype.itemsize)
        self.wake(frozenset({"kv_cache"}))
        return DeviceInfo(
            num_blocks=self._num_blocks,
            block_size=config.block_size,
            dtype=config.dtype,
            name="cpu",
            num_weight_bytes=self._decoder.num_weight_bytes,
            longest=longest if longest < config.max_model_len else None,
        )

    def sleep(self, level: int) -> None:
        """Discard KV memory, and at level 2 the weights too: those are in host memory already."""
        if level >= 1:
            self._kv = None
            self._sampler.clear()
        if level >= 2:
            self._decoder = None
        self.release()

    def release(self) -> None:
        """Give free memory back to the system."""
        give_back_free_memory()

    def wake(self, tags: frozenset[str]) -> None:
        """Make `weights` and `kv_cache` resident, as far as `tags` names them and they are not."""
        with torch.inference_mode():
            if "weights" in tags and self._decoder is None:
                wrap = None if self._adapters is None else self._adapters.wrap
                self._decoder = load_hf_decoder(self._config, wrap)
            if "kv_cache" in tags and self._kv is None and self._decoder is not None:
                # empty, not zeros: pages that no sequence has touched take no memory
                self._kv = KVCache.allocate(
                    layer_cache_specs(self._decoder.layers),
                    num_blocks=self._num_blocks,
                    block_size=self._config.block_size,
                    empty=partial(torch.empty, dtype=self._dtype),
                )

    def close(self) -> None:
        """Give back the memory.  Idempotent."""
        self.sleep(2)

    def load_adapter(self, slot: int, files: AdapterFiles) -> None:
        """Put an adapter into a slot, from 1 on; raises as `AdapterSlots.load` does, and the slot is as it was."""
        if self._adapters is None:
            raise RuntimeError("an adapter without enable_lora")
        with torch.inference_mode():
            self._adapters.load(slot, files)

    def execute(self, plan: StepPlan | PoolPlan) -> StepDone:
        """Run one plan.  After an exception its sequences must be given again."""
        assert isinstance(plan, StepPlan), "this model generates"
        if self._decoder is None or self._kv is None:
            raise RuntimeError("a step while weights or KV memory are absent")
        with torch.inference_mode():
            self._apply_changes(plan, self._kv)
            if not plan.request_slots:
                return StepDone(plan.step, ())
            return self._run(plan, self._decoder, self._kv)

    def _apply_changes(self, plan: StepPlan, kv: KVCache) -> None:
        for new in plan.new_sequences:
            self._slots.place(new)
            self._sampler.place(new.request_slot, new.grammar)
        for slot, block_ids in plan.new_blocks:
            self._slots.add_blocks(slot, block_ids)
        kv.copy_blocks(plan.copies)

    def _run(self, plan: StepPlan, decoder: HfDecoder, kv: KVCache) -> StepDone:
        batch = make_batch(plan, self._slots, decoder.windows, decoder.plan)
        if self._adapter_rows is not None:
            self._adapter_rows.begin_step(batch.adapters)
        hidden_TE = decoder.forward(batch.tokens, batch.plans, kv.layers, batch.embeds, batch.read)
        spans = self._slots.prompt_spans(plan, batch.first_tokens)
        of_prompts = prompt_logprobs(spans, hidden_TE, decoder.logits)
        _, tokens, slots, ends = batch.samples
        sampled = Sampled([], [])
        if len(tokens):
            if batch.read is None:
                hidden_TE = hidden_TE[tokens]
            sampled = self._sampler.sample(decoder.logits(hidden_TE), slots, ends)
        token_ids, logprobs = sampled.by_entry(batch.samples.entries, len(plan.request_slots))
        done = make_step_done(plan, token_ids, logprobs, of_prompts)
        return with_grammar_work(done, self._sampler.take_grammar_work())
