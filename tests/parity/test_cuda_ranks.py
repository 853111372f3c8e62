"""A model that GPUs share out says what it says on one: float32, eager and in graphs with the sums inside."""

import msgspec
import pytest
import torch

pytest.importorskip("triton", reason="no Triton")
from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.sharding import Shard
from trouper.actors.executor.runners.cuda.machine import CudaMachine
from trouper.actors.executor.runners.cuda.runner import CudaRunner, join_group
from trouper.actors.executor.weights.decoder import load_decoder
from trouper.actors.messages.steps import Sampling
from trouper.config.adapters import read_adapter
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


class Adapted:
    """A runner all of whose sequences have one adapter."""

    def __init__(self, runner, files):
        self._runner, self._files = runner, files

    def load(self):
        info = self._runner.load()
        self._runner.load_adapter(1, self._files)
        return info

    def execute(self, plan):
        new = [msgspec.structs.replace(each, adapter_slot=1) for each in plan.new_sequences]
        return self._runner.execute(msgspec.structs.replace(plan, new_sequences=tuple(new)))


def outputs(runner, adapter=None):
    runner = runner if adapter is None else Adapted(runner, adapter)
    driver = Driver(runner, chunk=6, stagger=1)
    return driver.run(PROMPTS, NUM_OUTPUTS, (ALL_LOGPROBS, SEEDED))


class Alone(CudaRunner):
    """A GPU whose results are waited for."""

    def execute(self, plan):
        return super().execute(plan).finish()


def on_one(config, adapter):
    runner = Alone(msgspec.structs.replace(config, device="cuda"), EmulatedMachine())
    try:
        return outputs(runner, adapter)
    finally:
        runner.close()


def make_model(case, folder, **changes):
    name, own = CASES[case]
    tiny_model(name, {**own, "num_hidden_layers": 2, **changes}, folder)


def same_as_on_one(processes, folder, adapter=None, **options):
    """Compare; returns how many graphs each rank has replayed."""
    config = engine_config(folder, **SIZES, **options)
    with ranked(processes, config, folder / "group") as model:
        found = outputs(model, adapter)
        num_replays = model.on_each("machine", "num_replays")
    expected = on_one(config, adapter)
    compare(found, expected)
    for mine, other in zip(found, expected, strict=True):
        ranks = [[entry.rank for entry in s.prompt_logprobs] for s in (mine, other)]
        assert ranks[0] == ranks[1]
    return num_replays


def test_two_ranks_give_tokens_and_logprobs_of_one(tmp_path, two):
    make_model("qwen3-tied", tmp_path)
    same_as_on_one(two, tmp_path, **EAGER)


def test_batch_invariant_sum_is_ordered_float32(tmp_path, two):
    make_model("qwen3-tied", tmp_path)
    parts = [torch.randn(3, 64).bfloat16() for _ in range(2)]
    with ranked(two, engine_config(tmp_path, **SIZES), tmp_path / "group") as model:
        found = model.on_each("invariant_sum", [part.float().numpy() for part in parts])
    expected = (parts[0].float() + parts[1].float()).bfloat16()
    assert all(torch.equal(torch.from_numpy(each), expected.float()) for each in found)


def test_captured_steps_have_the_sums_inside(tmp_path, two):
    """The norm over all heads of all ranks, too, of which both have the one of the keys."""
    make_model("olmo2", tmp_path, num_key_value_heads=1)
    first, second = same_as_on_one(two, tmp_path, **GRAPHS)
    assert first == second > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "changes", "options"),
    [
        ("gemma2", {}, {}),
        ("llama-biased-llama3", {"intermediate_size": 128}, {"quantization": "int4"}),
    ],
)
def test_other_models_and_weights_of_integers_are_those_of_one(
    case, changes, options, tmp_path, two
):
    make_model(case, tmp_path, **changes)
    same_as_on_one(two, tmp_path, **EAGER, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft
def test_an_adapter_is_cut_as_the_weights_are(tmp_path, two):
    pytest.importorskip("peft")
    from .test_lora import VARIANTS, save_adapter

    make_model("qwen3-tied", tmp_path)
    save_adapter(tmp_path, tmp_path / "adapter", VARIANTS["all"])
    adapter = read_adapter(str(tmp_path / "adapter"))
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    same_as_on_one(two, tmp_path, adapter, **lora, **EAGER)


def test_tied_head_stays_part_of_embedding_wherever_they_go(tmp_path):
    make_model("qwen3-tied", tmp_path)
    config = engine_config(tmp_path)
    traits = decoder_traits(config.model.hf_config, config.model.architecture)
    decoder = load_decoder(
        config, traits, ops=lambda: None, device=torch.device("cpu"), shard=Shard(1, 2)
    )
    before = decoder._head.weight.clone()
    for _ in range(2):
        decoder.move(torch.clone)
        embedding, head = decoder._embedding, decoder._head.weight
        assert torch.equal(head, before)
        assert head.untyped_storage().data_ptr() == embedding.untyped_storage().data_ptr()


def test_without_library_of_sums_ranks_are_refused(tmp_path):
    """As by a build of torch for the CPU; the tests' own way is gloo."""
    machine = EmulatedMachine()
    machine.backend = "mpi"
    with pytest.raises(UnsupportedFeatureError, match="needs MPI, which this build of torch lacks"):
        join_group(machine, 0, 0, 2)
    assert CudaMachine.backend == "nccl"
