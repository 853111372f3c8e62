"""Serve HTTP requests as an ASGI application.  Only this module converts exceptions to responses.

    head limits → key and route → body → admission → decoding → handler, next to a task that watches for a disconnect

When the client disconnects or the deadline passes, the handler is cancelled.  This closes its generations, which aborts them in the engine.
"""

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from trouper.errors import EngineDeadError
from trouper.frontends.server.admission.overload import Level
from trouper.frontends.server.asgi.auth import Authenticator
from trouper.frontends.server.asgi.durable_requests import (
    attached,
    has_stream,
    read_durable,
    started,
)
from trouper.frontends.server.asgi.routes import errors_at, path_of
from trouper.frontends.server.durable.streams import DurableStream
from trouper.frontends.server.http.body import Body, ClientGone
from trouper.frontends.server.http.context import (
    Receive,
    RequestContext,
    Route,
    Scope,
    Send,
)
from trouper.frontends.server.http.decoding import decode
from trouper.frontends.server.http.forms import FormBody
from trouper.frontends.server.http.headers import HostNames, cors_headers
from trouper.frontends.server.http.logs import access_line
from trouper.frontends.server.models.choosing import choose_model
from trouper.frontends.server.models.residency import Residency, residency_of
from trouper.frontends.server.ops.operations import FOLDER, SAFETY
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import ErrorBody, HTTPError, describe, log, unavailable
from trouper.frontends.server.shared.settings import ServerSettings
from trouper.frontends.server.shared.usage import Usage

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine

access_log = logging.getLogger("trouper.access")
POLICY_VIOLATION = 1008
# Seconds between comments on a silent stream while the device restarts.
LOST_INTERVAL_S = 5.0


def create_app(engine: "AsyncLLMEngine", settings: ServerSettings | None = None) -> "App":
    """Return an ASGI application for a running engine, to serve it or to mount it in another application.

    The caller opens and closes the engine.
    """
    service = Service(settings or ServerSettings())
    service.open(engine.engine)
    return App(service)


# Paths of answers that belong to the server with the journal; an id follows.
KEPT = ("/v1/streams", "/v1/responses/")


