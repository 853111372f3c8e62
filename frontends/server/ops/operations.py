"""Serve the routes for operators: health checks, metrics, the state of the server, llama.cpp's routes about it, and the page.

Editors and monitors for llama.cpp read the context length from `GET /props` and the free slots from `GET /slots`.  A slot of llama.cpp
corresponds to one of the `max_num_seqs` sequences that run at once.  Slots have no state of their own here, so their state cannot be saved
or restored.

The modules of the page at `/ui/` are imported at its first request, so that a server without viewers neither reads the page's files nor
spends time on its state.
"""

from collections import Counter
from contextlib import suppress
from typing import Any

import anyio
import msgspec
from prometheus_client.registry import Collector

from trouper import __version__
from trouper.actors.rendering.prompts.prompts import template_text
from trouper.config.media import AUDIO, IMAGE
from trouper.errors import EngineDeadError
from trouper.frontends.server.admission.overload import Level
from trouper.frontends.server.http.context import TEXT, RequestContext
from trouper.frontends.server.models.metrics import Merged, ResidencyMetrics
from trouper.frontends.server.models.residency import Residency, residency_of
from trouper.frontends.server.service.metrics import expose
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import Headers, HTTPError, unavailable

FOLDER = "/ui/"
FILE = "/ui/{file}"
STATE = "/ui/state"
# The page may load only its own files and contact only its own server, and no text can become markup or a script.
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
# Headers of every response below /ui, including errors.
SAFETY: Headers = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)


def is_below_ui(path: str) -> bool:
    """Return whether a path belongs to the page."""
    return path == FOLDER[:-1] or path.startswith(FOLDER)


async def welcome(service: Service, context: RequestContext, _: None) -> None:
    """Answer a program with one line, and redirect a browser to the page.

    This route needs no API key, so the line names the model only if the server has no keys.
    """
    headers: Headers = ((b"vary", b"accept"), (b"cache-control", b"no-store"))
    is_browser = b"text/html" in (context.header(b"accept") or b"")
    if is_browser and any(route.path == FOLDER for route in context.served):
        location = (b"location", f"{context.root_path}{FOLDER}".encode())
        await context.send_body(b"", TEXT, 307, (location, *headers))
        return
    hides_model = service.is_starting or bool(service.settings.api_keys)
    what = "" if hides_model else f" with the model {service.model_names[0]}"
    line = f"trouper {__version__} is running{what}; its OpenAI-compatible API is at /v1\n"
    await context.send_body(line.encode(), TEXT, headers=headers)


async def to_folder(service: Service, context: RequestContext, _: None) -> None:
    """Redirect to the page, whose links are relative to its folder."""
    location = (b"location", f"{context.root_path}{FOLDER}".encode())
    await context.send_body(b"", TEXT, 307, (location,))


async def send_file(service: Service, context: RequestContext, _: None) -> None:
    """Send a file of the page.  Names are looked up in a table, never in the file system."""
    from trouper.frontends.server.page.feed import find

    name = context.path.removeprefix(FOLDER) or "index.html"
    file = await anyio.to_thread.run_sync(find, name, limiter=service.threads)
    if file is None:
        raise HTTPError(404, "not_found", "the page has no such file")
    headers: Headers = (
        (b"etag", file.etag),
        (b"cache-control", b"no-cache"),
        (b"vary", b"accept-encoding"),
    )
    if file.etag in (context.header(b"if-none-match") or b""):
        await context.send_body(b"", file.kind, 304, headers)
    elif b"gzip" in (context.header(b"accept-encoding") or b""):
        packed = (*headers, (b"content-encoding", b"gzip"))
        await context.send_body(file.packed, file.kind, headers=packed)
    else:
        await context.send_body(file.content, file.kind, headers=headers)


async def stream_state(service: Service, context: RequestContext, _: None) -> None:
    """Stream the state of the server several times a second, as server-sent events.

    The documentation describes the frames on its page about the built-in page.
    """
    from trouper.frontends.server.page.feed import watch

    await watch(service, context)


SLOT = "/slots/{id}"


