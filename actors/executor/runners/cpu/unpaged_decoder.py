"""Run pooling models that an encoder's code does not cover: decoders, and the two towers of CLIP and SigLIP.

`UnpagedDecoder` reads whole prompts and keeps nothing between steps.  All layers share scratch memory for the keys and values
of one layer. Each prompt has whole blocks of it, so the decoder's paged attention reads it like a KV cache. Models that embed
with bidirectional attention (EmbeddingGemma, gte-Qwen2) use the attention of encoders over the same keys.

`TwoTowerRunner` runs a tower of texts and a tower of images by the code of transformers. Both towers end in one space, so the
embedding of a text is compared with that of an image. Texts of one length are one batch; each image is computed separately.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.device import DeviceInfo
from trouper.actors.executor.media.tower import TowerFunctions
from trouper.actors.executor.models.native_decoder import NativeDecoder, ops_config
from trouper.actors.executor.models.traits import DecoderTraits, PlanKey
from trouper.actors.executor.runners.cpu.process_resources import give_back_free_memory
from trouper.actors.executor.runners.resident_model import Profiler
from trouper.actors.executor.steps.batch import from_numpy, split_at_spans
from trouper.actors.executor.weights.decoder import load_decoder
from trouper.actors.executor.weights.tower import load_whole
from trouper.actors.messages.media import MediaItem
from trouper.actors.messages.steps import PoolDone, PoolEntry, PoolPlan, StepPlan
from trouper.config.adapters import AdapterFiles
from trouper.config.engine_config import EngineConfig
from trouper.errors import UnsupportedFeatureError
from trouper.kernels.cpu.attention.varlen import Group, is_native, tiles_of, varlen_attention
from trouper.kernels.ops import CpuOps, HostTokens, Spans
from trouper.kernels.select import make_ops

# See `pooling_runner.TINY_BYTES`.
TINY_BYTES = 4 * 2**20
PADDED = ("siglip", "siglip2")


class TwoTowerRunner:
    """Both towers of a model.  It belongs to the thread that calls `load`, which also executes plans."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._model: Any = None
        self._profiler = Profiler()
        self.start_profile, self.stop_profile = self._profiler.start, self._profiler.stop

    def load(self) -> DeviceInfo:
        """Read the weights of both towers.  There are no KV blocks, so the device reports one.

        Raises:
            TrouperValidationError: the checkpoint does not fit the config.
            UnsupportedFeatureError: transformers is not installed, or has no such class.
        """
        self.wake(frozenset({"weights"}))
        config = self._config
        return DeviceInfo(
            num_blocks=1, block_size=config.block_size, dtype=config.dtype, name="cpu"
        )

    def sleep(self, level: int) -> None:
        """Discard the weights at level 2."""
        if level >= 2:
            self._model = None
        self.release()

    def release(self) -> None:
        """Give free memory back to the system."""
        give_back_free_memory()

    def wake(self, tags: frozenset[str]) -> None:
        """Read the weights, if `tags` names them and they are not resident."""
        if "weights" in tags and self._model is None:
            self._model = load_whole(self._config)

    def load_adapter(self, slot: int, files: AdapterFiles) -> None:
        """Refuse an adapter; the config of a pooling model refuses `enable_lora` before."""
        raise UnsupportedFeatureError("a pooling model takes no adapters", parameter="enable_lora")

    @property
    def is_tiny(self) -> bool:
        """Whether one thread computes the model sooner than several."""
        if self._model is None:
            return False
        sizes = (p.numel() * p.element_size() for p in self._model.parameters())
        return sum(sizes) < TINY_BYTES

    def close(self) -> None:
        """Give back the memory.  Idempotent."""
        self.sleep(2)

    def execute(self, plan: StepPlan | PoolPlan) -> PoolDone:
        """Run one plan; the results have the order of the entries.

        Raises:
            RuntimeError: the weights are not loaded, or a tower computes infinite numbers or NaN.
        """
        assert isinstance(plan, PoolPlan), "this model pools"
        if self._model is None:
            raise RuntimeError("cannot run a step: the weights are not loaded")
        entries = plan.entries
        by_length: dict[int, list[int]] = {}
        found: dict[int, np.ndarray] = {}
        with torch.inference_mode(), TowerFunctions():
            for i, entry in enumerate(entries):
                if entry.media:
                    found[i] = self._seen(entry.media[0])
                else:
                    by_length.setdefault(len(entry.token_ids), []).append(i)
            for places in by_length.values():
                rows = self._read([entries[i] for i in places])
                found |= zip(places, rows, strict=True)
        return PoolDone(plan.step, tuple(found[i] for i in range(len(entries))))

    def _read(self, entries: Sequence[PoolEntry]) -> np.ndarray:
        """Compute the features [B, E] of texts of one length."""
        ids_BT = torch.tensor([entry.token_ids for entry in entries])
        text = self._model.config.text_config
        if self._model.config.model_type in PADDED:
            # SigLIP pools the state at its last position, so its texts are padded as in its training.
            num_more = int(text.max_position_embeddings) - ids_BT.shape[1]
            ids_BT = torch.nn.functional.pad(ids_BT, (0, num_more), value=int(text.pad_token_id))
        return _checked(self._model.get_text_features(input_ids=ids_BT))

    def _seen(self, item: MediaItem) -> np.ndarray:
        """Compute the features [E] of an image."""
        inputs: dict[str, Tensor] = {}
        for array in item.arrays:
            values = torch.tensor(np.frombuffer(array.data, array.dtype).reshape(array.shape))
            is_float = values.is_floating_point()
            inputs[array.name] = values.to(self._dtype) if is_float else values
        return _checked(self._model.get_image_features(**inputs))[0]


