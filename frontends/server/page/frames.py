"""Describe a running server in one frame: plain data, made from snapshots and counters without a wait.

A frame has numbers, states and names, but no text of a request, no token ids, no key and no path.  A model without requests takes
about 2 KB.
"""

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from trouper import __version__
from trouper.actors.engine.engine import Engine
from trouper.actors.executor.device import DeviceInfo
from trouper.actors.observability.observer import EngineEvent
from trouper.actors.scheduling.scheduling_policy import PolicySnapshot
from trouper.config.engine_config import EngineConfig
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.models.residency import residency_of
from trouper.frontends.server.models.table import capabilities
from trouper.frontends.server.service.service import Service

# 180 bytes each, so with the rest of the model 8 KiB hold these.
MAX_REQUESTS = 32
MAX_NAME = 64
HISTOGRAMS = {
    "first_token": "time_to_first_token_seconds",
    "inter_token": "inter_token_latency_seconds",
}


class GateFrame(msgspec.Struct, frozen=True):
    """Count the requests and sequences that admission holds, and the sequences that the engine has taken."""

    requests: int
    sequences: int
    started: int
    max_sequences: int
    refused: int


class RequestFrame(msgspec.Struct, frozen=True):
    """One open request, with the id by which it can be aborted."""

    id: str
    model: str
    route: str
    key: str
    age_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    is_stream: bool
    state: str


class ModelCard(msgspec.Struct, frozen=True):
    """Describe a loaded model by facts that do not change."""

    architecture: str
    can: list[str]
    task: str | None
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_weight_bytes: int
    dtype: str
    device: str
    worker: str
    num_replicas: int


class CounterFrame(msgspec.Struct, frozen=True):
    """Counts of events since the model was loaded.  They never fall, also not when a worker dies."""

    steps: int
    prompt_tokens: int
    tokens: int
    preemptions: int
    lost_tokens: int
    cache_queries: int
    cache_hits: int
    draft_tokens: int
    accepted_tokens: int


class ModelFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one model and of its actors.

    Attributes:
        inboxes: messages that wait in the inbox of each actor.
        rendering: prompts in the renderers' threads.
        deferred: sequences that wait for another one, or for a result in flight.
        in_flight: steps at the device, each with its number of sequences.
        call: what the executor waits for, if it is no step.
        tracked: sequences at the detokenizer, or queries at the pooler.
        blocks: of the KV cache: all, free ones, and those of the free ones that hold a cached prefix.
        memory_bytes: proportional memory of the worker processes; 0 before the first reading.
        histograms: (upper bound or null, observations up to it), cumulative as in Prometheus.
    """

    name: str
    state: str
    card: ModelCard | None = None
    inboxes: dict[str, int] = {}
    rendering: int = 0
    running: int = 0
    waiting: int = 0
    deferred: int = 0
    suspects: int = 0
    in_flight: list[int] = []
    pause: str = "none"
    call: str | None = None
    step: int = 0
    tracked: int = 0
    ended: int = 0
    num_open: int = 0
    blocks: tuple[int, int, int] = (0, 0, 0)
    counters: CounterFrame | None = None
    histograms: dict[str, list[tuple[float | None, int]]] = {}
    process_ids: list[int] = []
    memory_bytes: int = 0


class ServerFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a frame that all viewers share.

    Attributes:
        started_at: when the server started; a page that sees another value begins anew.
        gap_s: the worst lag of the event loop in the last second.
        budget_bytes: memory that models may have together, or null without a limit.
    """

    at: float
    started_at: float
    version: str
    process_id: int
    memory_bytes: int
    machine_bytes: int
    budget_bytes: int | None
    level: str
    gap_s: float
    viewers: int
    gate: GateFrame
    models: list[ModelFrame]


class MeasuredModel(NamedTuple):
    """A model of the server, and what was measured of it outside of its engine."""

    service: Service
    card: ModelCard | None
    memory_bytes: int


