"""A device of several workers: what they answer is joined, and the end of one is the end of all."""

import json
import math
import os
from collections import deque

import anyio
import msgspec
import pytest
import trio.testing

from trouper.actors.executor.device import DeviceInfo
from trouper.actors.executor.devices import process
from trouper.actors.executor.devices.process import NO_CALL, ProcessDevice
from trouper.actors.executor.workers.launching import CLOSED, Exit
from trouper.actors.executor.workers.model_files import FileSample
from trouper.actors.executor.workers.wire import (
    MAX_INLINE,
    Broken,
    Call,
    ErrorText,
    FrameReader,
    KeepMemory,
    Load,
    Loaded,
    Returned,
    encode,
)
from trouper.actors.messages.controls import LoadAdapter, Sleep, StartProfile
from trouper.actors.messages.requests import Grammar, GrammarRules, SequenceId, Vocabulary
from trouper.actors.messages.steps import (
    DeviceBack,
    DeviceLost,
    NewSequence,
    Sampling,
    StepDone,
    StepFailed,
    StepPlan,
)
from trouper.actors.rendering.grammar.matchers import ReceivedGrammars
from trouper.config.adapters import AdapterConfig, AdapterFiles
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import DeviceStartError, ProfilerAlreadyActiveError, TrouperValidationError

INFO = DeviceInfo(100, 16, "float32", "cpu")


class FakePeer:
    """A worker that writes what a test tells it to."""

    max_inline = MAX_INLINE
    where = ""
    pid = 0
    refusal = None  # of the adapters that it is given when it starts

    def __init__(self, rank, files):
        self.rank, self.files = rank, files
        self.frames, self.taken = FrameReader(ReceivedGrammars().make), []
        self.ended_after = None
        self._bytes = deque()
        self._changed = anyio.Event()

    def write(self, *frames):
        for frame in frames:
            self._bytes.append(encode(frame)[0])
        self._changed.set()

    def hang_up(self):
        self._bytes.append(b"")
        self._changed.set()

    def send(self, data, file):
        self.frames.feed(data, [] if file is None else [os.dup(file)])
        while (frame := self.frames.take()) is not None:
            if isinstance(frame, KeepMemory):
                os.close(frame.file)
                continue
            self.taken.append(frame)
            if isinstance(frame, Load):
                rank = self.rank
                self.write(
                    Loaded(
                        msgspec.structs.replace(
                            INFO, num_blocks=100 - 10 * rank, num_weight_bytes=10**rank
                        )
                    )
                )
            elif isinstance(frame, Call) and frame.number == NO_CALL:
                self.write(Returned(NO_CALL, self.refusal))

    async def receive(self):
        while not self._bytes:
            self._changed = anyio.Event()
            await self._changed.wait()
        data = self._bytes.popleft()
        return (data, []) if data else CLOSED

    async def end(self, grace_s):
        if self.ended_after is None:
            self.ended_after = grace_s
        return Exit(-9)


class FakeLauncher:
    def __init__(self, peer=FakePeer, refused=None):
        self.peers, self.refused, self._peer = [], refused, peer

    def __call__(self, rank, *, files=()):
        if rank == self.refused:
            raise DeviceStartError("cannot start a worker process")
        self.peers.append(self._peer(rank, files))
        return self.peers[-1]


def make_device(launcher, num_stages=3, replica=0, **options):
    config = resolve(EngineArgs(pipeline_parallel_size=num_stages, **options))
    return ProcessDevice(config, launcher, replica=replica)


def make_ranks(launcher, num_ranks, folder, **changes):
    """A device of ranks whose model is no more than its config."""
    sizes = {"architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64,
             "intermediate_size": 224, "num_hidden_layers": 2, "max_position_embeddings": 64}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(sizes | {"model_type": "llama"} | changes))
    options = {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}
    config = resolve(EngineArgs(tensor_parallel_size=num_ranks, **options))
    return ProcessDevice(config, launcher)


def plan(step, epoch=0, grammar=None):
    new = NewSequence(0, SequenceId(1), (1,), 1, (1,), Sampling(), grammar=grammar)
    return StepPlan(step, epoch, (0,), (0,), (1,), (1,), () if grammar is None else (new,))


def an_adapter(weights):
    return AdapterFiles.of(AdapterConfig(), weights)


