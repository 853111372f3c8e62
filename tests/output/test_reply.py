"""The reply slot: what one slow, fast or absent reader gets of what the engine writes."""

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.actors.output.slot import ReplySlot
from trouper.outputs import Logprob, RequestError
from trouper.params import RequestOutputKind, SamplingParams

pytestmark = pytest.mark.anyio

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


@pytest.fixture
async def open_slot():
    """Make slots that are closed when the test ends."""
    slots = []

    def open_slot(kind=CUMULATIVE, *, interval=1, **params):
        params = {"temperature": 1.0, "output_kind": kind} | params
        slots.append(ReplySlot("mine", SamplingParams(**params), interval))
        return slots[-1]

    yield open_slot
    for slot in slots:
        slot.close()


def texts(output):
    return {completion.index: completion.text for completion in output.outputs}


def ids(output):
    return {completion.index: completion.token_ids for completion in output.outputs}


async def test_a_new_slot_has_nothing(open_slot):
    assert open_slot().read_nowait() is None


async def test_cumulative_replaces(open_slot):
    slot = open_slot()
    slot.write(0, "a", (1,))
    assert texts(slot.read_nowait()) == {0: "a"}
    slot.write(0, "b", (2,))
    slot.write(0, "c", (3,))
    output = slot.read_nowait()
    assert (texts(output), ids(output)) == ({0: "abc"}, {0: [1, 2, 3]})
    assert slot.read_nowait() is None


async def test_delta_merges_unread_outputs(open_slot):
    slot = open_slot(DELTA)
    slot.write(0, "a", (1,))
    slot.read_nowait()
    slot.write(0, "b", (2,))
    slot.write(0, "c", (3,))
    output = slot.read_nowait()
    assert (texts(output), ids(output)) == ({0: "bc"}, {0: [2, 3]})


async def test_final_only_waits_for_all_n(open_slot):
    slot = open_slot(FINAL_ONLY, n=2)
    slot.write(1, "b", (2,), finish_reason="length")
    slot.write(0, "a", (1,))
    assert slot.read_nowait() is None
    slot.write(0, "c", (3,), finish_reason="stop", stop_reason=3)
    output = slot.read_nowait()
    assert output.finished
    assert [(c.index, c.text, c.finish_reason, c.stop_reason) for c in output.outputs] == [
        (0, "ac", "stop", 3),
        (1, "b", "length", None),
    ]
    assert slot.read_nowait() is None


async def test_what_was_handed_out_does_not_change_any_more(open_slot):
    slot = open_slot()
    slot.write(0, "a", (1,))
    first = slot.read_nowait()
    slot.write(0, "b", (2,))
    assert ids(first) == {0: [1]}


async def test_n_completions_come_as_they_change_and_finish_with_last(open_slot):
    slot = open_slot(n=2)
    slot.write(1, "b", (2,), finish_reason="stop")
    first = slot.read_nowait()
    assert (texts(first), first.finished) == ({1: "b"}, False)
    slot.write(0, "a", (1,), finish_reason="length")
    last = slot.read_nowait()
    assert (texts(last), last.finished) == ({0: "a"}, True)


async def test_interval_passes_first_every_nth_and_last_token(open_slot):
    slot = open_slot(DELTA, interval=3)
    seen = []
    for token in range(8):
        slot.write(0, "x", (token,), finish_reason="length" if token == 7 else None)
        if (output := slot.read_nowait()) is not None:
            seen.append(ids(output)[0])
    assert seen == [[0], [1, 2, 3], [4, 5, 6], [7]]


async def test_a_request_can_only_raise_the_engines_interval(open_slot):
    raised, kept = (
        open_slot(interval=2, stream_interval=5),
        open_slot(interval=5, stream_interval=2),
    )
    for slot in (raised, kept):
        slot.write(0, "", (0,))
        slot.read_nowait()
        slot.write(0, "", (1, 2, 3, 4))
        assert slot.read_nowait() is None
        slot.write(0, "", (5,))
        assert slot.read_nowait() is not None


async def test_writes_after_the_end_change_nothing(open_slot):
    slot = open_slot()
    slot.write(0, "a", (1,), finish_reason="stop")
    slot.write(0, "b", (2,), finish_reason="abort")
    slot.abort()
    output = slot.read_nowait()
    assert (texts(output), output.outputs[0].finish_reason) == ({0: "a"}, "stop")
    assert slot.read_nowait() is None


async def test_an_abort_before_rendering_ends_every_completion(open_slot):
    slot = open_slot(n=2)
    slot.abort()
    output = slot.read_nowait()
    assert output.finished
    assert output.prompt_token_ids == []
    assert [c.finish_reason for c in output.outputs] == ["abort", "abort"]


async def test_abort_keeps_reasons_of_those_that_had_finished(open_slot):
    slot = open_slot(FINAL_ONLY, n=2)
    slot.write(0, "a", (1,), finish_reason="length")
    slot.abort()
    assert [c.finish_reason for c in slot.read_nowait().outputs] == ["length", "abort"]


async def test_an_error_overrides_what_has_not_been_read(open_slot):
    slot = open_slot()
    slot.write(0, "a", (1,), finish_reason="stop")
    slot.fail(ValueError("first"))
    slot.fail(KeyError("second"))
    with pytest.raises(ValueError, match="first"):
        await slot.read()


async def test_an_error_is_raised_by_every_read(open_slot):
    slot = open_slot()
    slot.fail(ValueError("first"))
    for _ in range(2):
        with anyio.fail_after(5), pytest.raises(ValueError, match="first"):
            await slot.read()


