"""What is recorded is what runs, again and again, by any number of threads; and nothing else is recorded."""

import ctypes
import gc
import importlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from trouper.kernels.codegen import launch
from trouper.kernels.codegen.recording import Arena, NotRecordableError, Recording

machine_code = pytest.importorskip("trouper.kernels.codegen.compiler")

LENGTH = 64


def mirror(code):
    """x, y, turns: y[i] = x[LENGTH - 1 - i] + i, after as many turns of a loop.  A work item is an i."""
    x, y, turns = code.arguments(3)
    for i in code.work_items():
        total = code.var(0)
        for turn in code.loop(0, turns * i):
            total.set(total + turn % 3)
        with code.when(total >= 0):
            code.pointer(y, "i64")[i] = code.pointer(x, "i64")[LENGTH - 1 - i] + i


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(machine_code, "cache_folder", lambda: None)
    return launch.compiled.__wrapped__(mirror)


@pytest.fixture
def words():
    return torch.arange(LENGTH)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_launch_sees_all_earlier_writes(kernel, words, num_threads):
    """Some launches use one thread only, and some are slow enough to let the other threads sleep."""

    def function():
        x = words
        for i in range(200):
            y = x.new_empty(LENGTH)
            turns = 0 if i % 50 else 2000
            is_alone = i % 7 == 0
            kernel(
                LENGTH,
                x.data_ptr(),
                y.data_ptr(),
                turns,
                num_threads=1 if is_alone else num_threads,
            )
            x = y
        return x

    recording = Recording(Arena(), (words,), function)
    assert repr(recording) == "<Recording of 200 launches>"
    for start in range(10):
        words.copy_(torch.arange(start, start + LENGTH))
        expected = words.numpy().copy()
        for _ in range(200):
            expected = expected[::-1] + np.arange(LENGTH)
        recording.replay()
        assert recording.result.tolist() == expected.tolist()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_timed_replay_computes_and_names_every_command(kernel, words, num_threads):
    def function():
        y, z = words.new_empty(LENGTH), words.new_empty(LENGTH)
        kernel(LENGTH, words.data_ptr(), y.data_ptr(), 0, num_threads=num_threads)
        kernel(LENGTH, y.data_ptr(), z.data_ptr(), 2000, num_threads=num_threads)
        return z

    recording = Recording(Arena(), (words,), function)
    for _ in range(2):
        seconds = recording.timed_replay()
        assert recording.names == [kernel.name] * len(seconds) == [kernel.name] * 2
    timed = recording.result.tolist()
    recording.replay()
    assert recording.result.tolist() == timed


def test_a_late_thread_delays_nothing(kernel, words):
    replay = importlib.import_module("trouper.kernels.codegen.replay")

    def function():
        x = words
        for i in range(20):
            y = x.new_empty(LENGTH)
            kernel(LENGTH, x.data_ptr(), y.data_ptr(), 0, num_threads=1 + i % 2)
            x = y
        return x

    recording = Recording(Arena(), (words,), function)
    expected = words.numpy()
    for _ in range(20):
        expected = expected[::-1] + np.arange(LENGTH)
    commands = recording._commands
    counters = np.zeros(replay.num_counters(len(commands)), dtype=np.int64)
    two = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: 2)
    team_size = ctypes.cast(two, ctypes.c_void_p).value
    for _ in range(2):  # one thread, then the other
        launch.compiled(replay.replay)(
            1, commands.ctypes.data, len(commands), counters.ctypes.data, team_size, 0
        )
        assert recording.result.tolist() == expected.tolist()
        recording.result.zero_()  # the second computes nothing
        expected = np.zeros(LENGTH)
    words += 1
    recording.replay()
    assert recording.result.sum() == LENGTH + (LENGTH - 1) * LENGTH // 2 * 21


