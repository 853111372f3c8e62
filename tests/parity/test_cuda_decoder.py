"""A step of the Triton kernels is a step of the CPU path, for every architecture, in float32."""

import numpy as np
import pytest
import torch

from tests.support.interpreter import hasten_interpreter
from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.native_decoder import ops_config
from trouper.actors.executor.steps.batch import make_batch
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.executor.weights.decoder import load_decoder
from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.steps import NewSequence, Sampling, StepPlan
from trouper.kernels.select import make_ops

from .driver import engine_config
from .test_architectures import CASES, VOCAB, tiny_model

pytest.importorskip("triton", reason="no Triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the latter interpreted
BLOCK_SIZE = 4
# of rows 0, 1 and 2: (start, count) in each step; whole prompts, a mixed batch, then decode alone
STEPS = [[(0, 24), (0, 13), (0, 1)], [(24, 1), (13, 12), (1, 1)], [(25, 1), (25, 1), (2, 1)]]
DEFAULT = ("qwen3-tied", "gemma2")


def make_rows():
    rng = np.random.default_rng(0)
    rows = RequestSlots(3, 48, BLOCK_SIZE)
    blocks = 1 + rng.permutation(36)
    for row, mine in enumerate(blocks.reshape(3, 12).tolist()):
        ids = tuple(rng.integers(VOCAB, size=48).tolist())
        rows.place(NewSequence(row, SequenceId(row), ids, 48, tuple(mine), Sampling()))
    return rows


def device_tokens(rows, columns, *, padding):
    from trouper.kernels.cuda.ops import DeviceTokens

    def ids(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    starts, counts = zip(*columns, strict=True)
    bounds = np.cumsum([0, *counts]).tolist()
    return DeviceTokens(
        bounds=ids(bounds + bounds[-1:] * padding),
        request_slots=ids([*range(3), *[0] * padding]),
        num_computed_tokens=ids([*starts, *[0] * padding]),
        token_ids=ids(rows.token_ids),
        block_ids=ids(rows.block_ids),
        num_tokens=bounds[-1] + padding,
        is_decode=max(counts) == 1,
    )


@pytest.mark.parametrize(
    "case", [c if c in DEFAULT else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
@torch.no_grad()
def test_hidden_states_and_caches_equal_those_of_cpu_path(case, tmp_path):
    from trouper.kernels.cuda.ops import TritonOps

    if DEVICE.type == "cpu":
        hasten_interpreter()
    tiny_model(*CASES[case], tmp_path)
    config = engine_config(tmp_path)
    traits = decoder_traits(config.model.hf_config, config.model.architecture)
    shape = ops_config(traits, torch.float32, BLOCK_SIZE)
    on_cpu = load_decoder(config, traits, ops=lambda: make_ops(shape, native=False))
    ops = TritonOps(shape, max_length=48)
    on_device = load_decoder(config, traits, ops=lambda: ops, device=DEVICE)
    cache_shape = (len(traits.layers), 2, traits.num_kv_heads, 37 * BLOCK_SIZE, traits.head_dim)
    expected_kv = torch.zeros(cache_shape)
    kv = torch.full(cache_shape, torch.nan, device=DEVICE)
    rows = make_rows()
    for step, columns in enumerate(STEPS):
        plan = StepPlan(step, 0, (0, 1, 2), *zip(*columns, strict=True), (1,) * 3)
        batch = make_batch(plan, rows, [layer.window for layer in traits.layers], on_cpu.ops.plan)
        expected = on_cpu.forward(batch.tokens, batch.plans, list(expected_kv))
        tokens = device_tokens(rows, columns, padding=step)
        plans = {window: ops.plan(tokens, window) for window in traits.windows}
        with np.errstate(all="ignore"):  # the interpreter computes masked lanes too
            found = on_device.forward(tokens, plans, list(kv))
        torch.testing.assert_close(found[: len(expected)].cpu(), expected, atol=2e-4, rtol=2e-4)
    is_written = ~kv.isnan()
    assert torch.equal(is_written.cpu(), expected_kv != 0)
    torch.testing.assert_close(
        kv[is_written].cpu(), expected_kv[is_written.cpu()], atol=1e-4, rtol=0
    )
    on_device.move(torch.clone)  # what was one tensor still is
    assert (on_device._head.weight is on_device._embedding) == traits.tied_embeddings
