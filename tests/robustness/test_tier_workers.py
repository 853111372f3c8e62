"""The tier on disk of engines with stages, ranks and replicas, each in worker processes with files of their own."""

import subprocess
from pathlib import Path

import anyio
import pytest

from tests.robustness.test_tier import (
    GREEDY,
    PROMPTS,
    Hybrid,
    an_llm,
    answers,
    damage,
    files_of,
    stream_all,
    tokens,
    wait_for,
    wait_for_files,
    workers_of,
)
from trouper.actors.messages.requests import RequestOptions
from trouper.kernels.codegen import units

SIZES = {
    "stages": {"pipeline_parallel_size": 2},
    "ranks": {"tensor_parallel_size": 2},
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not units.can_multiply(), reason="needs compiled kernels"),
]


@pytest.fixture(scope="module")
def expected():
    with an_llm(None) as llm:
        return answers(llm)[0]


@pytest.fixture(scope="module", params=SIZES)
def stored(request, tmp_path_factory, expected):
    """The number of workers, and a folder with both parts of the blocks of all prompts and their answers."""
    folder, sizes = tmp_path_factory.mktemp("tier"), SIZES[request.param]
    folder.chmod(0o700)
    with an_llm(folder, **sizes) as llm:
        assert answers(llm) == (expected, 0)
        wait_for_files(folder, 54)
    return sizes, folder


def copy_of(stored, tmp_path):
    sizes, folder = stored
    copied = tmp_path / "tier"
    subprocess.run(["cp", "-a", folder, copied], check=True)
    return sizes, copied


def test_parts_of_all_workers_survive_the_engine(stored, expected, tmp_path):
    """Damage to the parts of one worker then costs only time."""
    sizes, folder = copy_of(stored, tmp_path)
    with an_llm(folder, **sizes) as llm:
        assert answers(llm) == (expected, 3 * 144)
        spaces = [files_of(path) for path in folder.iterdir() if path.is_dir()]
        assert list(map(len, spaces)) == [27, 27]
        for number, path in enumerate(spaces[0][::3]):
            damage(path, number, spaces[0][number - 1])
        assert llm.reset_prefix_cache()
        found, num_cached = answers(llm)
        assert found == expected
        assert num_cached < 3 * 144
        assert llm.reset_prefix_cache(reset_connector=True)
        wait_for(lambda: not files_of(folder))


def test_stages_with_and_without_states_survive_the_engine(tmp_path):
    """The first stage has recurrent layers only, and the second one has none."""
    hybrid = Hybrid("qwen3_5_text", tmp_path)
    hybrid.folder = tmp_path / "stages"
    for num_cached in (0, 3 * 144):
        with hybrid.llm(hybrid.folder, pipeline_parallel_size=2) as llm:
            assert answers(llm) == (hybrid.expected, num_cached)
            wait_for(lambda: len(hybrid.states()) == 2 * 3)
            wait_for_files(hybrid.folder, 2 * 27)


@pytest.mark.trio
async def test_hanging_disk_of_one_worker_stops_nothing(stored, expected, tmp_path, monkeypatch):
    sizes, folder = copy_of(stored, tmp_path)
    monkeypatch.setenv("TROUPER_TEST_HANGING_DISK", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    async with workers_of(folder, "tests.robustness.faulty_worker", **sizes) as (engine, _):
        for number in range(2):
            with anyio.fail_after(60):
                assert await stream_all(engine, number, lambda count: None) == 2 * tokens(expected)
        (statistics,) = engine.statistics().replicas
        assert dict(statistics.tier_skipped)["deadline"] > 0
        assert statistics.tier_hit_tokens == 0


@pytest.mark.trio
async def test_replica_reads_what_another_has_written(expected, tmp_path):
    """The second engine runs each prompt on the other replica."""

    async def life(first):
        async with workers_of(tmp_path / "tier", data_parallel_size=2) as (engine, _):
            found = []
            for number, prompt in enumerate(PROMPTS):
                options = RequestOptions(data_parallel_rank=(first + number) % 2)
                given = {"prompt_token_ids": prompt}
                async for output in engine.generate(given, GREEDY, str(number), options):
                    found[number:] = [list(output.outputs[0].token_ids)]
            assert found == tokens(expected)
            await anyio.to_thread.run_sync(wait_for_files, tmp_path / "tier", 27)
            return [replica.tier_hit_tokens for replica in engine.statistics().replicas]

    assert await life(0) == [0, 0]
    assert await life(1) == [144, 288]
