"""What must hold.  `at_rest` looks at the engine whenever no task can go on, the rest when all is over.

These read the policy's own tables and the actors' snapshots, which list what is in theirs: an oracle that saw only
the engine's statistics would believe its lies.
"""

from collections import Counter
from typing import Any

import anyio

from trouper.actors.engine.lifecycle import EngineState
from trouper.actors.engine.request_table import EngineSnapshot
from trouper.actors.engine.wiring import Engine
from trouper.actors.messages.controls import Pause
from trouper.actors.messages.steps import is_state
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.state.sequence import Sequence, State
from trouper.actors.scheduling.state.tier import FIRST_DEADLINE_S, MAX_ORDERS
from trouper.errors import (
    EngineDeadError,
    GenerationError,
    QueueOverflowError,
    RetryableRequestError,
    TrouperValidationError,
)

from .clients import Broken, Case
from .expected import Expected, expected, sampling_of, text_of
from .scenario import VOCAB_SIZE
from .simulated_device import simulated_logprobs


def require(holds: bool, law: str, *facts: object) -> None:
    if not holds:
        raise Broken(f"{law}: {' '.join(map(str, facts))}")


# While it runs


def at_rest(world: Any) -> None:
    """Every task waits and the clock is about to jump: nothing may be left lying about."""
    engine: Engine = world.engine
    policy: Policy = world.policy
    device = world.device
    stats = policy.statistics()
    snapshot = engine.snapshot()
    for name in ("scheduler", "executor 0", "detokenizer"):
        num_left = snapshot.inboxes[name]
        if name == "executor 0" and snapshot.executors[0].call is not None:
            num_left = max(0, num_left - 1)  # a grammar waits behind a call
        require(num_left == 0, "a message is left lying", name, num_left)
    num_rendering = world.threads.num_begun - world.threads.num_ended
    num_queued = snapshot.inboxes["renderer"]
    require(
        num_queued == 0 or num_rendering == world.scenario.num_renderers,
        "a renderer is idle while prompts wait", num_queued, num_rendering,
    )  # fmt: skip
    require(
        stats.num_steps_in_flight == device.num_steps_out,
        "steps in flight", stats, device.num_steps_out,
    )  # fmt: skip
    is_idle = device.is_up and device.num_steps_out == 0
    if is_idle and engine.lifecycle.state is EngineState.AWAKE:
        parked = check_waits_for_tier(policy, anyio.current_time())
        known = policy.table.sequences.values()
        sequences = [s for s in known if s.request.admit.id not in parked]
        ready = [s.id for s in sequences if policy.table.grammars.is_ready(s.request.admit)]
        if not (policy.is_searching or policy.table.grammars.needs_silence):
            require(not ready, "the device is idle while sequences wait", ready, stats)
        is_preparing = policy.table.grammars._preparing is not None
        require(not sequences or is_preparing, "none is prepared while sequences wait for grammars")
    check_blocks(policy)
    check_tier(policy, device)
    check_tables(world, snapshot, policy)
    for case in world.cases:
        if case.reads_since is not None and case.slot is not None and case.is_open:
            require(not _is_readable(case), "a reader sleeps beside its output", case)


