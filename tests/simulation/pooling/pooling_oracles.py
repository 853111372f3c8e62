"""What must hold of an engine that pools: the counterpart of `oracles.py`."""

import math
from itertools import accumulate
from typing import Any

import numpy as np

from tests.simulation.expected import expected_prompt, expected_types
from tests.simulation.oracles import check_error, check_faults, require
from tests.simulation.simulated_encoder import simulated_result
from trouper.actors.engine.lifecycle import EngineState
from trouper.actors.messages.steps import PoolEntry, PoolPlan
from trouper.actors.scheduling.pooling_policy import PASS_TOKENS, PoolingPolicy
from trouper.actors.scheduling.step_time import PoolingTime, StepWork
from trouper.errors import TrouperValidationError

__all__ = ["at_rest", "check_case", "check_delay", "check_faults", "check_idle"]

# While it runs


def at_rest(world: Any) -> None:
    """Every task waits and the clock is about to jump: nothing may be left lying about."""
    engine, device, threads = world.engine, world.device, world.threads
    policy: PoolingPolicy = world.policy
    is_pooling = threads.num_begun - threads.num_ended > threads.num_rendering
    snapshot = engine.snapshot()
    for name in ("scheduler", "executor 0", "pooler"):
        num_left = snapshot.inboxes[name]
        may_wait = name == "pooler" and is_pooling
        require(num_left == 0 or may_wait, "a message is left lying", name, num_left)
    num_queued = snapshot.inboxes["renderer"]
    require(
        num_queued == 0 or threads.num_rendering == world.scenario.num_renderers,
        "a renderer is idle while prompts wait", num_queued, threads.num_rendering,
    )  # fmt: skip
    require(
        len(policy.in_flight) == device.num_steps_out, "steps in flight", policy, device
    )  # fmt: skip
    running = {admit.id for flight in policy.in_flight for admit in flight.group}
    running &= policy.unfinished.keys()
    stats, num_waiting = policy.statistics(), len(policy.unfinished) - len(running)
    told = (stats.num_running, stats.num_waiting, stats.num_steps_in_flight)
    require(told == (len(running), num_waiting, len(policy.in_flight)), "statistics", stats)
    if num_waiting and engine.lifecycle.state is EngineState.AWAKE:
        is_busy = device.num_steps_out == world.scenario.steps_in_flight or _has_long_step(policy)
        require(is_busy, "the device could have more while texts wait", policy)
    require(not policy.outputs, "news that nobody is told", policy.outputs)
    for case in world.cases:
        if case.id is None:
            continue
        is_open = case.id in policy.unfinished
        if case.is_over:
            require(not is_open, "the engine works for a client that has left", case)
        else:
            is_known = is_open or case.id in world.rendering or is_pooling
            require(is_known or not case.is_unfinished, "a request is lost", case)
        if case.reads_since is not None and case.is_open:
            require(case.is_unfinished, "a reader sleeps beside its output", case)
    num_open = sum(c.is_open for c in world.cases)
    require(len(engine.requests) == num_open, "open requests", engine)


def _has_long_step(policy: PoolingPolicy) -> bool:
    """Whether a step in flight is so long that the next waits for its answer."""
    return policy.time is not None and any(each.estimate_s >= 0.05 for each in policy.in_flight)


class Line:
    """Who waits, before a plan is made, and what that must be."""

    def __init__(self, policy: PoolingPolicy) -> None:
        retries = [{a.id for a in group} & policy.unfinished.keys() for group in policy.retries]
        waiting = [entry for entry in policy.waiting if entry[1].id in policy.unfinished]
        self.next_ids = next(filter(None, retries), None) or _nearest(policy, waiting)
        self.has_long_step = _has_long_step(policy)
        self.in_flight = {
            admit.id for flight in policy.in_flight for admit in flight.group
        } & policy.unfinished.keys()


