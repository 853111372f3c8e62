"""Define an entry of the table of routes.

The type is apart from the table because the context, the service and the OpenAPI document use it, and the table imports all
handlers.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from trouper.frontends.server.shared.errors import OPENAI_ERRORS, ErrorForm

Access = Literal["public", "user", "admin"]
# Takes the service, the request's context and its decoded body.
Handler = Callable[[Any, Any, Any], Awaitable[None]]


class Route(msgspec.Struct, frozen=True):
    """The handler of a method and a path, and its description for the OpenAPI document.

    Attributes:
        body: the type of the request's body, or None without a body.
        generates: whether the engine works for the request, which is then admitted by the gate.
        pools: whether the route needs a pooling model; it `generates`, too.
        tokenizes: whether the request is admitted although the engine does not work for it.
        reply: the type of the reply; None means any JSON object.
        stream_prefix: of the ids of its replies; empty if its answers cannot be durable.
        choose: finds the route of a body, if one path takes the bodies of several routes.
    """

    method: str
    path: str
    access: Access
    handler: Handler
    body: type[msgspec.Struct] | None = None
    generates: bool = False
    reply: type[msgspec.Struct] | None = None
    # The kind of the reply's body.
    kind: Literal["json", "text", "empty", "events", "file"] = "json"
    # The schemas of the query's fields.
    query: dict[str, dict[str, Any]] = {}
    tokenizes: bool = False
    pools: bool = False
    # Chooses the route for a body, given the service and the body.
    choose: Callable[[Any, Any], "Route"] | None = None
    errors: ErrorForm = OPENAI_ERRORS
    stream_prefix: str = ""
    # Whether a body of any content type is read as JSON.  A browser's page cannot post one: requests with an Origin are refused.
    takes_any_type: bool = False
    # Whether the body is a form with a file, multipart/form-data, instead of JSON.
    takes_form: bool = False
