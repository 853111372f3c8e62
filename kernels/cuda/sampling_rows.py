"""The permanent sampling state of the device's rows, and what it changes in their logits before a token is drawn: mask, edits, penalties.

    M  rows of the device    V  vocabulary    K  edits of a row    L  tokens of an edit's condition

An *edit* adds a number to one token's logit while it applies.  A logit bias always applies; -inf applies to a stop token
until the row has its minimum length, and to the last token of a bad word while the output ends with its other tokens.

    x[v] = logits[v], or -inf if the row's mask forbids v;   + every edit of v that applies
    x[v] = x / ρ if x > 0 else x · ρ   for v in prompt or output (repetition penalty ρ)
    x[v] -= frequency · count(v) + presence · [count(v) > 0]      over the output

    logits [R, V]   any float type; not changed, because logprobs are those of the raw logits
    edited [R, V]   float32; only rows with `is_edited` are written
    rows, ends [R]  int32: device row, and the position of the token to draw; row -1 is padding

A logit that is not finite becomes NaN, so that the draw detects the row.

Roofline: (e + 4) R V bytes for R edited rows, and 4 R V more with penalties.  Target 70 %.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from trouper.kernels.cuda.launch import Table, config_of
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


_REPETITION = tl.constexpr(WORD["repetition"])
_FREQUENCY = tl.constexpr(WORD["frequency"])
_PRESENCE = tl.constexpr(WORD["presence"])


@triton.jit
def _apply_penalties_kernel(
    logits_ptr,
    edited_ptr,
    rows_ptr,
    ends_ptr,
    tokens_ptr,
    parameters_ptr,
    num_prompt_ptr,
    is_edited_ptr,
    is_masked_ptr,
    mask_ptr,
    history_ptr,
    num_edits_ptr,
    edit_ids_ptr,
    edit_values_ptr,
    edit_untils_ptr,
    edit_lengths_ptr,
    edit_conditions_ptr,
    tokens_stride_r,
    V,
    WORDS,
    K: tl.constexpr,
    L: tl.constexpr,
    L_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    if row < 0:
        return
    if tl.load(is_edited_ptr + row) == 0:
        return
    end = tl.load(ends_ptr + i)
    first = tl.program_id(1) * BLOCK
    token = first + tl.arange(0, BLOCK)
    in_range = token < V
    raw = tl.load(logits_ptr + i * V + token, mask=in_range, other=0.0).to(tl.float32)
    x = raw
    if tl.load(is_masked_ptr + row) != 0:
        word = tl.load(mask_ptr + row * WORDS + token // 32, mask=in_range, other=0)
        x = tl.where((word >> (token % 32)) & 1 != 0, x, float("-inf"))
    for edit in range(tl.load(num_edits_ptr + row)):
        at = row * K + edit
        token_id = tl.load(edit_ids_ptr + at)
        if (token_id >= first) & (token_id < first + BLOCK):
            applies = end < tl.load(edit_untils_ptr + at)
            length = tl.load(edit_lengths_ptr + at)
            if length > 0:
                j = tl.arange(0, L_PAD)
                wanted = tl.load(edit_conditions_ptr + at * L + j, mask=j < length, other=0)
                begin = end - length
                num_prompt = tl.load(num_prompt_ptr + row)
                has_room = begin >= num_prompt
                output_ptr = tokens_ptr + row * tokens_stride_r + begin + j
                output = tl.load(
                    output_ptr, mask=(j < length) & (begin + j >= num_prompt + j), other=0
                )
                differ = tl.sum(((wanted != output) & (j < length)).to(tl.int32), 0)
                applies = applies & has_room & (differ == 0)
            x = tl.where((token == token_id) & applies, x + tl.load(edit_values_ptr + at), x)
    repetition = load_number(parameters_ptr, row, _REPETITION)
    frequency = load_number(parameters_ptr, row, _FREQUENCY)
    presence = load_number(parameters_ptr, row, _PRESENCE)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        history = tl.load(history_ptr + row * V + token, mask=in_range, other=0)
        penalised = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(history != 0, penalised, x)
        count = (history >> 1).to(tl.float32)
        x = x - frequency * count - tl.where(count > 0, presence, 0.0)
    x = tl.where(tl.abs(raw) < float("inf"), x, float("nan"))
    tl.store(edited_ptr + i * V + token, x, mask=in_range)


def apply_penalties(
    logits_RV: Tensor,
    rows_R: Tensor,
    ends_R: Tensor,
    tokens: Tensor,
    sampling: SamplingRows,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return logits [R, V] float32.  Only edited rows have a meaning.

    Args:
        tokens: [M, …] int32, the permanent rows, for edits with a condition.
    """
    num_rows, vocab_size = logits_RV.shape
    num_edits, longest = sampling.edit_conditions.shape[1:]
    assert logits_RV.is_contiguous(), "logits must be contiguous"
    assert sampling.history.shape[1] == vocab_size, "the rows are of another vocabulary"
    out = torch.empty_like(logits_RV, dtype=torch.float32) if out is None else out
    config = config_of(BLOCKS, logits_RV.device, vocab_size)
    _apply_penalties_kernel[(num_rows, triton.cdiv(vocab_size, config["BLOCK"]))](
        logits_RV,
        out,
        rows_R,
        ends_R,
        tokens,
        sampling.parameters,
        sampling.num_prompt,
        sampling.is_edited,
        sampling.is_masked,
        sampling.mask,
        sampling.history,
        sampling.num_edits,
        sampling.edit_ids,
        sampling.edit_values,
        sampling.edit_untils,
        sampling.edit_lengths,
        sampling.edit_conditions,
        tokens.stride(0),
        vocab_size,
        sampling.mask.shape[1],
        K=num_edits,
        L=longest,
        L_PAD=triton.next_power_of_2(longest),
        **config,
    )
    return out


def apply_penalties_reference(
    logits_V: Tensor, row: int, end: int, tokens: Tensor, sampling: SamplingRows
) -> Tensor:
    """Edit one row of logits in float64: mask, edits, then penalties. Tests compare the kernel with it."""
    x = logits_V.double()
    if sampling.is_masked[row]:
        bits = sampling.mask[row].unsqueeze(1) >> torch.arange(32) & 1
        x = x.masked_fill(bits.flatten()[: len(x)] == 0, -torch.inf)
    for edit in range(int(sampling.num_edits[row])):
        length = int(sampling.edit_lengths[row, edit])
        output = tokens[row, int(sampling.num_prompt[row]) : end]
        ending = output[len(output) - length :] if length <= len(output) else None
        condition = sampling.edit_conditions[row, edit, :length]
        is_met = ending is not None and torch.equal(ending, condition)
        if is_met and end < int(sampling.edit_untils[row, edit]):
            x[sampling.edit_ids[row, edit]] += sampling.edit_values[row, edit].double()
    history = sampling.history[row]
    count = (history >> 1).double()
    repetition = sampling.numbers("repetition")[row].double()
    penalised = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(history != 0, penalised, x)
    x = x - sampling.numbers("frequency")[row].double() * count
    x = x - sampling.numbers("presence")[row].double() * (count > 0)
    return x.masked_fill(~logits_V.isfinite(), torch.nan).float()
