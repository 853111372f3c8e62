"""A response that goes on when its client has been told its id."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import anyio

from trouper.errors import EngineDeadError
from trouper.frontends.server.errors import MAX_MESSAGE, HTTPError, clean, describe, log
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.openai.driver import Driver, client_names
from trouper.frontends.server.responses.adapter import ResponsesAdapter
from trouper.frontends.server.responses.memory import stored_response
from trouper.frontends.server.responses.turn import ResponsesTurn
from trouper.frontends.server.service import Service

JSONObject = dict[str, Any]
CODES = {
    429: "rate_limit_exceeded"
}  # others of a request are invalid_prompt, as OpenAI's types have it


class BackgroundResponse:
    """One such response.  In whatever way it ends, the store has its end; unless it was deleted meanwhile."""

    def __init__(
        self,
        service: Service,
        context: RequestContext,
        turn: ResponsesTurn,
        driver: Driver[ResponsesAdapter],
    ) -> None:
        self._service = service
        self._context = context
        self._turn = turn
        self._driver = driver
        self._response = {**driver.adapter.response, "status": "queued"}

    @property
    def name(self) -> str:
        return self._response["id"]

    def queue(self) -> JSONObject:
        """Store the response as queued, and return it.  Raises HTTPError when all that is stored is running."""
        if not self._put(self._response):
            text = "there is no room for another response in background, try again later"
            raise HTTPError(503, "overloaded", text)
        return self._response

    async def perform(self, resources: AbstractContextManager[Any]) -> None:
        """Generate the answer, and give the resources back."""
        with resources, self._ended():
            self._put({**self._response, "status": "in_progress"})
            with anyio.move_on_after(self._context.timeout_s) as deadline:
                with client_names(partial(ResponsesAdapter.client_name, self._turn)):
                    await self._driver.complete()
            if deadline.cancelled_caught:
                text = f"the deadline of {self._context.timeout_s:g} s has passed"
                raise HTTPError(504, "deadline_exceeded", text)

    @contextmanager
    def _ended(self) -> Generator[None]:
        """Store how the block has ended; a failure goes no further."""
        end: JSONObject = {**self._response, "status": "cancelled"}
        try:
            yield
            end = self._driver.adapter.response
        except Exception as error:
            end = {**self._response, "status": "failed", "error": self._describe(error)}
        finally:
            stored = self._service.responses.get(self.name, self._context.tenant)
            if stored is not None and stored.is_running:
                self._put(end)

    def _put(self, response: JSONObject) -> bool:
        stored = stored_response(self._turn, response, self._context.tenant)
        return self._service.responses.put(self.name, stored)

    def _describe(self, error: Exception) -> JSONObject:
        problem = describe(error)
        log(problem, error, self._context.id)
        if isinstance(error, EngineDeadError):
            self._service.died.set()
        code = "server_error" if problem.status >= 500 else "invalid_prompt"
        return {
            "code": CODES.get(problem.status, code),
            "message": clean(problem.message, MAX_MESSAGE),
        }
