"""Three models share the memory of two, while their workers are killed; every answer is that of a server with one model."""

import re

import pytest

from trouper.bench.studies.server.several_models import compare, drawn_requests


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_swaps_and_kills_change_no_answer(tmp_path, capsys):
    status = compare(tmp_path, 12, num_clients=9, kill_every_s=1.0, turn="0.3s")
    line = capsys.readouterr().out
    assert (status, "12 requests, 0 differ" in line) == (0, True), line
    assert int(re.findall(r"(\d+) workers killed", line)[0]) > 0


def test_drawn_requests_are_of_every_kind():
    asked = drawn_requests(40)
    assert {each.body["model"] for each in asked} == {"chat", "code", "embed"}
    assert {each.body.get("stream") for each in asked} == {None, False, True}
    assert len({each.path for each in asked}) == 3