def check_blocks(policy: Policy) -> None:
    """Every block is free or held, by as many as its count says; what is shared is equal and read-only."""
    blocks = policy.blocks
    num_groups = len(blocks.layout.windows)
    holders: dict[int, list[tuple[Sequence, int]]] = {}
    running = policy.table.running.snapshot()
    for sequence in policy.table.sequences.values():
        is_running = sequence.id in policy.table.running
        require(
            is_running == (sequence.request_slot >= 0),
            "slot of a sequence that does not run",
            sequence.id,
        )
        require(is_running or not sequence.blocks, "blocks without a slot", sequence.id)
        require(
            sequence.state is not State.FINISHED, "a finished sequence in the table", sequence.id
        )
        require(
            0 <= sequence.num_computed_on_device <= sequence.num_computed
            <= len(sequence.blocks) // num_groups * blocks.block_size,
            "counters", sequence.id, sequence.num_computed_on_device, sequence.num_computed,
        )  # fmt: skip
        for place, block in enumerate(sequence.blocks):
            position, group = divmod(place, num_groups)
            window, computed = blocks.layout.windows[group], sequence.num_computed_on_device
            is_behind = window and (position + 1) * blocks.block_size < computed - window + 2
            require(block or is_behind, "a block inside a window is given back", sequence.id, place)
            is_kept = block and is_behind
            require(not is_kept, "a block behind a window is kept", sequence.id, place)
            if block:
                holders.setdefault(block, []).append((sequence, position))
    free = set(blocks.free_list)
    references = Counter({block: len(who) for block, who in holders.items()})
    references += held_by_tier(policy)
    for block in range(1, blocks.num_blocks):
        is_free = block in free
        require(blocks.num_references(block) == references[block], "references of block", block)
        require(is_free == (references[block] == 0), "free and held, or neither", block)
    require(0 not in references and 0 not in free, "the null block is held or free")
    for block, who in holders.items():
        end = (who[0][1] + 1) * blocks.block_size
        require(
            blocks.hash_of(block) is None or any(holder.num_computed_on_device >= end for holder, _ in who),
            "a prefix is offered before it is there", block,
        )  # fmt: skip
        if len(who) > 1:
            check_shared(block, who, blocks.block_size)
    slots = [sequence.request_slot for sequence in running]
    free_slots = list(policy.table.running.free_slots)
    require(len(set(slots + free_slots)) == len(slots) + len(free_slots), "a slot twice", slots)
    require(
        sorted(slots + free_slots) == list(range(policy.config.max_num_seqs)),
        "a slot is lost",
        slots,
    )
    require(len(slots) <= policy.config.max_num_active_seqs, "too many run", slots)


def held_by_tier(policy: Policy) -> Counter[int]:
    """Count how often each block is held until the tier on disk has answered."""
    tier = policy._tier
    if tier is None:
        return Counter()
    held = Counter(block for block, name, _ in tier._stores.values() if not is_state(name))
    if tier._fetch is not None:
        held.update(tier._fetch.prefix + tier._fetch.blocks)
    return held


def rows_of_tier(policy: Policy) -> set[int]:
    """Return the rows of states that are neither free nor offered until the tier on disk has answered."""
    tier, states = policy._tier, policy.states
    if tier is None or states is None:
        return set()
    stored = {row for row, name, _ in tier._stores.values() if is_state(name)}
    require(states.rows._held == stored, "rows are held that are not being stored", stored)
    fetch = tier._fetch
    fetched = set() if fetch is None or fetch.row is None else {fetch.row}
    require(
        not fetched & set(states.rows._offered.values()), "a state is offered before it is there"
    )
    return fetched | states.rows._withdrawn


def check_tier(policy: Policy, device: Any) -> None:
    """Scheduler and device have the same orders open, and no block is offered while it is being fetched."""
    tier = policy._tier
    if tier is None:
        return
    fetch = tier._fetch
    wanted = tier._stores.keys() | tier._touches
    wanted |= {fetch.number} if fetch is not None else set()
    wanted |= {tier._removal} if tier._removal else set()
    wanted |= {tier._barrier.number} if tier._barrier is not None else set()
    require(wanted <= device.tier.open, "the device has no such order", wanted, device.tier.open)
    if tier._pending is None and tier._barrier is None:
        # The thread may be within one order that was cancelled.
        surplus = device.tier.open - wanted
        require(len(surplus) <= 1, "orders that nobody waits for", surplus)
    require(len(device.tier.open) <= MAX_ORDERS + 1, "orders without an answer", device.tier.open)
    rows_of_tier(policy)
    for block in fetch.blocks if fetch is not None else ():
        is_offered = policy.blocks.hash_of(block) is not None
        require(not is_offered, "a prefix is offered before it is there", block)


def check_waits_for_tier(policy: Policy, now: float) -> set[int]:
    """A sequence waits for the tier only until a deadline.  Returns the requests with one that waits."""
    tier = policy._tier
    if tier is None:
        return set()
    parked = [sought for sought in tier._sought if sought.is_parked]
    for sought in parked:
        until = sought.deadline_s
        is_bounded = until is not None and now <= until <= now + FIRST_DEADLINE_S
        require(is_bounded, "a wait for the disk without an end", sought.sequence.id, now, until)
    return {sought.sequence.request.admit.id for sought in parked}


