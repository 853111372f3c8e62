"""The synchronous faces when something goes wrong: no output is lost, nothing stays open, nothing hangs."""

import gc
import subprocess
import sys
import threading

import pytest

from trouper import LLM, EngineArgs, LLMEngine, SamplingParams
from trouper.errors import EngineDeadError, ExecutionError
from trouper.outputs import RequestError

SMALL = {
    "max_model_len": 256,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 32,
    "dtype": "float32",
}


def greedy(max_tokens=6, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def raise_(error):
    raise error


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as llm:
        yield llm


@pytest.fixture(autouse=True)
def assert_idle(llm):
    yield
    after = llm.llm_engine.statistics()
    assert after.num_open_requests == after.num_tracked == after.scheduler.num_running == 0


def test_error_of_one_request_loses_no_output_of_others():
    with LLMEngine.from_engine_args(EngineArgs(**SMALL)) as engine:
        for request_id in "abc":
            engine.add_request(request_id, "def f(", greedy(1))
        broken = engine.thread.generations["b"]
        broken.take_nowait = lambda: raise_(EngineDeadError("first"))
        with pytest.raises(EngineDeadError, match="first"):
            engine.step()
        assert engine.has_unfinished_requests()
        assert [output.request_id for output in engine.step()] == ["a", "c"]
        assert not engine.has_unfinished_requests()
        assert engine.statistics().num_open_requests == 0


def test_an_execution_error_names_its_request():
    error = RequestError("execution_error", "no").to_exception("a")
    assert isinstance(error, ExecutionError)
    assert error.request_ids == ["a"]
    assert RequestError("execution_error", "no").to_exception().request_ids == [""]


class BrokenBar:
    """Cannot be made; or cannot be told."""

    def __init__(self, fails_at, desc, **_):
        self.fails_at = fails_at
        self.desc = desc
        self.tell("make")

    def tell(self, what):
        if self.fails_at == (self.desc, what):
            raise KeyError(what)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.tell("exit")

    def update(self, _):
        self.tell("update")


@pytest.mark.parametrize("desc", ["prompts", "requests"])
@pytest.mark.parametrize("what", ["make", "update", "exit"])
def test_a_progress_bar_that_fails_leaves_nothing_open(llm, desc, what):
    with pytest.raises(KeyError, match=what):
        llm.generate(["a", "b"], greedy(2), use_tqdm=lambda **how: BrokenBar((desc, what), **how))
    gc.collect()
    assert llm.thread.generations == {}
    assert llm.llm_engine.statistics().num_open_requests == 0


def test_closing_closes_what_is_enqueued():
    with LLM(**SMALL) as llm:
        llm.enqueue(["a", "b"], greedy(100, ignore_eos=True), use_tqdm=False)
    engine = llm.llm_engine
    del llm
    gc.collect()
    assert not engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == 0


def test_a_closed_stepped_engine_has_nothing_unfinished():
    with LLMEngine.from_engine_args(EngineArgs(**SMALL)) as engine:
        engine.add_request("a", "x", greedy())
        assert engine.has_unfinished_requests()
    gc.collect()
    assert not engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == 0


def test_what_is_closed_cannot_be_paused():
    llm = LLM(**SMALL)
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"), llm.paused():
        pass


def threads_called(name):
    return [t for t in threading.enumerate() if t.name.startswith(name)]


def test_engine_dropped_in_its_own_thread_ends_all_same():
    before = set(threads_called("trouper"))
    engine = LLMEngine.from_engine_args(EngineArgs(**SMALL))
    portal = engine.thread._portal
    box = [engine]
    del engine
    with pytest.warns(ResourceWarning, match="not closed before deletion"):
        portal.call(box.clear)
    for thread in set(threads_called("trouper")) - before:
        thread.join(20)
        assert not thread.is_alive()


def test_engine_may_be_closed_in_its_own_thread():
    before = set(threads_called("trouper"))
    engine = LLMEngine.from_engine_args(EngineArgs(**SMALL))
    engine.thread._portal.call(engine.close)
    for thread in set(threads_called("trouper")) - before:
        thread.join(20)
        assert not thread.is_alive()
    with pytest.raises(EngineDeadError):
        engine.step()


def test_engine_left_open_at_exit_ends_in_order():
    code = (
        "from trouper import LLM, SamplingParams\n"
        f"llm = LLM(**{SMALL!r})\n"
        "llm.enqueue(['a'], SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


class ClosingBar(BrokenBar):
    """Closes the `LLM` instead of failing; from `update`, which the engine's own thread calls, it only begins that."""

    llm = None

    def tell(self, what):
        if self.fails_at == (self.desc, what):
            self.llm.close()


@pytest.mark.parametrize("desc", ["prompts", "requests"])
@pytest.mark.parametrize("what", ["make", "update", "exit"])
def test_closing_during_generation_leaves_no_thread(desc, what):
    before = set(threads_called("trouper"))
    with LLM(**SMALL) as llm:

        def bar(**how):
            made = ClosingBar.__new__(ClosingBar)
            made.llm = llm
            made.__init__((desc, what), **how)
            return made

        params = [greedy(1), greedy(200, ignore_eos=True)]
        if (desc, what) == ("requests", "exit"):  # everything has ended by then
            assert len(llm.generate(["a", "b"], params, use_tqdm=bar)) == 2
        else:
            with pytest.raises(EngineDeadError, match="closed"):
                llm.generate(["a", "b"], params, use_tqdm=bar)
        assert llm.thread.generations == {}
    for thread in set(threads_called("trouper")) - before:
        thread.join(20)
        assert not thread.is_alive()


def test_closing_stepped_engine_in_step_is_dead_engine():
    with LLMEngine.from_engine_args(EngineArgs(**SMALL)) as engine:
        engine.add_request("a", "x", greedy())
        generation = engine.thread.generations["a"]
        take = generation.take_nowait

        def take_nowait():
            engine.close()
            return take()

        generation.take_nowait = take_nowait
        engine.step()
        with pytest.raises(EngineDeadError, match="closed"):
            engine.step()
        with pytest.raises(EngineDeadError, match="closed"):
            engine.add_request("b", "x", greedy())
    assert not engine.has_unfinished_requests()