async def load_adapter(device, peers, slot, adapter, errors=()):
    """Have the workers take an adapter, but for those with an error; what the device says meanwhile is returned."""
    found = []

    async def ask():
        with anyio.CancelScope() as scope:
            try:
                await device.call(LoadAdapter(slot, adapter))
            except TrouperValidationError:
                scope.cancel()

    async def receive():
        found.append(await device.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        for peer in peers:
            peer.write(Returned(peer.taken[-1].number, dict(errors).get(peer.rank)))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return found


def adapters_of(peer):
    return [
        (call.action.slot, call.action.files.weights)
        for call in peer.taken
        if isinstance(call, Call)
    ]


def run(function):
    trio.run(function, clock=trio.testing.MockClock(autojump_threshold=0))


def test_all_are_given_every_plan_and_last_one_answers():
    async def act():
        device = make_device(launcher := FakeLauncher())
        info = await device.load()
        # the blocks of the stage that has fewest, and the weights of all
        assert (info.num_blocks, info.num_weight_bytes) == (80, 111)
        device.submit(plan(1))
        device.submit(plan(2))
        assert [[p.step for p in peer.taken[1:]] for peer in launcher.peers] == [[1, 2]] * 3
        assert [peer.taken[0].rank for peer in launcher.peers] == [0, 1, 2]
        assert [len(peer.files) for peer in launcher.peers] == [6, 6, 6]
        launcher.peers[2].write(StepDone(1, ((5,),)), StepDone(2, ((6,),)))
        assert [(await device.receive()).token_ids for _ in range(2)] == [((5,),), ((6,),)]

    run(act)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_was_answered_comes_before_end_of_any_worker(rank):
    async def act():
        device = make_device(launcher := FakeLauncher())
        await device.load()
        for step in (1, 2, 3):
            device.submit(plan(step))
        launcher.peers[2].write(StepDone(1, ((5,),)), StepDone(2, ((6,),)))
        launcher.peers[rank].hang_up()
        assert [(await device.receive()).step for _ in range(2)] == [1, 2]
        lost = await device.receive()
        assert isinstance(lost, DeviceLost)
        assert (lost.step, lost.message) == (3, f"worker {rank} died of SIGKILL in step 3")
        assert [peer.ended_after for peer in launcher.peers] == [float(r == rank) for r in range(3)]
        back = await device.receive()
        assert isinstance(back, DeviceBack)
        assert [peer.rank for peer in launcher.peers] == [0, 1, 2] * 2
        assert {peer.taken[0].config.num_blocks for peer in launcher.peers[3:]} == {79}

    run(act)


def test_group_call_waits_and_raises_first_error():
    async def act():
        device = make_device(launcher := FakeLauncher())
        await device.load()
        errors = []

        async def ask(action):
            try:
                await device.call(action)
            except ProfilerAlreadyActiveError as error:
                errors.append(str(error))
            done.append(action.name)

        done = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(device.receive)
            nursery.start_soon(ask, Sleep(1))
            nursery.start_soon(ask, StartProfile("f", "p"))
            await trio.testing.wait_all_tasks_blocked()
            numbers = {
                c.action.name: c.number for c in launcher.peers[0].taken if isinstance(c, Call)
            }
            for peer in launcher.peers:
                assert done == []
                text = ErrorText("ProfilerAlreadyActiveError", f"in {peer.rank}")
                peer.write(Returned(numbers["sleep"]))
                peer.write(Returned(numbers["start_profile"], text if peer.rank else None))
                await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert sorted(done) == ["sleep", "start_profile"]
        assert errors == ["in 1"]

    run(act)


def test_successors_are_given_adapters_before_device_is_back():
    async def act():
        device = make_device(launcher := FakeLauncher(), num_stages=2)
        await device.load()
        for slot, weights in ((1, b"first"), (2, b"other"), (1, b"second")):
            assert await load_adapter(device, launcher.peers, slot, an_adapter(weights)) == []
        launcher.peers[0].hang_up()
        assert isinstance(await device.receive(), DeviceLost)
        assert isinstance(await device.receive(), DeviceBack)
        for peer in launcher.peers[2:]:
            assert adapters_of(peer) == [(1, b"second"), (2, b"other")]

    run(act)


def test_partly_refused_adapter_is_a_loss():
    async def act():
        device = make_device(launcher := FakeLauncher(), num_stages=2)
        await device.load()
        assert await load_adapter(device, launcher.peers, 1, an_adapter(b"good")) == []
        bad = ErrorText("TrouperValidationError", "no memory")
        (lost,) = await load_adapter(device, launcher.peers, 1, an_adapter(b"bad"), [(1, bad)])
        assert isinstance(lost, DeviceLost)
        assert "1 of 2 workers failed to load_adapter" in lost.message
        assert isinstance(await device.receive(), DeviceBack)
        assert [adapters_of(peer) for peer in launcher.peers[2:]] == [[(1, b"good")]] * 2
        every = [(rank, bad) for rank in (0, 1)]
        assert await load_adapter(device, launcher.peers[2:], 1, an_adapter(b"bad"), every) == []

    run(act)


def test_successor_that_refuses_adapter_is_another_loss():
    async def act():
        device = make_device(launcher := FakeLauncher(), num_stages=2, max_worker_restarts=1)
        await device.load()
        assert await load_adapter(device, launcher.peers, 1, an_adapter(b"good")) == []
        FakePeer.refusal = ErrorText("MemoryError", "no memory")
        try:
            launcher.peers[0].hang_up()
            assert isinstance(await device.receive(), DeviceLost)
            with pytest.raises(
                DeviceStartError, match="cannot load an adapter again: MemoryError: no memory"
            ):
                await device.receive()
        finally:
            FakePeer.refusal = None

    run(act)


def test_vocabulary_goes_before_first_grammar_to_each_worker_group():
    vocabulary = Vocabulary("{}", 3, (0,), ("a", "b", "c"))
    rules = GrammarRules(
        source="x", eos_token_ids=(0,), ignore_eos=False, num_tokens=3, reasoning=None
    )
    grammar = Grammar(rules, lambda: None, str, vocabulary)

    async def act():
        device = make_device(launcher := FakeLauncher(), num_stages=2)
        await device.load()
        device.submit(plan(1))
        device.submit(plan(2, grammar=grammar))
        device.submit(plan(3, grammar=grammar))
        kinds = [StepPlan, Vocabulary, StepPlan, StepPlan]
        for peer in launcher.peers:
            assert [type(frame) for frame in peer.taken[1:]] == kinds
            assert peer.taken[2] == vocabulary
            assert peer.taken[3].new_sequences[0].grammar.rules == rules
        launcher.peers[1].hang_up()
        assert isinstance(await device.receive(), DeviceLost)
        assert isinstance(await device.receive(), DeviceBack)
        device.submit(plan(4, epoch=1, grammar=grammar))
        assert [type(f) for f in launcher.peers[-1].taken[1:]] == [Vocabulary, StepPlan]

    run(act)


@pytest.mark.parametrize("num_failures", [0, 1])
def test_plan_from_before_a_loss_is_dropped(num_failures):
    """A call may hold it up until the device is back, also if the device had no plan when it was lost."""

    async def act():
        device = make_device(launcher := FakeLauncher())
        await device.load()
        for step in range(num_failures):
            device.submit(plan(step))
            launcher.peers[-1].write(StepFailed(step, "no memory"))
            assert isinstance(await device.receive(), StepFailed)
        launcher.peers[-1].hang_up()
        assert isinstance(await device.receive(), DeviceLost)
        assert isinstance(await device.receive(), DeviceBack)
        device.submit(plan(5, epoch=num_failures))
        device.submit(later := plan(6, epoch=num_failures + 1))
        assert launcher.peers[-1].taken[1:] == [later]

    run(act)


def test_a_launch_that_is_refused_ends_those_before():
    async def act():
        device = make_device(launcher := FakeLauncher(refused=2))
        with pytest.raises(DeviceStartError, match="cannot start"):
            await device.load()
        assert [peer.ended_after for peer in launcher.peers] == [0.0, 0.0]

    run(act)


def test_unfitting_ranks_are_refused_before_start(tmp_path):
    """Seven would divide the query heads, but not share the KV heads."""
    sizes = {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 16}

    async def act():
        device = make_ranks(launcher := FakeLauncher(), 3, tmp_path, **sizes)
        rule = r"3 does not divide 14 query heads; possible: 1, 2 \("
        with pytest.raises(TrouperValidationError, match=rule) as caught:
            await device.load()
        assert (caught.value.parameter, caught.value.value) == ("tensor_parallel_size", 3)
        assert launcher.peers == []

    run(act)


def test_error_of_any_worker_at_load_is_raised_unchanged():
    class Failing(FakePeer):
        def send(self, data, file):
            if self.rank == 1:
                self.write(Broken(ErrorText("TrouperValidationError", "no", "max_model_len", 7)))
            else:
                super().send(data, file)

    async def act():
        device = make_device(launcher := FakeLauncher(Failing))
        with pytest.raises(TrouperValidationError) as caught:
            await device.load()
        assert caught.value.parameter == "max_model_len"
        assert all(peer.ended_after is not None for peer in launcher.peers)

    run(act)


def test_error_on_another_machine_names_worker_and_machine():
    class Failing(FakePeer):
        where = "on node 1"

        def send(self, data, file):
            error = ErrorText("TrouperValidationError", "it lacks tensors", "model", "/there")
            self.write(Broken(error))

    async def act():
        device = make_device(FakeLauncher(Failing), num_stages=1, replica=2)
        with pytest.raises(TrouperValidationError) as caught:
            await device.load()
        assert caught.value.message == "worker 2 on node 1: it lacks tensors"
        assert (caught.value.parameter, caught.value.value) == ("model", "/there")

    run(act)


def test_workers_and_their_successors_are_told_which_files_engine_has():
    async def act():
        files = (FileSample("model.safetensors", 7, "ab"),)
        config = resolve(EngineArgs(pipeline_parallel_size=2))
        device = ProcessDevice(config, launcher := FakeLauncher(), files=files)
        await device.load()
        launcher.peers[0].hang_up()
        assert isinstance(await device.receive(), DeviceLost)
        assert isinstance(await device.receive(), DeviceBack)
        assert [peer.taken[0].files for peer in launcher.peers] == [files] * 4

    run(act)


def test_workers_are_numbered_through_all_replicas():
    async def act():
        launcher = FakeLauncher()
        device = make_device(launcher, replica=2, step_timeout=5.0)
        await device.load()
        # the peer, which puts its number before each line of stderr, and the worker, which has its rank
        assert [peer.rank for peer in launcher.peers] == [6, 7, 8]
        assert [peer.taken[0].rank for peer in launcher.peers] == [0, 1, 2]
        device.submit(plan(1))
        lost = await device.receive()
        assert lost.message.startswith("one of workers 6 to 8 was killed after 5 s")
        assert isinstance(await device.receive(), DeviceBack)
        launcher.peers[-1].hang_up()
        assert (await device.receive()).message.startswith("worker 8 died of SIGKILL")

    run(act)


@pytest.mark.parametrize(("kind", "is_from_outside"), [("LinkLostError", True), ("OSError", False)])
def test_no_request_is_suspected_of_network_lost(kind, is_from_outside):
    async def act():
        device = make_device(launcher := FakeLauncher())
        await device.load()
        device.submit(plan(1))
        launcher.peers[1].write(Broken(ErrorText(kind, "timed out")))
        lost = await device.receive()
        assert lost.message == f"worker 1 failed in step 1: {kind}: timed out"
        assert lost.is_from_outside == is_from_outside

    run(act)


def test_start_refused_is_reported_by_number_of_its_replica():
    async def act():
        launcher = FakeLauncher()
        device = make_device(launcher, replica=2, max_worker_restarts=1)
        await device.load()
        launcher.refused = 7
        launcher.peers[0].hang_up()
        assert isinstance(await device.receive(), DeviceLost)
        with pytest.raises(DeviceStartError, match=r"^worker 6 failed: cannot start"):
            await device.receive()
        assert [peer.ended_after for peer in launcher.peers[3:]] == [0.0]

    run(act)


def test_the_last_loss_is_told_before_the_failure():
    async def act():
        device = make_device(launcher := FakeLauncher(), max_worker_restarts=0)
        await device.load()
        device.submit(plan(1))
        launcher.peers[0].hang_up()
        assert isinstance(await device.receive(), DeviceLost)
        for _ in range(2):
            with pytest.raises(DeviceStartError, match="max_worker_restarts=0 in 300 s"):
                await device.receive()
        assert len(launcher.peers) == 3
        await device.aclose()

    run(act)


def test_call_that_cannot_be_sent_leaves_nothing_open(monkeypatch):
    def refuse(links, frame):
        raise OSError("no descriptor is left")

    async def act():
        device = make_device(FakeLauncher())
        await device.load()
        monkeypatch.setattr(process, "send_to_all", refuse)
        with pytest.raises(OSError, match="no descriptor"):
            await device.call(Sleep(1))
        assert repr(device._calls) == "<OpenCalls: []>"
        monkeypatch.undo()

    run(act)


def test_stages_that_do_not_answer_are_ended_at_deadline():
    async def act():
        device = make_device(FakeLauncher(), step_timeout=5.0)
        await device.load()
        device.submit(plan(1))
        begun_s = trio.current_time()
        lost = await device.receive()
        assert math.isclose(trio.current_time() - begun_s, 5.0)
        assert (
            lost.message == "one of workers 0 to 2 was killed after 5 s without an answer in step 1"
        )

    run(act)
