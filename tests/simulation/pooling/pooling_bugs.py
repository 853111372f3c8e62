"""Bugs on purpose in what only an engine that pools has; beside those of `bugs.py`, one registry."""

from functools import partial

import anyio
import msgspec

import trouper.actors.output.pooler as pooler_module
from tests.simulation.bugs import BUGS, bug, planted
from tests.simulation.simulated_encoder import SimulatedEncoder
from trouper.actors.output.pooler import Pooler
from trouper.actors.output.slot import PoolingSlot
from trouper.actors.rendering.prompts.pooling import PoolingPrompts
from trouper.actors.rendering.renderer import Renderer
from trouper.actors.scheduling.pooling_policy import PoolingPolicy
from trouper.actors.scheduling.step_time import PoolingTime
from trouper.outputs import RequestError

from .pooling_scenario import draw_pooling

__all__ = ["BUGS", "planted"]

pooling_bug = partial(bug, draw=draw_pooling)


# Plans


@pooling_bug(PoolingPolicy, "_next")
def pooled_budget_is_not_spent(right):
    def faulty(self, line):
        group = right(self, line)
        while line:
            admit = line.pop(0).admit
            if admit.id in self.unfinished:
                group.append(admit)
        return group

    return faulty


@pooling_bug(PoolingPolicy, "_next")
def one_text_a_plan(right):
    def faulty(self, line):
        group = right(self, line)
        for admit in group[1:]:
            order = 0, admit.arrival_time, admit.id
            self.enter(self.unfinished[admit.id]._replace(order=order))
        return group[:1]

    return faulty


@pooling_bug(PoolingTime, "count_fitting")
def pooled_steps_take_any_time(right):
    return lambda self, lengths: len(lengths)


@pooling_bug(PoolingPolicy, "_waits_for_answer")
def a_second_plan_behind_a_long_pooled_one(right):
    return lambda self: False


@pooling_bug(PoolingPolicy, "statistics")
def the_running_are_counted_as_waiting(right):
    def faulty(self):
        stats = right(self)
        num = stats.num_running + stats.num_waiting
        return msgspec.structs.replace(stats, num_running=0, num_waiting=num)

    return faulty


@pooling_bug(PoolingPolicy, "apply")
def pooled_tokens_are_counted_twice(right):
    def faulty(self, done):
        for admit in self.in_flight[0].group:
            self._num_prompt_tokens += len(admit.prompt_token_ids)
        right(self, done)

    return faulty


@pooling_bug(PoolingPolicy, "open_request")
def pooled_priority_is_inverted(right):
    def faulty(self, admit):
        request = right(self, admit)
        priority, *rest = request.order
        return request._replace(order=(-priority, *rest))

    return faulty


@pooling_bug(PoolingPolicy, "open_request")
def pooled_arrival_is_forgotten(right):
    def faulty(self, admit):
        request = right(self, admit)
        priority, _, number = request.order
        return request._replace(order=(priority, 0.0, -number))

    return faulty


@pooling_bug(PoolingPolicy, "apply")
def results_of_a_step_are_swapped(right):
    def faulty(self, done):
        right(self, msgspec.structs.replace(done, arrays=done.arrays[::-1]))

    return faulty


@pooling_bug(PoolingPolicy, "fail_step")
def pooled_group_is_condemned_together(right):
    def faulty(self, step, message, *, is_out_of_memory=False):
        group = self.in_flight[0].group
        right(self, step, message, is_out_of_memory=is_out_of_memory)
        if self.retries and len(group) > 1:
            for admit in group:
                if self._take(admit.id) is not None:
                    self.outputs.append(
                        pooler_module.PooledRequest(
                            admit, error=RequestError("execution_error", message)
                        )
                    )

    return faulty


@pooling_bug(PoolingPolicy, "fail_step")
def blamed_for_one_that_has_left(right):
    def faulty(self, step, message, *, is_out_of_memory=False):
        flight = self.in_flight[0]
        flight.group = [admit for admit in flight.group if admit.id in self.unfinished]
        right(self, step, message, is_out_of_memory=is_out_of_memory)

    return faulty


@pooling_bug(PoolingPolicy, "_retry")
def half_of_a_failed_plan_is_lost(right):
    def faulty(self):
        group = right(self)
        return group[:1]

    return faulty