async def test_a_request_error_travels_in_the_output(open_slot):
    slot = open_slot()
    slot.note_error(RequestError("internal_error", "NaN"))
    slot.write(0, "", (), finish_reason="error")
    assert slot.read_nowait().error.message == "NaN"


async def test_cumulative_logprob_is_float_exactly_when_logprobs_were_asked_for(open_slot):
    position = {7: Logprob(-0.5, 1, "x")}
    asked, not_asked = open_slot(logprobs=0), open_slot()
    for slot in (asked, not_asked):
        slot.write(0, "x", (7,), logprobs=[position])
        slot.write(0, "x", (7,), logprobs=[position], finish_reason="stop")
    completion = asked.read_nowait().outputs[0]
    assert completion.cumulative_logprob == -1.0
    assert completion.logprobs == [position, position]
    assert not_asked.read_nowait().outputs[0].cumulative_logprob is None


async def test_aborted_request_with_logprobs_has_zero_cumulative_logprob(open_slot):
    slot = open_slot(logprobs=1)
    slot.abort()
    assert slot.read_nowait().outputs[0].cumulative_logprob == 0.0


async def test_logprobs_follow_the_tokens_under_delta(open_slot):
    slot = open_slot(DELTA, logprob_token_ids=[7])
    for token in (1, 2):
        slot.write(0, "x", (token,), logprobs=[{token: Logprob(-1.0)}])
        assert list(slot.read_nowait().outputs[0].logprobs[0]) == [token]


@pytest.mark.parametrize(("kind", "times"), [(CUMULATIVE, 2), (DELTA, 1)])
async def test_prompt_logprobs_come_once_under_delta_and_always_otherwise(open_slot, kind, times):
    slot = open_slot(kind, prompt_logprobs=0)
    slot.start("ab", (1, 2))
    slot.extend_prompt_logprobs([{2: Logprob(-1.0)}])
    outputs = []
    for token in (3, 4):
        slot.write(0, "x", (token,))
        outputs.append(slot.read_nowait())
    expected = [None, {2: Logprob(-1.0)}]
    assert [o.prompt_logprobs for o in outputs].count(expected) == times
    assert (outputs[0].prompt, outputs[0].prompt_token_ids) == ("ab", [1, 2])


async def test_cached_tokens_are_reported(open_slot):
    slot = open_slot()
    slot.note_cached_tokens(16)
    slot.write(0, "a", (1,))
    assert slot.read_nowait().num_cached_tokens == 16


async def test_a_waiting_reader_is_woken_by_a_write(open_slot):
    slot = open_slot()
    seen = []
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:

            async def reader():
                seen.append(await slot.read())

            tasks.start_soon(reader)
            for _ in range(30):  # until the reader waits
                await anyio.lowlevel.checkpoint()
            assert slot._woken.statistics().tasks_waiting == 1
            slot.write(0, "a", (1,))
    assert texts(seen[0]) == {0: "a"}


async def test_a_stale_wake_up_does_no_harm(open_slot):
    slot = open_slot(DELTA)
    seen = []
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:

            async def reader():
                seen.append(await slot.read())

            tasks.start_soon(reader)
            for _ in range(30):  # until the reader waits
                await anyio.lowlevel.checkpoint()
            slot.write(0, "a", (1,))
            assert slot.read_nowait() is not None  # taken before the reader runs
            for _ in range(30):  # until it waits again
                await anyio.lowlevel.checkpoint()
            assert seen == []
            slot.write(0, "b", (2,))
    assert texts(seen[0]) == {0: "b"}


async def test_closing_wakes_whoever_waits(open_slot):
    slot = open_slot()
    errors = []

    async def reader():
        try:
            await slot.read()
        except anyio.ClosedResourceError as error:
            errors.append(error)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(reader)
            for _ in range(30):  # until both wait
                await anyio.lowlevel.checkpoint()
            slot.close()
    assert len(errors) == 2


async def test_closing_is_idempotent_aborts_and_swallows_writes(open_slot):
    slot = open_slot()
    slot.close()
    slot.close()
    assert slot.is_closed
    assert slot.is_aborted
    slot.start("a", (1,))
    slot.write(0, "a", (1,))
    slot.abort()
    slot.fail(ValueError())
    assert slot.read_nowait() is None
    assert "closed" in repr(slot)


async def test_cancelling_scope_aborts_but_leaves_slot_readable(open_slot):
    slot = open_slot()
    slot.cancel()
    assert slot.is_aborted
    assert not slot.is_closed
    slot.abort()
    assert slot.read_nowait().finished


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@settings(max_examples=50)
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 2), st.text("xyz", max_size=3), st.booleans()), max_size=20
    ),
    interval=st.integers(1, 4),
)
async def test_whatever_the_reader_misses_the_whole_arrives_once(kind, pieces, interval):
    """Reads after some of the writes, then to the end: nothing is lost, doubled or reordered."""
    slot = ReplySlot("mine", SamplingParams(n=3, output_kind=kind), interval)
    whole, got, ends = ["", "", ""], ["", "", ""], 0

    def read():
        nonlocal ends
        if (output := slot.read_nowait()) is None:
            return
        ends += output.finished
        for completion in output.outputs:
            seen = got[completion.index] if kind == DELTA else ""
            got[completion.index] = seen + completion.text

    for token, (index, text, is_read) in enumerate(pieces):
        slot.write(index, text, (token,))
        whole[index] += text
        if is_read:
            read()
    for index in range(3):
        slot.write(index, "", (), finish_reason="stop")
        read()
        read()
    slot.close()
    assert (got, ends) == (whole, 1)