def _nearest(policy: PoolingPolicy, waiting: list[Any]) -> set[int]:
    """The best, and those nearest to it in length: as many as there are seats, tokens, and, of a long plan, shares."""

    def turn(entry: Any) -> Any:
        (_, _, number), admit, _ = entry
        if policy.fluid is not None:
            return places[admit.id]
        return (
            (0, 0, number)
            if policy.config.policy == "fcfs"
            else (-admit.options.priority, admit.arrival_time, number)
        )

    def length(entry: Any) -> int:
        return len(entry[1].prompt_token_ids)

    if not waiting:
        return set()
    order = () if policy.fluid is None else policy.fluid.order()
    places = {job.id: place for place, job in enumerate(order)}
    config, best = policy.config, min(waiting, key=turn)
    waiting = sorted(waiting, key=lambda e: (abs(length(e) - length(best)), turn(e)))
    sums = list(accumulate(map(length, waiting[: config.max_num_active_seqs])))
    num_taken = max(1, sum(total <= config.max_num_scheduled_tokens for total in sums))
    if sums[num_taken - 1] > PASS_TOKENS:
        num_taken = min(num_taken, math.ceil(len(policy.unfinished) / config.max_steps_in_flight))
    if policy.time is not None:
        lengths = [length(entry) for entry in waiting[:num_taken]]
        num_taken = _num_in_time(policy.time, lengths, is_learnt=config.max_step_ms is None)
    return {entry[1].id for entry in waiting[:num_taken]}


def _num_in_time(time: PoolingTime, lengths: list[int], *, is_learnt: bool) -> int:
    """The most texts that a step has the seconds for, or, while its seconds are unknown, the tokens."""
    times = time.times
    times.refresh()
    budget_s = time.budget.prompt_s(StepWork(0, 0, 0, 0.0, 0), has_streams=False)
    if budget_s is None:
        is_large = times.num_chunks % 2
        most = 512 if is_large else 128
        nums = [num for num in range(len(lengths) + 1) if sum(lengths[:num]) <= most]
        return min(max(nums[-1], 1 + is_large), len(lengths))
    fixed_s = times.seconds(StepWork.of_texts(()))
    texts = [lengths[:num] for num in range(len(lengths) + 1)]
    added_s = [times.seconds(StepWork.of_texts(each)) - fixed_s for each in texts]
    most_s = budget_s * (1 + 1e-9)
    num_taken = max(sum(each <= most_s for each in added_s) - 1, 1)
    is_explored = num_taken < len(lengths) and is_learnt and (time.num_full + 1) % 8 == 0
    if is_explored:
        most_s = 2 * max(most_s, added_s[1] * (1 + 1e-9))
        num_taken = max(sum(each <= most_s for each in added_s) - 1, 1)
    return min(num_taken, len(lengths))


def check_plan(world: Any, plan: PoolPlan, before: Line) -> None:
    config = world.policy.config
    require(not before.has_long_step, "a plan behind a long step", plan)
    ids = set(world.device.groups[plan.step])
    require(not world.is_frozen, "a plan while paused", plan)
    num_tokens = sum(len(column.token_ids) for column in plan.entries)
    is_within = num_tokens <= config.max_num_scheduled_tokens or len(ids) == 1
    require(is_within, "token budget", plan)
    require(len(plan.entries) <= config.max_num_active_seqs, "seats", plan)
    require(len(ids) == len(plan.entries), "a text twice in a plan", ids)
    require(not ids & before.in_flight, "a text in two plans", ids)
    for id in ids:
        case = world.case_of(id)
        is_gone = case is not None and (case.is_over or case.was_aborted)
        require(not is_gone, "work for a request that has ended", case)
    require(ids == before.next_ids, "not who is next", ids, before.next_ids)


# What a reader gets


def check_delay(world: Any, case: Any, since: float, news: Any, now: float) -> None:
    """Where no thread takes time, a result is there in the very moment in which the device has it."""
    if world.scenario.weather.thread_delay_s or case.array is None:
        return
    ready = world.device.ready.get(case.id)
    require(ready is not None, "a result that the device never made", case)
    require(now <= max(since, ready) + 1e-9, "a result came late", case, now - ready)


def check_case(world: Any, case: Any) -> None:
    """The verdict on one client's story."""
    if case.error is not None:
        check_error(world, case, case.error)
    if not case.is_finished:
        return
    if case.array is None:
        require(case.was_aborted or world.is_closing, "an abort that nobody asked for", case)
        return
    limit = world.scenario.max_model_len
    prompt = expected_prompt(case.client.wish, limit)
    require(case.prompt == prompt, "another prompt", case, case.prompt, prompt)
    require(len(prompt) <= limit, "too long, and pooled", case)
    want = wanted(world, case)
    if case.client.wish.mode == "score_doc":
        queries = _kept_queries(world, case)
        scores = [(wanted(world, query) @ want.T).max(axis=1).sum() for query in queries]
        is_right = any(np.allclose(case.array, score, rtol=1e-4) for score in scores)
        require(is_right, "wrong score", case, case.array, scores)
        check_uses(world, case)
    else:
        is_right = case.array.shape == want.shape and np.allclose(case.array, want, rtol=1e-4)
        require(is_right, "wrong result", case, case.array.shape, want.shape)


