"""Two engines that take turns, with engines that are no more than their names."""

import pytest

from trouper.bench.studies.parallel.interleaved import InTurn

pytestmark = pytest.mark.anyio


async def test_engines_take_turns_and_the_medians_are_theirs():
    calls = []
    seconds = {"whole": [9.0, 2.0, 3.0], "cut": [1.0, 8.0, 1.5]}

    left = {engine: iter(each) for engine, each in seconds.items()}

    async def seconds_of(engine, name):
        calls.append((engine, name))
        return next(left[engine])

    found = await InTurn("whole", "cut").measure("x", seconds_of, 3)
    assert calls == [(e, f"x-{t}-{i}") for t in range(3) for i, e in enumerate(("whole", "cut"))]
    assert found == (3.0, 1.5, [seconds["whole"], seconds["cut"]])