def server_frame(
    service: Service,
    models: Iterable[MeasuredModel],
    *,
    at: float,
    started_at: float,
    memory_bytes: int,
    budget_bytes: int | None,
    viewers: int,
) -> ServerFrame:
    """Describe the server and its models at one moment."""
    admission, metrics = service.gate.admission, service.metrics
    return ServerFrame(
        at=at,
        started_at=started_at,
        version=__version__,
        process_id=os.getpid(),
        memory_bytes=memory_bytes,
        machine_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        budget_bytes=budget_bytes,
        level=service.gate.level.name.lower(),
        gap_s=max(metrics.last_gaps_s),
        viewers=viewers,
        gate=GateFrame(
            admission.num_requests,
            admission.num_sequences,
            admission.num_started,
            admission.max_sequences,
            metrics.num_rejections,
        ),
        models=[_model(model) for model in models],
    )


def model_name(service: Service) -> str:
    """Return the name that clients use, also while the model is loading."""
    names = service.settings.served_model_names
    if service.is_starting:
        return names[0] if names else "model"
    return service.model_names[0]


def _shown_state(service: Service, own: str) -> str:
    """Return the state of a model among several, or else its own, such as "paused" for an awake one."""
    residency = residency_of(service)
    if residency is None:
        return own
    state = residency.table.of_service(service).state
    return own if state == "awake" else state


def model_card(service: Service) -> ModelCard:
    """Describe a loaded model.  It is made once, because some capabilities are found in the vocabulary."""
    config, info = service.config, service.engine.info
    can = [*capabilities(service)]
    if _has_template(service.engine, config):
        can.append("chat")
    return _card(config, can, info)


def planned_card(service: Service) -> ModelCard:
    """Describe an unloaded model by its configuration.

    Capabilities that only its vocabulary shows appear after its first load.
    """
    return _card(service.config, ["completion", "chat"], None)


def _card(config: EngineConfig, can: list[str], info: DeviceInfo | None) -> ModelCard:
    if config.pooler is not None:
        can = ["rerank", *(["embed"] if config.pooler.task == "embed" else [])]
    return ModelCard(
        architecture=config.model.architecture,
        can=can,
        task=None if config.pooler is None else config.pooler.task,
        max_model_len=config.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs * config.data_parallel_size,
        block_size=0 if info is None else info.block_size,
        num_weight_bytes=0 if info is None else info.num_weight_bytes,
        dtype="" if info is None else info.dtype,
        device=config.device,
        worker=config.device_worker,
        num_replicas=config.data_parallel_size,
    )


def request_frames(service: Service, tenant: str | None) -> tuple[list[RequestFrame], int]:
    """List the open requests of a key, or of all for None, the oldest first, and how many are left out.

    Several choices and prompts of one HTTP request are one line, because they are aborted together.
    """
    found: dict[str, RequestContext] = {}
    for context in service.open_requests().values():
        if tenant is None or context.tenant == tenant:
            found.setdefault(context.id, context)
    chosen = list(found.values())[:MAX_REQUESTS]
    name = model_name(service)
    return [_request(context, name) for context in chosen], len(found) - len(chosen)


def describe(event: EngineEvent, num_replicas: int = 1) -> str:
    """Describe an event in one sentence."""
    who = f"replica {event.replica}: " if num_replicas > 1 else ""
    if event.kind == "loss":
        where = "" if event.step is None else f" in step {event.step}"
        cause, num = event.detail.replace("_", " "), _count(event.sequences, "sequence")
        text = f"the worker died{where} ({cause}); {num} will go on"
    elif event.kind == "return":
        kept = " with its KV cache" if event.detail == "kept" else ""
        text = f"the worker is back after {event.seconds:.2f} s{kept}"
    elif event.kind == "recompute":
        text = f"{_count(event.count, 'token')} computed again"
    elif event.kind == "failure":
        text = "the workers will not be started again"
    elif event.kind == "preemption":
        text = f"{_count(event.count, 'sequence')} gave up blocks to others"
    elif event.kind == "refusal":
        text = f"{_count(event.count, 'request')} refused: {event.detail.replace('_', ' ')}"
    elif event.kind == "state":
        text = f"{event.detail} after {event.seconds:.2f} s"
    else:
        text = f"overload: {event.detail.replace('_', ' ')}"
    return who + text