def _checked(found: Any) -> np.ndarray:
    features = cast("Tensor", getattr(found, "pooler_output", found)).float()
    if not torch.isfinite(features).all():
        raise RuntimeError("a tower computes numbers that are not finite")
    return features.numpy()


BLOCK_SIZE = 16
NO_SPANS: Mapping[int, Sequence[tuple[int, int]]] = {}


class UnpagedDecoder:
    """A decoder with the interface of an encoder: whole prompts to hidden states, without a KV cache."""

    def __init__(self, decoder: NativeDecoder[CpuOps], *, spans_ignore_window: bool) -> None:
        self._decoder, self._spans_ignore_window = decoder, spans_ignore_window

    @classmethod
    def load(cls, config: EngineConfig, traits: DecoderTraits) -> Self:
        """Read the weights of a decoder without its head.

        Raises:
            UnsupportedFeatureError: the attention is bidirectional and has a soft cap or sinks.
            TrouperValidationError: the checkpoint does not fit the config.
        """
        dtype: torch.dtype = getattr(torch, config.dtype)
        if not traits.is_causal and (traits.attention_softcap is not None or traits.has_sinks):
            rule = "attention in both directions with a soft cap or sinks is not supported"
            raise UnsupportedFeatureError(rule, parameter="model")

        def ops() -> CpuOps:
            made = make_ops(ops_config(traits, dtype, BLOCK_SIZE))
            return made if traits.is_causal else cast("CpuOps", _BothWays(made, traits, dtype))

        ignore = config.media is not None and config.media.family.spans == "prompt"
        decoder = load_decoder(config, traits, ops=ops, has_head=False)
        return cls(decoder, spans_ignore_window=ignore)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of weights that a pass reads."""
        return self._decoder.num_bytes

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        type_ids_T: Tensor,
        groups: Sequence[Group],
        embeds: Sequence[tuple[int, Tensor]] = (),
        axes_3T: Tensor | None = None,
        spans: Mapping[int, Sequence[tuple[int, int]]] = NO_SPANS,
    ) -> Tensor:
        """Compute the hidden states [T, E] of whole prompts. A decoder has no segments, so it ignores their ids.

        Args:
            embeds: rows of images in place of embeddings, as (first token, rows).
            axes_3T: positions in time, height and width, for images of a model that has them.
            spans: by index of the prompt the runs of tokens that see each other.
        """
        traits = self._decoder.traits
        lengths = [group.length for group in groups for _ in range(group.num_sequences)]
        num_blocks = -(-np.array(lengths) // BLOCK_SIZE)
        firsts = np.cumsum(num_blocks) - num_blocks
        block_ids = firsts[:, None] + np.arange(int(num_blocks.max()))
        slots_T = from_numpy(np.repeat(firsts * BLOCK_SIZE, lengths)) + positions_T
        ops = self._decoder.ops
        counts = np.array(lengths)
        columns = np.arange(len(counts)), np.zeros_like(counts), counts, counts > 1
        found: tuple[Spans, ...] = ()
        if spans:
            columns, found = split_at_spans(columns, spans, self._spans_ignore_window)
        rows, starts, counts, are_prompts = columns
        plans: dict[PlanKey, Any] = {
            window: ops.plan(block_ids, rows, starts, counts, window, are_prompts, *found)
            if traits.is_causal
            else _GroupPlan(groups, slots_T, window)
            for window in traits.windows
        }
        num_slots = int(num_blocks.sum()) * BLOCK_SIZE
        scratch = torch.empty(
            (2, traits.num_kv_heads, num_slots, traits.head_dim), dtype=self._decoder.dtype
        )
        tokens = HostTokens(token_ids_T, positions_T, slots_T, axes_3T)
        caches = [scratch] * len(traits.layers)
        return self._decoder.forward(tokens, plans, caches, embeds)


class _GroupPlan(NamedTuple):
    """The attention of prompts whose tokens all see each other, and the cache slots of their keys."""

    groups: Sequence[Group]
    slots_T: Tensor
    window: int | None


class _BothWays:
    """The operations of a decoder with bidirectional attention. All but `attend` are those of `ops`."""

    def __init__(self, ops: CpuOps, traits: DecoderTraits, dtype: torch.dtype) -> None:
        self._ops, self._traits = ops, traits
        self._is_native = is_native(dtype, traits.head_dim)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attend(
        self, qkv_TND: Tensor, cache_2HSD: Tensor, plan: _GroupPlan, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the attention's output [T, N D]. Each KV head is copied for the query heads that share it."""
        traits = self._traits
        num_shared = traits.num_q_heads // traits.num_kv_heads
        # The kernel of encoders reads [T, 3, N, D].
        q_TND = qkv_TND.narrow(1, 0, traits.num_q_heads)
        kv_2THD = cache_2HSD.index_select(2, plan.slots_T).transpose(1, 2)
        k_TND, v_TND = kv_2THD.repeat_interleave(num_shared, dim=2)
        return varlen_attention(
            torch.stack((q_TND, k_TND, v_TND), dim=1),
            plan.groups,
            scale=traits.attention_scale,
            window=plan.window,
            tiles=tiles_of(plan.groups) if self._is_native else None,
        )
