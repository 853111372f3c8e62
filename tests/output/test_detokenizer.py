"""The detokenizer actor with hand-held channel ends: text, stops, failures, and its table."""

from contextlib import asynccontextmanager
from itertools import pairwise

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trouper.actors.messages.outputs import SequenceTokens, StepTokens, Stop
from trouper.actors.messages.requests import RequestId, Track
from trouper.actors.messages.steps import TokenLogprobs
from trouper.actors.output.detokenizer import Detokenizer
from trouper.actors.output.slot import ReplySlot
from trouper.errors import GenerationError
from trouper.outputs import Logprob, RequestError
from trouper.params import RequestOutputKind, SamplingParams

pytestmark = pytest.mark.anyio


class Stage:
    """A detokenizer between the ends that this test holds."""

    def __init__(self, actor, to_actor, scheduler_inbox, tokenizer):
        self.actor, self.to_actor, self.scheduler_inbox = actor, to_actor, scheduler_inbox
        self.tokenizer = tokenizer
        self.slots = []
        self._next_id = 0

    def track(self, prompt="", **params):
        params = SamplingParams(**{"temperature": 1.0} | params)
        id, self._next_id = self._next_id, self._next_id + params.n
        self.slots.append(ReplySlot(str(id), params))
        ids = tuple(self.tokenizer.encode(prompt)) if self.tokenizer else (5,)
        self.to_actor.send_nowait(Track(RequestId(id), ids, params, self.slots[-1], prompt))
        return id, self.slots[-1]

    async def tell(self, *news):
        """Send one step's news and wait until the actor has dealt with it."""
        self.to_actor.send_nowait(StepTokens(news))
        await self.settled()

    async def settled(self):
        """Wait until the actor waits for its next message."""
        for _ in range(1000):
            await anyio.lowlevel.checkpoint()
            if self.to_actor.statistics().tasks_waiting_receive:
                return
        raise TimeoutError("the actor does not come back for its next message")

    def text(self, text):
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def num_tracked(self):
        return len(self.actor.snapshot().sequences)

    def stopped(self):
        """The ids of the one Stop that was sent since the last look, or none."""
        inbox = self.scheduler_inbox
        sent = [inbox.receive_nowait() for _ in range(inbox.statistics().current_buffer_used)]
        assert all(isinstance(message, Stop) for message in sent)
        assert len(sent) <= 1
        return sent[0].ids if sent else ()


@asynccontextmanager
async def open_stage(tokenizer):
    to_actor, inbox = anyio.create_memory_object_stream(64)
    to_scheduler, scheduler_inbox = anyio.create_memory_object_stream(64)
    actor = Detokenizer(inbox, to_scheduler, tokenizer)
    with to_actor, scheduler_inbox:
        stage = Stage(actor, to_actor, scheduler_inbox, tokenizer)
        async with anyio.create_task_group() as tasks:
            await tasks.start(actor.run)
            yield stage
            to_actor.close()  # the end of the inbox is the end of the actor
        for slot in stage.slots:
            slot.close()


@pytest.fixture
async def stage(byte_tokenizer):
    async with open_stage(byte_tokenizer) as stage:
        yield stage


def news(id, token_ids=(), finish_reason=None, **more):
    return SequenceTokens(id, tuple(token_ids), finish_reason, **more)


def completion(slot):
    return slot.read_nowait().outputs[0]


async def test_text_grows_by_whole_characters_and_ends_with_its_reason(stage):
    id, slot = stage.track("the", output_kind=RequestOutputKind.DELTA)
    ids = stage.text(" cat 🎊")
    texts = []
    for token_id in ids:
        await stage.tell(news(id, [token_id], num_cached_tokens=0))
        texts.append(completion(slot).text)
    await stage.tell(news(id, finish_reason="length"))
    output = slot.read_nowait()
    assert "".join(texts) == " cat 🎊"
    assert "\ufffd" not in "".join(texts)
    assert (output.outputs[0].finish_reason, output.finished) == ("length", True)
    assert (output.prompt, output.num_cached_tokens) == ("the", 0)
    assert output.prompt_token_ids == list(stage.text("the"))
    assert stage.num_tracked == 0


async def test_stop_string_ends_sequence_and_tells_scheduler_once(stage):
    id, slot = stage.track(stop=["sat"])
    ids = stage.text("the cat sat on")
    await stage.tell(news(id, ids))
    answer = completion(slot)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("the cat ", "stop", "sat")
    assert stage.tokenizer.decode(answer.token_ids).endswith("sat")
    assert stage.stopped() == (id,)
    assert stage.num_tracked == 0
    await stage.tell(news(id, ids), news(id, finish_reason="abort"))
    assert slot.read_nowait() is None
    assert stage.stopped() == ()


