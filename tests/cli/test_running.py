"""An engine for one prompt is small, and so has its weights in 12 bits."""

import pytest

from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.frontends.cli.running import size_for_one_prompt


@pytest.mark.parametrize(
    ("given", "num_completions", "num_seqs", "is_compressed"),
    [(None, 1, 1, True), (None, 7, 7, True), (None, 8, 256, False), (64, 1, 64, False)],
)
def test_one_prompt_limits_the_engine(given, num_completions, num_seqs, is_compressed):
    args = EngineArgs(max_num_seqs=given)
    size_for_one_prompt(args, num_completions)
    config = resolve(args, offline=True)
    assert config.scheduler.max_num_seqs == num_seqs
    assert config.compress_weights is is_compressed
