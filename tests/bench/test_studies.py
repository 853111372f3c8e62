"""Studies with a command line, on models as small as they can be."""

import signal

import anyio
import pytest

from trouper.bench.studies.command import run_study
from trouper.bench.studies.models import quantization
from trouper.bench.studies.parallel import pipeline, ranks, replicas
from trouper.bench.studies.scheduling import loop_gap, structured
from trouper.bench.studies.scheduling.loop_gap import Heartbeat

SMALL = ["--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "128"]
SMALL += ["--num-gpu-blocks-override", "8"]
TINY = [*SMALL, "--num-prompts", "3", "--input-len", "5", "--output-len", "4"]


def test_structured_compares_streams_by_schema_with_free_ones(study):
    options = (
        "--num-streams",
        "2",
        "--output-len",
        "16",
        "--num-rounds",
        "1",
        "--num-schemas",
        "2",
    )
    found = study(structured.structured, *SMALL, *options)
    assert found["ratio"] == pytest.approx(found["structured_tok_s"] / found["free_tok_s"])
    assert found["first_token_new_schema_ms"]["p50"] > 0
    assert found["loop_gap_ms"]["max"] >= found["loop_gap_ms"]["p50"]
    assert 0 < found["redrawn_share"] < 1
    assert found["mask_ms_per_step"] > 0
    assert found["missed"] == structured.missed(found)


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
def test_the_gaps_of_the_loop(study, loop):
    found = study(loop_gap.loop_gap, *TINY, "--loop", loop, "--idle", "0.1", "--interval-ms", "0.2")
    assert found["num_tokens"] == 12
    assert found["num_beats"] > 0
    for state in ("idle_ms", "busy_ms"):
        assert 0 <= found[state]["p50"] <= found[state]["p99.9"] <= found[state]["max"]


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
def test_ctrl_c_while_gaps_are_measured_is_one_line(loop, monkeypatch, capsys):
    hearts = []

    async def interrupted(heart):
        hearts.append(heart)
        if len(hearts) == 2:  # the one beside the streams
            signal.raise_signal(signal.SIGINT)
        await anyio.sleep_forever()

    monkeypatch.setattr(Heartbeat, "beat", interrupted)
    assert run_study(loop_gap.loop_gap, [*TINY, "--loop", loop, "--idle", "0"]) == 130
    assert capsys.readouterr() == ("", "trouper: interrupted\n")


def test_quantization_tells_what_each_method_costs(study):
    results = study(quantization.quantization, "--num-chars", "150", "--num-files", "2")["results"]
    none, int8, int4 = results
    assert none["mean_kl_nats"] == 0 <= int8["mean_kl_nats"] < int4["mean_kl_nats"] < 0.1
    assert none["same_top_token"] == 1 >= int8["same_top_token"] > 0.9
    assert int4["same_top_token"] > 0.7
    assert abs(int4["perplexity"] / none["perplexity"] - 1) < 0.1


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stall", [(), ("--stall",)])
def test_stages_are_measured_beside_one(study, stall):
    options = ("--model", "tiny", "--chunks", "1,3", "--chunk-tokens", "16", "--num-iters", "2")
    found = study(pipeline.pipeline, *options, *stall)
    assert found["stall"] is bool(stall)
    assert [record["num_chunks"] for record in found["results"]] == [1, 3]
    assert all(record["gain"] > 0 for record in found["results"])
    assert [round(record["bound"], 2) for record in found["results"]] == [1.0, 1.5]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_are_measured_beside_one_process(study):
    options = ("--model", "tiny", "--rows", "1,3", "--prompt-tokens", "16", "--output-tokens", "4")
    found = study(ranks.ranks, *options, "--num-iters", "1")["results"]
    names = ["prompt of 16", "step of 1 rows", "step of 3 rows"]
    assert [record["what"] for record in found] == names
    assert all(record["ratio"] > 0 and record["num_ranks"] == 2 for record in found)


def test_front_of_replicas_is_measured_with_hits_and_balance(study):
    options = ("-dp", "1,2", "--streams", "4", "--output-len", "6", "--num-iters", "1")
    found = study(replicas.replicas, *options)["results"]
    assert all(found["front"][count]["us_per_token"] > 0 for count in ("1", "2"))
    one, two = found["sharing"]["1"], found["sharing"]["2"]
    assert two["hit_rate"] >= 0.95 * one["hit_rate"] > 0.5
    assert two["max_over_min"] <= 1.2
    assert len(two["work"]) == 2


MISTAKES = [
    (loop_gap.loop_gap, "--interval-ms 0"),
    (structured.structured, "--rate 0"),
    (ranks.ranks, "--device auto"),
]


@pytest.mark.parametrize(("command", "line"), MISTAKES, ids=[line for _, line in MISTAKES])
def test_a_studys_mistake_is_one_line(capsys, command, line):
    assert run_study(command, line.split()) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert f"'{line.split()[0]}'" in printed.err
