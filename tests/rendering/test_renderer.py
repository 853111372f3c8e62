"""The renderer actor with hand-held channel ends: every way in which a request can leave it."""

import math
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from trouper.actors.messages.requests import NO_OPTIONS, Admit, Render, RequestId, Track
from trouper.actors.output.slot import ReplySlot
from trouper.actors.rendering import renderer as renderer_module
from trouper.actors.rendering.grammar.trial_processes import UntriedGrammarError
from trouper.actors.rendering.prompts.prompts import Rendered
from trouper.actors.rendering.renderer import Renderer, _plain_size
from trouper.actors.runtime.event_loop import WorkerThreads
from trouper.errors import GenerationError, TrouperValidationError
from trouper.params import SamplingParams

pytestmark = pytest.mark.anyio

PARAMS = SamplingParams()


def render(message):
    """A renderer of one id per character, which raises what it is told to raise."""
    if isinstance(message.prompt, Exception):
        raise message.prompt
    ids = tuple(map(ord, message.prompt))
    return Rendered(
        Track(message.id, ids, PARAMS, message.slot, message.prompt),
        Admit(
            id=message.id, prompt_token_ids=ids, params=PARAMS, eos_token_id=None, stop_token_ids=()
        ),
    )


def render_of(number, prompt, params, slot):
    return Render(
        id=RequestId(number),
        prompt=prompt,
        params=params,
        slot=slot,
        options=NO_OPTIONS,
        arrival_time=0.0,
    )


class Inline:
    """Threads that are none: calls run at once, or when the gate opens.

    As with real threads, a cancellation waits for a call that has begun.
    """

    def __init__(self):
        self.gate = None
        self.num_running = self.peak = 0

    async def run(self, function, *args):
        await anyio.lowlevel.checkpoint()
        self.num_running += 1
        self.peak = max(self.peak, self.num_running)
        with anyio.CancelScope(shield=True):
            if self.gate is not None:
                await self.gate.wait()
        self.num_running -= 1
        return function(*args)


class Stage:
    """Renderers between the ends that this test holds."""

    def __init__(self, to_renderer, scheduler_inbox, detokenizer_inbox, threads):
        self.to_renderer = to_renderer
        self.scheduler_inbox = scheduler_inbox
        self.detokenizer_inbox = detokenizer_inbox
        self.threads = threads
        self.slots = []

    def ask(self, prompt):
        number = len(self.slots)
        self.slots.append(ReplySlot(str(number), PARAMS))
        self.to_renderer.send_nowait(render_of(number, prompt, PARAMS, self.slots[-1]))
        return self.slots[-1]

    async def settled(self):
        for _ in range(30):  # far more turns than the longest chain of wake-ups here
            await anyio.lowlevel.checkpoint()

    def handed_over(self):
        """The ids that reached the Detokenizer and the Scheduler so far."""
        return [
            [message.id for message in drained(inbox)]
            for inbox in (self.detokenizer_inbox, self.scheduler_inbox)
        ]


def drained(inbox):
    while inbox.statistics().current_buffer_used:
        yield inbox.receive_nowait()


@asynccontextmanager
async def open_stage(num_workers=1, function=render, threads=None, trying=None):
    """Start renderers, and with the threads of `trying` one more, for what must be tried."""
    to_trying, trying_inbox = anyio.create_memory_object_stream(16)
    to_renderer, renderer_inbox = anyio.create_memory_object_stream(16)
    to_scheduler, scheduler_inbox = anyio.create_memory_object_stream(16)
    to_detokenizer, detokenizer_inbox = anyio.create_memory_object_stream(16)
    threads = threads or Inline()
    with (
        to_trying,
        trying_inbox,
        to_renderer,
        renderer_inbox,
        to_scheduler,
        scheduler_inbox,
        to_detokenizer,
        detokenizer_inbox,
    ):
        stage = Stage(to_renderer, scheduler_inbox, detokenizer_inbox, threads)
        async with anyio.create_task_group() as tasks:
            ends = to_scheduler, to_detokenizer
            lanes = [(renderer_inbox, function, threads, None, to_trying)] * num_workers
            if trying is not None:
                lanes.append((trying_inbox, render, trying, None, None))
            for inbox, *rest, trials in lanes:
                clones = [end.clone() for end in (inbox, *ends)]
                await tasks.start(Renderer(*clones, *rest, trials and trials.clone()).run)
            if trying is None:
                trying_inbox.close()
            yield stage
            tasks.cancel_scope.cancel()
        for slot in stage.slots:
            slot.close()


