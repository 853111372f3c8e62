"""Every benchmark on the bundled model, as small as it can be; mistakes in one line."""

import json
import struct
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from trouper.bench import report, startup
from trouper.bench import throughput as core
from trouper.bench.kernels.cpu import OPS
from trouper.bench.kernels.measure import (
    TOLERANCE,
    Case,
    Roofs,
    Shapes,
    WrongResultError,
    measure,
)
from trouper.config.args import EngineArgs
from trouper.config.checkpoint.model_path import GEOMETRIES
from trouper.config.model import DEMO_MODEL
from trouper.errors import UnsupportedFeatureError
from trouper.extras import install_hint
from trouper.kernels.codegen import units
from trouper.kernels.cpu.pack_kv import can_pack

SMALL = ["--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "128"]
SMALL += ["--num-gpu-blocks-override", "8"]
TINY = [*SMALL, "--num-prompts", "3", "--input-len", "5", "--output-len", "4"]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--prequeue-requests", "--num-warmups", "1"],
        ["--async-engine"],
        ["--disable-detokenize", "--random-range-ratio", "0"],
    ],
    ids=" ".join,
)
def test_throughput_counts_what_was_asked_for(report, options):
    found = report("throughput", *TINY, *options)
    assert (found["model_id"], found["num_requests"]) == ("trouper-demo", 3)
    assert (found["total_num_tokens"], found["total_output_tokens"]) == (27, 12)
    seconds = found["elapsed_time"]
    assert found["requests_per_second"] == pytest.approx(3 / seconds)
    assert found["tokens_per_second"] == pytest.approx(27 / seconds)
    assert found["front_cpu_share"] > 0
    assert found["about"]["arguments"][:2] == ["bench", "throughput"]


@pytest.mark.skipif(not find_spec("llguidance"), reason="extra grammar")
def test_drafts_inside_a_schema_save_steps(report):
    options = ["--dataset-name", "schema", "--num-prompts", "2", "--max-num-seqs", "1"]
    plain = report("throughput", *options, "--output-len", "48", "--max-model-len", "512")
    config = '{"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}'
    found = report(
        "throughput", *options, "--output-len", "48", "--max-model-len", "512",
        "--speculative-config", config,
    )  # fmt: skip
    assert plain["total_output_tokens"] == found["total_output_tokens"] == 2 * 48
    assert found["repeats"]["all_steps"][0] < 0.8 * plain["repeats"]["all_steps"][0]


@pytest.mark.parametrize("options", [[], ["--prequeue-requests"], ["--async-engine"]], ids=" ".join)
def test_a_chats_prompts_go_through_the_template(report, options):
    found = report("throughput", *TINY, "--backend", "trouper-chat", "--n", "2", *options)
    assert found["total_output_tokens"] == 3 * 2 * 4
    assert found["total_num_tokens"] > 3 * 2 * 4 + 3 * 5


def test_both_ways_are_run_in_turn_and_their_spreads_told(bench, tmp_path):
    path = tmp_path / "report.json"
    options = ["--compare-prequeue", "--repeat", "3", "--output-json", path]
    lines = bench("throughput", *TINY, *options).out.splitlines()
    assert (lines[0], lines[7]) == ("as they come:", "prequeued:")
    assert sum("3 runs: median" in line and "spread" in line for line in lines) == 2
    ways = json.loads(path.read_text())["ways"]
    assert [len(way["repeats"]["all_s"]) for way in ways.values()] == [3, 3]
    assert len(set(ways["prequeued"]["repeats"]["all_steps"])) == 1  # whatever the machine does


@pytest.mark.parametrize("options", [[], ["--async-engine"]], ids=" ".join)
def test_the_steps_are_counted(report, options):
    found = report("throughput", *TINY, *options)
    assert found["repeats"]["all_steps"][0] >= 4  # as many as each request has tokens