async def test_stops_of_one_step_share_one_message(stage):
    requests = [stage.track(stop=["cat"])[0] for _ in range(3)]
    await stage.tell(*(news(id, stage.text("the cat")) for id in requests))
    assert stage.stopped() == tuple(requests)


async def test_stop_string_in_last_step_needs_no_stop_message(stage):
    id, slot = stage.track(stop=["cat"])
    await stage.tell(news(id, stage.text("the cat sat"), "length"))
    assert completion(slot).finish_reason == "stop"
    assert stage.stopped() == ()


@pytest.mark.parametrize(("include", "text"), [(False, "the cat"), (True, "the cat<|im_end|>")])
async def test_text_of_stop_token_is_left_out_unless_asked_for(stage, include, text):
    id, slot = stage.track(include_stop_str_in_output=include, skip_special_tokens=False)
    eos = stage.tokenizer.eos_token_id
    await stage.tell(news(id, [*stage.text("the cat"), eos], "stop", stop_reason=eos))
    answer = completion(slot)
    assert (answer.text, answer.token_ids[-1], answer.stop_reason) == (text, eos, eos)


async def test_what_stop_string_held_back_comes_with_abort(stage):
    id, slot = stage.track(stop=["never, never"])
    await stage.tell(news(id, stage.text("the cat")))
    assert completion(slot).text == ""
    await stage.tell(news(id, finish_reason="abort"))
    assert completion(slot).text == "the cat"


async def test_without_detokenize_there_are_tokens_and_no_text(stage):
    id, slot = stage.track(detokenize=False)
    await stage.tell(news(id, stage.text("the cat"), "length"))
    answer = completion(slot)
    assert (answer.text, answer.token_ids) == ("", list(stage.text("the cat")))


async def test_without_tokenizer_tokens_and_logprobs_without_text():
    async with open_stage(None) as stage:
        id, slot = stage.track(logprobs=0)
        await stage.tell(news(id, [7], "length", logprobs=(TokenLogprobs((7,), (-1.0,), 3),)))
        answer = completion(slot)
        assert (answer.text, answer.logprobs) == ("", [{7: Logprob(-1.0, 3, None)}])


