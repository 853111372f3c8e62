"""x = words[id] + types[type] + positions[position]: what an encoder begins with.

    words, types, positions [., D], the last two may be absent      x [T, D]

    native   bfloat16 and float32, D a multiple of 16: `embed_tokens.py`, added in float32
    torch    elsewhere

Laws:
  * The choice depends on the dtype, the width and the machine, never on a batch.
  * Rows are those of their tables, as admission and loading have checked: the kernel does not.

In bfloat16 the sum is rounded once, where torch rounds twice: of 200 × 384 numbers 22 % differ, by a mean error of
1.8e-3 in place of 2.6e-3.

Roofline: bytes = 4 e T D.  One launch, which a recording holds, where torch's calls let go of the interpreter.

y = (s - mean(s)) / √(var(s) + ε) · w + b over the last dimension,  s = x + r

    x, r, y [T, D], r may be absent;  w, b [D], b may be absent

    native   bfloat16 and float32, D a multiple of 16: `center_norm.py`
    torch    elsewhere

Law: the choice depends on the dtype, the width and the machine, never on a batch.

Roofline: bytes = 3 e T D, FLOPs = 8 T D.

y = the mean of the rows of a text that count, in float32: all of them, the first or the last.

    x [T, D]   rows may be apart       y [C, D] float32, a row for each sequence of the groups, in their order

    native   bfloat16 and float32, D a multiple of 16: `mean_pool.py`
    torch    elsewhere

Laws:
  * The choice depends on the dtype, the width and the machine, never on a batch.
  * Rows are added one by one, in either way: a text's bits do not depend on what is beside it.

Roofline: bytes = e T D.  Measured on one Zen 3 core, with the call: 21 µs for 8 rows of 384 bfloat16 and 60 for 510 of
six texts, where torch's `embedding_bag` takes 116 and 157; from memory 159 and 245 where it takes 310 and 401.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of split, view and some others open.
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trouper.kernels.codegen import launch, units
from trouper.kernels.cpu.attention.varlen import Group
from trouper.kernels.cpu.memory import num_threads_for


class TokenEmbedding:
    """The tables of an encoder's embedding, and the way they are added."""

    def __init__(
        self,
        words: Tensor,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        native: bool | None = None,
    ) -> None:
        """Take the tables; `native` = None compiles a kernel wherever one can be used."""
        for table in (words, types, positions):  # as the kernel takes them to be
            assert table is None or (table.dtype, table.shape[1:]) == (words.dtype, words.shape[1:])
            assert table is None or table.is_contiguous()
        self._words, self._types, self._positions = words, types, positions
        kind = units.row_kind(words.dtype, words.shape[1], native=native)
        self._kernel: launch.Kernel | None = None
        if kind is not None:
            from trouper.kernels.cpu.fused.embed_and_pool import embed_tokens

            self._kernel = launch.compiled(embed_tokens, kind)

    def __repr__(self) -> str:
        return f"<TokenEmbedding of {tuple(self._words.shape)}, {'torch' if self._kernel is None else 'native'}>"

    @property
    def dtype(self) -> torch.dtype:
        return self._words.dtype

    @property
    def size(self) -> int:
        return self._words.shape[1]

    def __call__(self, ids_T: Tensor, type_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return [T, D]; ids and positions are [T] int64."""
        if self._kernel is None:
            x_TD = F.embedding(ids_T, self._words)
            if self._types is not None:
                x_TD += F.embedding(type_ids_T, self._types)
            if self._positions is not None:
                x_TD += F.embedding(positions_T, self._positions)
            return x_TD
        num_tokens = len(ids_T)
        x_TD = torch.empty((num_tokens, self.size), dtype=self.dtype)
        self._kernel(
            num_tokens,
            self._words.data_ptr(),
            ids_T.data_ptr(),
            0 if self._types is None else self._types.data_ptr(),
            type_ids_T.data_ptr(),
            0 if self._positions is None else self._positions.data_ptr(),
            positions_T.data_ptr(),
            self.size,
            x_TD.data_ptr(),
            num_threads=num_threads_for(num_tokens),
        )
        return x_TD


class LayerNorm:
    """One layer norm: its weights, and the way it is computed."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, eps: float, *, native: bool | None = None
    ) -> None:
        """Take the weights; `native` = None compiles a kernel wherever one can be used."""
        self._weight, self._bias, self._eps = weight, bias, eps
        kind = units.row_kind(weight.dtype, len(weight), native=native)
        self._kernel: launch.Kernel | None = None
        if kind is not None:
            from trouper.kernels.cpu.fused.norms import center_norm

            self._kernel = launch.compiled(center_norm, kind)
            self._eps_bits = launch.float_bits(eps)
            self._wide = weight.float().contiguous()
            self._wide_bias = None if bias is None else bias.float().contiguous()

    def __repr__(self) -> str:
        return (
            f"<LayerNorm of {len(self._weight)}, {'torch' if self._kernel is None else 'native'}>"
        )

    def __call__(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """Return the norm of x + residual, a new tensor; rows are contiguous."""
        if self._kernel is None:
            x_TD = x_TD if residual_TD is None else x_TD + residual_TD
            return F.layer_norm(x_TD, self._weight.shape, self._weight, self._bias, self._eps)
        y_TD = x_TD.new_empty(x_TD.shape)
        num_rows, width = x_TD.shape
        self._kernel(
            num_rows,
            x_TD.data_ptr(),
            0 if residual_TD is None else residual_TD.data_ptr(),
            self._wide.data_ptr(),
            0 if self._wide_bias is None else self._wide_bias.data_ptr(),
            y_TD.data_ptr(),
            width,
            self._eps_bits,
            num_threads=num_threads_for(num_rows),
        )
        return y_TD


def layer_norm_reference(x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    wide = x.double()
    centered = wide - wide.mean(-1, keepdim=True)
    y = centered * (centered.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_D.double()
    return (y if bias_D is None else y + bias_D.double()).to(x.dtype)


class RowPooling:
    """Pooling of the states of a text into one row."""

    def __init__(
        self, rows: str, dtype: torch.dtype, width: int, *, native: bool | None = None
    ) -> None:
        """Prepare the pooling of states of that dtype and width.

        Args:
            rows: MEAN, CLS (the first) or LAST.
            native: None = where it can.
        """
        self._rows, self._width = rows, width
        kind = units.row_kind(dtype, width, native=native)
        self._kernel: launch.Kernel | None = None
        if kind is not None:
            from trouper.kernels.cpu.fused.embed_and_pool import mean_of_spans

            self._kernel = launch.compiled(mean_of_spans, kind)

    def __repr__(self) -> str:
        return f"<RowPooling {self._rows}, {'torch' if self._kernel is None else 'native'}>"

    def __call__(self, x_TD: Tensor, groups: Sequence[Group]) -> Tensor:
        """Return one row a sequence, a new tensor; the groups hold all rows of x."""
        spans_C2 = self._spans(groups)
        if self._kernel is None:
            return self._by_torch(x_TD, torch.from_numpy(spans_C2[:, 0]))
        y_CD = torch.empty((len(spans_C2), self._width))
        x = x_TD.data_ptr(), x_TD.stride(0)
        self._kernel(len(y_CD), *x, spans_C2.ctypes.data, self._width, y_CD.data_ptr())
        return y_CD

    def _by_torch(self, x_TD: Tensor, firsts_C: Tensor) -> Tensor:
        if self._rows != "MEAN":
            return x_TD[firsts_C].float()
        return F.embedding_bag(torch.arange(len(x_TD)), x_TD.float(), firsts_C, mode="mean")

    def _spans(self, groups: Sequence[Group]) -> np.ndarray:
        """Return [C, 2] int64: the first of the rows that count, and how many there are."""
        spans: list[tuple[int, int]] = []
        for group in groups:
            length = group.length
            for start in range(group.first, group.end, length):
                match self._rows:
                    case "CLS":
                        spans.append((start, 1))
                    case "LAST":
                        spans.append((start + length - 1, 1))
                    case _:  # MEAN
                        spans.append((start, length))
        return np.array(spans, np.int64)
