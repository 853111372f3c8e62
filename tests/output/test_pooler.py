"""The pooler actor: threads, lanes, kept queries, and who gets which end."""

import anyio
import numpy as np
import pytest

from trouper.actors.messages.outputs import Pooled, PooledRequest
from trouper.actors.messages.requests import AdmitPooling, RequestId
from trouper.actors.output import pooler as pooler_module
from trouper.actors.output.pooler import LARGE, Pooler
from trouper.actors.output.slot import PoolingSlot
from trouper.actors.runtime.event_loop import Future
from trouper.errors import GenerationError, TrouperValidationError
from trouper.outputs import RequestError
from trouper.pooling import LateInteractionParams, PoolingParams

from .test_postprocessing import spec

pytestmark = pytest.mark.trio


class Inline:
    """Threads that are none; counts its calls."""

    def __init__(self):
        self.sizes = []
        self.gate = None

    async def run(self, function, batch, *args):
        self.sizes.append(len(batch))
        if self.gate is not None and batch[0].array.size > LARGE:
            await self.gate.wait()
        return function(batch, *args)


@pytest.fixture
async def stage():
    """(send the results of a step, the threads, the pooler)."""
    to_pooler, inbox = anyio.create_memory_object_stream(8)
    threads = Inline()
    pooler = Pooler(inbox, spec(), threads)

    async def send(*requests):
        answer = Future()
        await to_pooler.send(Pooled(tuple(requests), (answer,)))
        await answer.wait()

    async with anyio.create_task_group() as tasks:
        await tasks.start(pooler.run)
        with to_pooler:
            yield send, threads, pooler
            to_pooler.close()


@pytest.fixture
def request_of():
    """The raw result of a request, or its error."""
    slots = []

    def request_of(array, error=None, **params):
        params = PoolingParams(**{"task": "embed", "use_activation": False, **params})
        slot = PoolingSlot("a")
        slots.append(slot)
        slot.start((1, 2))
        admit = AdmitPooling(id=RequestId(0), prompt_token_ids=(1, 2), params=params, slot=slot)
        return PooledRequest(admit, None if array is None else np.array(array, np.float32), error)

    yield request_of
    for slot in slots:
        slot.close()


def result(request):
    return request.admit.slot.read_nowait()


async def test_small_results_of_step_share_one_hop(stage, request_of):
    send, threads, _ = stage
    requests = [request_of([i, 1]) for i in range(5)]
    await send(*requests)
    assert threads.sizes == [5]
    outputs = [result(r) for r in requests]
    assert [output.outputs.array.tolist() for output in outputs] == [[i, 1] for i in range(5)]
    assert outputs[0].prompt_token_ids == [1, 2]
    assert all(output.finished for output in outputs)


async def test_a_large_result_delays_no_small_one(stage, request_of):
    send, threads, _ = stage
    threads.gate = anyio.Event()
    large, small = request_of(np.ones(LARGE + 1)), request_of([1, 2])
    await send(large, small)
    await send(another := request_of([3]))
    assert result(small) is not None
    assert result(another) is not None
    assert result(large) is None
    threads.gate.set()
    assert (await large.admit.slot.read()).outputs.array.size == LARGE + 1


async def test_a_failure_reaches_exactly_its_request(stage, request_of, monkeypatch):
    send, _, _ = stage
    right = pooler_module.finish

    def faulty(array, *args):
        if array[0] == 13:
            raise ZeroDivisionError("thirteen")
        return right(array, *args)

    monkeypatch.setattr(pooler_module, "finish", faulty)
    good, bad, nan = request_of([1]), request_of([13]), request_of([np.nan])
    await send(good, bad, nan)
    assert result(good).error is None
    with pytest.raises(GenerationError, match="thirteen"):
        result(bad)
    with pytest.raises(GenerationError, match="not finite"):
        result(nan)


async def test_who_left_while_queued_costs_nothing(stage, request_of):
    send, threads, _ = stage
    gone = request_of([1])
    gone.admit.slot.cancel()
    await send(gone)
    assert threads.sizes == []
    assert result(gone).error.code == "aborted"
    failed = request_of(None, RequestError("execution_error", "bad"))
    await send(failed)
    assert result(failed).error.code == "execution_error"


async def test_late_interaction_ends_in_score_and_forgets_query(stage, request_of):
    send, _, pooler = stage
    keep = LateInteractionParams(mode="cache_query", query_key="k", query_uses=2)
    meet = LateInteractionParams(mode="score_doc", query_key="k")
    query, document = np.eye(3)[:2], np.eye(3)[1:]
    await send(request_of(query, task="token_embed", late_interaction_params=keep))
    assert pooler.snapshot().queries == ("k",)
    scored = request_of(document, task="token_embed", late_interaction_params=meet)
    await send(scored)
    assert result(scored).outputs.array == 1.0  # one of the two query tokens has a match
    failed = request_of(
        None, RequestError("execution_error", "x"), task="token_embed", late_interaction_params=meet
    )
    await send(failed)
    assert not pooler.snapshot().queries  # a use, however it ended
    late = request_of(document, task="token_embed", late_interaction_params=meet)
    await send(late)
    with pytest.raises(TrouperValidationError, match="query_key"):
        result(late)


async def test_so_many_queries_are_kept_and_no_more(stage, request_of, monkeypatch):
    send, _, pooler = stage
    monkeypatch.setattr(pooler_module, "MAX_QUERIES", 3)
    for i in range(5):
        keep = LateInteractionParams(mode="cache_query", query_key=str(i), query_uses=1)
        await send(request_of([[1.0]], task="token_embed", late_interaction_params=keep))
    assert pooler.snapshot().queries == ("2", "3", "4")  # the oldest have gone