class App:
    """The ASGI application of one listener: `await app(scope, receive, send)`.

    Several listeners may share one service, each with its own table of routes: control routes belong to the admin
    listener.

    Args:
        is_loopback: whether only this machine can connect.  Then the page is on by default, and accepts only local host names.
        names: further host names of the listener.
    """

    def __init__(
        self,
        service: Service,
        *,
        is_admin_listener: bool = False,
        root_path: str = "",
        is_loopback: bool = False,
        names: Iterable[str] = (),
    ) -> None:
        self.service = service
        self._residency = residency_of(service)
        # A prefix of all paths that the reverse proxy does not strip.
        self._root_path = root_path
        self._settings = service.settings
        settings = service.settings
        self._hosts = HostNames.of((*names, *settings.ui_hosts), is_loopback=is_loopback)
        self._is_loopback = is_loopback
        self._authenticator = Authenticator(
            settings,
            is_admin_listener=is_admin_listener,
            has_page=is_loopback if settings.ui is None else settings.ui,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                if self._root_path:
                    scope = {**scope, "root_path": self._root_path}
                await self._answer(RequestContext(scope, receive, send))
            case "lifespan":
                await self._live(receive, send)
            case "websocket":
                await receive()
                await send({"type": "websocket.close", "code": POLICY_VIOLATION})
            case other:
                raise NotImplementedError(f"the ASGI scope type {other!r} is not supported")

    async def _live(self, receive: Receive, send: Send) -> None:
        """Answer lifespan events, and run background work between them.

        The caller of `create_app` opens and closes the engine.
        """
        message = await receive()
        async with anyio.create_task_group() as tasks:
            # If several listeners share the service, only one of their applications runs the tasks.
            if not self.service.background.is_on:
                await tasks.start(self.service.background.run_tasks, name="background work")
            while message["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
                message = await receive()
            tasks.cancel_scope.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, context: RequestContext) -> None:
        try:
            await self._perform(context)
        except ClientGone:
            # The client has disconnected.
            pass
        except Exception as error:
            await context.fail(self._describe(context, error), errors_at(context.path))
        self._note(context)

    def _describe(self, context: RequestContext, error: Exception) -> ErrorBody:
        problem = describe(error)
        log(problem, error, context.id)
        if isinstance(error, EngineDeadError):
            if self._residency is None:
                self.service.died.set()
            else:
                self._residency.note_deaths()
        return problem

    def _note(self, context: RequestContext) -> None:
        """Count and log the sent response."""
        route = path_of(context.path)
        self.service.metrics.note_answer(route or "none", context.status)
        if self._settings.logs_access and route not in self._settings.unlogged_paths:
            access_log.info("%s", access_line(context, route))

    def _find(self, context: RequestContext) -> Route | None:
        """Return the route of a request, or None for OPTIONS, which gets an empty response.

        Raises:
            HTTPError: the head is too large, the key is wrong, or the route does not exist.
        """
        context.own_headers = cors_headers(context, self._settings)
        if self.service.gate.level >= Level.TIDY or self.service.is_leaving:
            context.own_headers += ((b"connection", b"close"),)
        context.check_head(self._settings)
        is_page = f"{context.path}/".startswith(FOLDER)
        if is_page:
            context.own_headers += SAFETY
        route = self._authenticator.route(context)
        if is_page or (route is not None and self._trusts_all(context, route)):
            self._hosts.check(context)
        if route is not None:
            context.read_timeout(self._settings)
        return route

    def _trusts_all(self, context: RequestContext, route: Route) -> bool:
        """Return whether only the check of the host name protects the route from web pages in a browser on this machine.

        This holds for Ollama's routes on a server without keys, because they accept any content type.
        """
        if not self._is_loopback:
            return False
        is_open = context.path.startswith("/api/") and not self._settings.api_keys
        return is_open or self._authenticator.needs_no_admin_key(route)

    async def _perform(self, context: RequestContext) -> None:
        with ExitStack() as stack:
            route = self._find(context)
            if route is None:
                await context.send_empty(204)
                return
            residency = self._residency
            if residency is None:
                self._check_early(context, route)
            elif route.generates or route.tokenizes:
                # The limits are those of a model, and only the body names it.
                self.service.check_serving()
            read = self._read_form if route.takes_form else self._read
            route, service, request = await read(context, route, residency, stack)
            act = partial(route.handler, service, context, request)
            if residency is not None and (route.generates or route.tokenizes):
                model = residency.table.of_service(service)
                act = partial(residency.use, model, act, needs_awake=route.generates)
            await self._attend(context, service, act, context.timeout_s)

    def _check_early(self, context: RequestContext, route: Route) -> None:
        """Raise the error of a request that cannot be accepted now, before its body is read."""
        if self.service.is_leaving and context.path.startswith(KEPT):
            text = "another server has taken over and has this answer; connect again"
            raise unavailable("draining", text)
        if route.generates:
            self.service.check_open()
            self.service.check_kind(route)
        # Without a journal no request has an answer, and the call would cost every request two changes of module.
        has_answer = self.service.journal is not None and has_stream(self.service, context, route)
        if not has_answer and (route.generates or route.tokenizes):
            self.service.check_room(context)

    async def _read(
        self,
        context: RequestContext,
        route: Route,
        residency: Residency | None,
        stack: ExitStack,
    ) -> tuple[Route, Service, Any]:
        """Read and decode the body.

        Returns the route of the body, too, because /invocations chooses one by the body, and the service of its model.  The
        place is reserved between reading and decoding, so that unfinished bodies hold no places.
        """
        service = self.service
        if route.body is None:
            if residency is not None:
                service = (await choose_model(residency, context, route, None)).service
            return route, service, None
        memory = stack.enter_context(self.service.bodies.open())
        await context.read_body(self._settings, memory)
        body = memory.whole()
        if residency is not None:
            service = (await choose_model(residency, context, route, body)).service
        durable = await read_durable(service, context, route, body)
        if isinstance(durable, DurableStream):
            # Reading an earlier answer needs no place of its own.
            memory.release()
            return attached(route, durable), service, None
        if durable is not None:
            # Parts of the decoded request refer to its body, and it may outlive the connection.
            body = durable.body
        if route.generates or route.tokenizes:
            context.ticket = stack.enter_context(service.enter(context))
        self._check_type(context, route, body)
        route, request = await self._decode(context, route, service, body, memory)
        if durable is not None:
            route = started(route, durable)
        return route, service, request

    async def _decode(
        self,
        context: RequestContext,
        route: Route,
        service: Service,
        body: bytes | memoryview,
        memory: Body,
    ) -> tuple[Route, Any]:
        """Return the route of a body, and the decoded request."""
        assert route.body is not None
        if not body and route.access == "admin":
            return route, route.body()  # all fields have defaults
        if route.choose is not None:
            route = await anyio.to_thread.run_sync(
                route.choose, service, body, limiter=service.threads
            )
        assert route.body is not None
        decoded = await decode(body, route.body, service.threads)
        if not decoded.holds_body:
            memory.release()
        if decoded.unknown:
            context.own_headers += service.unknown.note(route.path, decoded.unknown)
        return route, decoded.request

    def _check_type(self, context: RequestContext, route: Route, body: bytes | memoryview) -> None:
        """Raise HTTPError (400) unless the body may be read as JSON."""
        kind = (context.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        is_json = kind == b"application/json" or (
            route.takes_any_type and context.header(b"origin") is None
        )
        if not is_json and (body or route.generates):
            raise HTTPError(
                400, "invalid_content_type", "the content type must be application/json"
            )

    async def _read_form(
        self,
        context: RequestContext,
        route: Route,
        residency: Residency | None,
        stack: ExitStack,
    ) -> tuple[Route, Service, Any]:
        """Read and decode a form; see `_read`."""
        service, limiter = self.service, self.service.threads
        content_type = context.header(b"content-type") or b""
        memory = stack.enter_context(service.bodies.open())
        await context.read_body(self._settings, memory)
        form = await anyio.to_thread.run_sync(
            FormBody, memory.whole(), content_type, limiter=limiter
        )
        memory.release()
        if residency is not None:
            service = (await choose_model(residency, context, route, form.model_key())).service
        context.ticket = stack.enter_context(service.enter(context))
        assert route.body is not None
        decoded = form.decoded(route.body)
        if decoded.unknown:
            context.own_headers += service.unknown.note(route.path, decoded.unknown)
        return route, service, decoded.request

    async def _attend(
        self, context: RequestContext, service: Service, act: Any, timeout_s: float
    ) -> None:
        """Run the handler until it returns, the client disconnects, or the deadline passes."""
        deadline = anyio.CancelScope(deadline=anyio.current_time() + timeout_s)
        await self._attend_beside(context, service, act, deadline)
        if deadline.cancelled_caught and not context.is_gone:
            num_prompt, num_output = context.ticket.cost if context.ticket else (0, 0)
            phase = "decode" if num_output else "prefill" if num_prompt else "queue"
            raise HTTPError(
                504,
                "deadline_exceeded",
                f"the deadline of {timeout_s:g} s has passed",
                param=phase,
                usage=Usage(num_prompt, num_output, num_prompt + num_output),
            )

    async def _attend_beside(
        self, context: RequestContext, service: Service, act: Any, deadline: anyio.CancelScope
    ) -> None:
        """Run the handler next to a task that cancels it when the client disconnects."""
        error: Exception | None = None
        async with anyio.create_task_group() as tasks:
            watch = partial(self._watch_disconnect, context, service, tasks.cancel_scope)
            tasks.start_soon(watch, name="disconnect")
            with deadline:
                try:
                    await act()
                except Exception as raised:
                    # Raised after the group, which would wrap it in another group.
                    error = raised
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error

    async def _watch_disconnect(
        self, context: RequestContext, service: Service, handler: anyio.CancelScope
    ) -> None:
        """Wait for the client to disconnect, then cancel the handler.

        A stream without events for an interval gets a comment, if comments are on or the stream pauses.
        """
        interval_s = self._settings.sse_keep_alive_interval_s
        while not context.is_gone:
            num_sends = context.num_sends
            with anyio.move_on_after(interval_s or LOST_INTERVAL_S):
                await context.wait_disconnect()
            is_silent = context.is_stream and context.num_sends == num_sends
            is_due = is_silent and not context.is_gone
            if is_due and (interval_s or service.is_stalled):
                await context.send_comment()
        handler.cancel()
