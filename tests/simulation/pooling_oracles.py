"""What must hold of an engine that pools: the counterpart of `oracles.py`."""

from typing import Any

import numpy as np

from trouper.actors.executor.simulated import simulated_result
from trouper.actors.lifecycle import EngineState
from trouper.actors.messages import PoolColumn, PoolPlan
from trouper.actors.pooling_policy import PoolingPolicy
from trouper.errors import (
    EngineDeadError,
    GenerationError,
    QueueOverflowError,
    RetryableRequestError,
    TrouperValidationError,
)

from .clients import Broken
from .oracles import require
from .ports import DeviceCrashError

# While it runs


def at_rest(world: Any) -> None:
    """Every task waits and the clock is about to jump: nothing may be left lying about."""
    engine, device, threads = world.engine, world.device, world.threads
    policy: PoolingPolicy = engine._scheduler._policy
    is_pooling = threads.num_begun - threads.num_ended > threads.num_rendering
    for name, channel in (
        ("scheduler", engine._to_scheduler),
        ("executor", engine._questions._executor),
        ("pooler", engine._scheduler._reader),
    ):
        num_left = channel.statistics().current_buffer_used
        may_wait = name == "pooler" and is_pooling
        require(num_left == 0 or may_wait, "a message is left lying", name, num_left)
    num_queued = engine._to_renderer.statistics().current_buffer_used
    require(
        num_queued == 0 or threads.num_rendering == world.scenario.num_renderers,
        "a renderer is idle while prompts wait", num_queued, threads.num_rendering,
    )  # fmt: skip
    require(
        len(policy._flights) == device.num_steps_out, "steps in flight", policy, device
    )  # fmt: skip
    if device.num_steps_out == 0 and engine.lifecycle.state is EngineState.AWAKE:
        require(not policy._open, "the device is idle while texts wait", policy)
    require(not policy._news, "news that nobody is told", policy._news)
    for case in world.cases:
        if case.id is None:
            continue
        is_open = case.id in policy._open
        if case.is_over:
            require(not is_open, "the engine works for nobody", case)
        else:
            is_known = is_open or case.id in world.rendering or is_pooling
            require(is_known or not case.is_unfinished, "a request is lost", case)
        if case.reads_since is not None and case.is_open:
            require(case.is_unfinished, "a reader sleeps beside its output", case)
    require(len(engine._open) == sum(c.is_open for c in world.cases), "open requests", engine)


class Line:
    """Who waits, before a plan is made."""

    def __init__(self, policy: PoolingPolicy) -> None:
        self.retries = [{a.id for a in group} & policy._open.keys() for group in policy._retries]
        waiting = [entry for entry in policy._waiting if entry[1].id in policy._open]
        self.head = min(waiting, key=_turn(policy), default=None)
        self.in_flight = {
            admit.id for flight in policy._flights for admit in flight.group
        } & policy._open.keys()


def _turn(policy: PoolingPolicy) -> Any:
    """The larger priority first, then the earlier arrival, then the earlier admission."""

    def turn(entry: Any) -> Any:
        (_, _, number), admit = entry
        return (0, 0, number) if policy._is_fcfs else (-admit.priority, admit.arrival_time, number)

    return turn


def check_plan(world: Any, plan: PoolPlan, before: Line) -> None:
    config = world.engine._scheduler._policy._config
    ids = set(world.device.groups[plan.step])
    require(not world.is_frozen, "a plan while paused", plan)
    num_tokens = sum(len(column.token_ids) for column in plan.columns)
    is_within = num_tokens <= config.max_num_scheduled_tokens or len(ids) == 1
    require(is_within, "token budget", plan)
    require(len(plan.columns) <= config.max_num_active_seqs, "seats", plan)
    require(len(ids) == len(plan.columns), "a text twice in a plan", ids)
    require(not ids & before.in_flight, "a text in two plans", ids)
    for id in ids:
        case = world.case_of(id)
        is_gone = case is not None and (case.is_over or case.was_aborted)
        require(not is_gone, "work for a request that has ended", case)
    retries = [group for group in before.retries if group]
    if retries:
        require(ids == retries[0], "not what failed last", ids, retries)
    elif before.head is not None:
        require(before.head[1].id in ids, "overtaken", before.head[1].id, ids)


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
    require(case.prompt == world.prompts[case.id], "another prompt", case, case.prompt)
    check_prompt(world, case)
    want = wanted(world, case)
    if case.client.wish.mode == "score_doc":
        scores = [
            (wanted(world, query) @ want.T).max(axis=1).sum()
            for query in _queries_of(world, case)
            if query.id in world.device.ready
        ]
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