def check_shared(block: int, who: list[tuple[Sequence, int]], block_size: int) -> None:
    first, position = who[0]
    end = (position + 1) * block_size
    for sequence, its_position in who:
        require(its_position == position, "a shared block at two positions", block)
        require(sequence.num_computed >= end, "a shared block that is still written", block)
        require(sequence.token_ids(0, end) == first.token_ids(0, end), "other tokens shared", block)
        require(
            sequence.request.admit.cache_salt == first.request.admit.cache_salt,
            "a block shared across salts", block,
        )  # fmt: skip


def check_tables(world: Any, snapshot: EngineSnapshot, policy: Policy) -> None:
    """The actors agree about who is there, and everybody who waits is on somebody's list."""
    assert snapshot.detokenizer is not None
    tracked = set(snapshot.detokenizer.sequences)
    known = policy.table.sequences.keys() - policy.table.ghosts.keys()
    require(tracked == known, "the tables of scheduler and detokenizer differ", tracked ^ known)
    require(not policy.table.ghosts or policy.is_searching, "ghosts without a search")
    for case in world.cases:
        if case.id is None:
            continue
        mine = set(range(case.id, case.id + case.client.wish.n)) & tracked
        if case.is_over:
            require(not mine, "the engine works for a client that has left", case)
        else:
            is_rendering = case.id in world.rendering
            require(bool(mine) or is_rendering or case.slot.is_over, "a request is lost", case)
    require(
        len(snapshot.requests) == sum(case.is_open for case in world.cases),
        "open requests",
        snapshot.requests,
    )


def _is_readable(case: Case) -> bool:
    slot = case.slot
    assert slot is not None
    is_final_only = case.client.wish.output_kind == 2
    return slot._error is not None or bool(slot._due and not (is_final_only and slot._num_open))


# When a plan is made


def check_plan(world: Any, plan: Any, before: set[int]) -> None:
    """`before`: who ran already."""
    policy: Policy = world.policy
    config = policy.config
    require(not world.is_frozen, "a plan while paused", plan)
    require(sum(plan.num_scheduled_tokens) <= config.max_num_scheduled_tokens, "token budget", plan)
    require(len(plan.request_slots) <= config.max_num_active_seqs, "seats", plan)
    planned = [entry[0] for entry in policy.in_flight[-1].entries]
    ids = [sequence.id for sequence in planned if not sequence.is_ghost]
    for id in ids:
        case = world.case_of(id)
        if case is not None and (case.is_over or case.was_aborted):
            case.num_late_plans += 1
            # A stop string's news are on their way while one more step may be planned.
            allowed = 1 if case.is_finished and not case.was_aborted else 0
            require(case.num_late_plans <= allowed, "work for a request that has ended", case)
    check_overtaking(policy, before)
    if policy.turns is not None and not policy.is_searching:
        check_turns(policy, plan)
    check_starts(world, plan)


def check_turns(policy: Policy, plan: Any) -> None:
    """Prompts in a step: by priority, within its seconds, and none that goes on behind one that ends."""
    turns, entries = policy.turns, policy.in_flight[-1].entries
    assert turns is not None
    if len(policy.in_flight) > 1:
        for step in list(policy.in_flight)[:-1]:
            most_s = 0.01 if any(end - start > 1 for _, _, start, end, _ in step.entries) else 0.05
            require(step.estimate_s < most_s, "a plan behind a long one", step.estimate_s)
    chunks = [
        (sequence, start, end, num_sampled)
        for sequence, _, start, end, num_sampled in entries
        if end - start > 1
    ]
    ranks = [sequence.order[0] for sequence, *_ in chunks]
    require(ranks == sorted(ranks), "a prompt of a lower priority goes first", ranks)
    if policy.config.enable_chunked_prefill:
        # A prompt that is shortened because blocks are short may follow one that ends.
        layout = policy.blocks.layout
        short = layout.num_step_tokens if layout.has_windows else 0
        ends = [num_sampled for _, start, end, num_sampled in chunks if end - start != short]
        require(ends == sorted(ends), "a prompt goes on behind one that ends", ends)
    if chunks and not policy.table.running.num_preemptions:
        planned = {sequence.id for sequence, *_ in entries}
        held = [s for s in policy.table.running.snapshot() if s.id not in planned]
        held = [s for s in held if s.num_computed < s.num_prompt and s.num_tokens < s.limit]
        best = min((s.order[0] for s in held), default=max(ranks))
        require(best >= max(ranks), "a prompt of a higher priority is held back", held)
    if turns.times.is_known and policy.config.enable_chunked_prefill:
        costs = [turns.times.cost(start, end - start) for _, start, end, _ in chunks]
        is_least = sum(end - start for _, start, end, _ in chunks) <= 16
        spent_s, most_s = sum(costs), turns.budget.last_s * (1 + 1e-6)
        require(is_least or spent_s <= most_s, "the seconds of a step", spent_s, most_s)


