"""A second, smaller decoder that drafts for the first: the same vocabulary, the same noise, KV memory of its own.

Its cache lies under the model's block table, so a prefix that is in the one is in the other.  Laws:
  * It has computed the positions before `_known` of a slot; those of drafts that were wrong are computed again.
  * A step costs it no more than the model's own tokens, `CATCH_UP` others, and one row for each draft: what it has missed while a
    sequence had no drafts it computes in chunks, and drafts when it is through.
  * Whatever it computes, no token changes: what it lacks, after a prefix that was shared early, costs right drafts alone.
"""

import logging
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from trouper.actors.executor.models.decoder import Decoder, ops_config
from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.runners.cpu.recorded_steps import ForwardOutput, RecordedDecoderSteps
from trouper.actors.executor.sampling.sampler import Sampler
from trouper.actors.executor.steps.arrays import from_numpy
from trouper.actors.executor.steps.batch import Batch, make_batch
from trouper.actors.executor.steps.kv_memory import KVCache, kv_cache_specs
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.executor.weights.decoder import load_decoder
from trouper.actors.messages.steps import StepPlan
from trouper.config.model import ModelConfig
from trouper.config.resolve import EngineConfig
from trouper.kernels.codegen.arena import Arena, Lender
from trouper.kernels.codegen.recording import NotRecordableError
from trouper.kernels.ops import CpuOps
from trouper.kernels.select import make_ops

logger = logging.getLogger(__name__)
# Tokens of a step that it may compute beside those of the plan, of all sequences together.  A model of a tenth of the size computes
# as many in about the time of the other's step, where a whole prompt would hold up every sequence for seconds.
CATCH_UP = 128