def check_prompt(world: Any, case: Any) -> None:
    wish = case.client.wish
    if isinstance(wish.prompt, str):
        return
    limit = world.scenario.max_model_len if wish.truncate == -1 else wish.truncate
    whole = wish.prompt
    if limit is not None:
        whole = whole[-limit:] if wish.keeps_end else whole[:limit]
    require(case.prompt == whole, "another prompt than was asked", case)


def wanted(world: Any, case: Any) -> Any:
    """The embedding, from nothing but the tokens and the wish."""
    wish = case.client.wish
    column = PoolColumn(world.prompts[case.id], None, wish.task or "token_embed")
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


def _must_be_kept(world: Any, case: Any) -> bool:
    """Whatever else happened, there was a query for this document, with a use left."""
    queries = _queries_of(world, case)
    documents = [c for c in world.cases if c.client.wish.mode == "score_doc"]
    return any(
        query.array is not None and query.ended_s < case.client.arrival_s
        for query in queries
    ) and all(query.client.wish.query_uses >= len(documents) for query in queries)  # fmt: skip


def check_error(world: Any, case: Any, error: Exception) -> None:
    """Every error has its cause in what the scenario did."""
    scenario, trouble, wish = world.scenario, world.trouble, case.client.wish
    match error:
        case EngineDeadError() if trouble.has_crashed:
            is_mine = isinstance(error.__cause__, DeviceCrashError)
            require(is_mine or world.is_closing, "another cause of death", repr(error.__cause__))
        case EngineDeadError():
            require(world.is_closing, "the engine died of nothing", error, repr(error.__cause__))
            require(case.id is None or world.was_cancelled, "closed without an abort output", case)
        case QueueOverflowError():
            require(scenario.max_queued is not None, "no limit was set", case)
        case RetryableRequestError():
            require(case.client.request_id in world.refused, "refused", case)
        case TrouperValidationError(parameter="query_key"):
            require(wish.mode == "score_doc", "it asked for no query", case)
            require(not _must_be_kept(world, case), "a query is lost", case)
        case TrouperValidationError():
            # A character of text is a token at most.
            is_long = wish.truncate is None and len(wish.prompt) > scenario.max_model_len
            is_text = isinstance(wish.prompt, str) and not scenario.has_tokenizer
            require(is_long or is_text, "refused a good prompt", case, error)
        case ValueError():
            require(case.id is None and case.client.request_id in world.duplicates, "refused", case)
        case GenerationError():
            is_rendering = case.index in scenario.weather.render_errors
            is_mine = case.id in trouble.failed_alone or case.id in trouble.not_finite
            require(is_rendering or is_mine, "somebody else's fault", case, error)
        case _:
            raise Broken(f"{case}: {error!r}") from error


# When all is over


def check_faults(world: Any, case: Any) -> None:
    """Who was ill must have been told, unless it left, was aborted, or the engine ended first."""
    if case.has_left or case.was_aborted or world.is_closing or world.trouble.has_crashed:
        return
    weather = world.scenario.weather
    is_ill = case.index in weather.poison or case.index in weather.render_errors
    require(case.is_finished or case.error is not None, "no end", case)
    require(not (is_ill and case.is_finished), "a poisonous request went through", case)
    is_fine = case.is_finished and case.id in world.trouble.not_finite
    require(not is_fine, "not finite, and fine", case)


def check_idle(world: Any) -> None:
    """As it was at the beginning: all tables empty."""
    engine = world.engine
    stats = engine.statistics()
    policy: PoolingPolicy = engine._scheduler._policy
    require(stats.num_open_requests == 0, "open requests", stats)
    require(stats.num_rendering == 0, "rendering", stats)
    require(stats.num_prefill_tokens == 0, "tokens in prefill", stats)
    require(not (policy._open or policy._waiting or policy._retries), "requests leak", policy)
    require(not policy._flights, "steps in flight", policy)
    require(world.threads.num_begun == world.threads.num_ended, "a thread is lost")
    for case in world.cases:
        require(case.slot is None or case.slot.is_closed, "a slot is open", case)