def check_starts(world: Any, plan: Any) -> None:
    """A step goes on where the last one has come to with a slot, by drafts that were right as well; nothing is computed twice."""
    if plan.step in world.slots:
        return  # `plan` has called itself, at the end of a search
    ends, new = world.ends, {sequence.request_slot for sequence in plan.new_sequences}
    world.slots[plan.step] = plan.request_slots
    world.placed.update(dict.fromkeys(new, plan.step))
    entries = plan.request_slots, plan.num_computed_tokens, plan.num_scheduled_tokens
    for slot, start, count in zip(*entries, strict=True):
        require(slot in new or start == ends[slot], "computed twice or never", slot, start, ends)
        ends[slot] = start + count


def check_overtaking(policy: Policy, before: set[int]) -> None:
    """A sequence that has just started is no worse than any that could start: one whose grammar is not ready cannot."""
    if policy.pause is not Pause.NONE or policy.is_searching:  # suspects run before their turn
        return
    waiting, grammars = policy.table.waiting, policy.table.grammars
    heads = [
        next((s for s in queue.live() if grammars.is_ready(s.request.admit)), None)
        for queue in (waiting.fresh, waiting.returning)
    ]
    for sequence in policy.table.running.snapshot():
        if sequence.id in before or policy.config.policy == "fcfs":
            continue
        for head in heads:
            # In turns, equals may pass each other: `fluid_oracle` says when.
            length = 2 if policy.turns is None else 1
            is_first = head is None or _turn(sequence)[:length] <= _turn(head)[:length]
            require(is_first, "overtaken", sequence, head)


def _turn(sequence: Sequence) -> tuple[float, float]:
    """The larger priority first, then the earlier arrival."""
    admit = sequence.request.admit
    return -admit.options.priority, admit.arrival_time


# What a reader gets


def check_delay(
    world: Any, case: Case, since: float, news: list[tuple[int, int]], now: float
) -> None:
    """Head of line: whoever waits gets a token in the very moment in which the device has it."""
    scenario, wish = world.scenario, case.client.wish
    interval = max(scenario.stream_interval, wish.stream_interval or 1)
    if wish.output_kind == 2 or interval > 1 or case.prompt is None:
        return
    for index, position in news:
        ready = world.device.ready.get((case.id + index, len(case.prompt) + position))
        require(ready is not None, "a token that the device never made", case, index, position)
        require(now <= max(since, ready) + 1e-9, "a token came late", case, now - ready)


def check_case(world: Any, case: Case) -> None:
    """The verdict on one client's story."""
    if case.error is not None:
        world.oracles.check_error(world, case, case.error)
    if case.prompt is None:
        return
    scenario, wish = world.scenario, case.client.wish
    if not isinstance(wish.prompt, str):
        require(case.prompt == wish.prompt, "another prompt", case, case.prompt)
    drawn = world.seeds.get(case.id)
    for index, got in enumerate(case.completions):
        if drawn is None and got.token_ids:
            raise Broken(f"{case}: tokens without a slot")
        sampling = sampling_of(wish, index, drawn or 0)
        want = expected(wish, case.prompt, sampling, scenario.max_model_len, scenario.has_tokenizer)
        check_completion(world, case, got, want)
    if case.num_cached is not None:
        check_cached(world, case, case.num_cached)
    if scenario.log_stats and case.is_finished:
        check_times(case)


