"""The second process of a cold start, and the memory that kernels borrow."""

import threading

import pytest

from trouper.kernels import launch


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    return tmp_path


def test_a_second_process_compiles_what_is_not_cached(cache):
    file = cache / "ops.wanted-7.py311.nbi"
    with launch.compiling_beside("wanted", f"open({str(file)!r}, 'w')"):
        pass
    assert file.exists()
    file.write_text("kept")
    with launch.compiling_beside("wanted", f"open({str(file)!r}, 'w')"):
        pass
    assert file.read_text() == "kept"


def test_a_failing_or_missing_process_is_no_failure(cache, monkeypatch):
    with launch.compiling_beside("wanted", "raise SystemExit(3)"):
        pass
    monkeypatch.setattr(launch.sys, "executable", "/nowhere/python")
    with launch.compiling_beside("wanted", ""):
        pass


def test_an_error_in_the_body_ends_the_process(cache):
    def fail():
        with launch.compiling_beside("wanted", "import time; time.sleep(50)"):
            raise KeyError

    with pytest.raises(KeyError):
        fail()


def test_scratch_grows_is_aligned_and_is_each_threads_own():
    small = launch.scratch(10)
    assert small % 64 == 0
    assert launch.scratch(5) == small
    assert launch.scratch(100_000) % 64 == 0
    own, others = launch.scratch(64), []
    thread = threading.Thread(target=lambda: others.append(launch.scratch(64)))
    thread.start()
    thread.join()
    assert others[0] != own
