"""Which rank is on which machine, how stages of two machines reach each other, and options that do not fit."""

import os
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from trouper.actors.executor.worker_links import (
    SharedSizes,
    close_files,
    link_ends,
    open_worker_links,
)
from trouper.actors.executor.workers.launching import shared_sizes
from trouper.actors.executor.workers.machines.channel import Start
from trouper.actors.executor.workers.machines.launch_hosts import ranks_by_node, with_dials
from trouper.actors.executor.workers.machines.worker_group import WorkerGroup
from trouper.actors.executor.workers.model_files import MachineFacts
from trouper.config.args import EngineArgs
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.config.checkpoint.sentence_transformers import Dense
from trouper.config.parallel import CLUSTER_KEY, RAY_CPUS, NodesConfig, nodes_config
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

from .test_machines import KEY, a_config


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv(CLUSTER_KEY, KEY.decode())


# Which rank is where


@pytest.mark.parametrize(
    ("num_nodes", "stages", "replicas", "wanted"),
    [
        (2, 2, 1, [{0: (0,), 1: (1,)}]),
        (2, 4, 1, [{0: (0, 1), 1: (2, 3)}]),
        (2, 2, 2, [{0: (0, 1)}, {1: (0, 1)}]),
        (4, 2, 2, [{0: (0,), 1: (1,)}, {2: (0,), 3: (1,)}]),
        (2, 1, 4, [{0: (0,)}, {0: (0,)}, {1: (0,)}, {1: (0,)}]),
        (3, 3, 1, [{0: (0,), 1: (1,), 2: (2,)}]),
    ],
)
def test_every_machine_has_as_many_workers_in_order(num_nodes, stages, replicas, wanted):
    config = a_config(pipeline_parallel_size=stages, data_parallel_size=replicas)
    nodes = NodesConfig("mp", num_nodes)
    assert [ranks_by_node(config, nodes, r) for r in range(replicas)] == wanted


@pytest.mark.parametrize(
    ("num_ranks", "groups"),
    [
        (1, ((0,), (1,))),
        (1, ((0, 1), (2, 3))),
        (1, ((0,), (1,), (2,))),
        (1, ((0, 2), (1,))),
        (2, ((0, 1), (2, 3))),
        (2, ((0, 1, 2, 3), (4, 5))),
    ],
)
def test_each_link_between_machines_is_dialled_once_by_later_one(num_ranks, groups):
    num_stages = sum(map(len, groups)) // num_ranks
    sizes = SharedSizes(num_stages, num_ranks, 64, 8, (64,) * num_stages)
    starts = [Start(1, ranks, 0, sizes) for ranks in groups]
    addresses = [(f"10.0.0.{i}", 1000 + i) for i in range(len(groups))]
    found = [start.dials for start in with_dials(starts, addresses)]
    group_of = {rank: i for i, ranks in enumerate(groups) for rank in ranks}
    num_dials = 0
    for link in link_ends(sizes):
        places = {group_of[link.sender], group_of[link.receiver]}
        dialled = [(i, dials[link.name]) for i, dials in enumerate(found) if link.name in dials]
        assert dialled == ([(max(places), addresses[min(places)])] if len(places) > 1 else [])
        num_dials += len(dialled)
    assert num_dials == sum(map(len, found)) >= len(groups)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_stages_of_two_machines_connect(num_ranks):
    """Stage 0 at one place, 1 and 2 at another: rings inside, connections between."""
    config = a_config(pipeline_parallel_size=3, tensor_parallel_size=num_ranks, max_model_len=64,
                      max_num_seqs=2, max_num_batched_tokens=4)  # fmt: skip
    sizes = shared_sizes(config)
    groups = [WorkerGroup(("127.0.0.1", 1), "127.0.0.1", KEY) for _ in range(2)]
    addresses = [("127.0.0.1", group.listen()) for group in groups]
    ranks = tuple(range(num_ranks)), tuple(range(num_ranks, 3 * num_ranks))
    starts = with_dials([Start(1, some, 0, sizes) for some in ranks], addresses)
    assert addresses[1] not in starts[1].dials.values()
    with ThreadPoolExecutor(2) as places:
        found = list(places.map(WorkerGroup.connect_links, groups, starts))
    files = [some for part in found for some in part]
    links = [  # each process has descriptors of its own
        open_worker_links(worker, list(map(os.dup, mine)), sizes)
        for worker, mine in enumerate(files)
    ]
    close_files(files)
    out = np.zeros(16, dtype=np.uint8)

    def crosses(sender, receiver, text):
        sender.send(9, np.frombuffer(text, dtype=np.uint8))
        assert receiver.receive(out, wait=True) == (9, len(text))
        assert out[: len(text)].tobytes() == text

    for worker in range(2 * num_ranks):
        crosses(links[worker].hidden_out, links[worker + num_ranks].hidden_in, b"to %d" % worker)
    sampler = links[2 * num_ranks]
    assert len(sampler.tokens_out) == num_ranks
    for receiver, sender in zip(links, sampler.tokens_out, strict=False):
        crosses(sender, receiver.tokens_in, b"ids")
    kinds = {type(links[0].hidden_out).__name__, type(links[num_ranks].hidden_out).__name__}
    assert kinds == {"TcpLink", "Ring"}
    for link in links:
        link.close()
        if link.group is not None:
            os.close(link.group)
    for group in groups:
        group.close()


