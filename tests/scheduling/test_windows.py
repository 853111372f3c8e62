"""Planted faults in the rules of windows, each of which the policy's random test must find."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from trouper.actors.scheduling.state.windows import NULL_BLOCK, Windows
from trouper.config.kv_layout import KVLayout, group_size, tables_of

from . import test_policy_model


def freed_one_block_early(right):
    return lambda self, window, position: right(self, window, position + self.block_size)


def fork_without_the_tail(right):
    def faulty(self, leader, num_shared, *, copies_next):
        return leader.blocks[: num_shared * self._num_groups]

    return faulty


def limit_without_the_chunk(right):
    return lambda self, window: (
        right(self, window) and -(-((window or 2**40) - 1) // self.block_size)
    )


FAULTS = [
    (KVLayout, "num_behind", freed_one_block_early), (Windows, "fork", fork_without_the_tail),
    (KVLayout, "_most", limit_without_the_chunk),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "fault"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))  # fmt: skip
def test_random_test_finds_planted_fault(owner, name, fault, monkeypatch):
    monkeypatch.setattr(test_policy_model, "WINDOWS", ((None, 3), (None, 5, 5, 2), (4,)))
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    search = settings(
        max_examples=300, stateful_step_count=40, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        run_state_machine_as_test(test_policy_model.PolicyMachine, settings=search)


def test_groups_have_equal_size_and_few_empty_places():
    windows = [1024] * 29 + [None] * 5
    tables = tables_of(windows, 32_768, 128, 512)
    assert [tables.count(table) for table in range(7)] == [5, 5, 5, 5, 5, 5, 4]
    assert {table for table, window in zip(tables, windows, strict=True) if window is None} == {0}
    assert [group_size(counts) for counts in ((12, 12), (22, 4), (8, 24))] == [12, 4, 8]


def test_layers_share_a_table_if_it_saves_nothing():
    assert tables_of([None] * 8, 4096, 128, 512) is None
    assert tables_of([1024] * 5 + [None], 1200, 128, 512) is None


def test_layout_holds_window_and_step_besides_all_tokens():
    layout = KVLayout(128, (None, 1024, 1024), 512)
    assert layout.num_blocks(128) == 3
    assert layout.num_blocks(32_768) == 256 + 2 * 13
    assert layout.num_tokens(256 + 2 * 13) == 32_768
    assert layout.num_tokens(256 + 2 * 13 - 1) == 32_640
    assert layout.num_tokens(2) == 0
    assert (layout.num_behind(1024, 1023), layout.num_behind(1024, 1151)) == (0, 1)
    assert NULL_BLOCK == 0