def check_times(case: Case) -> None:
    """What the statistics say of a request that its reader has seen to the end."""
    stats = case.slot.stats
    num_tokens = [len(completion.token_ids) for completion in case.completions]
    require(stats.num_generation_tokens == sum(num_tokens), "tokens counted", case, stats)
    require(stats.max_num_generation_tokens == max(num_tokens), "longest counted", case, stats)
    moments = [
        moment
        for moment in (
            stats.arrival_ts, stats.queued_ts, stats.scheduled_ts,
            stats.first_token_ts, stats.last_token_ts,
        )
        if moment is not None
    ]  # fmt: skip
    require(moments == sorted(moments), "out of order", case, stats)


def check_completion(world: Any, case: Case, got: Any, want: Expected) -> None:
    has_text = world.scenario.has_tokenizer
    num_tokens = len(got.token_ids)
    require(got.token_ids == want.token_ids[:num_tokens], "wrong tokens", case, got.token_ids, want)
    match got.finish_reason:
        case "stop" | "length" | "repetition":
            mine = (got.token_ids, got.text, got.finish_reason, got.stop_reason)
            require(mine == tuple(want), "wrong end", case, mine, want)
        case "abort":
            require(case.was_aborted or world.is_closing, "an abort that nobody asked for", case)
            text = text_of(got.token_ids) if has_text else ""
            require(got.text == text, "text withheld", case, got.text)
        case None:
            require(not case.is_finished, "finished without a reason", case)
            text = text_of(got.token_ids) if has_text else ""
            require(text.startswith(got.text), "wrong text", case, got.text, text)
        case other:
            raise Broken(f"{case}: finish_reason {other}")
    wish = case.client.wish
    if wish.logprobs is not None:
        require(len(got.logprobs) == num_tokens, "logprobs", case, len(got.logprobs), num_tokens)
        for i, (token, position) in enumerate(zip(got.token_ids, got.logprobs, strict=True)):
            want_logprobs = simulated_logprobs(
                token, len(case.prompt or ()) + i, wish.logprobs, VOCAB_SIZE
            )
            mine = [(id, entry.logprob) for id, entry in position.items()]
            require(
                mine == list(zip(want_logprobs.token_ids, want_logprobs.logprobs, strict=True)),
                "other logprobs", case, i, mine,
            )  # fmt: skip
    if wish.prompt_logprobs is not None and got.token_ids:
        check_prompt_logprobs(case)


def check_prompt_logprobs(case: Case) -> None:
    wanted, prompt = case.client.wish.prompt_logprobs, case.prompt or ()
    told = case.prompt_logprobs
    require(told is not None and len(told) == len(prompt), "prompt logprobs", case, told)
    assert told is not None
    assert wanted is not None
    require(told[0] is None, "the first prompt token has a logprob", case)
    for i in range(1, len(prompt)):
        want = simulated_logprobs(prompt[i], i, wanted, VOCAB_SIZE)
        mine = [(id, entry.logprob) for id, entry in told[i].items()]
        require(
            mine == list(zip(want.token_ids, want.logprobs, strict=True)),
            "other prompt logprobs", case, i, mine,
        )  # fmt: skip


def check_cached(world: Any, case: Case, num_cached: int) -> None:
    """Whole blocks, not all of the prompt, and only what somebody with the same salt has computed."""
    prompt, size, salt = case.prompt or (), world.scenario.block_size, case.client.wish.salt
    require(num_cached % size == 0 and num_cached < len(prompt), "cached tokens", case, num_cached)
    if num_cached == 0:
        return
    require(world.scenario.prefix_caching, "a hit without a cache", case)
    # A sibling may find what its own leader has left.
    sources = [
        (*world.prompts.get(other.id, ()), *world.device.sampled.get(other.id + index, ()))
        for other in world.cases
        if other.id is not None and other.client.wish.salt == salt
        for index in range(other.client.wish.n)
        if other is not case or index > 0
    ]
    require(
        any(source[:num_cached] == prompt[:num_cached] for source in sources),
        "a prefix that nobody with this salt had", case, num_cached,
    )  # fmt: skip


