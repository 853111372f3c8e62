"""Control routes for administrators: sleep, pause, abort, profile, and load or unload adapters."""

from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import msgspec

from trouper.errors import (
    LoRAAdapterNotFoundError,
    OutsideRootError,
    TrouperError,
    TrouperValidationError,
    UnsupportedFeatureError,
    invalid,
)
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.models.choosing import ALL_MODELS
from trouper.frontends.server.models.residency import residency_of
from trouper.frontends.server.service.service import MAX_ECHO, Service
from trouper.frontends.server.shared import fields
from trouper.frontends.server.shared.errors import NO_RETRY, HTTPError, clean, describe
from trouper.lora import LoRARequest

if TYPE_CHECKING:
    from collections.abc import Generator


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """Hold the body of `POST /v1/load_lora_adapter`."""

    OTHERS: ClassVar[fields.Others] = fields.ADAPTERS

    # The model for which to load the adapter, on a server with several models.
    model: str | None = None
    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """Hold the body of `POST /v1/unload_lora_adapter`."""

    OTHERS: ClassVar[fields.Others] = fields.ADAPTERS

    model: str | None = None
    lora_name: str = ""


class AbortRequest(msgspec.Struct, kw_only=True):
    """Hold the body of `POST /abort_requests`.  Without ids, all requests are aborted.

    The ids are those in replies and logs.  Unknown ids are ignored, because a request may just have ended.
    """

    request_ids: list[str] | None = None


async def sleep(service: Service, context: RequestContext, _: None) -> None:
    query = context.query()
    level, mode = _one(query, "level", "1"), _one(query, "mode", "abort")
    if level not in ("0", "1", "2"):
        raise _bad_query("level", "must be 0, 1 or 2")
    for each in _chosen(service, context, is_resting=False):
        with _transition(), _held(each, is_after=True):
            await each.engine.controls.sleep(int(level), mode)
    await context.send_json({"status": "sleeping", "level": int(level)})


async def wake_up(service: Service, context: RequestContext, _: None) -> None:
    tags = context.query().get("tags")
    is_awake = True
    for each in _chosen(service, context, is_resting=True):
        with _transition(), _held(each, is_after=False):
            is_awake &= await each.engine.controls.wake(tags)
    await context.send_json({"status": "awake" if is_awake else "sleeping", "tags": tags})


async def is_sleeping(service: Service, context: RequestContext, _: None) -> None:
    await context.send_json({"is_sleeping": service.engine.lifecycle.is_sleeping})


async def pause(service: Service, context: RequestContext, _: None) -> None:
    query = context.query()
    clears = _flag(query, "clear_cache", "true")
    for each in _chosen(service, context, is_resting=False):
        with _transition(), _held(each, is_after=True):
            await each.engine.controls.pause(_one(query, "mode", "abort"), clear_cache=clears)
    await context.send_json({"status": "paused"})


async def resume(service: Service, context: RequestContext, _: None) -> None:
    for each in _chosen(service, context, is_resting=True):
        with _transition(), _held(each, is_after=False):
            await each.engine.controls.resume()
    await context.send_json({"status": "resumed"})


async def is_paused(service: Service, context: RequestContext, _: None) -> None:
    await context.send_json({"is_paused": service.engine.lifecycle.is_paused})


async def abort_requests(service: Service, context: RequestContext, request: AbortRequest) -> None:
    chosen = [service] if "model" in context.query() else service.services
    num_aborted = sum(each.abort(request.request_ids or None) for each in chosen)
    await context.send_json({"status": "aborted", "aborted": num_aborted})


async def reset_prefix_cache(service: Service, context: RequestContext, _: None) -> None:
    resets_running = _flag(context.query(), "reset_running_requests", "false")
    clears_tier = _flag(context.query(), "reset_external", "false")
    with _transition():
        preempt = "resample" if resets_running else "no"
        is_done = await service.engine.controls.reset_prefix_cache(
            preempt=preempt, clears_tier=clears_tier
        )
    await context.send_json({"success": is_done})


async def start_profile(service: Service, context: RequestContext, _: None) -> None:
    """Start a trace of the device, written to the folder of --profiler-config.

    The trace slows all requests until it ends.  Without that option the route is refused.
    """
    await service.engine.controls.start_profile(service.config.profile_folder(), "trouper")
    await context.send_empty()


async def stop_profile(service: Service, context: RequestContext, _: None) -> None:
    """End the trace and write it to a file for Perfetto."""
    service.config.profile_folder()  # raises if no folder is configured
    await service.engine.controls.stop_profile()
    await context.send_empty()