class DraftModel:
    """The draft model of one engine.

    Args:
        config: of the engine.
        model: the draft model.
        slots: of the engine, where drafts are written.
        sampler: of the engine: a token that both models find likely is drawn with the same noise.
    """

    def __init__(
        self, config: EngineConfig, model: ModelConfig, slots: RequestSlots, sampler: Sampler
    ) -> None:
        is_rounded = model.path.endswith(".gguf") or bool(
            model.hf_config.get("quantization_config")
        )
        self._config = msgspec.structs.replace(
            config,
            model=model,
            lora=None,
            load_format="dummy" if config.load_format == "dummy" else "auto",
            quantization=None if is_rounded else config.quantization,
        )
        self._traits = decoder_traits(model.hf_config, model.architecture)
        self._slots, self._sampler = slots, sampler
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self.kv_specs = kv_cache_specs(self._traits)
        self._decoder: Decoder[CpuOps] | None = None
        self._kv: KVCache | None = None
        self._recorded_steps: RecordedDecoderSteps | None = None
        self._arena = Arena()
        self._num_model_bytes = 1
        self._known: dict[int, int] = {}  # by slot; -1: as many as the model, when it begins

    @property
    def num_weight_bytes(self) -> int:
        return 0 if self._decoder is None else self._decoder.num_weight_bytes

    @property
    def cost(self) -> float:
        """A drafted token, in steps of the model: one row reads all weights of either."""
        return self.num_weight_bytes / self._num_model_bytes

    def sleep(self, level: int) -> None:
        """Discard what the runner discards."""
        if level >= 1:
            self._kv = self._recorded_steps = None
            self._arena = Arena()
        if level >= 2:
            self._decoder = None

    def wake(self, num_blocks: int | None, *, model: Decoder[CpuOps] | None) -> None:
        """Make resident what is absent: the weights beside the model's, and as many blocks, if there is a number of them."""
        if model is not None and self._decoder is None:
            ops = partial(make_ops, ops_config(self._traits, self._dtype, self._config.block_size))
            self._decoder = load_decoder(self._config, self._traits, ops=ops)
            self._num_model_bytes = model.num_weight_bytes
        if num_blocks is not None and self._kv is None:
            self._kv = KVCache.allocate(
                self.kv_specs,
                num_blocks=num_blocks,
                block_size=self._config.block_size,
                empty=partial(torch.empty, dtype=self._dtype),
            )
        if self._decoder is None or self._kv is None or self._config.enforce_eager:
            return
        if self._recorded_steps is None:
            most = self._config.scheduler.max_num_seqs
            self._recorded_steps = RecordedDecoderSteps(
                self._decoder, self._kv.layers, self._sampler, most, self._arena
            )

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks as the model's are."""
        assert self._kv is not None
        self._kv.copy_blocks(copies)

    def place(self, slot: int, *, has_drafts: bool) -> None:
        """Take up a sequence, but for one with rows that stand for tokens: those are of the other model's size."""
        self._known.pop(slot, None)
        if has_drafts and not self._slots.has_embeds(slot):
            self._known[slot] = -1

    def keep(self, slot: int, end: int, num_right: int) -> None:
        """Take what became of a draft behind position `end`."""
        self._known[slot] = min(self._known[slot], end + num_right)

    def propose(self, plan: StepPlan, lengths: Sequence[int]) -> list[list[int]]:
        """Compute the tokens of a plan, and write drafts behind them into the slots.

        Args:
            lengths: of the drafts of each entry, at most.
        """
        drafts: list[list[int]] = [[] for _ in lengths]
        ends: dict[int, int] = {}  # of the entries that take part
        entries = plan.request_slots, plan.num_computed_tokens, plan.num_scheduled_tokens
        room = self._room(plan)
        work: list[tuple[int, int, int, bool]] = []  # slot, start, count, whether it samples
        drafting: list[int] = []
        for i, (slot, start, count) in enumerate(zip(*entries, strict=True)):
            known = self._known.get(slot)
            if known is None:
                continue
            # Beyond `start` only where a row failed behind right drafts: the next step begins with that row again.
            known, end = (start if known < 0 else min(known, start)), start + count
            if lengths[i] == 0 and count == 1:
                self._known[slot] = known  # computed with those that follow
                continue
            num_missed = start - known
            now = min(end, known + room + count)
            room -= min(room, num_missed)
            ends[i], self._known[slot] = end, now
            is_drafting = lengths[i] > 0 and now == end
            work.append((slot, known, now - known, is_drafting))
            if is_drafting:
                drafting.append(i)
        while work:
            drawn = self._draw(plan, work)
            still = [i for i, token in zip(drafting, drawn, strict=True) if token >= 0]
            for i, token in zip(drafting, drawn, strict=True):
                if token >= 0:
                    drafts[i].append(token)
            drafting = [i for i in still if len(drafts[i]) < lengths[i]]
            work = []
            for i in drafting:
                slot, position = plan.request_slots[i], ends[i] + len(drafts[i]) - 1
                work.append((slot, position, 1, True))
                self._known[slot] = position + 1
        return drafts

    def _room(self, plan: StepPlan) -> int:
        """Return how many tokens that were missed it may compute in a step: its budget bounds those of the plan and these."""
        budget = self._config.scheduler.max_num_scheduled_tokens
        return max(0, min(CATCH_UP, budget - sum(plan.num_scheduled_tokens)))

    def _draw(self, plan: StepPlan, work: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Compute tokens of some slots, draw where they sample, and write what is drawn into the slots."""
        assert self._decoder is not None
        assert self._kv is not None
        slots, starts, counts, are_sampled = zip(*work, strict=True)
        part = StepPlan(
            step=plan.step,
            epoch=plan.epoch,
            request_slots=slots,
            num_computed_tokens=starts,
            num_scheduled_tokens=counts,
            num_sampled_tokens=tuple(map(int, are_sampled)),
        )
        batch = make_batch(part, self._slots, self._traits.windows, self._decoder.ops.plan)
        output = self._forward(batch, self._decoder, self._kv)
        _, tokens, drawn_slots, ends = batch.samples
        if not len(tokens):
            return []
        token_R, logits = output.token_R, output.logits_TV
        if token_R is None:
            picked = tokens
            if logits is None:
                hidden = output.hidden_TE
                if batch.read is None and len(tokens) < len(hidden):
                    hidden = hidden.index_select(0, from_numpy(tokens))
                logits, picked = self._decoder.logits(hidden), np.arange(len(tokens))
            token_R = self._sampler.draw(logits, picked, drawn_slots, ends)
        is_token_R = token_R >= 0  # else the logits are not finite
        self._slots.token_ids[drawn_slots[is_token_R], ends[is_token_R]] = token_R[is_token_R]
        return token_R.tolist()

    def _forward(self, batch: Batch, decoder: Decoder[CpuOps], kv: KVCache) -> ForwardOutput:
        if self._recorded_steps is not None and self._recorded_steps.can_forward(batch):
            try:
                return self._recorded_steps.forward(batch)
            except NotRecordableError as error:
                logger.info("steps of the draft model are not recorded: %s", error)
                self._recorded_steps = None
        with Lender(self._arena):
            return ForwardOutput(
                decoder.forward(batch.tokens, batch.plans, kv.layers, (), batch.read)
            )
