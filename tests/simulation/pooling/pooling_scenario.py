"""What is drawn for an engine that pools: as `scenario.py`, with other sizes and other wishes."""

import random
from typing import ClassVar, Literal

import msgspec

from tests.simulation.scenario import (
    VOCAB_SIZE,
    Client,
    Dice,
    Operation,
    Weather,
    draw_behaviour,
    draw_operations,
    draw_weather,
    streams_of,
)


class PoolingWish(msgspec.Struct, kw_only=True):
    """What one client asks for."""

    n: ClassVar[int] = 1

    prompt: tuple[int, ...] | str
    type_ids: tuple[int, ...] | None = None
    task: Literal["embed", "token_embed"] | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate: int | None = None
    keeps_end: bool = False
    priority: int = 0
    key: str = ""
    mode: Literal["cache_query", "score_doc"] | None = None  # of late interaction
    query_key: str = "q"
    query_uses: int | None = None


class PoolingClient(Client, kw_only=True):
    wish: PoolingWish  # type: ignore[assignment]


class PoolingScenario(msgspec.Struct, kw_only=True):
    seed: int  # of the schedule and of everything drawn at run time
    clients: tuple[PoolingClient, ...]
    weather: Weather = msgspec.field(default_factory=Weather)
    operations: tuple[Operation, ...] = ()
    has_priorities: bool = False
    closes_at_s: float | None = None
    cancelled_at_step: int | None = None
    size: int = 3  # of an embedding
    max_model_len: int = 200
    max_num_seqs: int = 4
    token_budget: int = 200
    policy: Literal["priority", "fcfs"] = "priority"
    steps_in_flight: int = 2
    max_step_ms: int | None = 0
    misjudged: float = 0.0  # estimated over true time of a step at the start; 0: unknown
    num_renderers: int = 1
    max_queued: int | None = None
    has_tokenizer: bool = False
    log_stats: bool = False


def draw_pooling(seed: int) -> PoolingScenario:
    """The scenario that a seed stands for."""
    return draw_pooling_with(streams_of(seed), seed=seed)


def draw_pooling_with(dice: Dice, *, seed: int) -> PoolingScenario:
    sizes, arrivals = dice("sizes"), dice("arrivals")
    max_num_seqs = sizes.choice((1, 2, 3, 4, 8))
    has_tokenizer = sizes.random() < 0.6
    # Beyond what is finished at once, and with nine tokens what shares no hop.
    size = sizes.choice((3, 3, 3, 8192))
    late_rate = sizes.choice((0.0, 0.1, 0.8))
    num_clients = arrivals.choice((1, 2, 3, 4, 4, 6, 8, 12))
    spread_s = arrivals.choice((0.0, 0.0, 0.03, 0.1, 0.4))
    clients = tuple(
        draw_client(dice, index, spread_s, size, has_tokenizer, late_rate)
        for index in range(num_clients)
    )
    weather = draw_weather(dice("faults"), num_clients)
    weather.not_finite = tuple((client, 0) for client, _ in weather.not_finite)
    return PoolingScenario(
        seed=seed,
        clients=clients,
        weather=weather,
        operations=draw_operations(dice("operator")),
        has_priorities=sizes.random() < 0.25,
        closes_at_s=sizes.uniform(0, 0.1) if sizes.random() < 0.08 else None,
        cancelled_at_step=sizes.randrange(1, 200) if sizes.random() < 0.06 else None,
        size=size,
        max_num_seqs=max_num_seqs,
        token_budget=max(sizes.choice((2, 20, 200, 1000)), max_num_seqs),
        policy=sizes.choice(("priority", "priority", "fcfs")),
        steps_in_flight=sizes.choice((1, 2, 2, 3)),
        max_step_ms=dice("turns").choice((0, 0, None, None, 20, 60)),
        misjudged=dice("turns").choice((0.0, 0.4, 1.0, 3.0)),
        num_renderers=sizes.choice((1, 1, 2, 3)),
        max_queued=sizes.choice((2, 4)) if sizes.random() < 0.08 else None,
        has_tokenizer=has_tokenizer,
        log_stats=sizes.random() < 0.5,
    )


def draw_client(
    dice: Dice, index: int, spread_s: float, size: int, has_tokenizer: bool, late_rate: float
) -> PoolingClient:
    client = PoolingClient(
        wish=draw_wish(dice("lengths"), size, has_tokenizer, late_rate),
        request_id=f"r{index}",
        arrival_s=dice("arrivals").uniform(0, spread_s),
    )
    draw_behaviour(dice("behaviour"), index, client, num_steps=2)
    return client


def draw_wish(dice: random.Random, size: int, has_tokenizer: bool, late_rate: float) -> PoolingWish:
    # Up to 128 are rendered at once; those beyond share a hop to a thread; 200 tokens are the limit.
    length = dice.choice((1, 2, 5, 9, 9, 40, 140, 150, 230 if dice.random() < 0.3 else 3))
    if size > 3:
        length = min(length, 9)
    prompt: tuple[int, ...] | str = tuple(dice.randrange(1, VOCAB_SIZE) for _ in range(length))
    type_ids = None
    if has_tokenizer and dice.random() < 0.75:
        prompt = "".join("abcdef"[token % 6] for token in prompt) * dice.choice((1, 1, 3))
    elif dice.random() < 0.1:
        type_ids = tuple(dice.randrange(2) for _ in range(length))
    wish = PoolingWish(
        prompt=prompt,
        type_ids=type_ids,
        task=dice.choice((None, "embed", "embed", "token_embed")),
        dimensions=dice.choice((None, None, 1, size)),
        use_activation=dice.choice((None, None, True, False)),
        priority=dice.choice((0, 0, 0, 1, 5)),
    )
    if dice.random() < 0.2:
        wish.truncate = dice.choice((-1, 1, 4, 100))
        wish.keeps_end = dice.random() < 0.5
    if dice.random() < late_rate:
        wish.task, wish.dimensions, wish.use_activation = "token_embed", None, None
        wish.mode = dice.choice(("cache_query", "score_doc", "score_doc"))
        wish.query_key = dice.choice(("q", "q", "q", "r"))
        wish.query_uses = dice.choice((1, 2, 20)) if wish.mode == "cache_query" else None
    return wish
