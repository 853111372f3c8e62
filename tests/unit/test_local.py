"""The device thread: order, cancellation, failure, the end.  A dummy model of a few thousand weights."""

import json
import subprocess
import sys
import threading

import anyio
import pytest

from trouper.actors.executor.local import LocalDevice, num_physical_cores
from trouper.actors.messages import NewRow, Sampling, SequenceId, StepDone, StepFailed, StepPlan
from trouper.config import EngineArgs
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "dtype": "float32",
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return EngineArgs(
        model=str(tmp_path),
        load_format="dummy",
        block_size=8,
        max_num_seqs=4,
        skip_tokenizer_init=True,
    ).resolve()


def first_plan(row=0, epoch=0):
    new = NewRow(row, SequenceId(row), (1, 2, 3), 3, (1, 2), Sampling(temperature=0.0))
    return StepPlan(0, epoch, (row,), (0,), (3,), (True,), new_rows=(new,))


def next_plan(step, row=0, epoch=0):
    return StepPlan(step, epoch, (row,), (2 + step,), (1,), (True,))


def device_threads():
    return [thread for thread in threading.enumerate() if thread.name == "trouper-device"]


@pytest.mark.anyio
async def test_answers_come_in_the_order_of_the_plans(config):
    device = LocalDevice(config)
    info = await device.load()
    assert (info.block_size, info.num_blocks, info.dtype) == (8, 4 * 8 + 1, "float32")
    device.submit(first_plan())
    for step in (1, 2, 3):
        device.submit(next_plan(step))
    with anyio.fail_after(10):
        answers = [await device.collect() for _ in range(4)]
    assert [answer.step for answer in answers] == [0, 1, 2, 3]
    assert all(isinstance(answer, StepDone) for answer in answers)
    await device.aclose()


@pytest.mark.anyio
async def test_collect_waits_for_a_plan_that_comes_later(config):
    device = LocalDevice(config)
    await device.load()
    found = []

    async def collect():
        found.append(await device.collect())

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tg:
            tg.start_soon(collect)
            await anyio.wait_all_tasks_blocked()
            device.submit(first_plan())
    assert found[0].step == 0
    await device.aclose()


@pytest.mark.anyio
async def test_a_cancelled_wait_loses_no_answer(config):
    device = LocalDevice(config)
    await device.load()
    device.submit(first_plan())
    with anyio.CancelScope() as scope:
        scope.cancel()
        await device.collect()
    device.submit(next_plan(1))
    with anyio.fail_after(10):
        assert [(await device.collect()).step for _ in range(2)] == [0, 1]
    await device.aclose()


@pytest.mark.anyio
async def test_a_failed_step_fails_its_epoch_and_nothing_after(config, caplog):
    device = LocalDevice(config)
    await device.load()
    device.submit(next_plan(1, row=77))  # there is no such row
    device.submit(first_plan())
    device.submit(first_plan(epoch=1))
    with anyio.fail_after(10):
        first, second, third = [await device.collect() for _ in range(3)]
    assert isinstance(first, StepFailed)
    assert "IndexError" in first.message
    assert isinstance(second, StepFailed)
    assert isinstance(third, StepDone)
    assert "step 1 of 1 columns failed" in caplog.text
    await device.aclose()


@pytest.mark.anyio
async def test_errors_of_loading_reach_the_caller(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["Mamba"]}))
    unknown = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).resolve()
    for broken, error in ((unknown, UnsupportedFeatureError), (None, TrouperValidationError)):
        device = LocalDevice(broken or _without_weights(tmp_path))
        with pytest.raises(error):
            await device.load()
        await device.aclose()
    assert device_threads() == []


def _without_weights(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return EngineArgs(model=str(folder), skip_tokenizer_init=True).resolve()


@pytest.mark.anyio
async def test_closing_waits_for_what_is_queued_and_ends_the_thread(config):
    device = LocalDevice(config)
    await device.load()
    assert len(device_threads()) == 1
    device.submit(first_plan())
    device.submit(next_plan(1))
    with anyio.CancelScope() as scope:  # closing is clean-up: cancellation does not shorten it
        scope.cancel()
        await device.aclose()
    assert device_threads() == []
    await device.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        device.submit(next_plan(2))


@pytest.mark.anyio
async def test_a_device_that_was_never_loaded_closes_at_once(config):
    device = LocalDevice(config)
    await device.aclose()
    with pytest.raises(RuntimeError, match="never loaded"):
        device.submit(first_plan())


@pytest.mark.anyio
async def test_sleeping_devices_fail_steps_and_wake_with_the_same_answers(config):
    device = LocalDevice(config)
    await device.load()
    device.submit(first_plan())
    before = await device.collect()
    await device.call("sleep", 2)
    device.submit(first_plan())
    assert isinstance(await device.collect(), StepFailed)
    await device.call("wake", frozenset({"weights", "kv_cache"}))
    device.submit(first_plan(epoch=1))
    assert (await device.collect()).token_ids == before.token_ids
    with pytest.raises(UnsupportedFeatureError, match="fly"):
        await device.call("fly")
    await device.aclose()


def test_the_module_does_not_import_torch():
    code = "import sys, trouper.actors.executor.local; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_there_is_at_least_one_core():
    assert num_physical_cores() >= 1