def _model(model: MeasuredModel) -> ModelFrame:
    service, card, memory_bytes = model
    if service.is_starting:
        state = _shown_state(service, "loading")
        return ModelFrame(name=model_name(service), state=state, card=card)
    engine = service.engine
    seen, stats = engine.snapshot(), engine.statistics()
    scheduler, policies = stats.scheduler, seen.scheduler.policies
    tracked = seen.detokenizer.sequences if seen.detokenizer else ()
    queries = seen.pooler.queries if seen.pooler else ()
    calls = [executor.call for executor in seen.executors if executor.call is not None]
    return ModelFrame(
        name=model_name(service),
        state="lost"
        if service.is_device_lost
        else _shown_state(service, engine.lifecycle.shown_state),
        card=card,
        inboxes={name: count for name, count in seen.inboxes.items() if count},
        rendering=sum(len(renderer.rendering) for renderer in seen.renderers),
        running=_total(policies, "running"),
        waiting=_total(policies, "waiting"),
        deferred=_total(policies, "other"),
        suspects=_total(policies, "suspects"),
        in_flight=[len(ids) for policy in policies for _, ids in policy.in_flight],
        pause=policies[0].pause.value,
        call=calls[0] if calls else None,
        step=max(executor.last_step for executor in seen.executors),
        tracked=len(tracked) + len(queries),
        ended=seen.observer.num_ended if seen.observer else 0,
        num_open=len(seen.requests),
        blocks=(
            scheduler.num_blocks_total,
            scheduler.num_blocks_free,
            scheduler.num_blocks_cached,
        ),
        counters=CounterFrame(
            scheduler.num_steps,
            scheduler.num_prompt_tokens,
            scheduler.num_generation_tokens,
            scheduler.num_preemptions,
            scheduler.num_lost_tokens,
            scheduler.prefix_cache_queries,
            scheduler.prefix_cache_hits,
            scheduler.num_draft_tokens,
            scheduler.num_accepted_tokens,
        ),
        histograms=_histograms(engine),
        process_ids=[pid for executor in seen.executors for pid in executor.process_ids],
        memory_bytes=memory_bytes,
    )


def _total(policies: Iterable[PolicySnapshot], field: str) -> int:
    return sum(len(getattr(policy, field)) for policy in policies)


def _histograms(engine: Engine) -> dict[str, list[tuple[float | None, int]]]:
    if engine.metrics is None:
        return {}
    found: Mapping[str, list[tuple[float, int]]] = {
        short: engine.metrics.cumulative(name) for short, name in HISTOGRAMS.items()
    }
    # JSON has no infinity.
    return {
        name: [(None if bound == float("inf") else bound, count) for bound, count in buckets]
        for name, buckets in found.items()
    }


def _has_template(engine: Engine, config: EngineConfig) -> bool:
    tokenizer = engine.tokenizer
    return config.chat_template is not None or bool(tokenizer and tokenizer.chat_templates)


def _request(context: RequestContext, model: str) -> RequestFrame:
    ticket = context.ticket
    num_prompt, num_output = (0, 0) if ticket is None else ticket.cost
    is_over = ticket is not None and ticket.is_over
    state = "ending" if is_over or context.is_aborted else "running" if num_output else "prompt"
    return RequestFrame(
        id=context.request_id,
        model=model[:MAX_NAME],
        route=context.path[:MAX_NAME],
        key=context.tenant,
        age_s=round(context.age_s, 3),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        is_stream=context.is_stream,
        state=state,
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
