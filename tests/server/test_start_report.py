"""What a server says while it loads, and when it is ready."""

import io
import logging

import msgspec
import pytest
import trio
import trio.testing

from tests.support.engines import engine_config
from trouper import extras
from trouper.actors.executor.device import DeviceInfo
from trouper.actors.executor.workers.model_host import log_phase
from trouper.frontends.server.program.start_report import CLEAR, REDRAW_S, LoadingLine, summarise

INFO = DeviceInfo(num_blocks=1001, block_size=16, dtype="float32", name="cpu")


def summary(**options):
    config = msgspec.structs.replace(engine_config(), **options)
    return summarise("demo", config, INFO, ["http://127.0.0.1:8000", "unix:/x"], 3.21)


def test_the_summary_names_model_device_cache_and_addresses():
    assert summary() == [
        "serving demo at http://127.0.0.1:8000, unix:/x",
        "model: Simulated, float32, 256 tokens of context",
        "device: cpu, in the server's process",
        "KV cache: 1,000 blocks of 16 tokens (16,000 in all), for at most 8 sequences at once",
        "sampling: temperature 1 (defaults: vLLM's)",
        "loaded in: 3.2 s",
    ]


def test_summary_tells_what_weights_of_quantised_checkpoint_take():
    config = engine_config()
    hf_config = {**config.model.hf_config, "quantization_config": {"quant_method": "fp8"}}
    model = msgspec.structs.replace(config.model, hf_config=hf_config)
    config = msgspec.structs.replace(config, model=model)
    info = msgspec.structs.replace(INFO, num_weight_bytes=473_000_000)
    assert "weights: 0.47 GB in memory, of a checkpoint in fp8" in summarise(
        "demo", config, info, ["unix:/x"], 3.21
    )


def test_the_summary_tells_how_many_workers_there_are():
    assert "in a worker process" in summary(device_worker="process")[2]
    scheduler = msgspec.structs.replace(engine_config().scheduler, num_stages=3)
    staged = summary(device_worker="process", scheduler=scheduler)
    assert "in 3 worker processes, a stage of the model each" in staged[2]


def test_summary_names_what_missing_package_leaves_out(monkeypatch):
    assert not [line for line in summary() if line.startswith("not available")]
    monkeypatch.setattr(extras, "REQUEST_EXTRAS", {"schemas": ("no_such_module", "none")})
    hint = "install trouper with its extra `none`"
    assert summary()[-1] == f"not available: schemas ({hint})"


@pytest.mark.trio
async def test_terminal_shows_last_phase_and_log_does_not(autojump_clock, caplog):
    caplog.set_level(logging.INFO, "trouper.loading")
    terminal = io.StringIO()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(LoadingLine(terminal).keep_drawn)
        await trio.sleep(REDRAW_S / 2)
        log_phase("weights", where="worker 1: ")
        await trio.sleep(REDRAW_S)
        nursery.cancel_scope.cancel()
    assert terminal.getvalue().split(CLEAR) == [
        "",
        "trouper: loading the model … 0 s",
        "trouper: worker 1: loading the weights … 0 s",
        "",
    ]
    assert not caplog.records
    log_phase("import")
    assert caplog.messages == ["importing torch"]