def counted(code):
    """A number of work items, y: how often each was taken."""
    count, y = code.arguments(2)
    for i in code.work_items(code.pointer(count, "i64")[0]):
        target = code.pointer(y, "i64") + i
        target[0] = target[0] + 1


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_late_thread_reads_the_new_item_count(monkeypatch, words, num_threads):
    monkeypatch.setattr(machine_code, "cache_folder", lambda: None)
    kernel = launch.compiled.__wrapped__(counted)
    count, taken = torch.tensor([1]), torch.zeros(LENGTH, dtype=torch.int64)

    def function():
        kernel(1, count.data_ptr(), taken.data_ptr(), num_threads=num_threads)
        return words

    recording = Recording(Arena(), (words,), function)
    arguments = (ctypes.c_int64 * 3).from_address(int(recording._commands[0][1]))
    for num in (LENGTH, 3, LENGTH):
        count.fill_(num)
        taken.zero_()
        recording.replay()
        assert taken.tolist() == [1] * num + [0] * (LENGTH - num)
        assert list(arguments) == [0, 0, num]


def test_recording_runs_no_kernels(kernel, words):
    y = torch.zeros_like(words)
    kernel_call = (LENGTH, words.data_ptr(), y.data_ptr(), 0)
    Recording(Arena(), (words,), lambda: kernel(*kernel_call) or words)
    assert not y.any()
    kernel(*kernel_call)
    assert y.all()
    y.zero_()
    with pytest.raises(ZeroDivisionError):
        Recording(Arena(), (words,), lambda: 1 / 0)
    kernel(*kernel_call)
    assert y.all()


def test_recordings_reuse_memory(words):
    arena = Arena()

    def function(num_bytes):
        x = words
        for _ in range(50):
            x = x.new_empty(num_bytes, dtype=torch.uint8).view(-1, 2).narrow(0, 0, num_bytes // 4)
            gc.collect(0)  # a view keeps its memory
        return x

    first = Recording(arena, (words,), lambda: function(1000))
    assert len(arena.blocks) == 2
    second = Recording(arena, (words,), lambda: function(600))
    assert repr(arena) == "<Arena of 2048 bytes>"
    assert first.result.data_ptr() in arena.blocks
    assert second.result.shape == (150, 2)
    assert all(address % 64 == 0 for address in arena.blocks)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: x.new_empty(3).zero_(),
        lambda x: torch.ones(LENGTH).add_(x),
        lambda x: x.view(8, 8).t().reshape(-1),
        lambda x: torch.cat((torch.ones(2), x)),
        lambda x: x.new_empty(0).sum(),
    ],
)
@pytest.mark.parametrize("is_inference", [False, True])
def test_torch_may_not_compute_from_inputs(words, function, is_inference):
    with torch.inference_mode(is_inference), pytest.raises(NotRecordableError):
        Recording(Arena(), (words,), lambda: function(words))


def test_constants_are_computed_once_and_kept(kernel, words):
    weight = torch.arange(LENGTH, dtype=torch.int32)
    y = torch.empty_like(words)

    def function():
        kernel(LENGTH, weight.long().mul(2).data_ptr(), y.data_ptr(), 0)
        return y

    recording = Recording(Arena(), (words,), function)
    others = [torch.full((LENGTH,), -1) for _ in range(100)]
    recording.replay()
    assert y.tolist() == [2 * (LENGTH - 1 - i) + i for i in range(LENGTH)]
    assert len(others) == 100


def test_scratch_memory_stays_where_a_recording_saw_it():
    recording = Recording(Arena(), (), lambda: launch.scratch(64))
    mine = launch._local.scratch
    launch.scratch(len(mine) + 1)
    assert launch._local.scratch is not mine
    assert any(kept is mine for kept in recording._kept)


def test_concurrent_threads_get_the_same_kernel():
    """A recording keeps only addresses, so the cache must not drop one of two kernels with its code."""
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(launch.compiled.__wrapped__, mirror) for _ in range(2)]
    assert asked[0].result() is asked[1].result()