def _chosen(service: Service, context: RequestContext, *, is_resting: bool) -> list[Service]:
    """Return the services that a call applies to: that of its model, or with `?model=*` those of several models.

    Args:
        is_resting: whether the call wakes or resumes.  Then `*` selects the models that an administrator has put to sleep or paused,
            otherwise all awake models.
    """
    residency = residency_of(service)
    if residency is None or _one(context.query(), "model", "") != ALL_MODELS:
        return [service]
    models = [model for model in residency.table if model.is_awake]
    return [model.service for model in models if model.is_paused or not is_resting]


@contextmanager
def _transition() -> "Generator[None]":
    """Convert the engine's refusal of a call to an HTTPError that names the field of the query."""
    try:
        yield
    except TrouperValidationError as error:
        raise _bad_query(str(error.parameter), error.message) from None
    except RuntimeError as error:
        if isinstance(error, TrouperError | NotImplementedError):
            raise
        raise HTTPError(409, "illegal_transition", str(error)) from None


@contextmanager
def _held(service: Service, *, is_after: bool) -> "Generator[None]":
    """Keep the residency policy from moving a model during the block, and after it while the model stays asleep or paused.

    Raises:
        HTTPError: (409) the model is not awake, so the policy controls its state.
    """
    residency = residency_of(service)
    if residency is None:
        yield
        return
    model = residency.table.of_service(service)
    if not model.is_awake:
        text = f"the model {model.name} is {model.state}; wake it with POST /models/load"
        raise HTTPError(409, "illegal_transition", text, param="query.model")
    was_paused = model.is_paused
    residency.hold(model, True)
    try:
        yield
    except BaseException:
        residency.hold(model, was_paused)
        raise
    residency.hold(model, is_after or service.engine.lifecycle.is_sleeping)


def _one(query: dict[str, list[str]], name: str, default: str) -> str:
    return query.get(name, [default])[-1]


def _flag(query: dict[str, list[str]], name: str, default: str) -> bool:
    value = _one(query, name, default).lower()
    if value not in ("true", "1", "false", "0"):
        raise _bad_query(name, "must be true or false")
    return value in ("true", "1")


def _bad_query(name: str, rule: str) -> HTTPError:
    return HTTPError(400, "invalid_value", f"{name}: {rule}", param=f"query.{name}")


async def load_adapter(
    service: Service, context: RequestContext, request: LoadAdapterRequest
) -> None:
    """Load an adapter from a folder below --lora-root.  Requests can then use its name as a model.

    The root keeps clients from reading other folders of the machine.
    """
    root, name = service.settings.lora_root, request.lora_name
    if root is None:
        raise HTTPError(
            403,
            "not_allowed",
            "loading adapters over HTTP is disabled; start the server with --lora-root DIR",
        )
    known = service.adapter(name)
    if known is not None and not request.load_inplace:
        raise invalid("lora_name", "has already been loaded; set load_inplace to replace it", name)
    if name in service.model_names:
        raise invalid("lora_name", "is the name of a model", name)
    number = service.next_adapter_number() if known is None else known.lora_int_id
    adapter = LoRARequest(name, number, request.lora_path, load_inplace=request.load_inplace)
    try:
        await service.engine.adapters.load_named(adapter, root)
    except OutsideRootError:
        raise
    except (TrouperValidationError, UnsupportedFeatureError) as error:
        raise _broken(error) from error
    await _confirm(context, name, "added")


async def unload_adapter(
    service: Service, context: RequestContext, request: UnloadAdapterRequest
) -> None:
    """Unload an adapter after the requests that use it.  New requests cannot use its name from now on."""
    if not request.lora_name:
        raise invalid("lora_name", "must name an adapter")
    known = service.adapter(request.lora_name)
    if known is None:
        name = clean(request.lora_name, MAX_ECHO)
        rule = f"the adapter {name!r} does not exist"
        raise LoRAAdapterNotFoundError(rule, parameter="lora_name")
    service.engine.adapters.unload(known.lora_int_id)
    await _confirm(context, request.lora_name, "removed")


async def _confirm(context: RequestContext, name: str, what: str) -> None:
    """Reply with vLLM's sentence, which clients compare, and with the adapter's name for clients that parse the JSON."""
    message = f"Success: LoRA adapter '{name}' {what} successfully."
    await context.send_json({"status": "success", "message": message, "id": name})


def _broken(error: TrouperValidationError | UnsupportedFeatureError) -> HTTPError:
    """Return the error for bad files of an adapter.  It is a 500 like in vLLM, because the request itself is valid."""
    problem = describe(error)
    return HTTPError(500, "broken_adapter", problem.message, param=problem.param, headers=NO_RETRY)