def test_a_config_alone_is_enough_for_dummy_weights(report, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEOMETRIES["tiny"]))
    for model in (tmp_path, "tiny"):
        found = report("throughput", *TINY, "-m", model, "--load-format", "dummy")
        assert (found["model_id"], found["total_output_tokens"]) == (str(model), 12)


@pytest.mark.slow
def test_transformers_runs_the_same_requests(report):
    options = ["--backend", "hf", "--hf-max-batch-size", "2", "--random-range-ratio", "0.5"]
    found = report("throughput", *TINY, *options)
    ours = report("throughput", *TINY, "--random-range-ratio", "0.5")
    assert found["total_num_tokens"] == ours["total_num_tokens"]
    assert found["front_cpu_share"] is None


@pytest.mark.slow  # transformers itself takes ten seconds
def test_continuous_batching_of_transformers_runs_the_same_requests(report):
    options = ["-m", "tiny", "--load-format", "dummy", "--random-range-ratio", "0.5"]
    found = report("throughput", *TINY, *options, "--backend", "hf-cb", "--repeat", "2")
    ours = report("throughput", *TINY, *options)
    assert found["total_num_tokens"] == ours["total_num_tokens"]
    assert len(found["repeats"]["all_s"]) == 2


def test_a_prefix_repetition_is_a_dataset(report):
    names = {"prefix-len": 8, "suffix-len": 2, "num-prefixes": 2, "output-len": 3}
    options = [part for n, v in names.items() for part in (f"--prefix-repetition-{n}", v)]
    name = ["--dataset-name", "prefix_repetition", "--num-prompts", "4"]
    found = report("throughput", *SMALL, *name, *options)
    assert (found["total_num_tokens"], found["total_output_tokens"]) == (4 * 13, 4 * 3)


def test_a_sharegpt_file_is_a_dataset(report, tmp_path):
    path = tmp_path / "sharegpt.json"
    turns = [{"value": "def quicksort(items): what does it do?"}, {"value": "It sorts the items."}]
    path.write_text(json.dumps([{"conversations": turns}]))
    options = ["--num-prompts", "3", "--dataset-path", path]
    assert report("throughput", *SMALL, *options)["num_requests"] == 3
    assert report("throughput", *SMALL, *options, "--no-oversample")["num_requests"] == 1
    chat = ["--backend", "trouper-chat", "--output-len", "2"]
    assert report("throughput", *SMALL, *options, *chat)["total_output_tokens"] == 6


def test_a_profile_is_written(bench, tmp_path):
    config = json.dumps({"torch_profiler_dir": str(tmp_path)})
    bench("throughput", *TINY, "--profile", "--profiler-config", config)
    assert list(tmp_path.iterdir())


def test_prequeued_requests_wait_until_all_are_there():
    """The calls that vLLM's benchmark makes, in its order; the engine wakes even if queueing fails."""
    calls = []

    class Fake:
        def __getattr__(self, name):
            def call(*arguments, **options):
                calls.append((name, *options.get("tags", ()), options.get("mode")))
                return []

            return call

    engine = object.__new__(core.OfflineEngine)
    engine._wishes = core.RunOptions(prequeue_requests=True, profile=True)
    engine._api, engine._llm = Fake(), Fake()
    engine.generate_all([], prequeue=True)
    assert calls == [
        ("reset_prefix_cache", None), ("sleep", "abort"), ("start_profile", None), ("enqueue", None),
        ("wake_up", "scheduling", None), ("wait_for_completion", None), ("stop_profile", None),
    ]  # fmt: skip
    calls.clear()
    engine._llm.enqueue = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.generate_all([], prequeue=True)
    assert calls[-1][:2] == ("wake_up", "scheduling")


def is_png(path):
    head = path.read_bytes()[:24]
    return head[:8] == b"\x89PNG\r\n\x1a\n" and min(struct.unpack(">II", head[16:])) > 100


