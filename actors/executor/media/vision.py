"""Implement the vision towers of common families as one transformer encoder with options.

Transformers' own modules take three seconds to import, longer than the rest of start-up.  They still compute the other families
(`weights/tower.py`), and tests compare both.

B  tiles of an image    L  patches of a tile, with the class token if there is one    E  width of the tower    N  heads    D  width of a head
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trouper.actors.executor.media.projectors import PROJECTORS, TowerRmsNorm, activations

Fields = Mapping[str, Any]
# The defaults of transformers' classes, because config.json contains only the fields that differ from them.
SIGLIP: Fields = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
CLIP = {**SIGLIP, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
IDEFICS = {**SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_LARGE: Fields = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "num_channels": 3,
    "hidden_act": "gelu",
}  # fmt: skip
# Pixtral's configuration has no field for the epsilon of its norms.
PIXTRAL = {**_LARGE, "image_size": 1024, "patch_size": 16, "head_dim": None}
INTERN: Fields = {
    **_LARGE, "image_size": 448, "patch_size": 14, "layer_norm_eps": 1e-6, "norm_type": "layer_norm",
    "attention_bias": False, "use_qk_norm": False, "use_absolute_position_embeddings": True, "use_mean_pooling": True,
}  # fmt: skip


class TowerKind(NamedTuple):
    """Describe the towers of one `model_type`.

    Attributes:
        defaults: the fields to read, with their default values.
        positions: `learned` for each patch; `stretched`: interpolated to the grid of the image; `share`: looked up by the share of
            the image's height and width that precedes a patch; or `rotary`.
        is_gated: like Llama: the MLP has a gate, norms are RMS norms, and linear layers have no bias.
        has_scales: the output of attention and of the MLP is scaled, by one number for each feature.
    """

    defaults: Fields
    positions: str = "learned"
    has_class: bool = False
    has_patch_bias: bool = True
    has_first_norm: bool = False
    is_gated: bool = False
    has_scales: bool = False


_SHARES = TowerKind(IDEFICS, "share")
_PIXTRAL = TowerKind(PIXTRAL, "rotary", has_patch_bias=False, has_first_norm=True, is_gated=True)
KINDS = {
    "clip_vision_model": TowerKind(CLIP, has_class=True, has_patch_bias=False, has_first_norm=True),
    "siglip_vision_model": TowerKind(SIGLIP),
    "pixtral": _PIXTRAL,
    "idefics3": _SHARES,
    "smolvlm": _SHARES,
    "internvl": TowerKind(INTERN, "stretched", has_class=True, has_scales=True),
}
# The default tower of each family.  If it has the family's own name, the tower named in the configuration is ignored.
TOWERS = {
    "llava": "clip_vision_model", "llava_next": "clip_vision_model", "llava_onevision": "siglip_vision_model",
    "gemma3": "siglip_vision_model", "paligemma": "siglip_vision_model", "colpali": "siglip_vision_model",
    "mistral3": "pixtral", "idefics3": "idefics3", "smolvlm": "smolvlm", "internvl": "internvl",
}  # fmt: skip


def own_tower(raw: Fields, row_size: int) -> "VisionTower | None":
    """Build the tower of a model, with uninitialized weights.  Returns None if only transformers can compute it.

    Args:
        raw: the contents of config.json.
        row_size: the features of a row, equal to the text model's hidden size.
    """
    family = str(raw.get("model_type"))
    vision: Any = raw.get("vision_config")
    if family not in TOWERS or not isinstance(vision, Mapping) or not vision:
        return None
    given = {name: value for name, value in cast("Fields", vision).items() if value is not None}
    name = TOWERS[family]
    name = name if name == family else str(given.get("model_type", name))
    kind = KINDS.get(name)
    if kind is None:
        return None
    read = {field: value for field, value in given.items() if field in kind.defaults}
    theta = _theta_of(given) if kind.positions == "rotary" else 0.0
    fields = {**kind.defaults, **read, "model_type": name, "rope_theta": theta}
    is_known = (
        fields["hidden_act"] in activations()
        and not fields.get("use_qk_norm")
        and fields.get("use_absolute_position_embeddings", True)
        and theta is not None
        and PROJECTORS[family].supports(raw)
    )
    return VisionTower(kind, fields, raw, row_size) if is_known else None


class VisionTower(nn.Module):
    """Encode an image's patches, and project them to embedding rows of the text model.

    Parameters do not have the names of the checkpoint; `plain_name` maps both to a common name.
    """

    def __init__(self, kind: TowerKind, fields: Fields, raw: Fields, row_size: int) -> None:
        super().__init__()
        self._kind, width = kind, int(fields["hidden_size"])
        self._side, self._patch = side_of(fields["image_size"]), side_of(fields["patch_size"])
        given = {"image_size": self._side, "patch_size": self._patch}
        # The fields that the trial of `MediaTower.check` reads.
        self.config = SimpleNamespace(
            **{**raw, "vision_config": SimpleNamespace(**{**fields, **given})}
        )
        num_inputs = int(fields["num_channels"]) * self._patch**2
        self.patch_embedding = nn.Linear(num_inputs, width, bias=kind.has_patch_bias)
        self._grid = self._side // self._patch
        self.class_embedding = nn.Parameter(torch.empty(width)) if kind.has_class else None
        has_table = kind.positions != "rotary"
        shape = self._grid**2 + kind.has_class, width
        self.position_embedding = nn.Parameter(torch.empty(shape)) if has_table else None
        head = int(fields.get("head_dim") or width // int(fields["num_attention_heads"]))
        self._rotary = AxialPositions(head, float(fields["rope_theta"]))
        self.first_norm = _norm(kind, fields) if kind.has_first_norm else None
        projector = PROJECTORS[str(raw["model_type"])]
        num_layers = int(fields["num_hidden_layers"])
        self._chosen = projector.layers(raw, num_layers)
        # Later layers are not computed.
        num_used = num_layers if self._chosen is None else max(self._chosen)
        self.layers = nn.ModuleList(TowerLayer(kind, fields) for _ in range(num_used))
        is_last = self._chosen is None and not fields.get("use_mean_pooling")
        self.last_norm = nn.LayerNorm(width, _eps_of(fields)) if is_last else None
        num_chosen = 1 if self._chosen is None else len(self._chosen)
        self.projector = projector(raw, width * num_chosen, row_size, self._grid)
        self.requires_grad_(False)

    def forward(self, pixel_values: Tensor, **given: Tensor) -> Tensor:
        """Return the rows [R, row_size] of one image, from the processor's arrays.

        Raises:
            ValueError: the tower has learned positions for another image size.
        """
        mask = None
        if "pixel_attention_mask" in given:
            pixel_values, mask = _without_padding(
                pixel_values, given["pixel_attention_mask"], self._patch
            )
        elif pixel_values.dim() == 5:
            pixel_values = pixel_values[0, : self.projector.num_tiles(given)]
        if self._kind.positions == "rotary" and "image_sizes" in given:
            height, width = (int(size) for size in given["image_sizes"][0])
            pixel_values = pixel_values[..., :height, :width]
        x_BLE, grid = self._embedded(pixel_values, mask)
        turns = self._rotary(*grid, x_BLE.dtype) if self._kind.positions == "rotary" else None
        seen = None if mask is None or mask.all() else mask.flatten(1)[:, None, None]
        found = [x_BLE]
        for layer in self.layers:
            found.append(layer(found[-1], seen, turns))
        if self._chosen is None:
            x_BLE = found[-1] if self.last_norm is None else self.last_norm(found[-1])
        else:
            x_BLE = torch.cat([found[i] for i in self._chosen], -1)
        return self.projector(x_BLE, grid, given)

    def _embedded(self, pixels: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple[int, int]]:
        """Return the patches [B, L, E] with their positions, and the height and width of the grid."""
        num_tiles, channels, height, width = pixels.shape
        patch, grid = self._patch, (height // self._patch, width // self._patch)
        is_fixed = self._kind.positions == "learned"
        if is_fixed and grid != (self._grid, self._grid):
            raise ValueError(
                f"the processor made an image of {width} x {height} pixels, but the tower takes {self._side} x {self._side}"
            )
        pixels = pixels[..., : grid[0] * patch, : grid[1] * patch]
        parts = pixels.reshape(num_tiles, channels, grid[0], patch, grid[1], patch)
        parts = parts.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x_BLE: Tensor = self.patch_embedding(parts)
        if self.class_embedding is not None:
            x_BLE = torch.cat([self.class_embedding.expand(num_tiles, 1, -1), x_BLE], 1)
        table = self.position_embedding
        if table is not None:
            if self._kind.positions == "stretched" and grid != (self._grid, self._grid):
                table = _stretched(table, self._grid, grid)
            elif mask is not None:
                table = table[_shares(mask, self._grid)]
            x_BLE = x_BLE + table
        return (x_BLE if self.first_norm is None else self.first_norm(x_BLE)), grid


class AxialPositions:
    """Compute rotary positions of patches, by row in one half of the frequencies and by column in the other."""

    def __init__(self, head: int, theta: float) -> None:
        self._head, self._theta = head, theta

    def __call__(self, height: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [L, D]."""
        steps = torch.arange(0, self._head, 2, dtype=torch.float) / self._head
        frequencies = 1.0 / (self._theta**steps)
        rows = torch.arange(height).repeat_interleave(width)[:, None].float()
        columns = torch.arange(width).repeat(height)[:, None].float()
        angles = torch.cat([rows * frequencies[0::2], columns * frequencies[1::2]], -1).repeat(1, 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class TowerLayer(nn.Module):
    """Compute one layer: attention and an MLP, each preceded by a norm."""

    def __init__(self, kind: TowerKind, fields: Fields) -> None:
        super().__init__()
        width, inner = int(fields["hidden_size"]), int(fields["intermediate_size"])
        self._num_heads = int(fields["num_attention_heads"])
        has_bias = not kind.is_gated
        has_attention_bias = has_bias and bool(fields.get("attention_bias", True))
        self.attention_norm = _norm(kind, fields)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, width, bias=has_attention_bias) for _ in range(3)
        )
        self.out_proj = nn.Linear(width, width, bias=has_bias)
        self.mlp_norm = _norm(kind, fields)
        self.gate_proj = nn.Linear(width, inner, bias=False) if kind.is_gated else None
        self.up_proj = nn.Linear(width, inner, bias=has_bias)
        self.down_proj = nn.Linear(inner, width, bias=has_bias)
        self._act: Callable[[Tensor], Tensor] = activations()[fields["hidden_act"]]
        scales = [nn.Parameter(torch.empty(width)) if kind.has_scales else None for _ in range(2)]
        self.lambda_1, self.lambda_2 = scales

    def forward(self, x_BLE: Tensor, mask: Tensor | None, turns: Any) -> Tensor:
        """Return the hidden states after this layer.

        Args:
            mask: the patches to attend to, [B, 1, 1, L]; None for all.
            turns: cosines and sines of rotary positions, or None.
        """
        added = self._attended(self.attention_norm(x_BLE), mask, turns)
        x_BLE = x_BLE + (added if self.lambda_1 is None else self.lambda_1 * added)
        y_BLE = self.mlp_norm(x_BLE)
        if self.gate_proj is None:
            inner = self._act(self.up_proj(y_BLE))
        else:
            inner = self._act(self.gate_proj(y_BLE)) * self.up_proj(y_BLE)
        added = self.down_proj(inner)
        return x_BLE + (added if self.lambda_2 is None else self.lambda_2 * added)

    def _attended(self, x_BLE: Tensor, mask: Tensor | None, turns: Any) -> Tensor:
        q_BNLD, k_BNLD, v_BNLD = (
            proj(x_BLE).unflatten(-1, (self._num_heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if turns is not None:
            q_BNLD, k_BNLD = _turned(q_BNLD, *turns), _turned(k_BNLD, *turns)
        out_BNLD = F.scaled_dot_product_attention(q_BNLD, k_BNLD, v_BNLD, attn_mask=mask)
        return self.out_proj(out_BNLD.transpose(1, 2).flatten(2))


def side_of(size: Any) -> int:
    """Return the side of a square that a configuration specifies as a number or as height and width.

    Raises:
        ValueError: they differ.
    """
    if not isinstance(size, list | tuple):
        return int(size)
    sides = {int(side) for side in cast("Sequence[Any]", size)}
    if len(sides) != 1:
        raise ValueError(f"height and width of {size} differ")
    return sides.pop()


_DROPPED = {
    "model", "vlm", "vision_tower", "vision_model", "embeddings", "patch_embeddings", "encoder", "transformer", "self_attn",
    "attention", "mlp", "feed_forward", "multi_modal_projector", "connector", "modality_projection", "patch_merger", "projector",
}  # fmt: skip
_RENAMED = {
    "layer": "layers", "patch_conv": "patch_embedding", "projection": "patch_embedding", "cls_token": "class_embedding",
    "position_embeddings": "position_embedding", "pre_layrnorm": "first_norm", "ln_pre": "first_norm",
    "post_layernorm": "last_norm", "layernorm": "last_norm", "layer_norm1": "attention_norm",
    "layernorm_before": "attention_norm", "layer_norm2": "mlp_norm", "ffn_norm": "mlp_norm", "layernorm_after": "mlp_norm",
    "o_proj": "out_proj", "projection_layer": "out_proj", "fc1": "up_proj", "fc2": "down_proj",
}  # fmt: skip


def plain_name(name: str) -> str:
    """Return a tensor's name in a common form, without the parts that differ between families and transformers releases."""
    parts = [_RENAMED.get(part, part) for part in name.split(".") if part not in _DROPPED]
    return ".".join(parts[:1] if parts[0] == "position_embedding" else parts)


def _norm(kind: TowerKind, fields: Fields) -> nn.Module:
    width, eps = int(fields["hidden_size"]), _eps_of(fields)
    if kind.is_gated or fields.get("norm_type", "layer_norm") != "layer_norm":
        return TowerRmsNorm(width, eps)
    return nn.LayerNorm(width, eps)


def _eps_of(fields: Fields) -> float:
    return float(fields.get("layer_norm_eps", 1e-5))


def _theta_of(given: Fields) -> float | None:
    """Return the base (theta) of the rotary positions, or None if they do not rotate by rows and columns."""
    rope: Fields = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type", "axial")) not in ("axial", "default"):
        return None
    return float(rope.get("rope_theta", given.get("rope_theta", 10000.0)))


def _turned(x_BNLD: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    first, second = x_BNLD.chunk(2, -1)
    return x_BNLD * cos_LD + torch.cat([-second, first], -1) * sin_LD


def _without_padding(pixels: Tensor, mask: Tensor, patch: int) -> tuple[Tensor, Tensor]:
    """Return Idefics 3's tiles [B, C, H, W] without padding tiles, and a mask [B, h, w] of the patches that show the image."""
    tiles, pixel_mask = pixels.flatten(0, 1), mask.flatten(0, 1)
    is_real = (tiles != 0).flatten(1).any(1)
    parts = pixel_mask[is_real].unfold(1, patch, patch).unfold(2, patch, patch)
    return tiles[is_real], parts.flatten(3).any(-1)


def _shares(mask: Tensor, side: int) -> Tensor:
    """Return each patch's index [B, L] in a table of `side` × `side` positions, by the share of the image that precedes the patch."""
    edges = torch.arange(1 / side, 1.0, 1 / side)
    places: list[Tensor] = []
    for counts, size in (
        (mask[:, :, 0].sum(1), mask.shape[1]),
        (mask[:, 0].sum(1), mask.shape[2]),
    ):
        shares = torch.arange(size, dtype=torch.float32) * (1.0 / counts)[:, None]
        places.append(torch.bucketize(shares.clamp(max=1.0 - 1e-6), edges, right=True))
    found = places[0][:, :, None] * side + places[1][:, None]
    return torch.where(mask, found, 0).flatten(1)


def _stretched(table_LE: Tensor, side: int, grid: Sequence[int]) -> Tensor:
    """Interpolate the positions of patches to another grid.  The position of the class token comes first and is unchanged."""
    image = table_LE[1:].view(1, side, side, -1).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=tuple(grid), mode="bicubic", align_corners=False)
    return torch.cat([table_LE[:1], image[0].flatten(1).T])
