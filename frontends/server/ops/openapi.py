"""`GET /openapi.json`: a description of the routes, made from the table that serves them."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from trouper import __version__
from trouper.frontends.server.http.context import RequestContext, Route
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import TYPES

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
NAMED_ERROR = {  # of the Messages API
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
TEXT_ERROR = {  # of Ollama's API
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
ANYWHERE = (400, 401, 404, 408, 413, 414, 415, 431, 500, 503)
TAKING_WORK = (429, 504)
IN_PATH = re.compile(r"\{(\w+)\}")


async def describe(service: Service, context: RequestContext, _: None) -> None:
    """Describe the routes of this listener as OpenAPI."""
    has_keys = bool(service.settings.api_keys)
    await context.send_json(document(context.served, has_keys=has_keys))


def document(routes: Iterable[Route], *, has_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes.

    It is made from the same table and types that serve requests, so it cannot become outdated.
    """
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
            "schemas": {
                **components,
                "Error": ERROR,
                "NamedError": NAMED_ERROR,
                "TextError": TEXT_ERROR,
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}] if has_keys else [],
    }


def _operation(route: Route, refs: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": f"{route.method.lower()} {route.path}",
        "summary": (route.handler.__doc__ or "").partition("\n")[0],
        "parameters": [
            *(_parameter(name, "path", {"type": "string"}) for name in IN_PATH.findall(route.path)),
            *(_parameter(name, "query", schema) for name, schema in route.query.items()),
        ],
        "responses": {"200": _answer(route, refs)},
    }
    if route.access == "public":
        found["security"] = []
    if route.body is not None:
        kind = "multipart/form-data" if route.takes_form else "application/json"
        content = {kind: {"schema": refs[route.body]}}
        found["requestBody"] = {"required": route.access != "admin", "content": content}
    is_looked_up = route.body is not None or "{" in route.path
    statuses = ANYWHERE + (TAKING_WORK if is_looked_up else ())
    statuses += (409,) if route.access == "admin" else ()
    # Of a foreign host or origin.
    checks_host = route.access == "admin" or route.path.startswith(("/ui", "/api/"))
    statuses += (403,) if checks_host else ()
    statuses += (501,) if route.errors.schema == "TextError" else ()
    schema = {"$ref": f"#/components/schemas/{route.errors.schema}"}
    error = {"application/json": {"schema": schema}}
    for status in sorted(statuses):
        found["responses"][str(status)] = {"description": TYPES[status], "content": error}
    return found


def _answer(route: Route, refs: dict[Any, Any]) -> dict[str, Any]:
    if route.kind == "empty":
        return {"description": "OK"}
    if route.kind == "events":
        return {"description": "OK", "content": {"text/event-stream": {}}}
    if route.kind == "file":
        return {"description": "OK", "content": {"*/*": {}}}
    if route.kind == "text":
        return {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}
    schema = refs[route.reply] if route.reply is not None else {"type": "object"}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if route.generates:
        # OpenAPI 3.1 cannot describe events: some readers take a schema for one of them, some for all
        content["text/event-stream"] = {}
    if route.errors.schema == "TextError" and route.method == "POST":
        content["application/x-ndjson"] = {}
    return {"description": "OK", "content": content}


def _parameter(name: str, place: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}
