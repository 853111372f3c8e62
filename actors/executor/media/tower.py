"""Compute the vision or audio tower of a model and its projector: trouper's own, or those of transformers.

The rows of an image or a recording depend on nothing else, so they can be cached and shared by requests.

Transformers' towers call torch's functions for attention, GELU and layer norms, which take a third of their time.  `TowerFunctions`
replaces these by trouper's kernels, two to four times as fast in bfloat16, and leaves calls that no kernel supports to torch.

A tower runs in slices of time, so that running streams continue while a large image is encoded.  Transformers' code cannot return in
the middle of a pass, so the tower runs on its own thread.  That thread and the device's thread never compute at the same time: one
waits while the other works.

Laws.
1. A slice ends at the first `pause` after its deadline, and every slice reaches at least the next `pause`.
2. Only one item is encoded at a time.  Its forward pass ends before another one begins.
3. Slices change no bit of a result: layers compute the tiles of an image, and products compute rows, independently of each other.
4. Whether a kernel computes a call depends only on the shapes and the mask of an item, so an item has the same rows in every step.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trouper.actors.executor.media.projectors import num_tiles
from trouper.actors.executor.media.vision import VisionTower, side_of
from trouper.actors.messages.media import MediaArray, MediaItem
from trouper.config.media import AUDIO, IMAGE, MediaConfig
from trouper.errors import UnsupportedFeatureError
from trouper.kernels.codegen.units import LANES
from trouper.kernels.cpu.attention.varlen import attend_both_ways, is_native
from trouper.kernels.cpu.encoder_ops import LayerNorm, gelu
from trouper.kernels.linear import LinearMethod

# Floating-point operations between two pauses of a product: 11 ms at the 380 GFLOP/s of two cores.
PIECE_OPERATIONS = 4 * 2**30


class AbandonedError(BaseException):
    """End the tower's thread at its pause, because its result is no longer needed."""


class Slices:
    """Connect the pauses in one tower's layers with the work that runs through them."""

    def __init__(self) -> None:
        self._work: SlicedWork | None = None

    def begin(self, function: Callable[[], Tensor]) -> "SlicedWork":
        """Prepare to run a function on its own thread.  The previous work must have ended or been abandoned."""
        assert self._work is None or self._work.has_ended
        self._work = SlicedWork(function)
        return self._work

    def pause(self) -> None:
        """Wait for the next slice if the current one has used up its time.  Does nothing on other threads."""
        work = self._work
        if work is not None and threading.current_thread() is work.thread:
            work.pause()


class SlicedWork:
    """Run a function in slices: each call of `advance` resumes it for a limited time.

    Args:
        function: called on a thread of its own, in inference mode.
    """

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self._function = function
        self._num_threads = torch.get_num_threads()
        self._may_go, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._deadline = 0.0
        self._is_abandoned = False
        self._result: Tensor | None = None
        self._error: BaseException | None = None
        self.has_ended = False
        # A daemon, since the process may end while an image is half encoded.
        self.thread = threading.Thread(target=self._run, name="trouper-tower", daemon=True)

    def advance(self, seconds: float) -> bool:
        """Resume the function for about this many seconds.  Returns whether it has ended."""
        if self.has_ended:
            return True
        if self.thread.ident is None:
            self.thread.start()
        self._deadline = time.monotonic() + seconds
        self._may_go.release()
        self._has_stopped.acquire()
        if self.has_ended:
            # The end of the thread releases its OpenMP team, which would slow down the device's team.
            self.thread.join()
        return self.has_ended

    def result(self) -> Tensor:
        """Return what the function returned.

        Raises:
            BaseException: what the function raised.
        """
        if self._error is not None:
            raise self._error
        assert self._result is not None, "it has ended"
        return self._result

    def abandon(self) -> None:
        """End the thread at the pause at which it waits.  Idempotent."""
        self._is_abandoned = True
        if self.thread.ident is None:
            self.has_ended = True
        self.advance(0.0)

    @property
    def has_failed(self) -> bool:
        """Return whether the function raised an error, which `result` would raise again."""
        return self._error is not None

    def pause(self) -> None:
        """Wait for the next slice if this one's deadline has passed.  Called on the function's thread."""
        if time.monotonic() < self._deadline:
            return
        self._has_stopped.release()
        self._may_go.acquire()
        if self._is_abandoned:
            raise AbandonedError

    def _run(self) -> None:
        self._may_go.acquire()
        torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode():
                self._result = self._function()
        except BaseException as error:  # noqa: ASYNC103  # a thread: it belongs to the caller of `result`
            self._error = error
        self.has_ended = True
        self._has_stopped.release()


