"""Run a model with a tower of texts and a tower of images, such as CLIP and SigLIP, by the code of transformers.

Both towers end in one space, so the embedding of a text is compared with that of an image.  Texts of one length are one batch;
each image is computed separately.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.device import DeviceInfo
from trouper.actors.executor.media.functions import TowerFunctions
from trouper.actors.executor.runners.cpu.process_resources import give_back_free_memory
from trouper.actors.executor.runners.model_runner import Profiler
from trouper.actors.executor.weights.tower import load_whole
from trouper.actors.messages.media import MediaItem
from trouper.actors.messages.steps import PoolDone, PoolEntry, PoolPlan, StepPlan
from trouper.config.adapters import AdapterFiles
from trouper.config.engine_config import EngineConfig
from trouper.errors import UnsupportedFeatureError

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