async def test_n_sequences_have_separate_texts_and_ends(stage):
    id, slot = stage.track(n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    await stage.tell(news(id, stage.text("cat")), news(id + 1, stage.text("mat"), "length"))
    assert stage.num_tracked == 1
    await stage.tell(news(id, stage.text(" sat"), "length"))
    assert [c.text for c in slot.read_nowait().outputs] == ["cat sat", "mat"]
    assert stage.num_tracked == 0


async def test_news_of_unknown_sequences_are_late_and_ignored(stage):
    await stage.tell(news(99, [5]), news(98, finish_reason="abort"))
    assert stage.stopped() == ()


async def test_error_in_engine_fails_request_with_its_message(stage):
    id, slot = stage.track()
    await stage.tell(
        news(id, finish_reason="error", error=RequestError("numerical_error", "not finite"))
    )
    output = slot.read_nowait()
    assert output.finished
    assert output.outputs[0].finish_reason == "error"
    assert output.error == RequestError("numerical_error", "not finite")
    assert stage.num_tracked == 0


async def test_failure_in_one_request_fails_that_one_alone(stage, monkeypatch):
    bad, bad_slot = stage.track(n=2, stop=["x"])
    good, good_slot = stage.track()
    stream = stage.tokenizer.stream

    def failing(prompt, **options):
        monkeypatch.setattr(stage.tokenizer, "stream", stream)  # the first call only
        raise RuntimeError("broken")

    monkeypatch.setattr(stage.tokenizer, "stream", failing)
    await stage.tell(news(bad, stage.text("a")), news(good, stage.text("cat"), "length"))
    with pytest.raises(GenerationError, match="broken") as caught:
        bad_slot.read_nowait()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert completion(good_slot).text == "cat"
    assert stage.stopped() == (bad, bad + 1)
    assert stage.num_tracked == 0


async def test_no_text_work_is_done_for_reader_who_left(stage, monkeypatch):
    id, slot = stage.track()
    slot.close()
    monkeypatch.setattr(stage.tokenizer, "stream", None)  # calling it would fail
    await stage.tell(news(id, stage.text("cat")))
    assert stage.num_tracked == 1
    await stage.tell(news(id, finish_reason="abort"))
    assert stage.num_tracked == 0
    assert stage.stopped() == ()


async def test_aborted_request_whose_reader_waits_gets_its_last_output(stage):
    id, slot = stage.track()
    slot.cancel()
    await stage.tell(news(id, stage.text("cat"), "abort"))
    assert completion(slot).finish_reason == "abort"


async def test_logprobs_have_ranks_and_texts_and_end_with_match(stage):
    id, slot = stage.track(logprobs=2, stop=["cat"])
    the, cat, on = (stage.text(word) for word in ("the", " cat", " on"))
    ids = (*the, *cat, *on)
    positions = tuple(TokenLogprobs((i, the[0], 65), (-3.0, -1.0, -2.0), 4) for i in ids)
    await stage.tell(news(id, ids, logprobs=positions))
    answer = completion(slot)
    assert len(answer.logprobs) == len(answer.token_ids) == len(the) + len(cat)
    last = answer.logprobs[-1]
    assert last[cat[-1]] == Logprob(-3.0, 4, stage.tokenizer.token_text(cat[-1]))
    assert [entry.rank for entry in last.values()] == [4, 1, 2]
    assert answer.cumulative_logprob == -3.0 * len(answer.token_ids)


async def test_sampled_token_among_candidates_takes_its_place_in_ranks(stage):
    id, slot = stage.track(logprobs=2)
    repeated = TokenLogprobs((70, 65, 70), (-2.0, -1.0, -2.0), 2)
    left_out = TokenLogprobs((70, 65, 66), (-2.0, -1.0, -3.0), 2)
    await stage.tell(news(id, (70, 70), logprobs=(repeated, left_out)))
    ranks = [{t: entry.rank for t, entry in p.items()} for p in completion(slot).logprobs]
    assert ranks == [{70: 2, 65: 1}, {70: 2, 65: 1, 66: 3}]


async def test_candidates_of_the_callers_choice_have_no_rank(stage):
    id, slot = stage.track(logprob_token_ids=[65])
    await stage.tell(news(id, (70,), logprobs=(TokenLogprobs((70, 65), (-2.0, -9.0), 2),)))
    assert [entry.rank for entry in completion(slot).logprobs[0].values()] == [2, None]


async def test_prompt_logprobs_arrive_in_chunks_with_corrected_texts(stage):
    id, slot = stage.track("a 🎊", prompt_logprobs=0, n=2)
    ids = stage.text("a 🎊")
    positions = [TokenLogprobs((token_id,), (-1.0,), 1) for token_id in ids[1:]]
    for chunk in (positions[:2], positions[2:]):
        await stage.tell(*(news(id + child, prompt_logprobs=tuple(chunk)) for child in (0, 1)))
    await stage.tell(news(id, stage.text("x")))
    first, *others = slot.read_nowait().prompt_logprobs
    assert first is None
    texts = [
        position[token_id].decoded_token for position, token_id in zip(others, ids[1:], strict=True)
    ]
    assert stage.tokenizer.token_text(ids[0]) + "".join(texts) == "a 🎊"


async def test_loop_gets_turn_within_long_step(stage):
    requests = [stage.track() for _ in range(60)]
    await stage.settled()
    turns = 0
    async with anyio.create_task_group() as tasks:

        async def count():
            nonlocal turns
            while not requests[-1][1].read_nowait():
                turns += 1
                await anyio.lowlevel.checkpoint()

        tasks.start_soon(count)
        ids = stage.text("hello ") * 4
        stage.to_actor.send_nowait(StepTokens(tuple(news(id, ids, "length") for id, _ in requests)))
    assert turns >= 60 * len(ids) // 256


async def test_scheduler_gone_is_no_failure_of_detokenizer(stage):
    id, slot = stage.track(stop=["cat"])
    stage.scheduler_inbox.close()
    await stage.tell(news(id, stage.text("cat")))
    assert completion(slot).finish_reason == "stop"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    ids=st.lists(st.integers(0, 310), max_size=40),
    cuts=st.lists(st.integers(1, 39), max_size=6),
    stop=st.lists(st.sampled_from(["the", "a", "\ufffd", " c", "é"]), max_size=2),
    include=st.booleans(),
)
async def test_streaming_equals_not_streaming(stage, ids, cuts, stop, include):
    """The deltas of any cut into steps are the text and the tokens of one single step."""
    options = {"stop": stop, "include_stop_str_in_output": include}
    whole, whole_slot = stage.track(**options)
    await stage.tell(news(whole, ids, "length"))
    expected = completion(whole_slot)

    id, slot = stage.track(output_kind=RequestOutputKind.DELTA, **options)
    edges = [0, *sorted({cut for cut in cuts if cut < len(ids)}), len(ids)]
    outputs = []
    for begin, end in pairwise(edges):
        await stage.tell(news(id, ids[begin:end], "length" if end == len(ids) else None))
        if (output := slot.read_nowait()) is not None:
            outputs.append(output.outputs[0])
    assert "".join(output.text for output in outputs) == expected.text
    assert [token for output in outputs for token in output.token_ids] == expected.token_ids
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (
        expected.finish_reason,
        expected.stop_reason,
    )
    assert stage.num_tracked == 0
    stage.stopped()