class SlicedLinear(nn.Module):
    """Compute a linear layer with pauses before it and between groups of rows.

    Args:
        method: computes the product and adds the bias, if any.
        weight: exposed as `weight`, for code that reads its dtype or shape.
    """

    def __init__(self, method: LinearMethod, weight: Tensor, slices: Slices) -> None:
        super().__init__()
        self.weight, self.bias = weight, method.bias
        self.out_features, self.in_features = method.shape
        self._method, self._slices = method, slices
        self._num_rows = max(1, PIECE_OPERATIONS // (2 * max(1, prod(method.shape))))

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b for rows x of any leading dimensions."""
        self._slices.pause()
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if len(rows) <= self._num_rows:
            return self._method.apply(rows).view(*x.shape[:-1], self.out_features)
        y = x.new_empty((len(rows), self.out_features))
        num_pieces = -(-len(rows) // self._num_rows)
        # All pieces have about the same size, because a product of few rows takes longer for each row.
        size = -(-len(rows) // num_pieces)
        for begin in range(0, len(rows), size):
            if begin:
                self._slices.pause()
            self._method.apply_into(rows[begin : begin + size], y[begin : begin + size])
        return y.view(*x.shape[:-1], self.out_features)


def slice_layers(model: nn.Module, slices: Slices) -> None:
    """Make the layers of a tower compute one tile after another, with a pause before each.

    Transformers passes all tiles of an image to a layer at once, which takes seconds.
    """
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    for layer in max(lists, key=len, default=()):
        cast("Any", layer).forward = _by_tile(layer.forward, slices)


def _by_tile(forward: Callable[..., Any], slices: Slices) -> Callable[..., Any]:
    def by_tile(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        num_tiles = len(hidden) if hidden.dim() == 3 else 1

        def part(value: Any, i: int) -> Any:
            # Only masks have four dimensions; positions are the same for all tiles.
            is_mask = isinstance(value, Tensor) and value.dim() == 4 and len(value) == num_tiles
            return value[i : i + 1] if is_mask else value

        found: list[Any] = []
        for i in range(num_tiles):
            slices.pause()
            # The embedding of patches may return a transposed tensor, which would slow down every layer.
            tile = hidden[i : i + 1].contiguous() if hidden.dim() == 3 else hidden
            given = {name: part(value, i) for name, value in kwargs.items()}
            found.append(forward(tile, *(part(value, i) for value in args), **given))
        if num_tiles == 1:
            return found[0]
        if isinstance(found[0], Tensor):
            return torch.cat(found)
        first, *rest = zip(*found, strict=True)
        return torch.cat(first), *(values[0] for values in rest)

    return by_tile


class TowerFunctions(TorchFunctionMode):
    """Compute attention, GELU and layer norms by trouper's kernels: a context manager that affects only the calling thread."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            found = _attended(*args, **kwargs)
            return func(*args, **kwargs) if found is None else found
        if func is F.gelu:
            return _gelu(*args, **kwargs)
        if func is F.layer_norm:
            found = _normed(*args, **kwargs)
            return func(*args, **kwargs) if found is None else found
        return func(*args, **kwargs)


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    return gelu(input, has_tanh=approximate == "tanh")


def _normed(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    """Compute torch's `layer_norm` of the last dimension.  Returns None if the kernel does not support this call."""
    if weight is None or len(normalized_shape) != 1 or input.dtype != weight.dtype:
        return None
    rows = input.reshape(-1, input.shape[-1]).contiguous()
    return LayerNorm(weight, bias, eps)(rows).view(input.shape) if len(rows) else None


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Compute torch's `scaled_dot_product_attention` of [B, N, L, D].  Returns None if the kernel does not support this call."""
    if is_causal or dropout_p or enable_gqa or query.dim() != 4:
        return None
    if not query.shape == key.shape == value.shape or not query.numel():
        return None
    width = query.shape[-1]
    padded = -(-width // LANES) * LANES
    if not is_native(query.dtype, padded) or not _sees_all(attn_mask):
        return None
    # Padding a head with zeros changes no score, and the padding of the result is cut off.
    parts = [x if padded == width else F.pad(x, (0, padded - width)) for x in (query, key, value)]
    q_BLND, k_BLND, v_BLND = (part.transpose(1, 2) for part in parts)
    out_BLND = attend_both_ways(q_BLND, k_BLND, v_BLND, width**-0.5 if scale is None else scale)
    return out_BLND[..., :width].transpose(1, 2)


def _sees_all(mask: Tensor | None) -> bool:
    """Return whether a mask hides nothing, because some towers also create one for an image without padding."""
    if mask is None:
        return True
    return bool(mask.all()) if mask.dtype == torch.bool else not mask.any()


ADVICE = "language_model_only=True serves only its text model"


class MediaTower:
    """Compute the rows of items by the tower and the projector of one model.

    Args:
        model: a `VisionTower`, or transformers' class without its text model.
        hidden_size: the features of a row, equal to the text model's hidden size.
        slices: the pauses of the model's layers.
    """

    def __init__(
        self,
        model: nn.Module,
        media: MediaConfig,
        dtype: torch.dtype,
        hidden_size: int,
        slices: Slices,
    ) -> None:
        self._model: Any = model
        self._slices = slices
        # The bytes of the linear layers replaced by `SlicedLinear`.
        self.num_packed_bytes = 0
        self._media, self._dtype, self._hidden_size = media, dtype, hidden_size
        self._name = "audio tower" if media.modality == AUDIO else "vision tower"

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weights."""
        plain = sum(p.numel() * p.element_size() for p in self._model.parameters())
        return plain + self.num_packed_bytes

    def begin(self, item: MediaItem) -> SlicedWork:
        """Prepare to compute the rows of an item in slices; see `rows`."""
        return self._slices.begin(lambda: self.rows(item))

    def rows(self, item: MediaItem) -> Tensor:
        """Compute the rows [R, E] of an item.

        Raises:
            RuntimeError: the number of rows differs from the item's placeholder tokens, or a row has infinite numbers or NaN.
        """
        rows_RE = self.compute({array.name: _tensor(array) for array in item.arrays})
        if len(rows_RE) != item.num_rows:
            raise RuntimeError(
                f"the {self._name} computed {len(rows_RE)} rows for an item with {item.num_rows} placeholder tokens"
            )
        if not torch.isfinite(rows_RE).all():
            raise RuntimeError(f"the {self._name} computed infinite numbers or NaN")
        return rows_RE

    def compute(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Compute rows [R, E] from the processor's arrays.

        If the family also adds features to the outputs of the first layers (DeepStack), these follow in the same row.
        """
        # Pixels are integers if the options of a processor disable all scaling.
        inputs = {
            name: array.to(self._dtype)
            if name == "pixel_values" or array.is_floating_point()
            else array
            for name, array in arrays.items()
        }
        with TowerFunctions():
            found: Any = self._features(inputs)
        levels: Any = getattr(found, "deepstack_features", None) or ()
        parts = [_joined(part) for part in (getattr(found, "pooler_output", found), *levels)]
        for part_RE in parts:
            if part_RE.shape[1] != self._hidden_size:
                raise RuntimeError(
                    f"the {self._name} computes rows of {part_RE.shape[1]} numbers, "
                    f"but the text model's hidden size is {self._hidden_size}"
                )
        rows_RE = torch.cat(parts, 1)
        # Rows are cached, so they must not be a view of a larger tensor.
        return rows_RE.to(self._dtype, copy=True).contiguous()

    def _features(self, inputs: Mapping[str, Tensor]) -> Any:
        model = self._model
        if isinstance(model, VisionTower):
            return model(**inputs)
        if self._media.modality == IMAGE:
            return model.get_image_features(**inputs)
        if self._media.model_type == "qwen2_audio":
            return _of_qwen2_audio(model, **inputs)
        return model.get_audio_features(**inputs)

    def check(self) -> Tensor:
        """Compute the rows of a small grey image or of silence, so that an unsupported model fails at start.

        Raises:
            UnsupportedFeatureError: the tower fails, or returns infinite numbers or NaN.
        """
        try:
            names = self._media.family.inputs
            config = self._model.config
            is_image = self._media.modality == IMAGE
            rows_RE = self.compute(_grey(config, names) if is_image else _silence(config, names))
        except Exception as error:  # a model's own code may raise anything
            line = str(error).strip().partition("\n")[0]
            text = (
                f"its {self._name} fails on a test input ({type(error).__name__}: {line}); {ADVICE}"
            )
            raise UnsupportedFeatureError(text, parameter="model") from error
        if not len(rows_RE) or not torch.isfinite(rows_RE).all():
            text = f"its {self._name} computes no rows, infinite numbers or NaN for a test input; {ADVICE}"
            raise UnsupportedFeatureError(text, parameter="model")
        return rows_RE


def _joined(found: Any) -> Tensor:
    """Return rows [R, E] as one matrix.  Transformers returns one matrix for each image or tile for some families."""
    parts = cast("list[Tensor]", found) if isinstance(found, list | tuple) else [found]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _of_qwen2_audio(model: Any, input_features: Tensor, feature_attention_mask: Tensor) -> Tensor:
    """Return the rows of one window like the `forward` of transformers' class, because no method of the class returns them."""
    num_frames = feature_attention_mask.sum(-1)
    num_places, num_rows = model.audio_tower._get_feat_extract_output_lengths(num_frames)
    length = (input_features.shape[-1] - 2) // 2 + 1
    # Attention must ignore the padding of the window.
    mask = (torch.arange(length) < num_places[:, None])[:, None, None, :].expand(-1, -1, length, -1)
    found = model.audio_tower(input_features, attention_mask=mask).last_hidden_state
    return model.multi_modal_projector(found)[0, : int(num_rows)]


def _silence(config: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Make the inputs of a recording without sound for a model with this config."""
    audio = config.audio_config
    num_frames = 2 * int(getattr(audio, "max_source_positions", 0) or audio.n_window)
    made = {"input_features": torch.zeros(1, int(audio.num_mel_bins), num_frames)}
    mask = torch.ones(1, num_frames, dtype=torch.int64)
    return made | {name: mask for name in names if name not in made}


def _tensor(array: MediaArray) -> Tensor:
    return torch.tensor(np.frombuffer(array.data, array.dtype).reshape(array.shape))


def _grey(config: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Make the inputs of a small image for a model with this config."""
    vision = config.vision_config
    if "image_grid_thw" in names:
        side = 2 * int(vision.spatial_merge_size)
        channels = int(getattr(vision, "in_channels", None) or vision.in_chans)
        width = channels * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
        grid = torch.tensor([[1, side, side]])
        return {"pixel_values": torch.full((side * side, width), 0.5), "image_grid_thw": grid}
    side, patch = side_of(vision.image_size), side_of(vision.patch_size)
    is_pixtral = vision.model_type == "pixtral"
    # Towers that accept any size get an image of two by two rows. A whole tile of Idefics 3 would take half a second at every start.
    if is_pixtral:
        side = 2 * patch * int(getattr(config, "spatial_merge_size", 1))
    elif "pixel_attention_mask" in names:
        side = 2 * patch * int(getattr(config, "scale_factor", 2))
    tiles: tuple[int, ...] = ()
    if pinpoints := getattr(config, "image_grid_pinpoints", None):
        tiles = (1, num_tiles([side, side], pinpoints, side))
    elif "pixel_attention_mask" in names:
        tiles = (1, 1)
    # Not zeros, which some families treat as padding.
    made = {"pixel_values": torch.full((*(tiles or (1,)), 3, side, side), 0.5)}
    if "image_sizes" in names and (tiles or is_pixtral):
        made["image_sizes"] = torch.tensor([[side, side]])
    if "batch_num_images" in names:
        made["batch_num_images"] = torch.tensor([1])
    if "pixel_attention_mask" in names:
        made["pixel_attention_mask"] = torch.ones((1, 1, side, side), dtype=torch.int64)
    return made
