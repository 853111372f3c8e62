"""A model that GPUs share out says what it says on one: float32, eager and in graphs with the sums inside."""

import msgspec
import pytest

pytest.importorskip("triton", reason="no Triton")
from trouper.actors.executor.cuda.machine import CudaMachine
from trouper.actors.executor.cuda.rank_runner import join_group
from trouper.actors.executor.cuda.runner import CudaRunner
from trouper.actors.messages.plans import Sampling
from trouper.errors import UnsupportedFeatureError

from .conftest import HAS_GPU
from .driver import Driver, engine_config, random_prompts
from .emulated_gpu import EmulatedMachine
from .ranks_in_processes import RankProcesses, ranked
from .test_architectures import CASES, VOCAB, tiny_model
from .test_ranks import compare

pytestmark = [
    pytest.mark.timeout(300),  # the kernels are interpreted
    pytest.mark.skipif(HAS_GPU, reason="of emulated GPUs"),
]
PROMPTS = random_prompts((3, 9), VOCAB)
ALL_LOGPROBS = Sampling(temperature=0.0, logprobs=-1)
SEEDED = Sampling(temperature=0.9, seed=5, top_k=20, logprobs=-1, prompt_logprobs=2)
NUM_OUTPUTS = 2
SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 16}
EAGER = {"enforce_eager": True}
GRAPHS = {"enforce_eager": False, "cudagraph_capture_sizes": [2, 8]}


@pytest.fixture(scope="module")
def two():
    processes = RankProcesses(2)
    yield processes
    processes.close()


def outputs(runner):
    driver = Driver(runner, chunk=6, stagger=1)
    return driver.run(PROMPTS, NUM_OUTPUTS, (ALL_LOGPROBS, SEEDED))


class Alone(CudaRunner):
    """A GPU whose results are waited for."""

    def execute(self, plan):
        return super().execute(plan).finish()


def on_one(config):
    runner = Alone(msgspec.structs.replace(config, device="cuda"), EmulatedMachine())
    try:
        return outputs(runner)
    finally:
        runner.close()


def make_model(case, folder, **changes):
    name, own = CASES[case]
    tiny_model(name, {**own, "num_hidden_layers": 2, **changes}, folder)


def same_as_on_one(processes, folder, **options):
    """Compare; returns how many graphs each rank has replayed."""
    config = engine_config(folder, **SIZES, **options)
    with ranked(processes, config, folder / "group") as model:
        found = outputs(model)
        num_replays = model.on_each("machine", "num_replays")
    expected = on_one(config)
    compare(found, expected)
    for mine, other in zip(found, expected, strict=True):
        ranks = [[entry.rank for entry in s.prompt_logprobs] for s in (mine, other)]
        assert ranks[0] == ranks[1]
    return num_replays


def test_two_ranks_give_the_tokens_and_logprobs_of_one(tmp_path, two):
    make_model("qwen3-tied", tmp_path)
    same_as_on_one(two, tmp_path, **EAGER)


def test_captured_steps_have_the_sums_inside(tmp_path, two):
    """The norm over all heads of all ranks, too."""
    make_model("olmo2", tmp_path)
    first, second = same_as_on_one(two, tmp_path, **GRAPHS)
    assert first == second > 3


def test_without_the_library_of_the_sums_ranks_are_refused(tmp_path):
    """As by a build of torch for the CPU; the tests' own way is gloo."""
    machine = EmulatedMachine()
    machine.backend = "mpi"
    with pytest.raises(UnsupportedFeatureError, match="are MPI's, which this build of torch lacks"):
        join_group(machine, 0, 0, 2)
    assert CudaMachine.backend == "nccl"