async def props(service: Service, context: RequestContext, _: None) -> None:
    """Describe the model and the limits of the server in llama.cpp's format.

    `model_path` contains the served name instead of the real path, which would reveal the machine's folders.
    """
    config, tokenizer = service.config, service.engine.tokenizer
    name = service.model_names[0]
    special = (
        (None, None) if tokenizer is None else (tokenizer.bos_token_id, tokenizer.eos_token_id)
    )
    bos, eos = ("" if id is None else service.token_text(id) for id in special)
    await context.send_json(
        {
            "default_generation_settings": {
                "n_ctx": config.max_model_len,
                "params": dict(config.model.default_sampling),
            },
            "total_slots": _num_slots(service),
            "model_alias": name,
            "model_path": name,
            "chat_template": _template(service),
            "bos_token": bos,
            "eos_token": eos,
            "modalities": {
                "vision": config.media is not None and config.media.modality == IMAGE,
                "audio": config.media is not None and config.media.modality == AUDIO,
            },
            "is_sleeping": service.engine.lifecycle.is_sleeping,
            "build_info": f"trouper-{__version__}",
        }
    )


async def slots(service: Service, context: RequestContext, _: None) -> None:
    """List the slots: first those of running sequences, then idle ones.

    `?fail_on_no_slot=1` fails with 503 if none is idle.  Prompts and outputs are not shown.
    """
    num_slots, busy = _num_slots(service), _running(service)
    must_be_free = context.query().get("fail_on_no_slot", ["0"])[0] not in ("", "0")
    if must_be_free and len(busy) >= num_slots:
        raise unavailable("no_slot", f"all {num_slots} slots are in use")
    idle = [_slot(service, -1, None) for _ in range(num_slots - len(busy))]
    await context.send_json([{"id": i, **slot} for i, slot in enumerate([*busy, *idle])])


async def refuse_change(service: Service, context: RequestContext, _: None) -> None:  # noqa: ASYNC124  # a handler is async
    """Refuse to change a property of the server, or to save, restore or erase a slot."""
    text = (
        f"{context.path} cannot be changed; prefixes of prompts are kept and reused without slots"
    )
    raise HTTPError(501, "not_supported", text)


def _num_slots(service: Service) -> int:
    return service.config.scheduler.max_num_seqs * service.config.data_parallel_size


def _running(service: Service) -> list[dict[str, Any]]:
    """Describe each running sequence, with the number of its request's tokens so far."""
    engine = service.engine
    tokens = {slot.request_id: slot.stats.num_generation_tokens for slot in engine.requests.slots}
    found = engine.snapshot()
    requests = {int(each.id): tokens.get(each.request_id, 0) for each in found.requests}
    running = (id for policy in found.scheduler.policies for id in policy.running)
    return [_slot(service, id, requests.get(id)) for id in running]


def _slot(service: Service, id_task: int, num_tokens: int | None) -> dict[str, Any]:
    """Describe a slot.  `num_tokens` is None for an idle slot, and for all choices of a request but the first."""
    return {
        "id_task": id_task,
        "n_ctx": service.config.max_model_len,
        "speculative": service.config.speculation is not None,
        "is_processing": id_task >= 0,
        "next_token": [{"has_next_token": id_task >= 0, "n_decoded": num_tokens or 0}],
    }


def _template(service: Service) -> str:
    """Return the server's chat template, or else the model's default one."""
    tokenizer = service.engine.tokenizer
    own = None if tokenizer is None else tokenizer.chat_templates.get("default")
    return template_text(service.config.chat_template) or own or ""


# The time limit for fresh statistics in seconds, because an actor that is shutting down may not answer.
REFRESH_S = 1.0
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


async def live(service: Service, context: RequestContext, _: None) -> None:
    """Fail only if the server can never make progress again, so that an orchestrator restarts the process.

    Loading and overload are no reasons for a restart.  With several models, a failed model is none either, because it is loaded again.
    """
    if not service.is_starting and residency_of(service) is None:
        service.check_alive()
    await context.send_empty()


async def ready(service: Service, context: RequestContext, _: None) -> None:
    """Report whether a request would be admitted and scheduled now.

    A failed check removes the server from a load balancer until the state changes.
    """
    residency = residency_of(service)
    if residency is not None:
        await _all_ready(residency, service, context)
        return
    service.check_alive()
    service.check_open()
    if service.engine.lifecycle.is_sleeping:
        text = "the engine is paused or asleep; continue with POST /resume or /wake_up"
        raise unavailable("engine_paused", text)
    _check_load(service)
    await service.prove()
    replicas = service.engine.statistics().replicas
    if len(replicas) > 1:  # some may be missing: fewer clients are served as fast
        num_ready = sum(replica.is_available for replica in replicas)
        context.own_headers += ((b"x-replicas-ready", b"%d/%d" % (num_ready, len(replicas))),)
    await context.send_empty()


