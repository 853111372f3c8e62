"""The arithmetic of groups of layers.  The simulation plants faults in the rules of windows."""

from trouper.actors.scheduling.state.windows import NULL_BLOCK
from trouper.config.kv_layout import KVLayout, group_size, tables_of


def test_groups_have_equal_size_and_few_empty_places():
    windows = [1024] * 29 + [None] * 5
    tables = tables_of(windows, 32_768, 128, 512)
    assert [tables.count(table) for table in range(7)] == [5, 5, 5, 5, 5, 5, 4]
    assert {table for table, window in zip(tables, windows, strict=True) if window is None} == {0}
    assert [group_size(counts) for counts in ((12, 12), (22, 4), (8, 24))] == [12, 4, 8]


def test_each_stage_has_its_share_of_each_group():
    windows = ([512] * 5 + [None]) * 4 + [512] * 2
    stages = [(0, 14), (14, 26)]
    tables = tables_of(windows, 32_768, 128, 512, stages=stages)
    counts = [[tables[first:last].count(table) for table in range(7)] for first, last in stages]
    assert counts[0] == [2] * 7
    assert max(counts[1]) == 2


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
