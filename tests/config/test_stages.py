"""Pipeline stages: the cut of the layers, what is sent and awaited, and the model check of both."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.stages import stage_protocol
from trouper.actors import stages
from trouper.config import devices
from trouper.config.args import EngineArgs
from trouper.config.parallel import PARTITION, read_partition, split_layers
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

COSTS = st.lists(st.integers(1, 9), min_size=1, max_size=9)


@given(COSTS, st.integers(1, 9), st.integers(0, 20))
def test_no_cut_has_a_cheaper_dearest_stage(costs, num_stages, head_cost):
    num_stages = min(num_stages, len(costs))
    found = split_layers(costs, num_stages, head_cost=head_cost)
    assert [stage.first for stage in found[1:]] == [stage.last for stage in found[:-1]]
    assert (found[0].first, found[-1].last) == (0, len(costs))

    def dearest(cuts):
        bounds = [0, *cuts, len(costs)]
        parts = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        parts[-1] += head_cost
        return max(parts)

    every = itertools.combinations(range(1, len(costs)), num_stages - 1)
    assert dearest([stage.first for stage in found[1:]]) == min(map(dearest, every))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "partition", "parameter"),
    [
        (28, 32, None, "pipeline_parallel_size"),
        (28, 0, None, "pipeline_parallel_size"),
        (28, 2, (10, 17), PARTITION),
        (28, 2, (28,), PARTITION),
        (28, 2, (28, 0), PARTITION),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(num_layers, num_stages, partition, parameter):
    with pytest.raises(TrouperValidationError) as caught:
        split_layers([1.0] * num_layers, num_stages, partition=partition)
    assert caught.value.parameter == parameter


def test_a_partition_is_read_and_kept():
    partition = read_partition("10, 18")
    found = split_layers([1.0] * 28, 2, partition=partition)
    assert [(stage.first, stage.last) for stage in found] == [(0, 10), (10, 28)]
    for text in ("", "10;18", "-1,29", "a", "1" * 10):
        with pytest.raises(TrouperValidationError):
            read_partition(text)


def test_only_token_that_plan_reads_is_waited_for():
    feedback = stages.Feedback()
    feedback.note_plan(1, new_rows=[0], rows=[0], ends=[128], num_wanted=[0])
    assert not feedback.must_wait(0)  # an unfinished chunk: no token is sent
    feedback.note_plan(2, new_rows=[], rows=[0], ends=[130], num_wanted=[1])
    assert not feedback.must_wait(0)
    assert feedback.must_wait(2)
    assert feedback.take(2, [7]) == [stages.TokenWrite(0, 130, 7)]
    assert not feedback.must_wait(2)
    with pytest.raises(RuntimeError, match="step 2"):
        feedback.take(2, [7])


def test_token_does_not_reach_row_that_another_sequence_has_taken():
    feedback = stages.Feedback()
    feedback.note_plan(1, new_rows=[0, 1], rows=[0, 1], ends=[5, 6], num_wanted=[1, 1])
    feedback.note_plan(2, new_rows=[0], rows=[0], ends=[3], num_wanted=[0])
    assert feedback.take(1, [7, 8]) == [stages.TokenWrite(1, 6, 8)]


def test_a_failed_entry_writes_no_token():
    feedback = stages.Feedback()
    feedback.note_plan(1, new_rows=[0, 1], rows=[0, 1], ends=[5, 6], num_wanted=[1, 1])
    assert feedback.take(1, [-2, 8]) == [stages.TokenWrite(1, 6, 8)]


@given(st.integers(1, 64), st.integers(1, 8))
def test_all_rows_decode_once_in_as_many_plans_as_stages(num_decoding, num_stages):
    quota = stages.decode_quota(num_decoding, num_stages)
    assert quota * num_stages >= num_decoding > (quota - 1) * num_stages


@given(st.integers(1, 100_000), st.integers(1, 8), st.integers(128, 8192))
def test_prompt_alone_is_cut_so_that_all_stages_work(num_tokens, num_stages, budget):
    chunk = stages.max_chunk(num_tokens, num_stages, budget)
    assert 0 < chunk <= budget
    if num_stages > 1 and num_tokens >= 128 * 4 * num_stages:
        assert -(-num_tokens // chunk) >= 4 * num_stages


def test_no_interleaving_of_two_stages_deadlocks():
    num_runs, num_states = stage_protocol.check_all(max_stages=2, extra_steps=3)
    assert num_runs > 50
    assert num_states > 1000


@pytest.mark.slow
def test_no_interleaving_of_up_to_four_stages_deadlocks():
    stage_protocol.check_all(max_stages=4, extra_steps=2)


@pytest.mark.parametrize("name", stage_protocol.FAULTS)
def test_the_model_check_finds_known_mistakes(name):
    assert stage_protocol.find(name)


# The wish


def test_stages_are_resolved_into_processes_steps_and_cut(monkeypatch):
    assert resolve(EngineArgs()).num_stages == 1
    config = resolve(EngineArgs(pipeline_parallel_size=2))
    assert (config.num_stages, config.device_worker) == (2, "process")
    assert (config.scheduler.max_steps_in_flight, config.layer_partition) == (3, None)
    monkeypatch.setenv(PARTITION, "2,7")
    config = resolve(EngineArgs(pipeline_parallel_size=2, async_scheduling=False))
    assert (config.scheduler.max_steps_in_flight, config.layer_partition) == (2, (2, 7))


POOLS = {"runner": "pooling"}


@pytest.mark.parametrize(
    ("wanted", "options", "serves", "found"),
    [
        ("auto", {}, True, "process"), ("auto", {}, False, "inline"), ("auto", POOLS, True, "inline"),
        ("inline", {}, True, "inline"), ("process", {}, False, "process"), ("process", POOLS, True, "process"),
    ],
)  # fmt: skip
def test_server_runs_generating_model_in_worker_by_default(wanted, options, serves, found):
    args = EngineArgs(device_worker=wanted, **options)
    assert resolve(args, frontend="server" if serves else "library").device_worker == found


def test_without_memory_files_server_runs_inline_and_process_is_refused(monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    assert resolve(EngineArgs(), frontend="server").device_worker == "inline"
    with pytest.raises(UnsupportedFeatureError, match="no shared memory files") as caught:
        resolve(EngineArgs(device_worker="process"))
    assert caught.value.parameter == "device_worker"


@pytest.mark.parametrize(
    ("options", "error", "parameter", "words"),
    [
        ({"pipeline_parallel_size": 0}, TrouperValidationError, "pipeline_parallel_size", "at least 1"),
        ({"pipeline_parallel_size": 32}, TrouperValidationError, "pipeline_parallel_size", "9 layers, too few for 32 stages"),
        ({"pipeline_parallel_size": 2, "device_worker": "inline"}, TrouperValidationError, "device_worker", "inline"),
        ({"pipeline_parallel_size": 2, "runner": "pooling"}, UnsupportedFeatureError, "pipeline_parallel_size", "pooling models"),
    ],
)  # fmt: skip
def test_a_wish_that_cannot_be_met_is_refused(options, error, parameter, words):
    with pytest.raises(error, match=words) as caught:
        resolve(EngineArgs(**options))
    assert caught.value.parameter == parameter


def test_cut_of_environment_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setenv(PARTITION, "3,4")
    with pytest.raises(TrouperValidationError, match="2 positive numbers whose sum is 9"):
        resolve(EngineArgs(pipeline_parallel_size=2))


def test_stages_are_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr(devices, "cuda_problem", lambda: None)
    with pytest.raises(UnsupportedFeatureError, match="GPU"):
        resolve(EngineArgs(pipeline_parallel_size=2, device="cuda"))