def test_latency_of_several_batch_sizes(bench, tmp_path):
    picture, path = tmp_path / "latency.png", tmp_path / "report.json"
    sizes = ["--input-len", "4", "--output-len", "3", "--batch-size", "1,2"]
    iterations = ["--num-iters", "3", "--num-iters-warmup", "1"]
    out = bench(
        "latency", *SMALL, *sizes, *iterations, "--plot", picture, "--output-json", path
    ).out
    assert out.count("avg latency") == 2
    assert is_png(picture)
    one, two = json.loads(path.read_text())["results"]
    assert (one["batch_size"], two["batch_size"]) == (1, 2)
    for record in (one, two):
        assert len(record["latencies"]) == 3
        assert min(record["latencies"]) <= record["percentiles"]["50"] <= max(record["latencies"])


def test_one_batch_is_traced(bench, tmp_path):
    config = json.dumps({"torch_profiler_dir": str(tmp_path)})
    options = ["--input-len", "4", "--output-len", "2", "--batch-size", "1", "--profile"]
    assert bench("latency", *SMALL, *options, "--profiler-config", config).out == ""
    assert list(tmp_path.iterdir())


QUICK = ["--roof-mib", "1", "--roof-gemm", "64", "--sample-ms", "0", "--context", "20"]
QUICK += ["--block-size", "16", "--num-tokens", "1,3", "--cold-mib", "0"]


