"""The processors of each worker, as the environment has them."""

import pytest

from trouper.config.args import EngineArgs
from trouper.config.parallel import CPU_BIND, read_cpu_bind
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError


@pytest.mark.parametrize(
    ("text", "bind"),
    [("0-2|3", ((0, 1, 2), (3,))), ("0,2-3|1", ((0, 2, 3), (1,))), ("7|7", ((7,), (7,)))],
)
def test_processors_are_read_by_worker(monkeypatch, text, bind):
    monkeypatch.setenv(CPU_BIND, text)
    assert read_cpu_bind(2, is_inline=False) == bind
    assert resolve(EngineArgs(tensor_parallel_size=2)).cpu_bind == bind


def test_nothing_is_bound_unasked(monkeypatch):
    monkeypatch.delenv(CPU_BIND, raising=False)
    assert resolve(EngineArgs(tensor_parallel_size=2)).cpu_bind is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0-1", "of 1 workers, but there are 2"),
        ("0|1|2", "of 3 workers, but there are 2"),
        ("0|x", "must list the processors of each worker"),
        ("0|3-1", "must list the processors of each worker"),
        ("0|-1", "must list the processors of each worker"),
        ("0|0-9999999999", "must list the processors of each worker"),
        ("0|", "must list the processors of each worker"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(monkeypatch, text, words):
    monkeypatch.setenv(CPU_BIND, text)
    with pytest.raises(TrouperValidationError, match=words) as caught:
        read_cpu_bind(2, is_inline=False)
    assert caught.value.parameter == CPU_BIND


def test_model_in_engines_process_is_not_bound(monkeypatch):
    monkeypatch.setenv(CPU_BIND, "0")
    with pytest.raises(TrouperValidationError, match="no effect with device_worker"):
        resolve(EngineArgs(device_worker="inline"))
