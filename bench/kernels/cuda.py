"""The CUDA operations of `kernels/cuda/` and cuBLAS products, for `trouper bench kernels`.

They run on a CUDA device, or in Triton's interpreter on the CPU, which only tests the cases: its times mean nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trouper.bench.kernels.measure import EPS, NUM_CHECKED_OUTPUTS, Case, Shapes
from trouper.kernels.cuda.decode_attention import decode_attention
from trouper.kernels.cuda.embed import embed
from trouper.kernels.cuda.lora import (
    BLOCK_ROWS,
    TritonLoRA,
    lora_expand_,
    lora_shrink,
    max_blocks,
    num_splits,
)
from trouper.kernels.cuda.norms import act_and_mul, fused_add_rms_norm, fused_add_rms_norm_reference
from trouper.kernels.cuda.prefill_attention import prefill_attention
from trouper.kernels.cuda.qk_norm_rope_kv_write import (
    qk_norm_rope_kv_write_,
    qk_norm_rope_kv_write_reference,
)
from trouper.kernels.cuda.sample import sample, top_logprobs, top_logprobs_reference
from trouper.kernels.cuda.sampling_rows import (
    SamplingRows,
    apply_penalties,
    apply_penalties_reference,
    make_sampling_rows,
)
from trouper.kernels.cuda.top_k_top_p import top_k_top_p
from trouper.kernels.linear import LowRank, RowTable
from trouper.kernels.reference.linear import linear_reference
from trouper.kernels.reference.norms import rope_table, silu_and_mul_reference
from trouper.kernels.reference.paged_attention import paged_attention_reference
from trouper.kernels.reference.sampling import PARAMETERS, ROW, gumbel, top_k_top_p_reference

# The number of compared tokens.  A reference in float64 takes longer than everything else.
NUM_CHECKED = 8
NUM_LORAS, RANK = 8, 16


class _Adapted(NamedTuple):
    """The product of gate and up with several adapters; consecutive rows use different ones."""

    weights: TritonLoRA
    parts: list[LowRank]  # of the first adapter
    x: Tensor
    order: Tensor
    blocks: Tensor
    num_blocks: int
    num_loras: int

    @classmethod
    def of(cls, s: Shapes) -> "_Adapted":
        num_loras = min(s.num_tokens, NUM_LORAS)
        table = RowTable(s.num_tokens, BLOCK_ROWS)
        table.fill(1 + np.arange(s.num_tokens) % num_loras)
        weights = TritonLoRA(
            (s.mlp, s.mlp), s.hidden, num_loras, RANK,
            empty=lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device=s.device),
            dtype=s.dtype,
        )  # fmt: skip
        host = s._replace(device="cpu")
        parts = [
            LowRank(normal(host, RANK, s.hidden) / s.hidden**0.5, normal(host, s.mlp, RANK))
            for _ in range(2)
        ]
        for slot in range(num_loras):
            weights.load(slot + 1, parts)
        x, bound = normal(s, s.num_tokens, s.hidden), max_blocks(s.num_tokens, num_loras)
        rows = ids(s, table.order), ids(s, table.blocks)
        return cls(weights, parts, x, *rows, bound, num_loras)

    def shrunk(self) -> Tensor:
        """Return the reference of the first rows' h, in float64.

        Only some rows are checked, because the reference runs on the CPU. They are equal for each row.
        """
        x = self.x[:NUM_CHECKED].cpu().double()
        h = torch.cat([x @ part.a_RI.double().T for part in self.parts], dim=1)
        return h.float().to(self.x.device)


def shrinking(s: Shapes) -> Iterator[Case]:
    step = _Adapted.of(s)
    w, x = step.weights, step.x

    def launch() -> Tensor:
        return lora_shrink(x, w.a, w.ranks, step.order, step.blocks, max_blocks=step.num_blocks)

    width = 2 * RANK
    yield Case(
        f"[{s.num_tokens}, {s.hidden}] -> {width}",
        lambda: launch().sum(0),
        step.shrunk,
        s.item * s.hidden * (step.num_loras * width + s.num_tokens),
        2 * s.num_tokens * s.hidden * width,
    )


def expanding(s: Shapes) -> Iterator[Case]:
    step = _Adapted.of(s)
    w, width = step.weights, 2 * RANK
    h = torch.randn(num_splits(s.hidden), s.num_tokens, width, device=s.device)
    y = torch.zeros(s.num_tokens, 2 * s.mlp, dtype=s.dtype, device=s.device)

    def launch() -> Tensor:
        lora_expand_(
            y, h, w.b, w.ranks, w.tiles, step.order, step.blocks, max_blocks=step.num_blocks
        )
        return y

    def reference() -> Tensor:
        few = h[:, :NUM_CHECKED].sum(0).cpu().double().split(RANK, dim=1)
        both = [x @ part.b_OR.double().T for x, part in zip(few, step.parts, strict=True)]
        return torch.cat(both, dim=1).to(s.dtype).to(y.device)

    yield Case(
        f"{width} -> [{s.num_tokens}, {2 * s.mlp}]",
        launch,
        reference,
        s.item * 2 * s.mlp * (step.num_loras * RANK + 2 * s.num_tokens),
        2 * s.num_tokens * 2 * s.mlp * RANK,
    )


def normal(s: Shapes, *shape: int) -> Tensor:
    return torch.randn(shape, device=s.device, dtype=s.dtype)


def ids(s: Shapes, values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(s.device)


# The most rows that sample in one step.
MAX_ROWS = 256
TOP_K, TOP_P, NUM_LOGPROBS = 50, 0.9, 20


def products(s: Shapes) -> Iterator[Case]:
    """Yield cuBLAS products: the four of a layer, and the head.

    They are the reference for the speed of the other kernels. Each case has the shape of a model's layer.
    """
    heads = s.num_q * s.width
    for num, inputs, outputs in (
        (s.num_tokens, s.hidden, heads + 2 * s.num_kv * s.width),
        (s.num_tokens, heads, s.hidden),
        (s.num_tokens, s.hidden, 2 * s.mlp),
        (s.num_tokens, s.mlp, s.hidden),
        (min(s.num_tokens, MAX_ROWS), s.hidden, s.vocab),
    ):
        yield _product(num, inputs, outputs, s)


def _product(num: int, inputs: int, outputs: int, s: Shapes) -> Case:
    weight = normal(s, outputs, inputs) / inputs**0.5
    weights = cycle([weight, *(weight.clone() for _ in range(s.copies(weight.nbytes) - 1))])
    x = normal(s, num, inputs)
    return Case(
        f"[{num}, {inputs}] x [{inputs}, {outputs}]",
        lambda: F.linear(x, next(weights)),
        lambda: linear_reference(x[:NUM_CHECKED], weight[:NUM_CHECKED_OUTPUTS]),
        s.item * (inputs * outputs + num * (inputs + outputs)),
        2 * num * inputs * outputs,
    )


class _Cache(NamedTuple):
    """A layer's KV cache during a step, with all blocks written and in random order."""

    arguments: tuple[Tensor, ...]  # q, cache, bounds, rows, starts, blocks
    options: dict[str, float]

    @classmethod
    def of(cls, s: Shapes, starts: Sequence[int], counts: Sequence[int]) -> "_Cache":
        size = -(-max(map(sum, zip(starts, counts, strict=True))) // s.block_size)
        blocks = np.random.default_rng(0).permutation(size * len(starts)).reshape(len(starts), size)
        cache = normal(s, 2, s.num_kv, blocks.size * s.block_size, s.width)
        bounds = np.cumsum([0, *counts])
        q = normal(s, int(bounds[-1]), s.num_q, s.width)
        numbers = (bounds, np.arange(len(starts)), np.asarray(starts), blocks)
        options = {"block_size": s.block_size, "scale": s.width**-0.5}
        return cls((q, cache, *(ids(s, n) for n in numbers)), options)

    def reference(self, column: int, num: int) -> Tensor:
        """Compute attention for the last `num` tokens of an entry.

        It reads the paged cache on the CPU, in float64. Keys behind the tokens are masked.
        """
        q, cache, bounds, _, starts, blocks = self.arguments
        end = int(bounds[column + 1])
        length = int(starts[column]) + end - int(bounds[column])
        size = int(self.options["block_size"])
        slots = (
            blocks[column].long()[:, None] * size + torch.arange(size, device=q.device)
        ).ravel()
        keys = cache[:, :, slots[:length]].cpu()
        scale = self.options["scale"]
        every = [list(range(length))]
        return paged_attention_reference(
            q[end - num : end].cpu(), keys, every, [length - num], [num], scale=scale
        ).to(q.device)


def decode(s: Shapes) -> Iterator[Case]:
    """Yield attention in which every token is the newest of its own sequence.

    It is limited by reading keys and values. Splitting along the keys keeps the whole device busy.
    """
    step = _Cache.of(s, [s.context - 1] * s.num_tokens, [1] * s.num_tokens)
    num = s.num_tokens
    yield Case(
        f"{num} of {s.context}",
        lambda: decode_attention(*step.arguments, max_length=s.context, **step.options),
        lambda: step.reference(0, 1),
        2 * s.item * s.num_kv * s.context * num * s.width,
        4 * s.num_q * s.context * num * s.width,
    )


def prefill(s: Shapes) -> Iterator[Case]:
    """Yield attention in which all tokens are one prompt.

    Only the last tokens are checked, because they see the most keys. It is limited by arithmetic.
    """
    num = s.num_tokens
    if num == 1:
        return
    step, checked = _Cache.of(s, [0], [num]), min(num, NUM_CHECKED)
    yield Case(
        f"{num} of {num}",
        lambda: prefill_attention(*step.arguments, **step.options)[-checked:],
        lambda: step.reference(0, checked),
        2 * s.item * num * s.width * (s.num_q + s.num_kv),
        2 * s.num_q * num * (num + 1) * s.width,
    )


def qkv_writing(s: Shapes) -> Iterator[Case]:
    num_heads = s.num_q + 2 * s.num_kv
    qkv = normal(s, s.num_tokens, num_heads, s.width)
    cache = normal(s, 2, s.num_kv, s.num_tokens + s.block_size, s.width)
    frequencies = 10_000.0 ** -(torch.arange(0, s.width, 2) / s.width)
    options = {
        "norm_ND": torch.ones_like(cache[0, 0, :1]).expand(s.num_q + s.num_kv, -1).contiguous(),
        "table_P2R": rope_table(frequencies, s.num_tokens, 1.0, s.dtype).to(s.device),
        "eps": EPS,
    }
    positions = ids(s, np.arange(s.num_tokens))

    def launch() -> Tensor:
        qk_norm_rope_kv_write_(qkv, cache, positions, positions, **options)
        return qkv[:, : s.num_q]

    def reference() -> Tensor:
        few = slice(NUM_CHECKED)
        return qk_norm_rope_kv_write_reference(
            qkv[few], cache, positions[few], positions[few], **options
        )[0]

    num_items = s.num_tokens * num_heads * s.width
    shape = f"[{s.num_tokens}, {num_heads}, {s.width}]"
    yield Case(shape, launch, reference, 2 * s.item * num_items, 10 * num_items)


def residual_norm(s: Shapes) -> Iterator[Case]:
    x, y, weight = (normal(s, *shape) for shape in [(s.num_tokens, s.hidden)] * 2 + [(s.hidden,)])
    num_items = s.num_tokens * s.hidden
    yield Case(
        f"[{s.num_tokens}, {s.hidden}]",
        lambda: fused_add_rms_norm(x, y, weight, EPS),
        lambda: fused_add_rms_norm_reference(x[:NUM_CHECKED], y[:NUM_CHECKED], weight, EPS)[1],
        4 * s.item * num_items,
        6 * num_items,
    )


def activation(s: Shapes) -> Iterator[Case]:
    x = normal(s, s.num_tokens, 2 * s.mlp)
    num_items = s.num_tokens * s.mlp
    yield Case(
        f"[{s.num_tokens}, {2 * s.mlp}]",
        lambda: act_and_mul(x, "silu"),
        lambda: silu_and_mul_reference(x[:NUM_CHECKED]),
        3 * s.item * num_items,
        6 * num_items,
    )


def preparation(s: Shapes) -> Iterator[Case]:
    num = s.num_tokens
    embedding, tokens = normal(s, s.vocab, s.hidden), ids(s, np.arange(num)[:, None] % s.vocab)
    bounds, rows = ids(s, np.arange(num + 1)), ids(s, np.arange(num))
    zeros = torch.zeros_like(rows)
    options: dict[str, Any] = {"num_tokens": num, "block_size": s.block_size}
    yield Case(
        f"[{num}, {s.hidden}]",
        lambda: embed(bounds, rows, zeros, tokens, zeros[:, None], embedding, **options).x,
        lambda: embedding[tokens[:NUM_CHECKED, 0].long()],
        2 * s.item * num * s.hidden,
        0,
    )


class _Draw(NamedTuple):
    """The logits of a step in which all rows sample."""

    logits: Tensor  # [R, V]
    edited: Tensor
    rows: Tensor
    ends: Tensor
    tokens: Tensor
    sampling: SamplingRows

    @classmethod
    def of(cls, s: Shapes, **settings: float) -> "_Draw":
        num = min(s.num_tokens, MAX_ROWS)
        logits = 4 * normal(s, num, s.vocab)
        rows, ends = ids(s, np.arange(num)), ids(s, np.full(num, 3))
        sampling = make_sampling_rows(num, s.vocab, max_edits=8, device=s.device)
        for name, value in {"temperature": 1.0, **settings}.items():
            table = sampling.numbers(name) if name in PARAMETERS else getattr(sampling, name)
            table.fill_(value)
        return cls(logits, logits.float(), rows, ends, ids(s, np.zeros((num, 8))), sampling)

    def case(self, run: Callable[[], Tensor], reference: Callable[[], Tensor], item: int) -> Case:
        """`item`: bytes moved for each logit."""
        num_rows, vocab = self.logits.shape
        return Case(f"{num_rows} × {vocab}", run, reference, item * num_rows * vocab, 0)


def edits(s: Shapes) -> Iterator[Case]:
    """Yield the penalties, applied to every row of logits.

    Requests with penalties read and write the whole vocabulary in each step. Tokens of the history are counted, too.
    """
    d = _Draw.of(s, repetition=1.1, is_edited=1, history=2)

    def reference() -> Tensor:
        first = SamplingRows(*(x[:1].cpu() for x in d.sampling))
        return apply_penalties_reference(d.logits[0].cpu(), 0, 3, d.tokens[:1].cpu(), first)[None]

    launch = lambda: apply_penalties(d.logits, d.rows, d.ends, d.tokens, d.sampling, out=d.edited)  # noqa: E731
    yield d.case(launch, reference, s.item + 8)


def thresholds(s: Shapes) -> Iterator[Case]:
    d = _Draw.of(s, top_k=TOP_K, top_p=TOP_P)
    scratch = torch.empty_like(d.edited)

    def reference() -> Tensor:
        first = d.logits[0].float().cpu()
        row = d.sampling.parameters[0].cpu().numpy().view(ROW)[0]
        return first[torch.from_numpy(top_k_top_p_reference(first.numpy(), row))].min()[None]

    def launch() -> Tensor:
        return top_k_top_p(d.logits, d.edited, d.rows, d.sampling, scratch=scratch)[0]

    yield d.case(launch, reference, 3 * s.item)


def draws(s: Shapes) -> Iterator[Case]:
    d = _Draw.of(s)
    everything = torch.full_like(d.edited[:, 0], -torch.inf), torch.full_like(d.rows, s.vocab)

    def reference() -> Tensor:
        first = d.logits[0].float().cpu()
        noise = gumbel(np.zeros(1, dtype=np.uint64), np.array([3]), np.arange(s.vocab))[0]
        return (first + noise).argmax()[None]

    launch = lambda: sample(d.logits, d.edited, d.rows, d.ends, *everything, d.tokens, d.sampling)  # noqa: E731
    yield d.case(launch, reference, s.item)


def logprobs(s: Shapes) -> Iterator[Case]:
    d = _Draw.of(s)
    num = min(NUM_LOGPROBS, s.vocab)
    yield d.case(
        lambda: top_logprobs(d.logits, d.rows, num).logprobs,
        lambda: top_logprobs_reference(d.logits[0].cpu(), 0, num).logprobs[None],
        s.item,
    )


OPS: dict[str, Callable[[Shapes], Iterable[Case]]] = {
    "linear (cuBLAS)": products,
    "decode_attention": decode,
    "prefill_attention": prefill,
    "qk_norm_rope_kv_write": qkv_writing,
    "fused_add_rms_norm": residual_norm,
    "act_and_mul": activation,
    "embed": preparation,
    "apply_penalties": edits,
    "top_k_top_p": thresholds,
    "sample": draws,
    "top_logprobs": logprobs,
    "lora_shrink": shrinking,
    "lora_expand": expanding,
}