OF_RANKS = {"shared_sum", "shared_sum, by gloo"}
OF_THE_TIER = {"pack_kv", "unpack_kv, with its sum"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sum_of_ranks_is_right_and_measured_beside_gloos(report, dtype):
    chosen = [word for name in OF_RANKS for word in ("--op", name)]
    found = report("kernels", "-m", DEMO_MODEL, "--dtype", dtype, *chosen, *QUICK)["results"]
    are_there = units.kind_of(getattr(torch, dtype)) is not None
    assert {record["op"] for record in found} == (OF_RANKS if are_there else set())
    assert all(record["us"] > 0 for record in found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_operation_is_right_and_has_its_figures(report, dtype):
    ops = [name for name in OPS if name not in OF_RANKS]
    chosen = [word for name in ops for word in ("--op", name)]
    found = report("kernels", "-m", DEMO_MODEL, "--dtype", dtype, *chosen, *QUICK)
    assert found["roofs"].keys() == {"read_gb_s", "gemm_gflop_s"}
    measured = set(ops) if dtype == "bfloat16" and can_pack(256) else set(ops) - OF_THE_TIER
    assert {record["op"] for record in found["results"]} == measured
    for record in found["results"]:
        assert record["us"] > 0
        assert record["share_of_roof"] >= 0
        assert record["error"] <= TOLERANCE[getattr(torch, dtype)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_triton_kernel_is_right_and_has_its_figures(report):
    """On the device that there is; without one the interpreter takes its place."""
    cuda_kernels = pytest.importorskip("trouper.bench.kernels.cuda", exc_type=ImportError)
    device = "cuda" if torch.cuda.is_available() else "interpreter"
    quick = [*QUICK, "--dtype", "float32", "--num-tokens", "2"]
    with np.errstate(all="ignore"):
        found = report("kernels", "-m", "tiny", "--device", device, *quick)
    assert {record["op"] for record in found["results"]} == set(cuda_kernels.OPS)
    assert (found["device"], min(record["us"] for record in found["results"]) > 0) == (device, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_kernels_on_device_not_one_line(bench):
    pytest.importorskip("triton")
    assert "--device cuda: " in bench("kernels", "--device", "cuda", code=2).err


def test_integers_must_be_those_of_the_reference():
    def wrong(_):
        yield Case("", lambda: torch.tensor([101]), lambda: torch.tensor([100]), 1, 1)

    with pytest.raises(WrongResultError, match=r"relative error 0\.01 \(maximum 0\)"):
        next(measure([Shapes()], Roofs(1.0, 1.0), ["wrong"], table={"wrong": wrong}))


def test_one_operation_may_be_named(bench):
    lines = bench("kernels", "--op", "rope", *QUICK).out.splitlines()
    assert len(lines) == 2 + 2
    assert lines[0].startswith("roofs: read")


def test_a_kernel_that_is_wrong_is_not_timed(monkeypatch):
    def wrong(shapes):
        for case in OPS["rms_norm"](shapes):
            yield case._replace(run=lambda case=case: case.run() * 1.5)

    monkeypatch.setitem(OPS, "wrong", wrong)
    step = Shapes(hidden=64, cold_bytes=0)
    with pytest.raises(WrongResultError, match="wrong"):
        next(measure([step], Roofs(1.0, 1.0), ["wrong"], table=OPS))


def test_share_of_roof_is_that_of_nearer_one():
    machine = Roofs(bytes_s=10.0, flops_s=100.0)
    assert machine.share(10, 50, 2.0) == 0.5
    assert machine.share(1, 100, 2.0) == 0.5
    assert Case._fields[3:5] == ("num_bytes", "num_flops")


def test_startup_times_each_command_cold_and_warm(report, monkeypatch):
    """With commands that take no time: what `trouper generate` takes is not a test."""
    monkeypatch.setattr(startup, "commands", lambda *_: {"quick": ["echo", "hello"]})
    options = ["--num-iters-cold", "2", "--num-iters-warm", "1", "--num-iters-warmup", "0"]
    figures = report("startup", *options)["results"]["quick"]
    assert [len(figures[how]["all_s"]) for how in ("cold", "warm")] == [2, 1]


def test_startup_runs_the_programs_that_it_names(tmp_path):
    commands = startup.commands("folder", 7)
    assert commands["trouper generate, first text"][-2:] == ["--model", "folder"]
    assert startup.until_output(commands["import trouper"]) > 0


def test_server_is_timed_until_it_is_ready_and_ended(tmp_path):
    serve = startup.commands(None, 7)["trouper serve, ready"]
    assert startup.timed(serve) > 0
    with pytest.raises(startup.StartError, match="model"):
        startup.timed([*serve, "--model", str(tmp_path)])


def test_cold_start_finds_no_cache_but_hubs(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/mine")
    monkeypatch.delenv("HF_HOME", raising=False)
    with startup.empty_caches() as environment:
        assert environment["HF_HOME"] == "/mine/huggingface"
        folders = {environment[name] for name in startup.CACHES}
        assert len(folders) == len(startup.CACHES)
        assert "/mine" not in folders


def test_command_that_fails_is_reported_by_its_last_line():
    with pytest.raises(startup.StartError, match=r"^no such luck$"):
        startup.until_output(["sh", "-c", "echo first >&2; echo no such luck >&2; exit 3"])


MISTAKES = [
    ("throughput --backend sglang", "'--backend'"),
    (
        "throughput --backend vllm --prequeue-requests",
        "--prequeue-requests requires --backend trouper or trouper-chat",
    ),
    (
        "throughput --backend hf --prequeue-requests --async-engine",
        "--prequeue-requests requires --backend trouper or trouper-chat",
    ),
    (
        "throughput --prequeue-requests --async-engine",
        "--prequeue-requests is not supported with --async-engine",
    ),
    (
        "throughput --backend hf-cb --dataset-name schema",
        "--dataset-name schema is not supported with --backend hf-cb",
    ),
    ("throughput --backend vllm", "--backend vllm needs vllm, which is not installed here"),
    ("throughput --backend vllm-chat", "--backend vllm-chat needs vllm, which is not"),
    ("throughput --backend vllm --async-engine", "--async-engine needs --backend trouper"),
    ("throughput --backend hf", "--hf-max-batch-size and --backend hf need each other"),
    ("throughput --hf-max-batch-size 2", "--hf-max-batch-size and --backend hf need each other"),
    ("throughput --backend hf --hf-max-batch-size 2 --n 2", "takes neither"),
    ("throughput --profile", "--profile needs --profiler-config"),
    ("throughput --num-prompts 0", "'--num-prompts'"),
    ("throughput --input-len 0", "'--input-len'"),
    ("throughput --random-range-ratio 1", "random_range_ratio"),
    ("throughput --dataset-name sonnet", "'--dataset-name'"),
    ("throughput --dataset-path /no/such/file", "No such file or directory"),
    ("throughput --input-len 4000", "exceed the model's 2048 tokens"),
    ("throughput --output-json /no/such/folder/x", "cannot be written: No such file or directory"),
    ("throughput -m /no/such/folder", "no such model folder"),
    ("throughput --skip-tokenizer-init", "skip_tokenizer_init"),
    ("latency --batch-size 0", "batch_size"),
    ("latency --batch-size x", "not a list of integers"),
    ("latency --input-len 4000", "exceed the model's"),
    ("latency --num-iters 0", "'--num-iters'"),
    ("latency --plot /no/such/folder/x.png", "plot: cannot be written"),
    ("kernels --op sort", "must be one of: linear"),
    ("kernels --num-tokens 0", "num_tokens"),
    ("startup -m /no/such/folder", "no such model folder"),
    ("peers --peer sglang", "must be one of trouper, vllm"),
    ("peers --peer vllm", "vllm cannot run: vllm is not installed here"),
    ("peers --vllm-python /no/such/python", "vllm cannot run: no program /no/such/python"),
    ("peers --peer llama.cpp", "llama.cpp cannot run: --gguf is missing"),
    ("peers --gguf /no/such.gguf", "llama.cpp cannot run: no file /no/such.gguf"),
    ("peers --workload 1x2", "requests x input x output"),
    ("peers --workload 1x2x0", "requests x input x output"),
    ("serve --num-prompts 0", "'--num-prompts'"),
    ("serve --request-rate 0", "request_rate"),
    ("serve --max-concurrency 0", "max_concurrency"),
    ("serve --goodput itl:3", "goodput"),
    ("serve --endpoint images", "'--endpoint'"),
    ("serve --extra-body []", "not a JSON object"),
    ("serve --url ftp://x/v1", "url"),
    ("nonsense", "No such command 'nonsense'"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_mistake_is_one_line_before_anything_is_loaded(bench, line, message):
    printed = bench(*line.split(), code=2)
    assert printed.out == ""
    assert printed.err.startswith("trouper: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.mark.parametrize(
    "wishes",
    [
        {"backend": "vllm", "prequeue_requests": True},
        {"prequeue_requests": True, "async_engine": True},
        {"backend": "hf"},
    ],
    ids=str,
)
def test_wishes_that_contradict_each_other_are_value_errors(wishes):
    with pytest.raises(ValueError, match="--"):
        core.RunOptions(**wishes).check(EngineArgs(), "random")


def test_options_of_engine_are_given_to_every_backend():
    args = EngineArgs(max_num_seqs=3, seed=7)
    assert core.given_options(args) == {"max_num_seqs": 3, "seed": 7}
    assert core.model_path(args) == str(DEMO_MODEL)


def test_a_plot_without_matplotlib_is_one_line(bench, monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda _: None)
    line = f"trouper: --plot needs matplotlib: {install_hint('bench')}\n"
    assert bench("latency", "--plot", "x.png", code=2).err == line
    assert bench("serve", "--plot", "x.png", code=2).err == line
    with pytest.raises(UnsupportedFeatureError):
        report.plot("x.png", [], title="", concurrency="")


@pytest.mark.slow
def test_tier_is_measured_with_every_disk(report):
    small = ["--input-len", "1500", "--output-len", "2", "--num-prompts", "1", "--repeat", "1"]
    found = {record["tier"]: record for record in report("tier", *small)["results"]}
    assert list(found) == ["off", "empty", "filled", "slow", "hanging"]
    assert found["filled"]["num_cached_tokens"] == 11 * 128
    assert all(record["equal_answers"] == record["num_answers"] for record in found.values())
