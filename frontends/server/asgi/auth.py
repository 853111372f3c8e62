"""Check API keys and find routes.

Authentication fails closed: with keys, only paths on the public list work without one.  The path is compared exactly as received,
without normalisation, and routing uses the same string, so no spelling of a path avoids the check.
"""

import hmac
from hashlib import sha256

from trouper.frontends.server.asgi.routes import ROUTES, find, nearest
from trouper.frontends.server.http.context import Access, RequestContext, Route
from trouper.frontends.server.ops.operations import is_below_ui
from trouper.frontends.server.shared.errors import HTTPError, clean
from trouper.frontends.server.shared.keys import key_digests, tenant_name, user_key_digests
from trouper.frontends.server.shared.settings import ServerSettings

SCHEME = b"Bearer "
ADAPTER_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
MAX_SHOWN_PATH = 200  # characters of a path in an error
KEY_HEADERS = (b"authorization", b"x-api-key")  # OpenAI's clients, Anthropic's


class Authenticator:
    """Find the route of a request and check its key.

    With `is_admin_listener`, every client that can connect is trusted, unless there is an admin key.
    """

    def __init__(
        self, settings: ServerSettings, *, is_admin_listener: bool = False, has_page: bool = False
    ) -> None:
        self._admin_keys = key_digests((settings.admin_key,) if settings.admin_key else ())
        self._user_keys = user_key_digests(settings)
        self._is_admin_listener = is_admin_listener
        self._has_control = is_admin_listener or settings.is_dev_mode or bool(self._admin_keys)
        self._is_dev_mode = settings.is_dev_mode
        self._protects_metrics = settings.protect_metrics
        scope = settings.cache_scope
        self._separates_caches = scope == "key" or (scope == "auto" and len(settings.api_keys) > 1)
        self._open_paths = ADAPTER_PATHS if settings.allows_lora_updates else frozenset[str]()
        self._has_page = has_page
        self._served = [route for route in ROUTES if self._is_served(route)]
        self._served_keys = {(route.method, route.path) for route in self._served}

    def route(self, context: RequestContext) -> Route | None:
        """Return the route, or None for OPTIONS, which needs no key.  Raises HTTPError: 401, 404 or 405.

        The key is checked before the path, so a client without a key cannot find out which routes exist.
        """
        context.served = self._served
        # A route that is not served is treated as nonexistent.
        methods = {
            method: route
            for method, route in find(context.path).items()
            if (method, route.path) in self._served_keys
        }
        route = methods.get(context.method) or next(iter(methods.values()), None)
        access = "user" if route is None else self._access(route)
        if context.path == "/metrics" and self._protects_metrics:
            access = "user"
        if context.method == "OPTIONS":
            return None
        self._check_key(context, access)
        context.has_control, context.is_admin = self._has_control, self._is_admin(context)
        if not methods:
            near = nearest(context.path, self._served)
            hint = (
                "; GET /openapi.json lists the paths" if near is None else f"; did you mean {near}?"
            )
            path = clean(context.path, MAX_SHOWN_PATH)
            raise HTTPError(404, "not_found", f"this server has no path {path!r}{hint}")
        if context.method not in methods:
            allowed = ", ".join(sorted(methods))
            text = f"{clean(context.path, MAX_SHOWN_PATH)} takes {allowed}, not {clean(context.method, 16)}"
            headers = ((b"allow", allowed.encode()),)
            raise HTTPError(405, "method_not_allowed", text, headers=headers)
        return methods[context.method]

    def needs_no_admin_key(self, route: Route) -> bool:
        """Return whether every client that can connect may use a control route."""
        return self._access(route) == "admin" and not self._admin_keys

    def _is_served(self, route: Route) -> bool:
        if is_below_ui(route.path):
            return self._has_page
        return self._access(route) != "admin" or self._has_control

    def _is_admin(self, context: RequestContext) -> bool:
        if not self._has_control or not self._admin_keys:
            return self._has_control
        digest = sha256(_given_key(context) or b"").digest()
        found = [hmac.compare_digest(digest, key) for key in self._admin_keys]
        return any(found)

    def _access(self, route: Route) -> Access:
        return "user" if route.path in self._open_paths else route.access

    def _check_key(self, context: RequestContext, access: str) -> None:
        keys = self._user_keys
        if access == "admin":
            keys = () if self._is_dev_mode and not self._admin_keys else self._admin_keys
        elif self._is_admin_listener:
            keys = self._admin_keys
        if access == "public" or not keys:
            return
        given = _given_key(context)
        digest = sha256(given or b"").digest()
        # All keys are compared, so that the time reveals nothing.
        found = [hmac.compare_digest(digest, key) for key in keys]
        if given is not None and any(found):
            context.tenant = tenant_name(found.index(True))
            context.key_digest = digest
            if self._separates_caches:
                context.cache_scope = sha256(b"cache scope" + digest).digest()[:16]
        else:
            header = (b"www-authenticate", b"Bearer")
            raise HTTPError(
                401,
                "invalid_api_key",
                "a valid API key is required; send it as Authorization: Bearer KEY or as x-api-key",
                headers=(header,),
            )


def _given_key(context: RequestContext) -> bytes | None:
    """Return the API key of a request, from a bearer token or `x-api-key`, or None without exactly one such header."""
    given = [pair for pair in context.headers if pair[0] in KEY_HEADERS]
    if len(given) != 1:
        return None
    name, value = given[0]
    if name == b"x-api-key":
        return value
    return value[len(SCHEME) :] if value.startswith(SCHEME) else None