def check_error(world: Any, case: Any, error: Exception) -> None:
    """Every error has its cause in what the scenario did.  Of either kind of engine."""
    scenario, trouble = world.scenario, world.trouble
    match error:
        case EngineDeadError() if trouble.has_crashed:
            is_mine = isinstance(error.__cause__, world.death_cause)
            require(is_mine or world.is_closing, "another cause of death", repr(error.__cause__))
        case EngineDeadError():
            require(world.is_closing, "the engine died of nothing", error, repr(error.__cause__))
            require(case.id is None or world.was_cancelled, "closed without an abort output", case)
        case QueueOverflowError():
            require(scenario.max_queued is not None, "no limit was set", case)
        case RetryableRequestError():
            require(case.client.request_id in world.refused, "refused", case)
        case TrouperValidationError():
            world.oracles.check_refusal(world, case, error)
        case ValueError():
            require(case.id is None and case.client.request_id in world.duplicates, "refused", case)
        case GenerationError():
            is_rendering = case.index in scenario.weather.render_errors
            is_mine = bool(case.ids & (trouble.failed_alone | trouble.not_finite.keys()))
            require(is_rendering or is_mine, "a fault of another request", case, error)
        case _:
            raise Broken(f"{case}: {error!r}") from error


def check_refusal(world: Any, case: Case, error: TrouperValidationError) -> None:
    is_long = len(case.client.wish.prompt) >= world.scenario.max_model_len
    require(is_long, "refused a good prompt", case, error)


# When all is over


def check_faults(world: Any, case: Any) -> None:
    """Who was ill must have been told, unless it left, was aborted, or the engine ended first.  Of either kind."""
    if case.has_left or case.was_aborted or world.is_closing or world.trouble.has_crashed:
        return
    weather = world.scenario.weather
    must_fail = case.index in weather.poison or case.index in weather.render_errors
    require(case.is_finished or case.error is not None, "no end", case)
    require(not (must_fail and case.is_finished), "a poisonous request went through", case)
    if case.id is not None and case.is_finished:
        world.oracles.check_finite(world, case)


def check_finite(world: Any, case: Case) -> None:
    for index, completion in enumerate(case.completions):
        position = world.trouble.not_finite.get(case.id + index, 10**9)
        is_surplus = position >= len(case.prompt or ()) + len(completion.token_ids)
        require(is_surplus, "not finite, and fine", case)


def check_idle(world: Any) -> None:
    """As it was at the beginning: all tables empty, all blocks free."""
    engine: Engine = world.engine
    stats = engine.statistics()
    policy: Policy = world.policy
    require(stats.num_open_requests == 0, "open requests", stats)
    require(stats.num_rendering == 0, "rendering", stats)
    require(stats.num_tracked == 0, "tracked", stats)
    mine = stats.scheduler
    require(mine.num_running + mine.num_waiting + mine.num_deferred == 0, "sequences", stats)
    require(mine.num_steps_in_flight == 0, "steps in flight", stats)
    num_held = len(held_by_tier(policy))
    require(mine.num_blocks_free + num_held == mine.num_blocks_total, "blocks leak", stats)
    num_pending = len(rows_of_tier(policy))
    require(mine.num_state_rows_pending == num_pending, "rows of states leak", stats)
    require(not policy.table.requests and not policy.table.sequences, "requests leak", policy)
    if policy.turns is not None:
        require(not policy.turns.has_prompts, "prompts leak", policy.turns)
    suspects = policy.snapshot().suspects
    require(not suspects, "suspects of a fault that have ended", suspects)
    check_blocks(policy)
    for name, owners in policy.blocks.prefixes().items():
        require(
            bool(owners) and all(policy.blocks.hash_of(b) == name for b in owners),
            "the prefix cache contradicts itself", owners,
        )  # fmt: skip
    if world.scenario.log_stats:
        observer = engine.snapshot().observer
        assert observer is not None
        counted = observer.num_ended
        require(counted == len(world.prompts), "ends counted", counted, len(world.prompts))
    require(world.threads.num_begun == world.threads.num_ended, "a thread is lost")
    for case in world.cases:
        require(case.slot is None or case.slot.is_closed, "a slot is open", case)
