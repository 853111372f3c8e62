"""`GET /openapi.json`: a description of the routes, made from the table that serves them."""

from collections.abc import Iterable
from typing import Any

import msgspec

from trouper import __version__
from trouper.frontends.server.errors import TYPES
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.http.route import Route
from trouper.frontends.server.service import Service

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": sorted(set(TYPES.values()))},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        },
        "usage": {"type": "object"},
    },
}
ANYWHERE = (400, 401, 408, 413, 414, 415, 431, 500, 503)
TAKING_WORK = (404, 429, 504)


async def describe(service: Service, context: RequestContext, _: None) -> None:
    """Describe the routes of this listener as OpenAPI."""
    has_keys = bool(service.settings.api_keys)
    await context.send_json(document(context.served, has_keys=has_keys))


def document(routes: Iterable[Route], *, has_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes."""
    routes = tuple(routes)
    kinds = {kind for route in routes for kind in (route.body, route.reply) if kind is not None}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}"
    )
    refs = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "trouper", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}] if has_keys else [],
    }


def _operation(route: Route, refs: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": f"{route.method.lower()} {route.path}",
        "summary": (route.handler.__doc__ or "").partition("\n")[0],
        "parameters": [_query(name, schema) for name, schema in route.query.items()],
        "responses": {"200": _answer(route, refs)},
    }
    if route.access == "public":
        found["security"] = []
    if route.body is not None:
        content = {"application/json": {"schema": refs[route.body]}}
        found["requestBody"] = {"required": route.access != "admin", "content": content}
    statuses = ANYWHERE + (TAKING_WORK if route.body is not None else ())
    statuses += (409,) if route.access == "admin" else ()
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status in sorted(statuses):
        found["responses"][str(status)] = {"description": TYPES[status], "content": error}
    return found


def _answer(route: Route, refs: dict[Any, Any]) -> dict[str, Any]:
    if route.kind == "empty":
        return {"description": "OK"}
    if route.kind == "text":
        return {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}
    schema = refs[route.reply] if route.reply is not None else {"type": "object"}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if route.generates:
        # OpenAPI 3.1 cannot describe events: some readers take a schema for one of them, some for all
        content["text/event-stream"] = {}
    return {"description": "OK", "content": content}


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}
