"""The files that ranks and stages inherit: each worker has its ends, and nothing is left open."""

import json
import os

import msgspec
import numpy as np
import pytest

from trouper.actors.executor import worker_links
from trouper.actors.executor.runners.cpu.recorded_steps import MAX_LOGITS
from trouper.actors.executor.worker_links import (
    ModelSizes,
    SharedSizes,
    WorkerPosition,
    close_files,
    create_shared_files,
    group_sizes,
    open_worker_links,
)
from trouper.actors.executor.workers.launching import shared_sizes
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import DeviceStartError, UnsupportedFeatureError

MODEL = ModelSizes(hidden_size=64, vocab_size=512)


def config_of(num_ranks, num_stages):
    config = resolve(EngineArgs(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64))
    scheduler = msgspec.structs.replace(config.scheduler, num_stages=num_stages)
    return msgspec.structs.replace(config, scheduler=scheduler, tensor_parallel_size=num_ranks)


def num_open():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def worker_group(request):
    """The links of all workers."""
    before = num_open()
    config = config_of(*request.param)
    sizes = SharedSizes.of(config, MODEL)
    files = create_shared_files(sizes)
    links = [
        open_worker_links(worker, list(map(os.dup, mine)), sizes)
        for worker, mine in enumerate(files)
    ]
    close_files(files)
    yield config, links
    for link in links:
        link.close()
        if link.group is not None:
            os.close(link.group)
    assert num_open() == before


def sent(sender, receiver):
    """What arrives of four bytes."""
    out = np.zeros(4, dtype=np.uint8)
    sender.send(7, np.arange(4, dtype=np.uint8))
    assert receiver.receive(out, wait=True) == (7, 4)
    return out.tolist()


SIZES = [(2, 1), (2, 2), (3, 3), (1, 2)]


@pytest.mark.parametrize("worker_group", SIZES, indirect=True)
def test_tokens_go_from_sampler_to_all_others_of_first_stage(worker_group):
    config, links = worker_group
    senders = [worker for worker, link in enumerate(links) if link.tokens_out]
    assert senders == [(config.num_stages - 1) * config.tensor_parallel_size]
    readers = [worker for worker, link in enumerate(links) if link.tokens_in is not None]
    first = range(config.tensor_parallel_size)
    assert readers == [worker for worker in first if worker not in senders]
    for ring, reader in zip(links[senders[0]].tokens_out, readers, strict=True):
        assert sent(ring, links[reader].tokens_in) == [0, 1, 2, 3]


@pytest.mark.parametrize("worker_group", SIZES, indirect=True)
def test_hidden_states_go_to_same_rank_of_next_stage(worker_group):
    config, links = worker_group
    num_ranks = config.tensor_parallel_size
    for worker, link in enumerate(links):
        assert (link.hidden_in is None) == (WorkerPosition.of(worker, config).stage == 0)
        if link.hidden_out is not None:
            assert sent(link.hidden_out, links[worker + num_ranks].hidden_in) == [0, 1, 2, 3]


@pytest.mark.parametrize("worker_group", [(2, 2)], indirect=True)
def test_ranks_of_stage_share_memory(worker_group):
    config, links = worker_group
    files = [os.fstat(link.group) for link in links]
    assert files[0].st_ino == files[1].st_ino != files[2].st_ino == files[3].st_ino
    sizes = [group_sizes(config, MODEL, stage) for stage in range(2)]
    assert [file.st_size for file in files[::2]] == [size.num_bytes for size in sizes]
    assert sizes[0].sheet_numbers == 0
    assert sizes[1].sheet_numbers >= config.scheduler.max_num_seqs * MODEL.vocab_size
    assert sizes[1].sheet_numbers >= MAX_LOGITS  # or torch would copy in a recorded step
    assert sizes[0].part_bytes >= 16 * 64 * 2


def test_too_little_memory_is_error_before_any_is_taken(monkeypatch):
    before = num_open()
    monkeypatch.setattr(worker_links, "available_bytes", lambda: 1000)
    # two rings of hidden states with two entries, two of tokens with three, a group of each stage
    wanted = 2 * 2 * 64 + 2 * 3 * 8 + 600 + 500
    with pytest.raises(
        DeviceStartError, match=f"the workers need {wanted} bytes .* only 1000 are free"
    ):
        create_shared_files(SharedSizes(2, 2, 64, 8, (600, 500)))
    assert num_open() == before


@pytest.mark.parametrize("name", ["memfd_create", "posix_fallocate"])
def test_a_system_that_refuses_leaves_nothing_open(monkeypatch, name):
    real, calls = getattr(os, name), []

    def refusing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(*args)

    before = num_open()
    monkeypatch.setattr(os, name, refusing)
    with pytest.raises(DeviceStartError, match="No space left"):
        create_shared_files(SharedSizes.of(config_of(2, 2), MODEL))
    assert num_open() == before


def test_mixture_is_refused_on_gpus_before_process_starts(tmp_path):
    hf_config = {
        "architectures": ["MixtralForCausalLM"], "vocab_size": 100, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    config = resolve(EngineArgs(str(tmp_path), tensor_parallel_size=2, max_model_len=64))
    assert shared_sizes(config).num_ranks == 2
    with pytest.raises(UnsupportedFeatureError, match="experts") as caught:
        shared_sizes(msgspec.structs.replace(config, device="cuda"))
    assert caught.value.parameter == "device"