@pooling_bug(PoolingPolicy, "abort")
def pooled_abort_leaves_it_in_line(right):
    def faulty(self, id):
        request = self.unfinished.get(id)
        right(self, id)
        if request is not None and self.outputs:
            self.outputs.pop()
            self.enter(request._replace(order=(0, 0.0, 10**6 + id)))

    return faulty


@pooling_bug(PoolingPolicy, "set_pause")
def pooled_pause_is_ignored(right):
    return lambda self, pause: None


@pooling_bug(SimulatedEncoder, "submit")
def pooled_steps_run_out_of_order(right):
    def faulty(self, plan):
        right(self, plan)
        self._queue.rotate(1)

    return faulty


# Rendering


@pooling_bug(Renderer, "_render_all")
def an_error_fails_all_texts_of_a_hop(right):
    return lambda self, batch: [self._render(message) for message in batch]


@pooling_bug(Renderer, "_gather")
def what_came_behind_a_batch_is_dropped(right):
    def faulty(self, message):
        batch, _ = right(self, message)
        return batch[:2], None

    return faulty


@pooling_bug(Renderer, "_serve_all")
def texts_of_a_hop_are_exchanged(right):
    async def faulty(self, batch):
        prompts = [message.prompt for message in batch]
        exchanged = [
            msgspec.structs.replace(message, prompt=prompt)
            for message, prompt in zip(batch, prompts[::-1], strict=True)
        ]
        await right(self, exchanged)

    return faulty


@pooling_bug(PoolingPrompts, "_resolve")
def parameters_of_the_text_before(right):
    def faulty(self, given):
        last = self._resolved
        return right(self, given) if last is None else last[1]

    return faulty


@pooling_bug(PoolingPrompts, "_keeps_end")
def the_wrong_end_is_cut(right):
    return lambda self, side: not right(self, side)


@pooling_bug(PoolingPrompts, "_encode_text")
def the_last_token_of_a_text_is_lost(right):
    def faulty(self, *args):
        encoded = right(self, *args)
        return msgspec.structs.replace(encoded, ids=encoded.ids[:-1] or encoded.ids)

    return faulty


@pooling_bug(PoolingPrompts, "_check_length")
def a_text_that_is_too_long_is_pooled(right):
    return lambda self, *rest: None


# Results


@pooling_bug(pooler_module, "finish")
def embeddings_are_cut_after_they_are_normalised(right):
    def faulty(array, params, *rest):
        whole = right(array, msgspec.structs.replace(params, dimensions=None), *rest)
        return whole[..., : params.dimensions] if whole.ndim else whole

    return faulty


@pooling_bug(Pooler, "_finish")
def a_failure_kills_the_pooler(right):
    async def faulty(self, batch):
        results = await self._threads.run(pooler_module._finish_all, batch, self._spec)
        for result in results:
            if isinstance(result, Exception):
                raise result
        self._write(batch, results)

    return faulty


@pooling_bug(Pooler, "_use_query")
def a_query_is_used_for_ever(right):
    def faulty(self, late):
        query = self._queries.get(late.query_key)
        return None if query is None else query.embeddings

    return faulty


@pooling_bug(Pooler, "_use_query")
def the_key_of_a_query_is_ignored(right):
    def faulty(self, late):
        key = next(iter(self._queries), late.query_key)
        return right(self, msgspec.structs.replace(late, query_key=key))

    return faulty


@pooling_bug(Pooler, "_keep_query")
def a_query_is_never_replaced(right):
    def faulty(self, late, embeddings):
        before = self._queries.get(late.query_key)
        right(self, late, embeddings if before is None else before.embeddings)

    return faulty


@pooling_bug(Pooler, "_use_query")
def a_query_is_gone_after_one_use(right):
    def faulty(self, late):
        found = right(self, late)
        self._queries.pop(late.query_key, None)
        return found

    return faulty


@pooling_bug(Pooler, "_finish_large")
def a_large_result_is_forgotten(right):
    async def faulty(self, lane):
        async for _ in lane:
            await anyio.lowlevel.checkpoint()

    return faulty


@pooling_bug(PoolingSlot, "_wake_reader")
def pooled_wake_up_is_lost(right):
    return lambda self: None if self._output is not None else right(self)


@pooling_bug(PoolingSlot, "abort")
def pooled_abort_is_not_told(right):
    return lambda self: None
