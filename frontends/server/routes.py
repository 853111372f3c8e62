"""The one table of routes.  Authentication and routing read the same entry of it."""

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from trouper.frontends.server import control, operations, tokens
from trouper.frontends.server.chat import create_chat
from trouper.frontends.server.completions import create_completion
from trouper.frontends.server.exchange import Exchange
from trouper.frontends.server.responses import create_response
from trouper.frontends.server.service import Service
from trouper.frontends.server.wire import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)

Handler = Callable[[Service, Exchange, Any], Awaitable[None]]
Access = Literal["public", "user", "admin"]


class Route(msgspec.Struct, frozen=True):
    """`body` is what the request's body is decoded to; `generates` needs a place in the house."""

    method: str
    path: str
    access: Access
    handler: Handler
    body: type[msgspec.Struct] | None = None
    generates: bool = False


ROUTES = (
    Route("GET", "/health", "public", operations.ready),
    Route("GET", "/health/live", "public", operations.live),
    Route("GET", "/health/ready", "public", operations.ready),
    Route("GET", "/health/step", "public", operations.step_age),
    Route("GET", "/ping", "public", operations.ready),
    Route("POST", "/ping", "public", operations.ready),
    Route("GET", "/version", "public", operations.version),
    Route("GET", "/metrics", "public", operations.metrics),
    Route("GET", "/load", "user", operations.load),
    Route("GET", "/v1/models", "user", operations.list_models),
    Route("POST", "/v1/completions", "user", create_completion, CompletionRequest, True),
    Route("POST", "/v1/chat/completions", "user", create_chat, ChatRequest, True),
    Route("POST", "/v1/responses", "user", create_response, ResponsesRequest, True),
    Route("POST", "/tokenize", "user", tokens.tokenize, TokenizeRequest),
    Route("POST", "/detokenize", "user", tokens.detokenize, DetokenizeRequest),
    Route("POST", "/sleep", "admin", control.sleep),
    Route("POST", "/wake_up", "admin", control.wake_up),
    Route("GET", "/is_sleeping", "admin", control.is_sleeping),
    Route("POST", "/pause", "admin", control.pause),
    Route("POST", "/resume", "admin", control.resume),
    Route("GET", "/is_paused", "admin", control.is_paused),
    Route("GET", "/server_info", "admin", operations.server_info),
    Route("POST", "/abort_requests", "admin", control.abort_requests, AbortRequest),
    Route("POST", "/reset_prefix_cache", "admin", control.reset_prefix_cache),
)
TABLE: dict[str, dict[str, Route]] = {}
for _route in ROUTES:
    TABLE.setdefault(_route.path, {})[_route.method] = _route
