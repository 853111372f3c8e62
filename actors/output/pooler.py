"""The pooler actor: it finishes raw results (normalisation, activation, scores) and writes the reply slots.

Laws:
1. All small results of a step share one call to a thread.  Large results have their own queue, so they delay only each other.
2. An aborted request is skipped.
3. A failure ends only the request that caused it.
4. Only this actor keeps queries of late interaction: at most `MAX_QUERIES`; the oldest is dropped first.
"""

import logging
from collections.abc import Sequence

import anyio
import msgspec
import numpy as np
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream

from trouper.actors.messages.controls import PoolerInbox
from trouper.actors.messages.outputs import PooledRequest
from trouper.actors.messages.requests import MAX_OPEN_REQUESTS
from trouper.actors.output.postprocessing import finish
from trouper.actors.runtime.event_loop import Threads
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.errors import GenerationError, TrouperError, TrouperValidationError
from trouper.outputs import Array
from trouper.pooling import LateInteractionParams

logger = logging.getLogger("trouper")
# Normalising this many numbers takes 0.1 ms.
LARGE = 2**16
MAX_QUERIES = 1024


class _Query(msgspec.Struct):
    embeddings: Array
    # Remaining uses.
    num_uses: int


class _PoolerJob(msgspec.Struct, frozen=True):
    request: PooledRequest
    array: Array
    query: Array | None


class PoolerSnapshot(msgspec.Struct, frozen=True):
    """The state of the pooler.

    A kept query takes memory until all of its documents have been scored.
    """

    # Keys of the kept queries, the oldest first.
    queries: tuple[str, ...]
    # Unfinished large results.
    num_large: int


class Pooler:
    """The actor that finishes pooling results and writes reply slots.

    It owns the kept queries of late interaction; large results are computed in worker threads.
    """

    def __init__(
        self,
        inbox: MemoryObjectReceiveStream[PoolerInbox],
        spec: PoolerSpec,
        threads: Threads,
    ) -> None:
        self._inbox = inbox
        self._spec = spec
        self._threads = threads
        self._queries: dict[str, _Query] = {}
        self._num_large = 0

    def __repr__(self) -> str:
        return f"<Pooler {len(self._queries)} queries kept>"

    def snapshot(self) -> PoolerSnapshot:
        """Describe the kept queries and the remaining work."""
        return PoolerSnapshot(tuple(self._queries), self._num_large)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        # One for each open request, so there is always room.
        to_lane, lane = anyio.create_memory_object_stream[_PoolerJob](MAX_OPEN_REQUESTS)
        # The two defaults differ, so both are logged.
        logger.info(
            "pooling tasks: %s; by default %s, of encode %s",
            ", ".join(self._spec.tasks),
            self._spec.task,
            self._spec.engine_task,
        )
        with self._inbox, to_lane, lane:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._finish_large, lane, name="pooler, large")
                task_status.started()
                async for message in self._inbox:
                    small: list[_PoolerJob] = []
                    for work in self._prepare(message):
                        if work.array.size > LARGE:
                            to_lane.send_nowait(work)
                            self._num_large += 1
                        else:
                            small.append(work)
                    if small:
                        await self._finish(small)
                    for answer in message.answers:
                        answer.set(None)
                to_lane.close()

    async def _finish_large(self, lane: MemoryObjectReceiveStream[_PoolerJob]) -> None:
        async for work in lane:
            await self._finish([work])
            self._num_large -= 1

    def _prepare(self, message: PoolerInbox) -> list[_PoolerJob]:
        works = map(self._prepare_one, message.requests)
        return [work for work in works if work is not None]

    def _prepare_one(self, request: PooledRequest) -> _PoolerJob | None:
        """Make the job of a request.  Returns None if the request has already ended."""
        slot, late = request.admit.slot, request.admit.params.late_interaction_params
        is_scored = late is not None and late.mode == "score_doc"
        query: Array | None = None
        if late is not None and is_scored:
            query = self._use_query(late)
        if request.error is not None:
            slot.write(np.empty(0, np.float32), request.error)
            return None
        if slot.is_aborted:
            slot.abort()
            return None
        if late is not None and is_scored and query is None:
            rule = "no query is kept under this key: send its cache_query first"
            slot.fail(TrouperValidationError(rule, parameter="query_key", value=late.query_key))
            return None
        assert request.array is not None
        return _PoolerJob(request, request.array, query)

    async def _finish(self, batch: Sequence[_PoolerJob]) -> None:
        self._write(batch, await self._threads.run(_finish_all, batch, self._spec))

    def _write(
        self, batch: Sequence[_PoolerJob], results: Sequence[Array | Exception | None]
    ) -> None:
        for work, result in zip(batch, results, strict=True):
            self._write_one(work, result)

    def _write_one(self, work: _PoolerJob, result: Array | Exception | None) -> None:
        admit = work.request.admit
        late = admit.params.late_interaction_params
        if result is None:
            admit.slot.abort()
        elif isinstance(result, Exception):
            admit.slot.fail(result)
        else:
            if late is not None and late.mode == "cache_query":
                self._keep_query(late, result)
            admit.slot.write(result)

    def _keep_query(self, late: LateInteractionParams, embeddings: Array) -> None:
        self._queries.pop(late.query_key, None)
        while len(self._queries) >= MAX_QUERIES:
            del self._queries[next(iter(self._queries))]
        self._queries[late.query_key] = _Query(embeddings, late.query_uses or 1)

    def _use_query(self, late: LateInteractionParams) -> Array | None:
        """Count a use of a query, whether the document succeeds or not.  The last use drops the query."""
        query = self._queries.get(late.query_key)
        if query is None:
            return None
        query.num_uses -= 1
        if query.num_uses == 0:
            del self._queries[late.query_key]
        return query.embeddings


def _finish_all(batch: Sequence[_PoolerJob], spec: PoolerSpec) -> list[Array | Exception | None]:
    """Finish the results of a batch.  The entry of an aborted request is None."""
    return [_finish_one(work, spec) for work in batch]


def _finish_one(work: _PoolerJob, spec: PoolerSpec) -> Array | Exception | None:
    admit = work.request.admit
    if admit.slot.is_aborted:
        return None
    try:
        ids, skipped = admit.prompt_token_ids, admit.skipped_rows
        return finish(work.array, admit.params, spec, ids, work.query, skipped)
    except TrouperError as error:
        return error
    except Exception as error:
        # Any other error ends only this request, too.
        wrapped = GenerationError(f"post-processing failed: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped
