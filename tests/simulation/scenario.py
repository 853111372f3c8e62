"""What is drawn: one engine's sizes, its clients, and what goes wrong.  Plain data, so it can be shrunk.

The dice are split by port: who arrives, what they ask, how they behave, what fails.  A draw more in one
of them leaves the others as they were.
"""

import copy
import random
from collections.abc import Callable
from typing import Literal

import msgspec

from trouper.config.kv_layout import KVLayout

VOCAB_SIZE = 48
EOS = 0
STEP_S = 0.01
FAST = 0.002, 0.001, 0.001, 0.001, 1e-5, 1e-5
SLOW = 0.005, 0.005, 0.01, 0.002, 1e-4, 1e-5
WINDOWS = (None, 3), (None, 5, 5, 2), (4,), (None, 9)
Dice = Callable[[str], random.Random]
Drafters = Literal["mixed", "true", "junk"]
DRAFTERS: tuple[Drafters, ...] = ("mixed", "mixed", "true", "junk")  # as often as they are drawn


class Wish(msgspec.Struct, kw_only=True):
    """What one client asks for."""

    prompt: tuple[int, ...] | str
    max_tokens: int = 4
    n: int = 1
    temperature: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    output_kind: int = 0
    stream_interval: int | None = None
    priority: int = 0
    salt: str | None = None
    key: str = ""
    repetition: tuple[int, int] | None = None  # patterns of up to so many tokens, so many times
    grammar: int | None = None  # which of a few, that the device must prepare


class Client(msgspec.Struct, kw_only=True):
    """How one client behaves; times are virtual seconds after its start."""

    wish: Wish
    request_id: str
    arrival_s: float = 0.0
    style: Literal["bare", "with"] = "with"
    pause_s: float = 0.0  # between two reads: a slow reader
    leaves_after: int | None = None  # outputs
    patience_s: float | None = None  # cancelled then
    aborted_at_s: float | None = None  # by another client


class Operation(msgspec.Struct, kw_only=True):
    """What the operator does to the engine as a whole, and takes back after a while."""

    kind: Literal["paused", "sleep", "reset"]
    after_s: float  # since the operation before
    hold_s: float = 0.0
    mode: Literal["abort", "wait", "keep"] = "keep"
    level: int = 0
    tags: tuple[str, ...] | None = None  # what is woken first; the rest follows
    preempt: Literal["no", "recompute", "resample"] = "no"
    patience_s: float | None = None  # the operator is cancelled then


class Weather(msgspec.Struct, kw_only=True):
    """What goes wrong.  Clients are named by their index."""

    step_error_rate: float = 0.0  # passing errors, nobody's fault
    slow_step_rate: float = 0.0
    crash_at_step: int | None = None
    poison: tuple[int, ...] = ()  # every step with them raises
    not_finite: tuple[tuple[int, int], ...] = ()  # client, output position
    render_errors: tuple[int, ...] = ()
    thread_delay_s: float = 0.0  # at most
    call_error_rate: float = 0.0  # going to sleep, waking up


class DiskWeather(msgspec.Struct, kw_only=True):
    """What a disk does wrong.  Rates are of each call."""

    num_files: int
    fault_rate: float = 0.0
    # Of each order: a file is damaged behind the tier's back.
    damage_rate: float = 0.0
    # At most this long for an order; a tenth takes much longer.
    order_s: float = 0.005
    # From the order of this number on, the disk hangs for so long.
    hangs_at: int | None = None
    hang_s: float = 0.0


class Scenario(msgspec.Struct, kw_only=True):
    seed: int  # of the schedule and of everything drawn at run time
    clients: tuple[Client, ...]
    weather: Weather = msgspec.field(default_factory=Weather)
    operations: tuple[Operation, ...] = ()  # one after the other
    has_priorities: bool = False  # PCT instead of shuffled batches
    closes_at_s: float | None = None  # the engine ends while clients still wait
    cancelled_at_step: int | None = None  # the whole program, before this step of any task
    num_blocks: int = 12  # usable ones
    block_size: int = 4
    max_model_len: int = 32
    max_num_seqs: int = 4
    token_budget: int = 16
    chunked: bool = True
    long_prefill_threshold: int = 0
    is_adaptive: bool = False
    policy: Literal["priority", "fcfs"] = "priority"
    reserve_full_isl: bool = True
    watermark: float = 0.0
    prefix_caching: bool = True
    steps_in_flight: int = 2
    max_step_ms: int | None = 0
    # Of the machine, as `StepTimes` has them; none: each step takes the same.
    coefficients: tuple[float, float, float, float, float, float] | None = None
    misjudged: float = (
        1.0  # times the seconds that the policy believes in at first; 0: it knows nothing
    )
    # Of the groups of layers.  `num_blocks` is the number for each group.
    windows: tuple[int | None, ...] = (None,)
    # The most tokens of a sequence in a step when blocks are short.
    short_step: int = 24
    # Rows for snapshots of recurrent states; 0 stands for a model without states.
    num_snapshots: int = 0
    # Of the tier on disk; None without it.
    disk: DiskWeather | None = None
    num_drafts: int = 0  # that a step may verify
    drafters: Drafters = "mixed"  # of all sequences; mixed: each draft is right to a drawn length
    num_renderers: int = 1
    stream_interval: int = 1
    max_queued: int | None = None
    has_tokenizer: bool = False
    log_stats: bool = False


def layout_of(scenario: Scenario) -> KVLayout:
    step = scenario.short_step if scenario.chunked else scenario.max_model_len
    return KVLayout(scenario.block_size, scenario.windows, step)


def draw(seed: int) -> Scenario:
    """The scenario that a seed stands for."""
    return draw_with(streams_of(seed), seed=seed)


def draw_with_drafts(seed: int) -> Scenario:
    """One whose steps verify drafts, of drafters that know everything, nothing or some of it."""
    scenario = draw(seed)
    scenario.num_drafts = scenario.num_drafts or 3
    scenario.drafters = streams_of(seed)("drafters").choice(DRAFTERS)
    scenario.steps_in_flight = 1
    return scenario


def draw_with_states(seed: int) -> Scenario:
    """One whose model keeps recurrent states, with few rows or many."""
    scenario = draw(seed)
    scenario.num_snapshots = scenario.num_snapshots or 1 + seed % 8
    return scenario


def draw_with_windows(seed: int) -> Scenario:
    """One whose layers have windows, in little memory."""
    scenario = draw(seed)
    scenario.num_snapshots = 0
    if scenario.windows == (None,):
        give_windows(scenario, streams_of(seed)("more windows"))
    return scenario


def give_windows(scenario: Scenario, dice: random.Random) -> None:
    """Divide the layers into groups with windows, and the memory likewise: for at least one sequence of any length."""
    scenario.windows = dice.choice(WINDOWS)
    scenario.short_step = dice.choice((2, 5, 24))
    layout, num_groups = layout_of(scenario), len(scenario.windows)
    least = layout.num_blocks(scenario.max_model_len)
    whole = scenario.num_blocks * num_groups
    scenario.num_blocks = -(-dice.choice((least, least, least + 2, 2 * least, whole)) // num_groups)


def draw_with_tier(seed: int) -> Scenario:
    """One with a tier on disk, in little memory, and with clients that come again when their blocks are gone."""
    scenario, dice = draw(seed), streams_of(seed)("more tiers")
    scenario.num_snapshots, scenario.prefix_caching = 0, True
    if scenario.disk is None:
        scenario.windows = (None,)
        scenario.num_blocks = 2 * scenario.max_model_len // scenario.block_size
        give_disk(scenario, dice)
    return scenario


def draw_with_states_on_disk(seed: int) -> Scenario:
    """One with a tier on disk whose model keeps recurrent states."""
    scenario = draw_with_tier(seed)
    scenario.num_snapshots = streams_of(seed)("more rows").choice((2, 4, 8))
    return scenario


def draw_with_bad_disk(seed: int) -> Scenario:
    """One whose disk keeps everything, and much of it wrongly."""
    scenario = draw_with_tier(seed)
    scenario.disk = DiskWeather(num_files=80, fault_rate=0.2, damage_rate=0.5, order_s=0.1 * STEP_S)
    return scenario


def give_disk(scenario: Scenario, dice: random.Random) -> None:
    """Add a tier on disk.  Some prompts come again, and the cache is reset, so that blocks are found there."""
    scenario.disk = draw_disk(dice)
    last_s = max(client.arrival_s for client in scenario.clients)
    for client in dice.sample(scenario.clients, min(4, len(scenario.clients))):
        wish = copy.deepcopy(client.wish)
        wish.max_tokens, wish.min_tokens = min(wish.max_tokens, 3), 0
        later_s = last_s + dice.uniform(10, 50) * STEP_S
        name = f"{client.request_id} again"
        scenario.clients += (Client(wish=wish, request_id=name, arrival_s=later_s),)
    if dice.random() < 0.7:
        reset = Operation(kind="reset", after_s=dice.uniform(10, 30) * STEP_S)
        reset.preempt = dice.choice(("no", "recompute", "resample"))
        scenario.operations += (reset,)


def draw_disk(dice: random.Random) -> DiskWeather:
    disk = DiskWeather(
        num_files=dice.choice((3, 10, 40, 40)),
        fault_rate=dice.choice((0.0, 0.0, 0.05, 0.3)),
        damage_rate=dice.choice((0.0, 0.0, 0.05, 0.3)),
        order_s=dice.choice((0.1, 0.5, 2.0)) * STEP_S,
    )
    if dice.random() < 0.3:
        disk.hangs_at, disk.hang_s = dice.randrange(1, 30), dice.choice((1.0, 30.0, 1e9))
    return disk


def draw_without_states(seed: int) -> Scenario:
    """One whose model keeps only keys and values, so that a failed step's sequences go on where they were."""
    scenario = draw(seed)
    scenario.num_snapshots = 0
    return scenario


def streams_of(seed: int) -> Dice:
    """Dice for each port."""
    streams: dict[str, random.Random] = {}
    return lambda port: streams.setdefault(port, random.Random(f"{seed}:{port}"))


def draw_with(dice: Dice, *, seed: int) -> Scenario:
    sizes, arrivals, times = dice("sizes"), dice("arrivals"), dice("times")
    num_drafts = dice("drafts").choice((0, 0, 1, 3, 7))
    block_size = sizes.choice((1, 2, 4, 4))
    max_model_len = sizes.choice((16, 24, 32))
    least = -(-max_model_len // block_size)
    num_blocks = least + sizes.choice((0, 0, 1, 3, least, 3 * least))
    max_num_seqs = sizes.choice((1, 2, 3, 4, 8))
    chunked = sizes.random() < 0.8
    budget = max(sizes.choice((2, 3, 5, 8, 16, 64)), max_num_seqs)
    if not chunked:
        budget = max(budget, max_model_len)
    has_tokenizer = sizes.random() < 0.25
    num_clients = arrivals.choice((1, 2, 3, 4, 4, 5, 6, 8))
    spread_s = arrivals.choice((0.0, 0.0, 0.03, 0.1, 0.4))
    prefixes = [draw_prompt(dice("lengths"), max_model_len - 4) for _ in range(2)]
    clients = tuple(
        draw_client(dice, index, spread_s, prefixes, max_model_len, max_num_seqs, has_tokenizer)
        for index in range(num_clients)
    )
    for client in clients:
        client.wish.key = times.choice(("", "", "x", "y"))
    scenario = Scenario(
        seed=seed,
        clients=clients,
        weather=draw_weather(dice("faults"), num_clients),
        operations=draw_operations(dice("operator")),
        has_priorities=sizes.random() < 0.25,
        closes_at_s=sizes.uniform(0, 0.3) if sizes.random() < 0.06 else None,
        cancelled_at_step=sizes.randrange(1, 600) if sizes.random() < 0.06 else None,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        token_budget=budget,
        chunked=chunked,
        long_prefill_threshold=sizes.choice((0, 0, 0, 2, 5)),
        is_adaptive=sizes.random() < 0.3,
        policy=sizes.choice(("priority", "priority", "fcfs")),
        reserve_full_isl=sizes.random() < 0.5,
        watermark=sizes.choice((0.0, 0.0, 0.1)),
        prefix_caching=sizes.random() < 0.8,
        steps_in_flight=sizes.choice((1, 2, 2, 3)),
        max_step_ms=times.choice((0, 0, None, None, None, 20, 60)),
        coefficients=times.choice((None, FAST, SLOW)),
        misjudged=times.choice((0.0, 0.4, 1.0, 1.0, 3.0)),
        num_snapshots=dice("states").choice((0, 0, 0, 2, 6)),
        num_drafts=num_drafts,
        num_renderers=sizes.choice((1, 1, 2, 3)),
        stream_interval=sizes.choice((1, 1, 1, 3)),
        max_queued=sizes.choice((2, 4)) if sizes.random() < 0.08 else None,
        has_tokenizer=has_tokenizer,
        log_stats=sizes.random() < 0.5,
    )
    if not scenario.num_snapshots and dice("windows").random() < 0.4:
        give_windows(scenario, dice("windows"))
    if scenario.prefix_caching and scenario.windows == (None,) and dice("tier").random() < 0.5:
        give_disk(scenario, dice("tier"))
    return scenario


def draw_prompt(dice: random.Random, longest: int) -> tuple[int, ...]:
    length = min(longest, dice.choice((1, 2, 4, 5, 8, 9, 12, 17, 20)))
    return tuple(dice.randrange(1, VOCAB_SIZE) for _ in range(length))


def draw_client(
    dice: Dice,
    index: int,
    spread_s: float,
    prefixes: list[tuple[int, ...]],
    max_model_len: int,
    max_num_seqs: int,
    has_tokenizer: bool,
) -> Client:
    lengths, behaviour = dice("lengths"), dice("behaviour")
    wish = draw_wish(lengths, prefixes, max_model_len, max_num_seqs, has_tokenizer)
    if dice("grammars").random() < 0.15:
        wish.grammar = dice("grammars").randrange(4)
    client = Client(
        wish=wish,
        request_id=f"r{index}",
        arrival_s=dice("arrivals").uniform(0, spread_s),
    )
    draw_behaviour(behaviour, index, client, num_steps=20)
    return client


def draw_behaviour(behaviour: random.Random, index: int, client: Client, *, num_steps: int) -> None:
    """`num_steps`: about how long its request takes at most."""
    client.style = behaviour.choice(("bare", "with"))
    kind = behaviour.random()
    if kind < 0.10:
        client.leaves_after = behaviour.randrange(4)
    elif kind < 0.28:
        client.patience_s = behaviour.choice(
            (0.0, STEP_S, behaviour.uniform(0, num_steps * STEP_S))
        )
    elif kind < 0.42:
        client.aborted_at_s = behaviour.choice(
            (0.0, STEP_S, behaviour.uniform(0, 3 * num_steps // 4 * STEP_S))
        )
    if behaviour.random() < 0.15:
        client.pause_s = behaviour.choice((0.5, 3.0, 12.0)) * STEP_S
    if index and behaviour.random() < 0.06:
        client.request_id = (
            f"r{behaviour.randrange(index)}"  # a duplicate, if that one is still open
        )
    if client.leaves_after is not None or client.pause_s:
        client.style = "with"  # who may leave in the loop's body says so


def draw_wish(
    dice: random.Random,
    prefixes: list[tuple[int, ...]],
    max_model_len: int,
    max_num_seqs: int,
    has_tokenizer: bool,
) -> Wish:
    shared = dice.random()
    if shared < 0.3:
        prompt = draw_prompt(dice, max_model_len - 1)
    else:
        prefix = dice.choice(prefixes)
        prompt = prefix if shared < 0.6 else prefix + draw_prompt(dice, 4)[:4]
    if dice.random() < 0.03:
        prompt = prompt * 8  # too long, as a rule
    is_random = dice.random() < 0.6
    n = min(max_num_seqs, dice.choice((1, 1, 1, 2, 3))) if is_random else 1
    wish = Wish(
        prompt=prompt,
        max_tokens=dice.choice((1, 1, 2, 3, 5, 8, 12)),
        n=n,
        temperature=1.0 if is_random else 0.0,
        seed=dice.choice((None, 7, 11, 2**63 - 1)) if is_random else None,
        ignore_eos=dice.random() < 0.3,
        output_kind=dice.choice((0, 0, 1, 1, 2)),
        priority=dice.choice((0, 0, 0, 1, 5)),
        salt=dice.choice((None, None, None, "a", "b")),
    )
    draw_extras(dice, wish)
    if has_tokenizer:
        if dice.random() < 0.5:
            wish.prompt = "".join("abcdef"[token % 6] for token in prompt)
        if dice.random() < 0.7:
            wish.stop = dice.choice((("a",), ("ab", "cd"), ("fa", "bcd"), ("e", "ef")))
            wish.include_stop = dice.random() < 0.3
    return wish


def draw_extras(dice: random.Random, wish: Wish) -> None:
    """What few requests have."""
    if dice.random() < 0.25:
        wish.stop_token_ids = tuple(dice.randrange(VOCAB_SIZE) for _ in range(12))
    if dice.random() < 0.15:
        wish.min_tokens = dice.randrange(1, wish.max_tokens + 1)
    if dice.random() < 0.08:
        wish.logprobs = dice.choice((0, 2))
    if dice.random() < 0.06:
        wish.prompt_logprobs = 1
    if dice.random() < 0.08:
        wish.stream_interval = 2
    if dice.random() < 0.1:
        wish.repetition = (dice.randrange(1, 4), 2)


def draw_operations(dice: random.Random) -> tuple[Operation, ...]:
    operations = [
        Operation(
            kind=dice.choice(("paused", "sleep", "sleep", "reset")),
            after_s=dice.choice((0.0, STEP_S, dice.uniform(0, 12 * STEP_S))),
            hold_s=dice.choice((0.0, 0.5 * STEP_S, 8 * STEP_S)),
            mode=dice.choice(("abort", "wait", "keep")),
            level=dice.randrange(3),
            tags=dice.choice((None, None, ("weights",), ("kv_cache",), ("scheduling",))),
            preempt=dice.choice(("no", "recompute", "resample")),
            patience_s=dice.uniform(0, 10 * STEP_S) if dice.random() < 0.2 else None,
        )
        for _ in range(dice.choice((0, 0, 0, 1, 1, 2)))
    ]
    return tuple(operations)


def draw_weather(dice: random.Random, num_clients: int) -> Weather:
    """Swarm style: first which kinds of trouble there are, none to four, then how much of each."""
    weather = Weather()
    kinds = (
        "call_error",
        "step_error",
        "slow",
        "crash",
        "poison",
        "not_finite",
        "render_error",
        "threads",
    )
    for kind in dice.sample(kinds, dice.choice((0, 0, 1, 1, 2, 2, 3, 4))):
        match kind:
            case "step_error":
                weather.step_error_rate = dice.choice((0.03, 0.1, 0.3))
            case "call_error":
                weather.call_error_rate = 0.4
            case "slow":
                weather.slow_step_rate = 0.2
            case "crash" if dice.random() < 0.3:
                weather.crash_at_step = dice.randrange(1, 20)
            case "poison":
                weather.poison = tuple(
                    dice.sample(range(num_clients), min(num_clients, dice.choice((1, 1, 2))))
                )
            case "not_finite":
                weather.not_finite = ((dice.randrange(num_clients), dice.randrange(4)),)
            case "render_error":
                weather.render_errors = (dice.randrange(num_clients),)
            case "threads":
                weather.thread_delay_s = dice.choice((0.001, 0.05))
            case _:
                pass
    return weather
