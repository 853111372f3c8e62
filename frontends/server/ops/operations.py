"""Routes for operators: models, health checks, metrics, and the state of the server."""

import time
from contextlib import suppress
from typing import Any

import anyio
import msgspec

from trouper import __version__
from trouper.errors import EngineDeadError
from trouper.frontends.server.admission.overload import Level
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.service.metrics import expose
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import HTTPError, unavailable

# Timeout in seconds for fresh statistics, because an ending actor may delay them.
REFRESH_S = 1.0
MODELS = "/v1/models/"  # a name follows, which may hold slashes
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


async def list_models(service: Service, context: RequestContext, _: None) -> None:
    """List the names of the model.

    Adapters appear as models of their own, because requests choose them by the field `model`.
    """
    adapters = [adapter.lora_name for adapter in service.engine.adapters.requests]
    cards = [_model_card(service, name) for name in (*service.model_names, *adapters)]
    await context.send_json({"object": "list", "data": cards})


async def show_model(service: Service, context: RequestContext, _: None) -> None:
    """Describe the model of one name."""
    name = service.check_model(context.path.removeprefix(MODELS))
    await context.send_json(_model_card(service, name))


def _model_card(service: Service, name: str) -> dict[str, Any]:
    base, adapter = service.model_names[0], service.adapter(name)
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "trouper",
        "root": base if adapter is None else adapter.lora_path,
        "parent": None if adapter is None else base,
        "max_model_len": service.config.max_model_len,
        "modalities": ["text"] if service.config.media is None else ["text", "image"],
        "permission": [],
    }


async def live(service: Service, context: RequestContext, _: None) -> None:
    """Fail only if no progress is possible any more.

    A failed check tells an orchestrator to restart the process; loading and overload are no reasons for that.
    """
    if not service.is_starting:
        service.check_alive()
    await context.send_empty()


async def ready(service: Service, context: RequestContext, _: None) -> None:
    """Report whether a request would be admitted and scheduled now.

    A failed check removes the server from a load balancer until the state changes.
    """
    service.check_alive()
    service.check_open()
    if service.engine.lifecycle.is_sleeping:
        raise unavailable("engine_paused", "the engine is paused or asleep")
    if service.gate.level >= Level.SHED_ALL:
        raise unavailable("overloaded", "the server is overloaded")
    service.check_admits()
    await service.prove()
    replicas = service.engine.statistics().replicas
    if len(replicas) > 1:  # some may be missing: fewer clients are served as fast
        num_ready = sum(replica.is_available for replica in replicas)
        context.own_headers += ((b"x-replicas-ready", b"%d/%d" % (num_ready, len(replicas))),)
    await context.send_empty()


async def step_age(service: Service, context: RequestContext, _: None) -> None:
    """Report the seconds since the last step ended, or 0 without work.

    A value above the limit is an error: the device has accepted work and made no progress.
    """
    service.check_alive()
    age_s = service.steps.age_s(service.engine.statistics().scheduler, anyio.current_time())
    if age_s > service.settings.max_step_age_s:
        raise unavailable("no_progress", f"the engine has completed no step for {age_s:.0f} s")
    await context.send_json({"age_s": round(age_s, 3)})


async def version(service: Service, context: RequestContext, _: None) -> None:
    await context.send_json({"version": __version__})


async def server_info(service: Service, context: RequestContext, _: None) -> None:
    """Show the resolved configuration, the device, and each replica in numbers.

    It belongs to the control routes, because the configuration contains paths of the machine.
    """
    info = {
        "version": __version__,
        "config": msgspec.to_builtins(service.config),
        "device": msgspec.to_builtins(service.engine.info),
        "replicas": msgspec.to_builtins(service.engine.statistics().replicas),
    }
    await context.send_json(info)


async def metrics(service: Service, context: RequestContext, _: None) -> None:
    engine = service.engine
    found = engine.metrics
    if found is None:
        raise HTTPError(404, "not_found", "statistics are off (--disable-log-stats)")
    # An ending engine reports no new statistics, so the last ones are used.
    with suppress(EngineDeadError), anyio.move_on_after(REFRESH_S):
        await engine.refresh_metrics()
    await context.send_body(await expose((found, service.metrics)), PROMETHEUS)


async def load(service: Service, context: RequestContext, _: None) -> None:
    await context.send_json({"server_load": service.gate.admission.num_requests})