async def test_plain_texts_there_together_share_hop_and_no_fault():
    texts = ["a" * 130, "b" * 130, "c" * 2, "d" * 500]
    batches = []

    class Counting(Inline):
        async def run(self, function, *args):
            batches.append(len(args[0]) if isinstance(args[0], list) else 1)
            return await super().run(function, *args)

    def fussy(message):
        if message.prompt[0] == "b":
            raise ValueError("no b")
        return render(message)

    async with open_stage(function=fussy, threads=Counting()) as stage:
        slots = [stage.ask(text) for text in texts]
        gone = stage.ask("e" * 500)
        gone.close()
        stage.ask({"messages": "x"})  # nobody knows how long it takes
        stage.ask("f" * 500)
        await stage.settled()
        assert stage.handed_over() == [[0, 2, 3, 6], [0, 2, 3, 6]]
        with pytest.raises(ValueError, match="no b"):
            slots[1].read_nowait()
    assert batches == [5, 1, 1]


async def test_a_prompt_reaches_the_detokenizer_and_the_scheduler():
    async with open_stage() as stage:
        stage.ask("ab")
        await stage.settled()
        assert stage.detokenizer_inbox.receive_nowait().prompt_token_ids == (97, 98)
        assert stage.scheduler_inbox.receive_nowait().prompt_token_ids == (97, 98)


@pytest.mark.parametrize("error", [TrouperValidationError("no"), TypeError("no"), ValueError("no")])
async def test_typed_failure_is_requests_own_and_next_one_is_served(error):
    async with open_stage() as stage:
        bad = stage.ask(error)
        stage.ask("ok")
        await stage.settled()
        with pytest.raises(type(error)) as caught:
            bad.read_nowait()
        assert caught.value is error
        assert stage.handed_over() == [[1], [1]]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("x"), MemoryError(), RecursionError(), ExceptionGroup("x", [KeyError(1)])],
)
async def test_any_other_failure_is_wrapped(error):
    async with open_stage() as stage:
        slot = stage.ask(error)
        await stage.settled()
        with pytest.raises(GenerationError) as caught:
            slot.read_nowait()
        assert caught.value.__cause__ is error
        stage.ask("ok")
        await stage.settled()
        assert stage.handed_over() == [[1], [1]]


async def test_new_grammars_go_to_another_renderer():
    def quick(message):
        if message.prompt == "new":
            raise UntriedGrammarError
        return render(message)

    trying = Inline()
    trying.gate = anyio.Event()
    async with open_stage(function=quick, trying=trying) as stage:
        stage.ask("new")
        gone = stage.ask("new")
        stage.ask("ok")
        gone.close()
        await stage.settled()
        assert stage.handed_over() == [[2], [2]]
        trying.gate.set()
        await stage.settled()
        assert stage.handed_over() == [[0], [0]]


async def test_pending_trial_ends_with_engine():
    def quick(message):
        raise UntriedGrammarError

    async with open_stage(function=quick) as stage:
        stage.ask("new")
        await stage.settled()
        assert stage.handed_over() == [[], []]


