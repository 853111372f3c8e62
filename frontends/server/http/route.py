"""One entry of the table of routes, and nothing of what stands in it."""

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from trouper.frontends.server.shared.errors import OPENAI_ERRORS, ErrorForm

Access = Literal["public", "user", "admin"]
# Takes the service, the request's context and its decoded body.
Handler = Callable[[Any, Any, Any], Awaitable[None]]


class Route(msgspec.Struct, frozen=True):
    """The handler of a method and a path, and its description for the OpenAPI document.

    `body` is what the request's body is decoded to.  A route that `generates` makes the engine work, and
    one that also `pools` needs a pooling model; requests of a route that generates or `tokenizes` are admitted.  `reply` of None stands for any JSON object.  `choose` finds the
    route that a body is for, where one path takes the bodies of several.
    """

    method: str
    path: str
    access: Access
    handler: Handler
    body: type[msgspec.Struct] | None = None
    generates: bool = False
    reply: type[msgspec.Struct] | None = None
    kind: Literal["json", "text", "empty"] = "json"  # of the reply's body
    query: dict[str, dict[str, Any]] = {}  # schemas of the query's fields
    tokenizes: bool = False
    pools: bool = False
    choose: Callable[[Any, Any], "Route"] | None = None  # takes the service and the body
    errors: ErrorForm = OPENAI_ERRORS
    # Whether a body of any content type is read as JSON.  A browser's page cannot post one: requests with an Origin are refused.
    takes_any_type: bool = False

    @property
    def is_admitted(self) -> bool:
        """Whether a request counts against the limits of the admission gate."""
        return self.generates or self.tokenizes
