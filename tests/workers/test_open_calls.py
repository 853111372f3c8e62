"""Calls to several workers: all of them do what is asked, or none does, or they differ."""

import pytest

from trouper.actors.executor.devices.outstanding import OpenCalls
from trouper.actors.executor.workers.wire import ErrorText, Returned
from trouper.errors import TrouperValidationError

BAD = ErrorText("TrouperValidationError", "too wide", "lora_path")


def answered(*errors):
    """The calls, an open one and what its last answer gave, once workers have answered so."""
    calls = OpenCalls()
    opened = calls.open("sleep", (1,), 0.0)
    found = [calls.note(Returned(opened.call.number, error), len(errors)) for error in errors]
    assert found[:-1] == [None] * (len(errors) - 1)
    return calls, opened, found[-1]


def test_a_call_that_all_workers_have_done_is_done():
    calls, opened, done = answered(None, None, None)
    assert (done, opened.future.result(), calls.differ) == (opened.call, None, None)


def test_an_error_of_all_workers_is_the_askers_alone():
    calls, opened, done = answered(BAD, BAD)
    with pytest.raises(TrouperValidationError, match="too wide"):
        opened.future.result()
    assert (done, calls.differ) == (None, None)


def test_an_error_of_some_workers_leaves_them_in_different_states():
    calls, opened, done = answered(None, BAD, None)
    with pytest.raises(TrouperValidationError, match="too wide"):
        opened.future.result()
    assert done is None
    assert calls.differ == "1 of 3 workers failed to sleep: TrouperValidationError: too wide"
    calls.fail_all(RuntimeError())
    assert calls.differ is None
