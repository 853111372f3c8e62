"""The CPU operations of `kernels/`, for `trouper bench kernels`.

To add a kernel, write a function that yields its `Case`s and add a line to `OPS`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.steps.tier_files import Bytes, Checksum
from trouper.bench.kernels import recurrent
from trouper.bench.kernels.measure import (
    EPS,
    NUM_CHECKED_OUTPUTS,
    Case,
    Operation,
    Shapes,
    WrongResultError,
)
from trouper.kernels.codegen import units
from trouper.kernels.cpu.attention.varlen import (
    Group,
    is_native,
    tiles_of,
    varlen_attention,
    varlen_attention_reference,
)
from trouper.kernels.cpu.encoder_ops import LayerNorm, layer_norm_reference
from trouper.kernels.cpu.pack_kv import KvCodec, can_pack, unpack_reference
from trouper.kernels.cpu.sample import sample
from trouper.kernels.linear import LinearConfig
from trouper.kernels.ops import HostTokens
from trouper.kernels.reference.linear import linear_reference
from trouper.kernels.reference.norms import (
    kv_write_,
    kv_write_reference,
    rms_norm,
    rms_norm_heads_,
    rms_norm_reference,
    rope_,
    rope_reference,
    rope_table,
    rotation_of,
    silu_and_mul_reference,
)
from trouper.kernels.reference.paged_attention import paged_attention_reference
from trouper.kernels.reference.sampling import NEUTRAL, gumbel, gumbel_reference, sample_reference
from trouper.kernels.select import make_linear

# The reference of the noise is slow, so only this many tokens are checked.
NUM_CHECKED_TOKENS = 8
# The reference of sampling sorts the vocabulary, so only this many rows are checked.
NUM_CHECKED_ROWS = 8


def act_and_mul(s: Shapes) -> Iterator[Case]:
    x = torch.randn(s.num_tokens, 2 * s.mlp).to(s.dtype)
    yield Case(
        f"[{s.num_tokens}, {2 * s.mlp}]",
        partial(s.ops().act_and_mul, x),
        lambda: silu_and_mul_reference(x),
        3 * s.item * s.num_tokens * s.mlp,
        6 * s.num_tokens * s.mlp,
    )


def kv_write(s: Shapes) -> Iterator[Case]:
    num_slots = s.num_tokens + s.block_size
    cache = torch.zeros(2, s.num_kv, num_slots, s.width, dtype=s.dtype)
    kv = torch.randn(s.num_tokens, 2, s.num_kv, s.width).to(s.dtype)
    slots = torch.randperm(num_slots)[: s.num_tokens]

    def launch() -> Tensor:
        kv_write_(cache, kv, slots)
        return cache

    num_bytes = 4 * s.item * s.num_tokens * s.num_kv * s.width
    shape = f"[{s.num_tokens}, 2, {s.num_kv}, {s.width}]"
    yield Case(shape, launch, lambda: kv_write_reference(cache, kv, slots), num_bytes, 0)


def gemm(s: Shapes, *, is_compressed: bool = True) -> Iterator[Case]:
    """Yield the four matrix products of a layer, and the logits of one token.

    With `is_compressed`, bfloat16 weights are also measured in 12 bits.
    """
    heads = s.num_q * s.width
    qkv = heads + 2 * s.num_kv * s.width
    for num, inputs, outputs in (
        (s.num_tokens, s.hidden, qkv),
        (s.num_tokens, heads, s.hidden),
        (s.num_tokens, s.hidden, 2 * s.mlp),
        (s.num_tokens, s.mlp, s.hidden),
        (1, s.hidden, s.vocab),
    ):
        yield _gemm(num, inputs, outputs, s, is_compressed)


def _gemm(num: int, inputs: int, outputs: int, s: Shapes, is_compressed: bool) -> Case:
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(s.dtype)
    x = torch.randn(num, inputs).to(s.dtype)
    config = LinearConfig(is_compressed=is_compressed)
    layers = [make_linear(weight, config=config) for _ in range(s.copies(weight.nbytes))]
    turns = cycle(layers)
    return Case(
        f"[{num}, {inputs}] x [{inputs}, {outputs}]",
        lambda: next(turns).apply(x),
        lambda: linear_reference(x, weight[:NUM_CHECKED_OUTPUTS]),
        layers[0].num_bytes + s.item * num * (inputs + outputs),
        2 * num * inputs * outputs,
    )


def noise(s: Shapes) -> Iterator[Case]:
    seeds, positions = np.arange(s.num_tokens, dtype=np.uint64), np.arange(s.num_tokens)
    ids = np.arange(s.vocab)

    def reference() -> Tensor:
        rows = [
            [gumbel_reference(int(seed), int(position), token) for token in range(NUM_CHECKED_TOKENS)]
            for seed, position in zip(seeds, positions, strict=True)
        ]  # fmt: skip
        return torch.tensor(rows)

    num_bytes, num_flops = 4 * s.num_tokens * s.vocab, 12 * s.num_tokens * s.vocab
    shape = f"[{s.num_tokens}, {s.vocab}]"
    yield Case(shape, lambda: gumbel(seeds, positions, ids), reference, num_bytes, num_flops)


def draws(s: Shapes) -> Iterator[Case]:
    """Yield the sampling of one token per row from the whole vocabulary, with top-k 50, and with top-p 0.9.

    The limit is the memory of the logits, since each is read at least once.
    """
    logits, positions = 3 * torch.randn(s.num_tokens, s.vocab), np.arange(s.num_tokens)
    few, nothing = positions[:NUM_CHECKED_ROWS], np.zeros((s.num_tokens, 1), dtype=np.int64)
    no_masks = np.zeros(s.num_tokens, dtype=np.int64)
    for name, top_k, top_p in (("all", 0, 1.0), ("top-k 50", 50, 1.0), ("top-p 0.9", 0, 0.9)):
        rows = np.repeat(NEUTRAL, s.num_tokens)
        rows["temperature"], rows["top_k"], rows["top_p"] = 1.0, top_k, top_p
        rows["seed"] = positions
        yield Case(
            f"[{s.num_tokens}, {s.vocab}], {name}",
            lambda rows=rows: torch.from_numpy(
                sample(logits, positions, rows, positions, positions, nothing, no_masks)
            ),
            lambda rows=rows: torch.from_numpy(
                sample_reference(logits, few, rows, few, few, nothing, no_masks)
            ),
            4 * s.num_tokens * s.vocab,
            0,
        )


def decode_attention(s: Shapes) -> Iterator[Case]:
    """Yield attention in which every token is the newest of its own sequence.

    Reading keys and values is the limit, so the time should grow only with the context.
    """
    starts, counts = [s.context - 1] * s.num_tokens, [1] * s.num_tokens
    num_bytes = 2 * s.item * s.num_kv * s.context * s.num_tokens * s.width
    num_flops = 4 * s.num_q * s.context * s.num_tokens * s.width
    shape = f"{s.num_tokens} of {s.context}"
    yield Case(shape, *_attention(s, starts, counts), num_bytes, num_flops)


def prefill_attention(s: Shapes) -> Iterator[Case]:
    """Yield attention in which all tokens are one prompt, without a cached prefix.

    It is limited by arithmetic, and half of the scores are masked.
    """
    num = s.num_tokens
    num_bytes = 2 * s.item * num * s.width * (s.num_q + s.num_kv)
    num_flops = 2 * s.num_q * num * (num + 1) * s.width
    if num > 1:
        yield Case(f"{num} of {num}", *_attention(s, [0], [num]), num_bytes, num_flops)


def _attention(
    s: Shapes, starts: list[int], counts: list[int]
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return paged attention and its reference, over a cache with shuffled blocks."""
    sizes = [-(-(start + count) // s.block_size) for start, count in zip(starts, counts, strict=True)]  # fmt: skip
    blocks = np.random.default_rng(0).permutation(sum(sizes))
    tables = np.split(blocks, np.cumsum(sizes)[:-1])
    cache = torch.randn(2, s.num_kv, len(blocks) * s.block_size, s.width).to(s.dtype)
    caches = cycle([cache, *(cache.clone() for _ in range(s.copies(cache.nbytes) - 1))])
    slots = [(t[:, None] * s.block_size + np.arange(s.block_size)).ravel() for t in tables]
    fresh = np.concatenate([w[a : a + c] for w, a, c in zip(slots, starts, counts, strict=True)])
    qkv = torch.randn(sum(counts), s.num_q + 2 * s.num_kv, s.width).to(s.dtype)
    kv = cache[:, :, torch.from_numpy(fresh)].permute(2, 0, 1, 3)
    qkv[:, s.num_q :].unflatten(1, (2, s.num_kv)).copy_(kv)
    q, ops = qkv[:, : s.num_q], s.ops()
    ids = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
    for row, table in enumerate(tables):
        ids[row, : len(table)] = table
    plan = ops.plan(ids, range(len(tables)), starts, counts, None)
    where = [slot.tolist() for slot in slots]
    return (
        lambda: ops.attend(qkv, next(caches), plan),
        lambda: paged_attention_reference(q, cache, where, starts, counts, scale=s.width**-0.5),
    )


def qk_norm_rope_kv_write(s: Shapes) -> Iterator[Case]:
    """Yield the norm and rotation of q and k with the write to the cache; only q is checked.

    One launch does four operations, each of which would otherwise read the tensor.
    """
    num_heads = s.num_q + 2 * s.num_kv
    qkv = torch.randn(s.num_tokens, num_heads, s.width).to(s.dtype)
    weight = torch.ones(s.num_q + s.num_kv, s.width, dtype=s.dtype)
    frequencies = 10_000.0 ** -(torch.arange(0, s.width, 2) / s.width)
    positions, slots = torch.arange(s.num_tokens), torch.randperm(s.num_tokens)
    cache = torch.zeros(2, s.num_kv, s.num_tokens, s.width, dtype=s.dtype)
    ops = s.ops()
    tokens = HostTokens(torch.zeros_like(positions), positions, slots)
    table = rope_table(frequencies, s.num_tokens, 1.0, s.dtype)
    _, step = ops.begin_step(tokens, torch.zeros(1, s.hidden, dtype=s.dtype), 1.0, [table])

    def launch() -> Tensor:
        ops.qk_norm_rope_kv_write(qkv, weight, step, 0, cache)
        return qkv[:, : s.num_q]

    def reference() -> Tensor:
        normed = rms_norm_reference(qkv[:, : s.num_q].double(), weight[0], EPS)
        return rope_reference(normed, positions, frequencies)

    num_items = s.num_tokens * num_heads * s.width
    shape = f"[{s.num_tokens}, {num_heads}, {s.width}]"
    yield Case(shape, launch, reference, 2 * s.item * num_items, 7 * num_items)


def fused_add_rms_norm(s: Shapes) -> Iterator[Case]:
    x, y = torch.randn(2, s.num_tokens, s.hidden).to(s.dtype)
    weight, ops = torch.randn(s.hidden).to(s.dtype), s.ops()
    total, num_items = x + y, s.num_tokens * s.hidden
    yield Case(
        f"[{s.num_tokens}, {s.hidden}]",
        lambda: ops.fused_add_norm(x, y, weight),
        lambda: rms_norm_reference(total, weight, EPS),
        4 * s.item * num_items,
        6 * num_items,
    )


def norm(s: Shapes) -> Iterator[Case]:
    x = torch.randn(s.num_tokens, s.hidden).to(s.dtype)
    weight = torch.randn(s.hidden).to(s.dtype)
    yield Case(
        f"[{s.num_tokens}, {s.hidden}]",
        lambda: rms_norm(x, weight, EPS),
        lambda: rms_norm_reference(x, weight, EPS),
        2 * s.item * s.num_tokens * s.hidden,
        4 * s.num_tokens * s.hidden,
    )


def head_norm(s: Shapes) -> Iterator[Case]:
    num_heads = s.num_q + s.num_kv
    x = torch.randn(s.num_tokens, num_heads, s.width).to(s.dtype)
    # The operation works in place, so repeating it must not let the values grow.
    weight = torch.ones(num_heads, s.width).to(s.dtype)

    def launch() -> Tensor:
        rms_norm_heads_(x, weight, EPS)
        return x

    num_items = s.num_tokens * num_heads * s.width
    yield Case(
        f"[{s.num_tokens}, {num_heads}, {s.width}]",
        launch,
        lambda: rms_norm_reference(x, weight[0], EPS),
        2 * s.item * num_items,
        4 * num_items,
    )


def rope(s: Shapes) -> Iterator[Case]:
    num_heads = s.num_q + s.num_kv
    x = torch.randn(s.num_tokens, num_heads, s.width).to(s.dtype)
    frequencies = 10_000.0 ** -(torch.arange(0, s.width, 2) / s.width)
    positions = torch.arange(s.num_tokens)
    rotation = rotation_of(rope_table(frequencies, s.num_tokens, 1.0, s.dtype), positions)

    def launch() -> Tensor:
        rope_(x, rotation)
        return x

    num_items = s.num_tokens * num_heads * s.width
    yield Case(
        f"[{s.num_tokens}, {num_heads}, {s.width}]",
        launch,
        lambda: rope_reference(x, positions, frequencies),
        2 * s.item * num_items,
        3 * num_items,
    )


def whole_attention(s: Shapes) -> Iterator[Case]:
    """Yield an encoder's attention, for sequences of at most 128 tokens.

    All tokens see each other, and there is no cache. It is limited by arithmetic.
    """
    length = min(s.num_tokens, 128)
    groups = [Group(0, s.num_tokens // length, length)]
    num_tokens = groups[0].num_sequences * length
    qkv = torch.randn(num_tokens, 3, s.num_q, s.width).to(s.dtype)
    scale = s.width**-0.5
    tiles = tiles_of(groups) if is_native(s.dtype, s.width) else None
    yield Case(
        f"{groups[0].num_sequences} x {length}, {s.num_q} heads of {s.width}",
        partial(varlen_attention, qkv, groups, scale=scale, tiles=tiles),
        partial(varlen_attention_reference, qkv, groups, scale=scale),
        4 * s.item * num_tokens * s.num_q * s.width,
        4 * num_tokens * length * s.num_q * s.width,
    )


def layer_norm(s: Shapes) -> Iterator[Case]:
    x, residual = torch.randn(2, s.num_tokens, s.hidden).to(s.dtype)
    weight, bias = torch.randn(2, s.hidden).to(s.dtype)
    yield Case(
        f"[{s.num_tokens}, {s.hidden}]",
        partial(LayerNorm(weight, bias, EPS), x, residual),
        lambda: layer_norm_reference(x.double() + residual.double(), weight, bias, EPS),
        3 * s.item * s.num_tokens * s.hidden,
        8 * s.num_tokens * s.hidden,
    )


def sum_of_ranks(s: Shapes) -> Iterator[Case]:
    """Yield the sum of two ranks in shared memory with residual and norm, as in a recorded step.

    Nothing is measured on machines that do not support the kernel.
    """
    if not _has_shared_sum(s):
        return
    from trouper.bench.kernels import shared_sum as core

    sums = core.Sums(s.num_tokens, s.hidden, s.dtype)
    num_items = s.num_tokens * s.hidden
    with core.both(sums.recorded) as run:
        yield Case(
            f"[{s.num_tokens}, {s.hidden}] of 2 ranks",
            run,
            sums.normed_reference,
            6 * s.item * num_items,
            8 * num_items,
            core.NUM_SUMS,
        )


def sum_by_gloo(s: Shapes) -> Iterator[Case]:
    """Yield the sum of two ranks by gloo, torch's collective library for CPUs.

    Gloo adds no residual and computes no norm, so this is less work than `sum_of_ranks`.
    """
    if not _has_shared_sum(s):
        return
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    from trouper.bench.kernels import shared_sum as core

    sums, store = core.Sums(s.num_tokens, s.hidden, s.dtype), HashStore()
    num_items = s.num_tokens * s.hidden
    with core.both(partial(sums.by_gloo, store=store)) as run:
        yield Case(
            f"[{s.num_tokens}, {s.hidden}] of 2 ranks",
            run,
            sums.sum_reference,
            3 * s.item * num_items,
            num_items,
        )


def pack_kv(s: Shapes) -> Iterator[Case]:
    """Yield the packing of a KV block of four layers for the tier on disk.

    The shape in the table ends with the compression ratio. Only bfloat16 is packed, and only in blocks that are not too short.
    """
    for codec, raw, payload, sizes in _packed_block(s):

        def pack(codec: KvCodec = codec, raw: Bytes = raw) -> Tensor:
            return torch.from_numpy(codec.pack(raw)[0])

        def reference(payload: Bytes = payload, sizes: Any = sizes, raw: Bytes = raw) -> Tensor:
            found = unpack_reference(payload, sizes, s.block_size * s.width)
            if not np.array_equal(found.reshape(-1), raw.view(np.uint16)):
                raise WrongResultError("pack_kv: the payload has other values")
            return torch.from_numpy(payload)

        yield Case(
            f"{_size_of_block(s)}, ratio {len(payload) / len(raw):.3f}",
            pack,
            reference,
            len(raw),
            0,
        )


def unpack_kv(s: Shapes) -> Iterator[Case]:
    """Yield the unpacking of a KV block of four layers, with the sum of its values."""
    for codec, raw, payload, sizes in _packed_block(s):
        room, checksum = np.empty_like(raw), Checksum()

        def unpack(
            args: Any = (payload, sizes, room), codec: KvCodec = codec, sums: Checksum = checksum
        ) -> Tensor:
            codec.unpack(*args)
            sums.of(args[2], b"")
            return torch.from_numpy(args[2])

        reference = partial(torch.from_numpy, raw)
        yield Case(_size_of_block(s), unpack, reference, len(raw), 0)


def _size_of_block(s: Shapes) -> str:
    return f"[4, 2, {s.num_kv}, {s.block_size}, {s.width}]"


def _packed_block(s: Shapes) -> Iterator[tuple[KvCodec, Bytes, Bytes, Any]]:
    """Yield at most one block with channels of different scales, as keys have, and its packed form."""
    if s.dtype != torch.bfloat16 or not can_pack(s.block_size * s.width):
        return
    scales = torch.randn(4, 2, s.num_kv, 1, s.width).exp()
    values = (torch.randn(4, 2, s.num_kv, s.block_size, s.width) * scales).to(s.dtype)
    raw = values.view(torch.uint8).flatten().numpy()
    codec = KvCodec([(8 * s.num_kv, s.block_size * s.width)])
    payload, sizes = codec.pack(raw)
    yield codec, raw, payload.copy(), sizes.copy()


def _has_shared_sum(s: Shapes) -> bool:
    return units.row_kind(s.dtype, s.hidden) is not None


OPS: dict[str, Operation] = {
    "linear": gemm,
    "linear, not compressed": partial(gemm, is_compressed=False),
    "paged_attention, decode": decode_attention,
    "paged_attention, prefill": prefill_attention,
    "kv_write": kv_write,
    "pack_kv": pack_kv,
    "unpack_kv, with its sum": unpack_kv,
    "rope": rope,
    "qk_norm_rope_kv_write": qk_norm_rope_kv_write,
    "fused_add_rms_norm": fused_add_rms_norm,
    "rms_norm": norm,
    "rms_norm, heads": head_norm,
    "act_and_mul": act_and_mul,
    "causal_conv": recurrent.causal_conv,
    "gated_delta": recurrent.gated_delta,
    "ssd": recurrent.ssd,
    "gated_norm": recurrent.gated_norm,
    "varlen_attention": whole_attention,
    "layer_norm": layer_norm,
    "shared_sum": sum_of_ranks,
    "shared_sum, by gloo": sum_by_gloo,
    "noise": noise,
    "sample": draws,
}
