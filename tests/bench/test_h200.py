"""The command that needs a GPU, without one: its jobs, its floors, and a whole run on tiny shapes."""

import json
import subprocess
import sys

import pytest

from trouper.bench.h200 import run
from trouper.bench.h200.goals import GOALS, Ceilings, Goal, floor_s, table, workload
from trouper.bench.h200.run import GpuJob

WRITE = "import sys; open(sys.argv[1], 'w').write('{}')"


def test_the_floors_are_those_of_bytes_and_flops():
    """Milliseconds on 4.3 TB/s and 790 TFLOP/s, worked out by hand."""
    floors = [round(1e3 * floor_s(goal, Ceilings()), 3) for goal in GOALS]
    assert floors == [
        3.522, 4.489, 11.481, 167.014, 18.441, 10078.906, 0.305, 1.151, 7.269, 3700.39,
    ]  # fmt: skip
    twice = Ceilings(2 * 4.3e12, 2 * 790e12)
    assert floor_s(GOALS[0], twice) == pytest.approx(floor_s(GOALS[0], Ceilings()) / 2)


def test_the_workload_is_the_one_that_others_publish():
    prompts, lengths = workload(256, 1024)
    assert (sum(map(len, prompts)), sum(lengths)) == (142_827, 133_966)


def test_goal_needs_share_of_floor_and_busy_device():
    goal = GOALS[0]
    fast, slow = floor_s(goal, Ceilings()) / 0.75, floor_s(goal, Ceilings()) / 0.6
    records = [
        {"goal": goal._asdict(), "seconds": seconds, "idle_share": idle}
        for seconds, idle in ((fast, 0.01), (fast, 0.2), (slow, 0.01))
    ]
    peers = [{"goal": goal._asdict(), "seconds": 2 * fast}]
    rows = [line.split(" | ") for line in table(records, peers, Ceilings()) if "decode" in line]
    assert [row[6] for row in rows] == ["yes", "no", "no"]
    assert rows[0][4:6] == ["75%", "70%, idle < 5%"]
    assert rows[0][9] == "2.00 × |"


def test_jobs_run_once_and_what_fails_runs_again(tmp_path):
    bad = GpuJob("bad", 20, ("-c", "print('this is why'); raise SystemExit(3)"))
    good = GpuJob("good", 20, ("-c", WRITE, run.REPORT))
    silent = GpuJob("silent", 20, ("-c", "print('17 passed')"))
    lines = list(run.run_jobs([bad, good, silent], tmp_path, 60))
    assert lines[0] == "bad: FAILED with 3: this is why"
    assert json.loads((tmp_path / "silent.json").read_text())["said"] == "17 passed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.log", "good.json", "silent.json"]  # fmt: skip
    again = list(run.run_jobs([bad, good], tmp_path, 60))
    assert again == [lines[0], "good: done before"]


def test_slow_measurement_is_ended_and_unfitting_one_skipped(tmp_path):
    endless = GpuJob("endless", 0.5, ("-c", "import time; time.sleep(600)"))
    assert list(run.run_jobs([endless], tmp_path, 60)) == [
        "endless: FAILED after 0.5 s; see endless.log"
    ]
    (line,) = run.run_jobs([endless], tmp_path, -1)
    assert "NOT RUN" in line


@pytest.mark.parametrize("is_tiny", [False, True])
def test_every_goals_model_has_its_pieces(is_tiny):
    names = [job.name for job in run.jobs(is_tiny=is_tiny)]
    assert names[0] == "tests"
    for model in {goal.model for goal in GOALS}:
        kinds = ("goals", run.PEER) if is_tiny else ("kernels", "goals", run.PEER)
        assert {f"{kind}-{model}" for kind in kinds} < set(names)
    assert f"ranks-{run.MODELS[0]}" in names
    assert len(names) == len(set(names)) == (9 if is_tiny else 12)


def test_job_for_two_gpus_is_left_out_where_one(tmp_path, monkeypatch):
    two = GpuJob("two", 20, ("-c", WRITE, run.REPORT), num_gpus=2)
    monkeypatch.setattr(run, "num_devices", lambda: 1)
    assert list(run.run_jobs([two], tmp_path, 60)) == [
        "two: skipped, because it needs 2 GPUs (visible: 1)"
    ]
    monkeypatch.setattr(run, "num_devices", lambda: 2)
    list(run.run_jobs([two], tmp_path, 60))
    assert (tmp_path / "two.json").exists()


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run.report, "gpus", list)
    monkeypatch.setattr(sys, "argv", ["h200", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="no GPU: nvidia-smi"):
        run.main()
    assert list(tmp_path.iterdir()) == []


def test_outside_of_a_checkout_it_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["h200", "--tiny"])
    with pytest.raises(SystemExit, match="checkout"):
        run.main()


def test_a_shrunk_goal_is_small():
    goal = Goal("llama-3.1-8b", "decode", 256, 1024, 0.68, 0.75).shrunk()
    assert (goal.model, goal.batch_size, goal.accept) == ("tiny", 2, 0.68)


@pytest.mark.slow  # it is a benchmark
@pytest.mark.timeout(600)
def test_all_of_it_can_be_tried_without_gpu(tmp_path):
    command = [sys.executable, "-m", "trouper.bench.h200", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("*.json"))) == 9
    assert done.stdout.count("| tiny ") == len(GOALS)
    assert done.stdout.count(" × |") == len(GOALS)
