"""Find the model of a request before its handler runs: by its body, its query, or the response that it continues."""

from typing import Any

import anyio.to_thread
import msgspec

from trouper.frontends.server.http.context import RequestContext, Route
from trouper.frontends.server.http.decoding import THREAD_FROM
from trouper.frontends.server.models.residency import Residency
from trouper.frontends.server.models.table import HostedModel
from trouper.frontends.server.shared.errors import HTTPError, unavailable

# The value of `?model=` that selects all models, in the control routes of `FOR_ALL`.
ALL_MODELS = "*"
FOR_ALL = ("/sleep", "/wake_up", "/pause", "/resume")


class ChoosingKeys(msgspec.Struct):
    """Hold the fields of a body that determine its model.  The route's own decoder refuses values of a wrong type."""

    model: Any = None
    # In Ollama's older routes only.
    name: Any = None
    previous_response_id: Any = None


async def choose_model(
    residency: Residency, context: RequestContext, route: Route, body: bytes | memoryview | None
) -> HostedModel:
    """Return the model of a request, and check that the model can answer it.

    Raises:
        TrouperNotFoundError: no model has the requested name.
        HTTPError: the request names no model (400), or its model cannot answer it (400, 503, 507).
    """
    keys = ChoosingKeys() if body is None else await _read_keys(residency, body)
    name = _name(residency, context, route, keys)
    table, is_asking = residency.table, route.generates or route.tokenizes
    if name == ALL_MODELS and route.path in FOR_ALL:
        return table.default
    if name is None and is_asking and not table.has_default:
        names = ", ".join(model.name for model in table)[:200]
        text = f"set model to one of the models of this server: {names}"
        raise HTTPError(400, "model_required", text, param="model")
    model = table.default if name is None else table.find(name)
    if is_asking:
        _check(residency, context, route, model)
    return model


def _name(
    residency: Residency, context: RequestContext, route: Route, keys: ChoosingKeys
) -> str | None:
    given = (keys.model, keys.name if route.path.startswith("/api/") else None)
    for name in given:
        if isinstance(name, str) and name:
            return name
    if isinstance(keys.previous_response_id, str):
        responses = residency.table.default.service.responses
        stored = responses.get(keys.previous_response_id, context.tenant)
        if stored is not None and stored.model:
            return stored.model
    return context.query().get("model", [None])[-1]


async def _read_keys(residency: Residency, body: bytes | memoryview) -> ChoosingKeys:
    def read() -> ChoosingKeys:
        try:
            return msgspec.json.decode(body, type=ChoosingKeys)
        except (msgspec.MsgspecError, RecursionError):
            # The route's own decoder reports the error.
            return ChoosingKeys()

    if len(body) < THREAD_FROM:
        return read()
    limiter = residency.table.default.service.threads
    return await anyio.to_thread.run_sync(read, limiter=limiter)


def _check(residency: Residency, context: RequestContext, route: Route, model: HostedModel) -> None:
    """Raise HTTPError if the model could not answer the request even after loading."""
    residency.check(model)
    service = model.service
    # Skipped while the engine is being stopped: it refuses everything, but the policy starts it again for this request.
    if model.is_loaded:
        service.check_open()
    service.check_kind(route)
    given = context.query().get("autoload", [""])[-1].lower()
    if given not in ("", "true", "1", "false", "0"):
        text = "autoload: must be true or false"
        raise HTTPError(400, "invalid_value", text, param="query.autoload")
    loads = given in ("true", "1") if given else residency.loads_by_request
    if not loads and service.is_starting and model.state == "cold":
        text = f"the model {model.name} is not loaded; load it with POST /models/load"
        raise unavailable("model_not_loaded", text)
