"""A small draft model for speculative decoding: the same vocabulary and noise as the target model, with its own KV cache.

Its cache uses the target model's block tables, so a cached prefix of one is a cached prefix of the other.  If layers of the target have
tables of their own, it is the first, which keeps all blocks.

Laws:
  * The draft model has computed the positions before `_known` of a slot. Positions of rejected drafts are computed again.
  * In one step it computes at most the target model's own tokens, `CATCH_UP` tokens that it missed, and one row for each
    draft. It misses tokens while a sequence has no drafts, computes them in chunks, and then drafts again.
  * It never changes a sampled token. If its cache lacks a prefix shared early, only the acceptance rate falls.
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch
from torch import Tensor

from trouper.actors.executor.models.decoder import Decoder, KVCacheSpec, plan_keys_of
from trouper.actors.executor.runners.cpu.models import DecoderPass, NativeModel, allocate_kv_cache
from trouper.actors.executor.runners.resident_model import ResidentModel
from trouper.actors.executor.sampling.sampler import Sampler
from trouper.actors.executor.steps.batch import make_batch
from trouper.actors.executor.steps.cache_memory import KVCache
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.steps import StepPlan
from trouper.config.engine_config import EngineConfig
from trouper.config.model import ModelConfig

# The most missed tokens of all sequences together that it computes in one step. A model of a tenth of the size computes
# this many in about the time of a step of the target model; a whole prompt would delay every sequence by seconds.
CATCH_UP = 128


class DraftModel:
    """The draft model of one engine.

    Args:
        config: the engine's config, which the draft model shares except for adapters and quantization.
        model: the draft model itself.
        slots: the engine's request slots, into which drafts are written.
        sampler: the engine's sampler, so that both models draw with the same noise and agree on likely tokens.
        empty: makes the tensors of the KV cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        slots: RequestSlots,
        sampler: Sampler,
        empty: Callable[..., Tensor] = torch.empty,
    ) -> None:
        is_rounded = model.is_gguf or bool(model.hf_config.get("quantization_config"))
        self._config = msgspec.structs.replace(
            config,
            model=model,
            lora=None,
            load_format="dummy" if config.load_format == "dummy" else "auto",
            quantization=None if is_rounded else config.quantization,
        )
        self._slots, self._sampler = slots, sampler
        allocate = partial(
            allocate_kv_cache,
            block_size=config.block_size,
            empty=partial(empty, dtype=getattr(torch, config.dtype)),
        )
        self._model = ResidentModel[Decoder, KVCache](NativeModel(self._config), allocate)
        self._steps: DecoderPass | None = None
        self._num_target_bytes = 1
        # By slot, the number of positions in this model's cache; -1 means as many as the target model has at its next step.
        self._known: dict[int, int] = {}

    @property
    def cache_specs(self) -> tuple[KVCacheSpec, ...]:
        """Return what the layers of the draft model keep of each token."""
        return self._model.cache_specs

    @property
    def kv_cache(self) -> KVCache:
        """Return the draft model's own KV cache, which must be in memory."""
        return self._model.resident()[1]

    @property
    def num_weight_bytes(self) -> int:
        """Return the bytes that the weights take in memory, 0 while they are not loaded."""
        decoder = self._model.decoder
        return 0 if decoder is None else decoder.num_weight_bytes

    @property
    def cost(self) -> float:
        """Return the time of a drafted token in steps of the target model: a row of either reads all weights once.

        The length of drafts depends on it.
        """
        return self.num_weight_bytes / self._num_target_bytes

    def sleep(self, level: int) -> None:
        """Discard what the target model discards at this level. Both share the memory budget of the engine."""
        if level >= 1:
            self._steps = None
        self._model.sleep(level)

    def wake(self, target: ResidentModel[Decoder, KVCache]) -> None:
        """Make resident what the target model has resident: the weights, and as many KV blocks as it has."""
        if target.decoder is not None:
            self._model.load_weights()
            self._num_target_bytes = target.decoder.num_weight_bytes
        if target.memory is not None:
            self._model.allocate(target.num_blocks)
        if self._steps is None and self._model.is_resident:
            decoder, kv = self._model.resident()
            self._steps = DecoderPass(
                decoder,
                kv.layers,
                self._sampler,
                self._config.scheduler.max_num_seqs,
                is_eager=self._config.enforce_eager,
            )

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of this model's KV cache, as the target model copies its own.

        Both caches have the same block numbers, so the scheduler's plans apply to both.
        """
        self._model.resident()[1].copy_blocks(copies)

    def place(self, slot: int, *, has_drafts: bool) -> None:
        """Begin to draft for a sequence, unless it has prompt embeddings: these have the target model's width."""
        self._known.pop(slot, None)
        if has_drafts and not self._slots.has_embeds(slot):
            self._known[slot] = -1

    def keep(self, slot: int, end: int, num_right: int) -> None:
        """Record that the first `num_right` drafts behind position `end` were accepted.

        Keys and values of rejected drafts are overwritten by later steps. Otherwise the cache has to catch up.
        """
        self._known[slot] = min(self._known[slot], end + num_right)

    def propose(self, plan: StepPlan, lengths: Sequence[int]) -> list[list[int]]:
        """Compute the tokens of a plan, and write drafts behind them into the slots.

        Args:
            lengths: the maximum number of drafts for each entry.

        Returns:
            The drafts of each entry.
        """
        drafts: list[list[int]] = [[] for _ in lengths]
        # The end of each entry for which this model computes something.
        ends: dict[int, int] = {}
        entries = plan.request_slots, plan.num_computed_tokens, plan.num_scheduled_tokens
        room = self._room(plan)
        # Slot, start, count, and whether a draft is sampled.
        work: list[tuple[int, int, int, bool]] = []
        drafting: list[int] = []
        for i, (slot, start, count) in enumerate(zip(*entries, strict=True)):
            known = self._known.get(slot)
            if known is None:
                continue
            # `known` exceeds `start` only if a row failed behind accepted drafts. This step then begins with that row again.
            known, end = (start if known < 0 else min(known, start)), start + count
            if lengths[i] == 0 and count == 1:
                # This token is computed later, together with the tokens behind it.
                self._known[slot] = known
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
        """Return how many missed tokens this step may compute in addition to those of the plan, within the token budget."""
        budget = self._config.scheduler.max_num_scheduled_tokens
        return max(0, min(CATCH_UP, budget - sum(plan.num_scheduled_tokens)))

    def _draw(self, plan: StepPlan, work: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Compute tokens of some slots, and write the sampled ones into the slots. Returns -1 for infinite logits or NaN."""
        decoder, steps = self._model.decoder, self._steps
        assert decoder is not None
        assert steps is not None
        slots, starts, counts, are_sampled = zip(*work, strict=True)
        part = StepPlan(
            step=plan.step,
            epoch=plan.epoch,
            request_slots=slots,
            num_computed_tokens=starts,
            num_scheduled_tokens=counts,
            num_sampled_tokens=tuple(map(int, are_sampled)),
        )
        batch = make_batch(part, self._slots, plan_keys_of(self._model.cache_specs), decoder.plan)
        if len(self._slots.tables) > 1:
            ids, positions, kv_slots = batch.inputs
            batch = msgspec.structs.replace(batch, inputs=(ids, positions, kv_slots[0]))
        output = steps.forward(batch)
        _, tokens, drawn_slots, ends = batch.samples
        if not len(tokens):
            return []
        token_R = output.token_R
        if token_R is None:
            logits, rows = steps.logits(output, batch)
            token_R = self._sampler.draw(logits, rows, drawn_slots, ends)
        # A negative token means that the logits are not finite.
        is_token_R = token_R >= 0
        self._slots.token_ids[drawn_slots[is_token_R], ends[is_token_R]] = token_R[is_token_R]
        return token_R.tolist()
