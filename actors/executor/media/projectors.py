"""Projectors, which turn the patches that a vision tower has encoded into embedding rows of the text model.

B  tiles of an image    L  patches of a tile    E  width of the tower    R  rows of the image
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Fields = Mapping[str, Any]
Grid = tuple[int, int]
ANY_SHAPE = "anyres_max_"
NINE_TILES = "anyres_max_9"


def activations() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return activation functions by transformers' names."""
    return {
        "gelu": F.gelu,
        "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "silu": F.silu,
        "relu": F.relu,
    }


class TowerRmsNorm(nn.Module):
    """Normalize by the root mean square (RMS norm).

    Args:
        has_offset: scale by 1 + weight before rounding to the dtype, like Gemma. Otherwise by the weight, after rounding.
    """

    def __init__(self, width: int, eps: float, *, has_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self._eps, self._has_offset = eps, has_offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        if self._has_offset:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class LlavaProjector(nn.Module):
    """Project with two linear layers and an activation between them.

    Args:
        raw: the contents of config.json.
        width: the features of an encoded patch, of all chosen layers together.
        row_size: the features of a row, equal to the text model's hidden size.
        grid: patches along one side of a tile.
    """

    def __init__(self, raw: Fields, width: int, row_size: int, grid: int) -> None:
        super().__init__()
        has_bias = bool(raw.get("multimodal_projector_bias", True))
        self.linear_1 = nn.Linear(width, row_size, bias=has_bias)
        self.linear_2 = nn.Linear(row_size, row_size, bias=has_bias)
        self._act = activations()[raw.get("projector_hidden_act", "gelu")]
        self._drops_first = raw.get("vision_feature_select_strategy", "default") == "default"

    @classmethod
    def supports(cls, raw: Fields) -> bool:
        """Return whether this class computes the projector that the configuration describes."""
        strategy = raw.get("vision_feature_select_strategy", "default")
        is_known = strategy in ("default", "full")
        return is_known and raw.get("projector_hidden_act", "gelu") in activations()

    @classmethod
    def layers(cls, raw: Fields, num_layers: int) -> tuple[int, ...] | None:
        """Return after which numbers of layers hidden states are read, or None for the output of the final norm.

        Raises:
            ValueError: the tower has fewer layers.
        """
        given = raw.get("vision_feature_layer", -2)
        chosen: Sequence[int] = [given] if isinstance(given, int) else given
        if not chosen or not all(-num_layers - 1 <= i <= num_layers for i in chosen):
            raise ValueError(
                f"vision_feature_layer is {given}, but the tower has {num_layers} layers"
            )
        return tuple(i if i >= 0 else i + num_layers + 1 for i in chosen)

    def num_tiles(self, given: Mapping[str, Tensor]) -> int | None:
        """Return how many tiles of the arrays belong to the image, the others being padding.  None means all."""
        return None

    def forward(self, x_BLE: Tensor, grid: Grid, given: Mapping[str, Tensor]) -> Tensor:
        """Return rows [R, row_size].

        Args:
            grid: height and width of a tile in patches.
            given: the other arrays of the processor.
        """
        return self._projected(x_BLE[:, 1:] if self._drops_first else x_BLE).flatten(0, 1)

    def _projected(self, x: Tensor) -> Tensor:
        return self.linear_2(self._act(self.linear_1(x)))


class TiledProjector(LlavaProjector):
    """Project like LLaVA-Next: the downscaled image comes first, then the tiles, joined to one image with a newline row after each line."""

    def __init__(self, raw: Fields, width: int, row_size: int, grid: int) -> None:
        super().__init__(raw, width, row_size, grid)
        size: Any = raw["vision_config"]["image_size"]
        self._side = int(size if isinstance(size, int) else size[0])
        self._pinpoints: Any = raw["image_grid_pinpoints"]
        self.image_newline = nn.Parameter(torch.empty(row_size))

    @classmethod
    def supports(cls, raw: Fields) -> bool:
        """Return whether the configuration lists the shapes into which images are cut.  Transformers' default list is not supported."""
        has_size = isinstance(raw["vision_config"].get("image_size"), int | list)
        return super().supports(raw) and has_size and bool(raw.get("image_grid_pinpoints"))

    def num_tiles(self, given: Mapping[str, Tensor]) -> int | None:
        """Return the number of tiles for the image's size, including the downscaled image.  Returns 1 if it is not cut."""
        if not self._is_cut(given):
            return 1
        return num_tiles(_size_of(given), self._pinpoints, self._side)

    def forward(self, x_BLE: Tensor, grid: Grid, given: Mapping[str, Tensor]) -> Tensor:
        """Return rows [R, row_size]; see `LlavaProjector.forward`."""
        rows = self._projected(x_BLE[:, 1:] if self._drops_first else x_BLE)
        if len(rows) == 1:
            return torch.cat([rows[0], self.image_newline[None]])
        size = _size_of(given)
        down, across = (side // self._side for side in best_shape(size, self._pinpoints))
        tiles = rows[1:].view(down, across, *grid, -1).permute(4, 0, 2, 1, 3)
        image = self._scaled(_unpadded(tiles.flatten(1, 2).flatten(2, 3), size), grid)
        ends = self.image_newline[:, None, None].expand(-1, image.shape[1], 1)
        lines = torch.cat([image, ends], -1).flatten(1).T
        return torch.cat([rows[0], lines])

    def _is_cut(self, given: Mapping[str, Tensor]) -> bool:
        return True

    def _scaled(self, image: Tensor, grid: Grid) -> Tensor:
        """Return the image [row_size, h, w], scaled down if it has too many rows."""
        return image


class OneVisionProjector(TiledProjector):
    """Project like LLaVA-OneVision, which scales down an image of too many patches."""

    def __init__(self, raw: Fields, width: int, row_size: int, grid: int) -> None:
        super().__init__(raw, width, row_size, grid)
        self._drops_first = raw.get("vision_feature_select_strategy", "full") == "default"
        # `anyres_max_9` means at most nine tiles.
        ratio = str(raw.get("vision_aspect_ratio", NINE_TILES))
        self._most = int(ratio.removeprefix(ANY_SHAPE))

    @classmethod
    def supports(cls, raw: Fields) -> bool:
        """Return whether the configuration lists the shapes of images and limits the number of tiles."""
        ratio = str(raw.get("vision_aspect_ratio", NINE_TILES))
        return super().supports(raw) and ratio.removeprefix(ANY_SHAPE).isdecimal()

    @classmethod
    def layers(cls, raw: Fields, num_layers: int) -> tuple[int, ...] | None:
        return super().layers({"vision_feature_layer": -1, **raw}, num_layers)

    def _is_cut(self, given: Mapping[str, Tensor]) -> bool:
        return "batch_num_images" not in given or int(given["batch_num_images"][0]) == 1

    def _scaled(self, image: Tensor, grid: Grid) -> Tensor:
        _, height, width = image.shape
        ratio = math.sqrt(height * width / (self._most * grid[0] ** 2))
        if ratio <= 1.1:
            return image
        size = [int(height // ratio), int(width // ratio)]
        return F.interpolate(image[None], size, mode="bilinear")[0]


class _LastProjector(nn.Module):
    """Share the parts of projectors that read the output of the tower's final norm."""

    @classmethod
    def supports(cls, raw: Fields) -> bool:
        return True

    @classmethod
    def layers(cls, raw: Fields, num_layers: int) -> tuple[int, ...] | None:
        return None

    def num_tiles(self, given: Mapping[str, Tensor]) -> int | None:
        return None


class ShufflingProjector(_LastProjector):
    """Project like Idefics 3: the patches of a square become one row."""

    def __init__(self, raw: Fields, width: int, row_size: int, grid: int) -> None:
        super().__init__()
        self._factor = int(raw.get("scale_factor", 2))
        self.proj = nn.Linear(width * self._factor**2, row_size, bias=False)

    def forward(self, x_BLE: Tensor, grid: Grid, given: Mapping[str, Tensor]) -> Tensor:
        return self.proj(_squares(x_BLE, grid, self._factor).flatten(2)).flatten(0, 1)


class InternProjector(_LastProjector):
    """Project like InternVL: a norm and two linear layers on the patches of a square, without the class token."""

    def __init__(self, raw: Fields, width: int, row_size: int, grid: int) -> None:
        super().__init__()
        self._factor = int(1 / float(raw.get("downsample_ratio", 0.5)))
        inner = width * self._factor**2
        self.layer_norm = nn.LayerNorm(inner)
        self.linear_1, self.linear_2 = nn.Linear(inner, row_size), nn.Linear(row_size, row_size)
        self._act = activations()[raw.get("projector_hidden_act", "gelu")]
        self._drops_first = raw.get("vision_feature_select_strategy", "default") == "default"

    @classmethod
    def supports(cls, raw: Fields) -> bool:
        is_usual = raw.get("vision_feature_select_strategy", "default") == "default"
        is_usual = is_usual and isinstance(raw.get("vision_feature_layer", -1), int)
        return is_usual and raw.get("projector_hidden_act", "gelu") in activations()

    @classmethod
    def layers(cls, raw: Fields, num_layers: int) -> tuple[int, ...] | None:
        given = int(raw.get("vision_feature_layer", -1))
        return None if given == -1 else LlavaProjector.layers(raw, num_layers)

    def forward(self, x_BLE: Tensor, grid: Grid, given: Mapping[str, Tensor]) -> Tensor:
        x = self.layer_norm(_squares(x_BLE[:, 1:], grid, self._factor).flatten(2))
        return self.linear_2(self._act(self.linear_1(x))).flatten(0, 1)


class MergingProjector(LlavaProjector):
    """Project like Mistral 3: a norm, a linear layer that merges the patches of a square, and LLaVA's two layers."""

    def __init__(self, raw: Fields, width: int, row_size: int, grid: int) -> None:
        super().__init__({"multimodal_projector_bias": False, **raw}, width, row_size, grid)
        self._factor = int(raw.get("spatial_merge_size", 2))
        self.norm = TowerRmsNorm(width, float(raw["text_config"]["rms_norm_eps"]))
        self.merging_layer = nn.Linear(width * self._factor**2, width, bias=False)

    @classmethod
    def supports(cls, raw: Fields) -> bool:
        is_one = isinstance(raw.get("vision_feature_layer", -1), int)
        return super().supports(raw) and is_one and "rms_norm_eps" in (raw.get("text_config") or {})

    @classmethod
    def layers(cls, raw: Fields, num_layers: int) -> tuple[int, ...] | None:
        return super().layers({"vision_feature_layer": -1, **raw}, num_layers)

    def forward(self, x_BLE: Tensor, grid: Grid, given: Mapping[str, Tensor]) -> Tensor:
        parts = _squares(self.norm(x_BLE), grid, self._factor)
        # Unlike other families, this one orders the numbers by feature, then by patch of the square.
        return self._projected(self.merging_layer(parts.transpose(2, 3).flatten(2))).flatten(0, 1)


class PoolingProjector(_LastProjector):
    """Project like Gemma 3: the mean of the patches of a square, a norm and a matrix product."""

    def __init__(self, raw: Fields, width: int, row_size: int, grid: int) -> None:
        super().__init__()
        self._factor = grid // math.isqrt(int(raw.get("mm_tokens_per_image") or 256))
        eps = float(raw["vision_config"].get("layer_norm_eps", 1e-6))
        self.mm_soft_emb_norm = TowerRmsNorm(width, eps, has_offset=True)
        self.mm_input_projection_weight = nn.Parameter(torch.empty(width, row_size))

    def forward(self, x_BLE: Tensor, grid: Grid, given: Mapping[str, Tensor]) -> Tensor:
        image = F.avg_pool2d(x_BLE.mT.unflatten(2, grid), self._factor)
        normed = self.mm_soft_emb_norm(image.flatten(2).mT)
        return (normed @ self.mm_input_projection_weight).flatten(0, 1)


class PlainProjector(_LastProjector):
    """Project like PaliGemma: one linear layer."""

    def __init__(self, raw: Fields, width: int, row_size: int, grid: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, row_size)

    def forward(self, x_BLE: Tensor, grid: Grid, given: Mapping[str, Tensor]) -> Tensor:
        return self.linear(x_BLE).flatten(0, 1)


# By the `model_type` of config.json.
PROJECTORS: dict[str, Any] = {
    "llava": LlavaProjector,
    "llava_next": TiledProjector,
    "llava_onevision": OneVisionProjector,
    "idefics3": ShufflingProjector,
    "smolvlm": ShufflingProjector,
    "internvl": InternProjector,
    "mistral3": MergingProjector,
    "gemma3": PoolingProjector,
    "paligemma": PlainProjector,
    "colpali": PlainProjector,
}


def best_shape(size: Sequence[int], shapes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Choose the height and width to which an image is scaled: most preserved pixels first, then least padding."""

    def rank(shape: Sequence[int]) -> tuple[int, int]:
        scale = min(shape[1] / size[1], shape[0] / size[0])
        pixels = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return pixels, pixels - shape[0] * shape[1]

    height, width = max(shapes, key=rank)
    return height, width


def num_tiles(size: Sequence[int], shapes: Sequence[Sequence[int]], side: int) -> int:
    """Return the number of tiles of an image of this size, including the downscaled image."""
    height, width = best_shape(size, shapes)
    return -(-height // side) * -(-width // side) + 1


def _size_of(given: Mapping[str, Tensor]) -> tuple[int, int]:
    height, width = (int(size) for size in given["image_sizes"][0])
    return height, width


def _squares(x_BLE: Tensor, grid: Grid, factor: int) -> Tensor:
    """Group patches into squares of `factor` × `factor`: [B, R, factor², E]."""
    height, width = (side // factor for side in grid)
    image = x_BLE.unflatten(1, grid)[:, : height * factor, : width * factor]
    parts = image.reshape(len(x_BLE), height, factor, width, factor, -1)
    return parts.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _unpadded(image: Tensor, size: Sequence[int]) -> Tensor:
    """Crop the padding with which the sides of an image [row_size, h, w] were filled up to whole tiles."""
    height, width = image.shape[1:]
    if size[1] / size[0] > width / height:
        padding = (height - int(round(size[0] * (width / size[1]), 7))) // 2
        return image[:, padding : height - padding]
    padding = (width - int(round(size[1] * (height / size[0]), 7))) // 2
    return image[:, :, padding : width - padding]
