"""The permanent sampling state of the device's rows, and the function with which kernels load a row's logits.

    M  rows of the device    V  vocabulary    K  edits of a row    L  tokens of an edit's condition

An *edit* adds a number to one token's logit while it applies.  A logit bias always applies; -inf applies to a stop token
until the row has its minimum length, and to the last token of a bad word while the output ends with its other tokens.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.launch import Table
from trouper.kernels.reference.sampling import NEUTRAL, ROW, ROW_WORDS, WORD

# The end position of an edit that always applies.
NEVER = 2**31 - 1

# Tokens of the vocabulary in a program, by V.
BLOCKS: Table = {"sm_90": ((1 << 30, {"BLOCK": 4096, "num_warps": 8}),)}


class SamplingRows(NamedTuple):
    """The sampling state, with one entry for each row.

    It is written when a request gets a row; steps also write `history` and `mask`.
    """

    parameters: Tensor  # [M, ROW_WORDS] int32: the `ROW` of `kernels/reference/sampling.py`
    num_prompt: Tensor  # [M] int32
    is_edited: Tensor  # [M] int32: 1 if logits change before the draw
    is_masked: Tensor  # [M] int32: 1 if `mask` applies
    mask: Tensor  # [M, ⌈V / 32⌉] int32: bit v % 32 of word v // 32 allows token v
    history: Tensor  # [M, V] int32: bit 0 means in the prompt; the other bits count outputs
    num_edits: Tensor  # [M] int32
    edit_ids: Tensor  # [M, K] int32
    edit_values: Tensor  # [M, K] float32
    edit_untils: Tensor  # [M, K] int32: applies to tokens at earlier positions
    edit_lengths: Tensor  # [M, K] int32: tokens of the condition, or 0
    edit_conditions: Tensor  # [M, K, L] int32: the end of the output that the edit requires

    def numbers(self, name: str) -> Tensor:
        """Return one number of every row, as a view [M] of `parameters`.  The seed is [M, 2] words of 32 bits."""
        first = WORD[name]
        if ROW[name].itemsize == 8:
            return self.parameters[:, first : first + 2]
        dtype = torch.float32 if ROW[name] == np.float32 else torch.int32
        return self.parameters[:, first].view(dtype)


def make_sampling_rows(
    num_rows: int,
    vocab_size: int,
    *,
    max_edits: int = 512,
    max_condition: int = 8,
    device: torch.device | str = "cpu",
) -> SamplingRows:
    """Allocate rows that are all greedy and unedited: about M · (4 V + V / 8 + 4 K (4 + L)) bytes."""

    def rows(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full((num_rows, *shape), value, dtype=dtype, device=device)

    float32, int32 = torch.float32, torch.int32
    return SamplingRows(
        parameters=torch.from_numpy(NEUTRAL.view(np.int32)).repeat(num_rows, 1).to(device),
        num_prompt=rows(0, int32),
        is_edited=rows(0, int32),
        is_masked=rows(0, int32),
        mask=rows(0, int32, -(-vocab_size // 32)),
        history=rows(0, int32, vocab_size),
        num_edits=rows(0, int32),
        edit_ids=rows(0, int32, max_edits),
        edit_values=rows(0, float32, max_edits),
        edit_untils=rows(NEVER, int32, max_edits),
        edit_lengths=rows(0, int32, max_edits),
        edit_conditions=rows(0, int32, max_edits, max_condition),
    )


_ROW_WORDS = tl.constexpr(ROW_WORDS)
TEMPERATURE = tl.constexpr(WORD["temperature"])


@triton.jit
def load_number(parameters_ptr, row, word):
    """Load one float32 of a row: `word` is its index in a `ROW`."""
    return tl.load(parameters_ptr + row * _ROW_WORDS + word).to(tl.float32, bitcast=True)


@triton.jit
def load_word(parameters_ptr, row, word):
    """Load one int32 of a row: `word` is its index in a `ROW`."""
    return tl.load(parameters_ptr + row * _ROW_WORDS + word)


@triton.jit
def load_scaled(logits_ptr, edited_ptr, at, mask, is_edited, temperature):
    """Load logits / temperature, from the edited logits if the row has any.  Returns -inf outside of the mask."""
    # The condition has the shape of the mask, because some interpreters do not broadcast.
    has_edits = (is_edited + at * 0) != 0
    raw = tl.load(logits_ptr + at, mask=mask & ~has_edits, other=float("-inf"))
    edited = tl.load(edited_ptr + at, mask=mask & has_edits, other=float("-inf"))
    x = tl.where(is_edited != 0, edited, raw.to(tl.float32))
    return tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))