def _check_load(service: Service) -> None:
    if service.gate.level >= Level.SHED_ALL:
        raise unavailable("overloaded", "the server is overloaded")
    service.check_admits()


async def _all_ready(residency: Residency, service: Service, context: RequestContext) -> None:
    """Check that the server accepts requests and that all preloaded models are loaded, or with `?model=` that this model is.

    Other cold and sleeping models do not matter, because a request wakes them.
    """
    states = Counter(model.state for model in residency.table)
    shown = ", ".join(f"{num} {state}" for state, num in sorted(states.items()))
    context.own_headers += ((b"x-models", shown.encode()),)
    service.check_serving()
    named = context.query().get("model")
    must_be = (
        [model for model in residency.table if model.options.is_preloaded]
        if named is None
        else [residency.table.find(named[-1])]
    )
    for model in must_be:
        residency.check(model)
        if not model.is_loaded:
            raise unavailable("model_not_loaded", f"the model {model.name} is {model.state}")
        _check_load(model.service)
        if model.is_awake and not model.is_paused:
            await model.service.prove()
    await context.send_empty()


async def step_age(service: Service, context: RequestContext, _: None) -> None:
    """Report the seconds since the last step ended, or 0 without work.

    A value above the limit is an error (503), because the device has accepted work and makes no progress.
    """
    if residency_of(service) is None:
        service.check_alive()
    now = anyio.current_time()
    ages = [
        each.steps.age_s(each.engine.statistics().scheduler, now)
        for each in service.services
        if not each.is_starting and not each.engine.lifecycle.is_sleeping
    ]
    age_s = max(ages, default=0.0)
    if age_s > service.settings.max_step_age_s:
        raise unavailable("no_progress", f"the engine has completed no step for {age_s:.0f} s")
    await context.send_json({"age_s": round(age_s, 3)})


async def version(service: Service, context: RequestContext, _: None) -> None:
    await context.send_json({"version": __version__})


async def server_info(service: Service, context: RequestContext, _: None) -> None:
    """Show the resolved configuration, the device, and the statistics of each replica.

    This is a control route, because the configuration contains paths of the machine.
    """
    residency = residency_of(service)
    if residency is None:
        await context.send_json({"version": __version__, **_engine_info(service)})
        return
    now = anyio.current_time()
    models = {
        status.name: {
            "status": msgspec.to_builtins(status),
            **({} if model.service.is_starting else _engine_info(model.service)),
        }
        for model, status in zip(residency.table, residency.table.statuses(now), strict=True)
    }
    budget = residency.limits.budget
    await context.send_json({"version": __version__, "memory_budget": budget, "models": models})


def _engine_info(service: Service) -> dict[str, Any]:
    return {
        "config": msgspec.to_builtins(service.config),
        "device": msgspec.to_builtins(service.engine.info),
        "replicas": msgspec.to_builtins(service.engine.statistics().replicas),
    }


async def metrics(service: Service, context: RequestContext, _: None) -> None:
    residency = residency_of(service)
    open_services = [each for each in service.services if not each.is_starting]
    # Raises the error of a server with one model that is still loading.
    found = [service.engine.metrics] if residency is None else residency.engine_metrics()
    if residency is None and found == [None]:
        raise HTTPError(404, "not_found", "statistics are off (--disable-log-stats)")
    for each in open_services:
        # An engine that is shutting down reports no new statistics.  Then the last ones are used.
        with suppress(EngineDeadError), anyio.move_on_after(REFRESH_S):
            await each.engine.refresh_metrics()
    collectors: list[Collector] = [each for each in found if each is not None]
    if residency is not None:
        collectors = [Merged(collectors), ResidencyMetrics(residency, service.metrics.prefix)]
    await context.send_body(await expose((*collectors, service.metrics)), PROMETHEUS)


async def load(service: Service, context: RequestContext, _: None) -> None:
    await context.send_json({"server_load": service.num_requests})
