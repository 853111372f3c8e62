"""Routes for operators: health checks, metrics, and the state of the server."""

from collections import Counter
from contextlib import suppress
from typing import Any

import anyio
import msgspec
from prometheus_client.registry import Collector

from trouper import __version__
from trouper.errors import EngineDeadError
from trouper.frontends.server.admission.overload import Level
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.models.metrics import Merged, ResidencyMetrics
from trouper.frontends.server.models.residency import Residency, residency_of
from trouper.frontends.server.service.metrics import expose
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import HTTPError, unavailable

# Timeout in seconds for fresh statistics, because an ending actor may delay them.
REFRESH_S = 1.0
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


async def live(service: Service, context: RequestContext, _: None) -> None:
    """Fail only if no progress is possible any more.

    A failed check tells an orchestrator to restart the process; loading and overload are no reasons for that.  With several
    models a failed one is loaded again, so it is no reason either.
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
        raise unavailable("engine_paused", "the engine is paused or asleep")
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
    """Check that the server accepts requests, and that the models that must be loaded are.

    Cold and sleeping models do not count against it, because a request wakes them.  `?model=` checks one model.
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

    A value above the limit is an error: the device has accepted work and made no progress.
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
    """Show the resolved configuration, the device, and each replica in numbers.

    It belongs to the control routes, because the configuration contains paths of the machine.
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
        # An ending engine reports no new statistics, so the last ones are used.
        with suppress(EngineDeadError), anyio.move_on_after(REFRESH_S):
            await each.engine.refresh_metrics()
    collectors: list[Collector] = [each for each in found if each is not None]
    if residency is not None:
        collectors = [Merged(collectors), ResidencyMetrics(residency, service.metrics.prefix)]
    await context.send_body(await expose((*collectors, service.metrics)), PROMETHEUS)


async def load(service: Service, context: RequestContext, _: None) -> None:
    await context.send_json({"server_load": service.num_requests})