@pytest.mark.parametrize("is_closed", [True, False])
async def test_request_aborted_in_queue_is_not_rendered(is_closed):
    calls = []
    async with open_stage(function=calls.append) as stage:
        slot = stage.ask("ab")
        slot.close() if is_closed else slot.cancel()
        await stage.settled()
        assert calls == []
        assert stage.handed_over() == [[], []]
        if not is_closed:
            assert slot.read_nowait().outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("is_closed", [True, False])
async def test_request_aborted_while_it_is_rendered_goes_to_nobody(is_closed):
    async with open_stage() as stage:
        stage.threads.gate = anyio.Event()
        slot = stage.ask("ab")
        stage.ask("cd")
        await stage.settled()
        slot.close() if is_closed else slot.cancel()
        await stage.settled()
        assert stage.threads.num_running == 1  # the thread is not abandoned
        stage.threads.gate.set()
        await stage.settled()
        assert stage.handed_over() == [[1], [1]]
        if not is_closed:
            assert slot.read_nowait().outputs[0].finish_reason == "abort"


async def test_each_worker_serves_one_request_at_a_time(monkeypatch):
    monkeypatch.setattr(renderer_module, "BATCH_CHARS", 0)  # so that none shares a hop
    async with open_stage(num_workers=2) as stage:
        stage.threads.gate = anyio.Event()
        for prompt in "abcde":
            stage.ask(prompt)
        await stage.settled()
        assert stage.threads.num_running == 2
        stage.threads.gate.set()
        await stage.settled()
        assert stage.threads.peak == 2
        assert [sorted(ids) for ids in stage.handed_over()] == [[0, 1, 2, 3, 4]] * 2


async def test_it_ends_when_its_inbox_ends():
    to_renderer, inbox = anyio.create_memory_object_stream(1)
    to_scheduler, scheduler_inbox = anyio.create_memory_object_stream(1)
    to_detokenizer, detokenizer_inbox = anyio.create_memory_object_stream(1)
    with scheduler_inbox, detokenizer_inbox:
        to_renderer.close()
        with anyio.fail_after(5):
            await Renderer(inbox, to_scheduler, to_detokenizer, render, Inline()).run()
        with pytest.raises(anyio.EndOfStream):
            scheduler_inbox.receive_nowait()


async def test_scheduler_gone_is_no_failure_of_renderer():
    async with open_stage() as stage:
        stage.scheduler_inbox.close()
        stage.ask("ab")
        await stage.settled()
        assert [message.id for message in drained(stage.detokenizer_inbox)] == [0]


async def test_real_threads_are_limited_and_bring_exceptions_back():
    threads = WorkerThreads(1)
    async with open_stage(threads=threads) as stage:
        bad, _ = stage.ask(ValueError("no")), stage.ask("ab")
        with anyio.fail_after(5):
            with pytest.raises(ValueError, match="no"):
                await bad.read()
            assert (await stage.scheduler_inbox.receive()).id == 1


@pytest.mark.parametrize(
    ("prompt", "params", "size"),
    [
        ("x" * 128, {}, 128),
        ([1] * 128, {}, 128),
        ((1,) * 129, {}, 129),
        ({"prompt": "one", "text_pair": "two!"}, {}, 7),
        ({"prompt_token_ids": [1, 2], "cache_salt": "s"}, {}, 3),
        ({"prompt": "one", "token_type_ids": [0]}, {}, math.inf),
        ({"messages": []}, {}, math.inf),
        ({"prompt": None}, {}, math.inf),
        (b"x", {}, math.inf),
        ("x", {"bad_words": ["y"]}, math.inf),
        ("x", {"logit_bias": {1: 1.0}}, math.inf),
        ("x", {"allowed_token_ids": [1]}, math.inf),
        ("x", {"stop_token_ids": [1]}, math.inf),
    ],
)
async def test_only_texts_and_ids_share_thread_calls(prompt, params, size):
    params = SamplingParams(**params)
    slot = ReplySlot("a", params)
    assert _plain_size(render_of(0, prompt, params, slot)) == size
    slot.close()