def check_uses(world: Any, case: Any) -> None:
    """Of all queries that were there under the document's key, together."""
    num_scored = sum(
        other.array is not None and other.client.wish.query_key == case.client.wish.query_key
        for other in world.cases
        if other.client.wish.mode == "score_doc"
    )
    computed = [query for query in _queries_of(world, case) if query.id in world.device.ready]
    num_uses = sum(query.client.wish.query_uses for query in computed)
    require(num_scored <= num_uses, "a query is used up, and used", num_scored, num_uses)


def wanted(world: Any, case: Any) -> Any:
    """The embedding, from nothing but the wish."""
    wish = case.client.wish
    limit = world.scenario.max_model_len
    ids, types = expected_prompt(wish, limit), expected_types(wish, limit)
    column = PoolEntry(ids, types, wish.task or "token_embed")
    raw = simulated_result(column, world.scenario.size)[..., : wish.dimensions]
    if wish.use_activation is False:
        return raw
    return raw / np.linalg.norm(raw, axis=-1, keepdims=True)


def _queries_of(world: Any, case: Any) -> list[Any]:
    wish = case.client.wish
    return [
        other
        for other in world.cases
        if other.client.wish.mode == "cache_query" and other.client.wish.query_key == wish.query_key
    ]


def _kept_queries(world: Any, case: Any) -> list[Any]:
    """Those that may have been kept when the document was scored: none that was surely replaced before."""
    ready = world.device.ready
    computed = [query for query in _queries_of(world, case) if query.id in ready]
    told = [query for query in computed if query.array is not None]
    return [
        query
        for query in computed
        if not any(
            query.ended_s < ready[later.id] and later.ended_s < ready[case.id] for later in told
        )
    ]


def _must_be_kept(world: Any, case: Any) -> bool:
    """Whatever else happened, there was a query for this document, with a use left."""
    queries, key = _queries_of(world, case), case.client.wish.query_key
    wishes = [other.client.wish for other in world.cases]
    documents = [wish for wish in wishes if wish.mode == "score_doc" and wish.query_key == key]
    return any(
        query.array is not None and query.ended_s < case.client.arrival_s
        for query in queries
    ) and all(query.client.wish.query_uses >= len(documents) for query in queries)  # fmt: skip


def check_refusal(world: Any, case: Any, error: TrouperValidationError) -> None:
    scenario, wish = world.scenario, case.client.wish
    if error.parameter == "query_key":
        require(wish.mode == "score_doc", "it asked for no query", case)
        require(not _must_be_kept(world, case), "a query is lost", case)
        return
    is_long = len(expected_prompt(wish, scenario.max_model_len)) > scenario.max_model_len
    require(is_long, "refused a good prompt", case, error)


# When all is over


def check_finite(world: Any, case: Any) -> None:
    require(case.id not in world.trouble.not_finite, "not finite, and fine", case)


def check_idle(world: Any) -> None:
    """As it was at the beginning: all tables empty."""
    engine = world.engine
    stats = engine.statistics()
    policy: PoolingPolicy = world.policy
    require(stats.num_open_requests == 0, "open requests", stats)
    require(stats.num_rendering == 0, "rendering", stats)
    require(stats.num_prefill_tokens == 0, "tokens in prefill", stats)
    require(not (policy.unfinished or policy.waiting or policy.retries), "requests leak", policy)
    require(not policy.returning, "requests of others", policy)
    require(not policy.in_flight, "steps in flight", policy)
    require(policy.work() == (0, 0), "work", policy.work())
    finished = [case.prompt for case in world.cases if case.array is not None]
    computed = [world.prompts[id] for id in world.device.ready]
    least, most = (sum(map(len, prompts)) for prompts in (finished, computed))
    num_tokens = stats.scheduler.num_prompt_tokens
    require(least <= num_tokens <= most, "tokens counted", least, num_tokens, most)
    require(world.threads.num_begun == world.threads.num_ended, "a thread is lost")
    for case in world.cases:
        require(case.slot is None or case.slot.is_closed, "a slot is open", case)
