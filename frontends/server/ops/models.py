"""List the models of a server, follow their states, and load or unload them."""

import time
from typing import Any, ClassVar

import anyio
import msgspec

from trouper.errors import invalid
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.models.policy import COLD
from trouper.frontends.server.models.residency import Residency, residency_of
from trouper.frontends.server.models.table import ModelStatus, status_words
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared import fields
from trouper.frontends.server.shared.errors import HTTPError, unavailable, unsupported

# Each watcher has a connection with up to 64 KiB in its buffers, so these take 2 MiB.
MAX_WATCHERS = 32
# A comment after this silence shows watchers and proxies that the connection is alive.
COMMENT_S = 15.0
MODELS = "/v1/models/"  # a name follows, which may hold slashes


class LoadModelRequest(msgspec.Struct, kw_only=True):
    """`POST /models/load`: load or wake a model, and answer when it is awake, or at once with `wait` false."""

    OTHERS: ClassVar[fields.Others] = fields.NONE

    model: str = ""
    wait: bool = True


class UnloadModelRequest(msgspec.Struct, kw_only=True):
    """`POST /models/unload`: unload a model when its requests have ended, or after aborting them (`mode`: abort)."""

    OTHERS: ClassVar[fields.Others] = fields.NONE

    model: str = ""
    wait: bool = True
    mode: str = "wait"
    force: bool = False


async def list_models(service: Service, context: RequestContext, _: None) -> None:
    """List the models by all their names.

    Adapters appear as models of their own, because requests choose them by the field `model`.  In a server with several
    models each entry has the state of its model and the memory that it takes.
    """
    residency = residency_of(service)
    if residency is not None and context.query().get("reload", ["0"])[-1] not in ("", "0", "false"):
        raise invalid(
            "query.reload", "is not a listing: POST /models/reload reads the folder again"
        )
    cards = [card for each in service.services for card in _cards(each)]
    await context.send_json({"object": "list", "data": cards})


def _cards(service: Service) -> list[dict[str, Any]]:
    names = (*service.model_names, *(adapter.lora_name for adapter in service.adapters))
    return [_model_card(service, name) for name in names]


async def show_model(service: Service, context: RequestContext, _: None) -> None:
    """Describe the model of one name."""
    name = context.path.removeprefix(MODELS)
    residency = residency_of(service)
    if residency is not None:
        service = residency.table.find(name).service
    await context.send_json(_model_card(service, service.check_model(name)))


def _model_card(service: Service, name: str) -> dict[str, Any]:
    base, adapter = service.model_names[0], service.adapter(name)
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "trouper",
        "root": base if adapter is None else adapter.lora_path,
        "parent": None if adapter is None else base,
    }
    residency = residency_of(service)
    if residency is None or residency.table.of_service(service).plan.config is not None:
        config = service.config
        card["max_model_len"] = config.max_model_len
        card["modalities"] = ["text"] if config.media is None else ["text", config.media.modality]
        if residency is not None:
            card["task"] = "generate" if config.pooler is None else config.pooler.task
    if residency is not None:
        card |= _state(residency, service)
    return {**card, "permission": []}


def _state(residency: Residency, service: Service) -> dict[str, Any]:
    model = residency.table.of_service(service)
    status = residency.table.status(model, anyio.current_time())
    return {
        "status": status_words(status),
        **{name: getattr(status, name) for name in ModelStatus.__struct_fields__ if name != "name"},
    }


async def watch_models(service: Service, context: RequestContext, _: None) -> None:
    """Stream the state of each model, and then each change, as server-sent events.

    A watcher that reads slowly gets the newest state of a model instead of a queue of old ones.

    Raises:
        HTTPError: the server has one model (400), or too many clients watch already (503).
    """
    residency = _need(service, "models/events")
    if residency.num_watchers >= MAX_WATCHERS:
        raise unavailable("too_many_watchers", f"{MAX_WATCHERS} clients watch the models already")
    residency.num_watchers += 1
    try:
        await context.start_events()
        await _send_states(service, residency, context)
    finally:
        residency.num_watchers -= 1


async def _send_states(service: Service, residency: Residency, context: RequestContext) -> None:
    """Send what differs from the states that the client has, until it leaves or the server stops."""
    known: dict[str, dict[str, Any]] = {}
    # The stream ends in order a little before its deadline, and the client opens another one.
    while context.age_s < context.timeout_s - 1:
        changed = residency.changed
        now = anyio.current_time()
        for status in residency.table.statuses(now):
            state = _event(residency, status)
            if known.get(status.name) != state:
                known[status.name] = state
                await context.send_event({"model": status.name, **state}, "model_status")
        for name in [name for name in known if name not in residency.table.models]:
            del known[name]
            await context.send_event({"model": name}, "model_remove")
        if service.is_draining or context.is_gone:
            break
        wait_s = min(COMMENT_S, context.timeout_s - 1 - context.age_s)
        with anyio.move_on_after(wait_s) as silence:
            await changed.wait()
        if silence.cancelled_caught:
            await context.send_comment()
    await context.end_events(b"")


def _event(residency: Residency, status: ModelStatus) -> dict[str, Any]:
    """Return what changes only with the state of a model, not with its requests."""
    model = residency.table.models[status.name]
    return {
        "status": status_words(status),
        "state": status.state,
        "is_paused": model.is_paused,
        "bytes": status.bytes,
        "seconds": round(model.last_change_s, 3),
        "error": status.error,
    }


def _need(service: Service, route: str) -> Residency:
    residency = residency_of(service)
    if residency is None:
        raise unsupported(route, "the server was started with one model, which stays loaded")
    return residency


async def load_model(service: Service, context: RequestContext, request: LoadModelRequest) -> None:
    """Load or wake a model, although no request needs it.  Also ends the pause after a failure."""
    residency = _need(service, "models/load")
    model = residency.table.find(_named(request.model))
    if request.wait:
        seconds = await residency.load(model)
    else:
        seconds = 0.0
        residency.load_later(model)
    await context.send_json(
        {"success": True, "model": model.name, "state": model.state, "seconds": round(seconds, 3)}
    )


async def unload_model(
    service: Service, context: RequestContext, request: UnloadModelRequest
) -> None:
    """Unload a model.  Its requests end first, unless `mode` is abort."""
    residency = _need(service, "models/unload")
    model = residency.table.find(_named(request.model))
    if request.mode not in ("wait", "abort"):
        raise invalid("mode", "must be wait or abort", request.mode[:40])
    begun = anyio.current_time()
    residency.begin_unload(model, aborts=request.mode == "abort", is_forced=request.force)
    if request.wait:
        await residency.wait_for(model, COLD)
    seconds = anyio.current_time() - begun
    await context.send_json(
        {"success": True, "model": model.name, "state": model.state, "seconds": round(seconds, 3)}
    )


def _named(name: str) -> str:
    if not name:
        raise invalid("model", "must be the name of a model")
    return name


async def reload_models(service: Service, context: RequestContext, _: object) -> None:
    """Read the folder of `--models-dir` again: new models are added, and those without files go when they are unloaded."""
    residency = _need(service, "models/reload")
    if residency.reload is None:
        raise HTTPError(400, "not_supported", "the server was started without --models-dir")
    added, removed = await residency.reload()
    await context.send_json({"success": True, "added": added, "removed": removed})
