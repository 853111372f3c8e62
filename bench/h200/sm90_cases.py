"""The launches that `sm90.py` compiles: each row of each table of launch configurations.

The shapes are those of Qwen3-0.6B (16 query heads on 8, width 128) and Llama-3.1-8B (32 on 8). Some configurations
need Phi-3-mini (width 96), Gemma-2 (width 256, soft cap, window) or SmolLM2 (9 on 3, width 64). The tensors are meta
tensors, so a launcher that reads a value raises an error.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trouper.kernels.cuda import (
    decode_attention,
    embed,
    linear,
    lora,
    norms,
    prefill_attention,
    qk_norm_rope_kv_write,
    sample,
    sampling_rows,
    top_k_top_p,
)
from trouper.kernels.cuda.launch import Config
from trouper.kernels.cuda.prefill_attention import head_bytes

VOCABULARY = 151_936
bf16, fp32 = torch.bfloat16, torch.float32


class Sm90Case(NamedTuple):
    label: str
    # The row of the table.
    config: Config
    # The matrix instructions of the kernel that uses the config: wgmma, mma or none.
    expected: str
    launch: Callable[[], object]


def _norms() -> Iterator[Sm90Case]:
    for width, config in norms.NORM_CONFIGS["sm_90"]:
        x, weight = meta(256, width), meta(width)
        for label, y, post in (("", None, None), (", sum", x, None), (", post norm", x, weight)):

            def launch(
                x: Tensor = x, y: Tensor | None = y, w: Tensor = weight, post: Tensor | None = post
            ) -> object:
                return norms.fused_add_rms_norm(x, y, w, 1e-6, post_weight_E=post)

            yield Sm90Case(f"E {width}{label}", config, "none", launch)


def _heads_norms() -> Iterator[Sm90Case]:
    for width, config in norms.HEADS_CONFIGS["sm_90"]:
        x, sums, weight = meta(256, width), meta(256, dtype=fp32), meta(width)

        def launch(x: Tensor = x, sums: Tensor = sums, weight: Tensor = weight) -> object:
            norms.sum_of_squares_(x, sums)
            return norms.norm_by_sum_(x, sums, weight, num=2 * x.shape[1], eps=1e-6)

        yield Sm90Case(f"X {width}", config, "none", launch)


def _acts() -> Iterator[Sm90Case]:
    for width, config in norms.CONFIGS["sm_90"]:
        activations: tuple[norms.Activation, ...] = ("silu", "gelu_tanh")
        for activation in activations:
            gate_up = meta(256, 2 * min(width, 14_336))
            yield Sm90Case(
                f"M {gate_up.shape[1] // 2}, {activation}",
                config,
                "none",
                partial(norms.act_and_mul, gate_up, activation),
            )


def _qkv_posts() -> Iterator[Sm90Case]:
    for width, config in qk_norm_rope_kv_write.CONFIGS["sm_90"]:
        for has_norm in (False, True):
            yield Sm90Case(
                f"32/8 × {width}" + ", norm" * has_norm,
                config,
                "none",
                lambda d=width, has_norm=has_norm: qk_norm_rope_kv_write.qk_norm_rope_kv_write_(
                    meta(256, 48, d),
                    meta(2, 8, 4096, d),
                    ids(256),
                    ids(256),
                    norm_ND=meta(40, d) if has_norm else None,
                    table_P2R=meta(4096, 2, d),
                    eps=1e-6,
                ),
            )


# heads, KV heads, width, options
GEOMETRIES: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    (9, 3, 64, {}),
    (16, 8, 128, {}),
    (32, 8, 128, {}),
    (32, 32, 96, {}),
    (16, 8, 256, {}),
    (16, 8, 256, {"softcap": 50.0, "window": 4096}),
    (8, 1, 512, {}),
)


def _attentions(table: Any, run: Callable[..., object], block_m: int | None) -> Iterator[Sm90Case]:
    for heads, kv_heads, width, options in GEOMETRIES:
        for dtype in (bf16, fp32) if heads in (9, 16) and width < 256 else (bf16,):
            size = head_bytes(2 ** (width - 1).bit_length(), dtype)
            config = next(config for largest, config in table["sm_90"] if size <= largest)
            rows = block_m or config["BLOCK_M"]
            expected = "wgmma" if rows >= 64 else "mma"
            for block_size in (16,) if width != 128 else (16, 64):
                yield Sm90Case(
                    f"{heads}/{kv_heads} × {width} {str(dtype)[6:]}, blocks of {block_size}"
                    + ", cap, window" * bool(options),
                    config,
                    expected,
                    lambda h=heads, k=kv_heads, d=width, t=dtype, b=block_size, o=options: run(
                        meta(256, h, d, dtype=t),
                        meta(2, k, 1 << 16, d, dtype=t),
                        ids(257),
                        ids(256),
                        ids(256),
                        ids(256, 1024),
                        block_size=b,
                        scale=d**-0.5,
                        **o,
                    ),
                )


def _decodes() -> Iterator[Sm90Case]:
    def launch(*arguments: Tensor, **options: Any) -> object:
        return decode_attention.decode_attention(*arguments, max_length=8192, **options)

    return _attentions(decode_attention.CONFIGS, launch, 16)


def _prefills() -> Iterator[Sm90Case]:
    return _attentions(prefill_attention.CONFIGS, prefill_attention.prefill_attention, None)


def _prepares() -> Iterator[Sm90Case]:
    for largest, config in embed.CONFIGS["sm_90"]:
        width = min(largest, 8192)
        yield Sm90Case(
            f"E {width}",
            config,
            "none",
            lambda e=width: embed.embed(
                ids(257), ids(256), ids(256), ids(256, 4097), ids(256, 256),
                meta(VOCABULARY, e), num_tokens=2048, block_size=16,
            ),
        )  # fmt: skip


def _samplings() -> Iterator[Sm90Case]:
    rows = sampling_rows.make_sampling_rows(256, VOCABULARY, device="meta")
    raw, edited = meta(256, VOCABULARY), meta(256, VOCABULARY, dtype=fp32)
    tokens = ids(256, 4097)
    (_, blocks), *_ = sampling_rows.BLOCKS["sm_90"]
    (_, search), *_ = top_k_top_p.CONFIGS["sm_90"]
    yield Sm90Case(
        "256 × 152 k, edits",
        blocks,
        "none",
        lambda: sampling_rows.apply_penalties(raw, ids(256), ids(256), tokens, rows),
    )
    yield Sm90Case(
        "256 × 152 k, top-k, top-p",
        search,
        "none",
        lambda: top_k_top_p.top_k_top_p(raw, edited, ids(256), rows),
    )
    yield Sm90Case(
        "256 × 152 k, draw",
        blocks,
        "none",
        lambda: sample.put_tokens_(
            sample.sample(raw, edited, ids(256), ids(256), edited[:, 0], ids(256), tokens, rows),
            ids(256),
            ids(256),
            tokens,
        ),
    )
    for num_top, config in sample.CONFIGS["sm_90"]:
        yield Sm90Case(
            f"256 × 152 k, {num_top} logprobs",
            config,
            "none",
            lambda n=num_top: sample.top_logprobs(raw, ids(256), n),
        )


def _matmuls() -> Iterator[Sm90Case]:
    for size, config in linear.CONFIGS["sm_90"]:
        dtype = {2: bf16, 4: fp32}[size]
        for num_in, num_out in ((1024, 6144), (4096, 6144), (3072, 1024)):
            for bias in (None, meta(num_out, dtype=dtype)):
                yield Sm90Case(
                    f"{num_in} -> {num_out} {str(dtype)[6:]}" + ", bias" * (bias is not None),
                    config,
                    "wgmma",
                    partial(
                        linear.matmul,
                        meta(256, num_in, dtype=dtype),
                        meta(num_out, num_in, dtype=dtype),
                        bias,
                    ),
                )


def _shrinks() -> Iterator[Sm90Case]:
    ranks = (16, 32, 64)
    for rank, (_, config) in zip(ranks, lora.SHRINK_CONFIGS["sm_90"], strict=True):
        for num_in, num_parts in ((4096, 3), (14_336, 1)):
            yield Sm90Case(
                f"{num_in} -> {num_parts} × {rank}",
                config,
                "mma",
                lambda i=num_in, p=num_parts, r=rank: lora.lora_shrink(
                    meta(256, i), meta(8, p, r, i), ids(9), ids(256), ids(25, 3), max_blocks=24
                ),
            )


def _expands() -> Iterator[Sm90Case]:
    for rank, (_, config) in zip((16, 64), lora.EXPAND_CONFIGS["sm_90"], strict=True):
        for num_out, num_parts, splits in ((6144, 3, 4), (4096, 1, 14)):
            yield Sm90Case(
                f"{num_parts} × {rank} -> {num_out}, {splits} sums",
                config,
                "mma",
                lambda o=num_out, p=num_parts, c=splits, r=rank: lora.lora_expand_(
                    meta(256, o), meta(c, 256, p * r, dtype=fp32), meta(8, o, r),
                    ids(9), ids(48, 3), ids(256), ids(25, 3), max_blocks=24,
                ),
            )  # fmt: skip


def meta(*shape: int, dtype: torch.dtype = bf16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ids(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


CASES: dict[str, Callable[[], Iterator[Sm90Case]]] = {
    "decode_attention": _decodes,
    "prefill_attention": _prefills,
    "qk_norm_rope_kv_write": _qkv_posts,
    "fused_add_rms_norm": _norms,
    "heads_norm": _heads_norms,
    "act_and_mul": _acts,
    "embed": _prepares,
    "sampling": _samplings,
    "matmul": _matmuls,
    "lora_shrink": _shrinks,
    "lora_expand": _expands,
}