def test_place_has_its_own_paths_and_its_share_of_cores():
    config = a_config(pipeline_parallel_size=4)
    nodes = NodesConfig("mp", 2)
    theirs = msgspec.structs.replace(
        config, nodes=nodes, model=msgspec.structs.replace(config.model, path="/elsewhere")
    )
    place = MachineFacts.of_argument(MachineFacts.of(theirs).as_argument().decode())
    found = place.localise(config)
    assert (found.model.path, found.num_workers) == ("/elsewhere", 2)
    assert MachineFacts(3).localise(config).model == config.model


def with_dense(config, *folders):
    """A model that pools and ends in such modules."""
    modules = tuple(Dense(str(folder), 4, 4, False, "tanh") for folder in folders)
    pooler = PoolerSpec(
        tasks=("embed",), task="embed", engine_task="embed", seq_pooling_type="CLS", tok_pooling_type="ALL",
        embedding_size=4, normalizes=False, use_activation=False, activation="identity", dense=modules,
    )  # fmt: skip
    return msgspec.structs.replace(config, pooler=pooler)


def test_worker_reads_dense_modules_from_own_folder():
    config = a_config()
    place = MachineFacts.of(with_dense(config, "/here/2_Dense", "/here/3_Dense"))
    found = place.localise(with_dense(config, "/there/2_Dense", "/there/3_Dense"))
    assert [each.folder for each in found.pooler.dense] == ["/here/2_Dense", "/here/3_Dense"]
    other = with_dense(config, "/there/2_Dense")  # another model: the load refuses it
    assert place.localise(other).pooler == other.pooler


# Options


@pytest.mark.parametrize(
    ("options", "error", "parameter", "words"),
    [
        ({"nnodes": 0}, TrouperValidationError, "nnodes", "at least 1"),
        ({"nnodes": 65}, TrouperValidationError, "nnodes", "at most 64"),
        ({"nnodes": 2, "node_rank": 2}, TrouperValidationError, "node_rank", "below nnodes \\(2\\)"),
        ({"node_rank": 1}, TrouperValidationError, "node_rank", "below nnodes \\(1\\)"),
        ({"node_rank": -1}, TrouperValidationError, "node_rank", "at least 0"),
        ({"nnodes": 2}, TrouperValidationError, "nnodes", "which is 1"),
        ({"nnodes": 2, "pipeline_parallel_size": 3}, TrouperValidationError, "nnodes", "which is 3"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, UnsupportedFeatureError, "tensor_parallel_size", "share memory"),
        ({"nnodes": 2, "pipeline_parallel_size": 2, "master_addr": "0.0.0.0"}, TrouperValidationError, "master_addr", "reach machine 0"),
        ({"master_port": 0}, TrouperValidationError, "master_port", "at least 1"),
        ({"master_port": 65536}, TrouperValidationError, "master_port", "at most 65535"),
        ({"nnodes": 2, "data_parallel_size": 2, "device_worker": "inline"}, TrouperValidationError, "device_worker", "inline"),
        ({"distributed_executor_backend": "torchrun"}, UnsupportedFeatureError, "distributed_executor_backend", "lost workers could not be restarted"),
        ({"distributed_executor_backend": "external_launcher"}, UnsupportedFeatureError, "distributed_executor_backend", "mp or ray"),
        ({"distributed_executor_backend": "gloo"}, TrouperValidationError, "distributed_executor_backend", "must be mp or ray"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_named(options, error, parameter, words, key):
    with pytest.raises(error, match=words) as caught:
        a_config(**options)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("version", "options", "cpus", "error", "parameter", "words"),
    [
        (None, {}, "1", UnsupportedFeatureError, "distributed_executor_backend", "the extra `ray`"),
        ("2.49.2", {}, "1", UnsupportedFeatureError, "distributed_executor_backend", "2.49.2 is older than 2.50"),
        ("2.60.0", {"nnodes": 2}, "1", TrouperValidationError, "nnodes", "chooses the machines itself"),
        ("2.60.0", {"device_worker": "inline"}, "1", TrouperValidationError, "device_worker", "inline"),
        ("2.60.0", {}, "0", TrouperValidationError, RAY_CPUS, "must be a positive number"),
        ("2.60.0", {}, "two", TrouperValidationError, RAY_CPUS, "must be a positive number"),
    ],
)  # fmt: skip
def test_what_ray_cannot_do_is_named(version, options, cpus, error, parameter, words, monkeypatch):
    found = None if version is None else object()
    monkeypatch.setattr("trouper.config.parallel.importlib.util.find_spec", lambda name: found)
    monkeypatch.setattr("trouper.config.parallel.importlib.metadata.version", lambda name: version)
    monkeypatch.setenv(RAY_CPUS, cpus)
    with pytest.raises(error, match=words) as caught:
        nodes_config(EngineArgs(distributed_executor_backend="ray", **options), "cpu")
    assert caught.value.parameter == parameter


def test_machines_of_gpus_are_refused_by_name():
    for options in ({"nnodes": 2}, {"distributed_executor_backend": "ray"}):
        with pytest.raises(UnsupportedFeatureError, match="not supported on a GPU yet"):
            nodes_config(EngineArgs(**options), "cuda")


@pytest.mark.parametrize("text", [None, "", "too short"])
def test_several_machines_need_a_key(text, monkeypatch):
    monkeypatch.delenv(CLUSTER_KEY, raising=False)
    if text is not None:
        monkeypatch.setenv(CLUSTER_KEY, text)
    with pytest.raises(TrouperValidationError, match="openssl rand") as caught:
        a_config(nnodes=2, pipeline_parallel_size=2)
    assert caught.value.parameter == CLUSTER_KEY


def test_the_key_is_in_no_plan(key):
    config = a_config(nnodes=2, pipeline_parallel_size=2)
    assert config.num_workers == 1
    assert KEY.decode() not in repr(config)
