"""The pool of recurrent states: views, copies, positions, and the rows that fit into memory."""

import msgspec
import numpy as np
import pytest
import torch

from trouper.actors.executor.models.decoder import StateSpec
from trouper.actors.executor.steps.cache_memory import (
    NOTHING,
    StatePool,
    num_kv_blocks,
    num_state_rows,
)
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError

SPECS = (
    StateSpec(layer=0, conv=(3, 5), matrix=(2, 4, 4)),
    StateSpec(layer=2, conv=(2, 7)),
    StateSpec(layer=2, index=1, matrix=(9,)),
)


def pool(num_rows=4, dtype=torch.bfloat16):
    return StatePool(SPECS, num_rows, dtype)


def rows(*numbers):
    return np.array(numbers, np.int64)


def test_mixers_have_views_of_disjoint_parts():
    states = pool()
    found = states.mixers[0, 0]
    assert (found.conv.shape, found.conv.dtype) == ((4, 3, 5), torch.bfloat16)
    assert (found.matrix.shape, found.matrix.dtype) == ((4, 2, 4, 4), torch.float32)
    assert states.mixers[2, 0].matrix is states.mixers[2, 1].conv is None
    views = [view for mixer in states.mixers.values() for view in mixer[:2] if view is not None]
    for i, view in enumerate(views):
        view.fill_(i)
    assert [float(view.float().mean()) for view in views] == [0, 1, 2, 3]
    assert all(view[row].data_ptr() % 64 == 0 for view in views for row in range(4))


def test_convolutions_of_one_tap_have_empty_views():
    found = StatePool([StateSpec(layer=0, conv=(0, 5))], 3, torch.float32)
    assert found.mixers[0, 0].conv.shape == (3, 0, 5)
    found.copy(0, 1)
    assert StatePool([], 3, torch.float32).mixers == {}


def test_copy_takes_states_and_position_of_one_row():
    states = pool()
    for mixer in states.mixers.values():
        for view in filter(lambda view: view is not None, mixer[:2]):
            view.copy_(torch.arange(4.0).view(4, *[1] * (view.dim() - 1)).expand_as(view))
    states.begin(rows(1), rows(0))
    states.finish(rows(1), rows(16), saves=((1, 3, 16),))
    assert states.positions.tolist() == [NOTHING, 16, NOTHING, 16]
    assert states.mixers[2, 1].matrix[:, 0].tolist() == [0, 1, 2, 1]


def test_states_saved_inside_a_pass_have_their_position():
    states = pool()
    states.positions[3] = 8
    saves = (1, 2, 9), (1, 3, 16), (0, 0, 40)
    states.begin(rows(1), rows(0), saves)
    assert states.positions.tolist() == [NOTHING] * 4
    states.finish(rows(1), rows(16), saves)
    assert states.positions.tolist() == [NOTHING, 16, 9, 16]


@pytest.mark.parametrize(("position", "start"), [(40, 32), (32, 40), (NOTHING, 1)])
def test_plan_from_another_position_is_refused(position, start):
    states = pool()
    states.positions[2] = position
    with pytest.raises(
        RuntimeError, match=f"position {position}, but the plan continues it from {start}"
    ):
        states.begin(rows(1, 2), rows(0, start))


def test_row_of_an_interrupted_pass_has_no_position():
    states = pool()
    states.begin(rows(0), rows(0))
    with pytest.raises(RuntimeError, match="position -1"):
        states.begin(rows(0), rows(8))
    states.begin(rows(0), rows(0))


def made(memory, **options):
    config = resolve(EngineArgs(block_size=16, max_model_len=64, **options))
    return msgspec.structs.replace(config, kv_cache_bytes=memory)


def test_own_number_of_sequences_is_kept_or_refused():
    row_bytes = num_state_rows(made(2**30), SPECS, torch.float32).row_bytes
    found = num_state_rows(made(8 * row_bytes, max_num_seqs=4), SPECS, torch.float32)
    assert (found.num_live, found.num_snapshots) == (4, 4)
    with pytest.raises(TrouperValidationError, match="largest max_num_seqs that fits is 4") as e:
        num_state_rows(made(8 * row_bytes, max_num_seqs=5), SPECS, torch.float32)
    assert e.value.parameter == "max_num_seqs"


def test_open_number_of_sequences_is_lowered_to_what_fits():
    row_bytes = num_state_rows(made(2**30), SPECS, torch.float32).row_bytes
    found = num_state_rows(made(100 * row_bytes), SPECS, torch.float32)
    assert (found.num_live, found.num_snapshots) == (50, 25)
    with pytest.raises(TrouperValidationError, match=f"set at least {2 * row_bytes} bytes") as e:
        num_state_rows(made(row_bytes), SPECS, torch.float32)
    assert (e.value.parameter, e.value.value) == ("kv_cache_memory_bytes", row_bytes)


def test_blocks_of_models_without_keys_take_no_memory():
    config = made(2**20, max_num_seqs=3)
    assert num_kv_blocks(config, (), 4, 2**19) == 3 * 4 + 1
    assert num_state_rows(config, (), torch.float32).num_bytes == 0
