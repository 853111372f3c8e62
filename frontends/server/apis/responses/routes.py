"""Serve the routes of the Responses API, and define its error format: the usual bodies, but its own events.

Besides creating, reading, cancelling and deleting responses, clients can summarise a conversation (`POST /v1/responses/compact`) or count
its tokens (`/v1/responses/input_tokens`).
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec

from trouper.errors import invalid
from trouper.frontends.server.apis.openai.tokens import conversation_ids
from trouper.frontends.server.apis.responses.adapter import ResponsesAdapter
from trouper.frontends.server.apis.responses.background import (
    MAX_DIGITS,
    BackgroundResponse,
    follow,
    forget_request,
    keep_request,
    kept_turn,
    with_seed,
)
from trouper.frontends.server.apis.responses.conversation import (
    CompactRequest,
    Page,
    ResponsesRequest,
    ResponsesTurn,
    listed,
)
from trouper.frontends.server.apis.responses.memory import (
    check_is_on,
    encode,
    find,
    input_items,
    recall,
    stored_response,
)
from trouper.frontends.server.durable.streams import DurableStream
from trouper.frontends.server.generation.driver import client_names, prepare
from trouper.frontends.server.generation.stream_readers import follow_stream
from trouper.frontends.server.generation.transcript import chat_prompt, seal
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.http.decoding import TOOLS
from trouper.frontends.server.models.residency import residency_of
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import (
    MAX_MESSAGE,
    MAX_PARAM,
    OPENAI_ERRORS,
    ErrorBody,
    ErrorForm,
    HTTPError,
    clean,
    unsupported,
)

JSONObject = dict[str, Any]
RESPONSES = "/v1/responses/"  # an id follows, and perhaps what is to be done
INSTRUCTION = (
    "Write a summary of the conversation above, from which another model can go on with it without seeing anything "
    "else of it. Keep the task and every wish of the user, what was decided and done, the names of files, commands "
    "and results that matter, and what is left to do. Write nothing but the summary."
)


async def count_input_tokens(
    service: Service, context: RequestContext, request: CompactRequest
) -> None:
    """Count the tokens of a conversation of items.

    The result is the exact length of the prompt after rendering, and includes tools and instructions.
    """
    service.check_model(request.model)
    turn = await _recalled(service, context, request)
    with client_names(partial(ResponsesAdapter.client_name, turn)):
        ids = await conversation_ids(
            service, context, chat_prompt(turn.as_chat(), service.settings)
        )
    await context.send_json({"object": "response.input_tokens", "input_tokens": len(ids)})


async def compact_response(
    service: Service, context: RequestContext, request: CompactRequest
) -> None:
    """Summarise a conversation with the model.  The reply contains the user's messages and the summary.

    Raises:
        HTTPError: the model wrote no summary.
    """
    turn = await _recalled(service, context, request)
    turn.transcript.append("input", "user", INSTRUCTION)
    with client_names(partial(ResponsesAdapter.client_name, turn)):
        driver = prepare(service, context, turn, ResponsesAdapter)
        await driver.complete()
    response = driver.adapter.response
    summary = "\n".join(_texts(response["output"])).strip()
    if not summary:
        raise HTTPError(500, "no_summary", "the model wrote no summary; try again")
    name = response["id"].removeprefix("resp_")
    said = [item for item in (*turn.history, *turn.items) if _is_of_user(item)]
    compaction = {
        "id": f"cmp_{name}_0",
        "type": "compaction",
        "encrypted_content": seal("compaction", summary),
    }
    await context.send_json(
        {
            "id": response["id"],
            "object": "response.compaction",
            "created_at": response["created_at"],
            "output": [*listed(said, name, Page(len(said), False))["data"], compaction],
            "usage": response["usage"],
        }
    )


async def _recalled(
    service: Service, context: RequestContext, request: CompactRequest
) -> ResponsesTurn:
    """Return the conversation for a single use, without storing it.

    The tools stay in the prompt, so that its prefix is found in the cache, but `tool_choice` forbids calls.
    """
    choice = "none" if request.tools else None
    given = [] if request.input is None else request.input
    body = msgspec.structs.replace(
        request, input=given, stream=None, background=None, store=False, text=None, tool_choice=choice
    )  # fmt: skip
    return await recall(service, context, body)


def _is_of_user(item: JSONObject) -> bool:
    return item.get("type", "message") == "message" and item.get("role") == "user"


def _texts(output: list[JSONObject]) -> list[str]:
    messages = [item for item in output if item["type"] == "message"]
    return [part["text"] for item in messages for part in item["content"]]


async def create_response(
    service: Service, context: RequestContext, request: ResponsesRequest
) -> None:
    """Answer a request as one reply, as a stream of typed events, or in background.

    Tools that only OpenAI's servers can run are left out and listed in a header.
    """
    turn = await _recall(service, context, request)
    if left_out := turn.tools.left_out:
        context.own_headers += service.unknown.note(context.path, left_out, TOOLS)
    with client_names(partial(ResponsesAdapter.client_name, turn)):
        if request.background:
            queued = await _start(service, context, turn)
            if isinstance(queued, DurableStream):
                await follow_stream(service, context, queued)
            elif request.stream:
                await follow(service, context, queued["id"])
            else:
                await context.send_json(queued)
            return
        driver = prepare(service, context, turn, ResponsesAdapter)

        def keep() -> None:
            response = driver.adapter.response
            stored = stored_response(turn, response, context.tenant)
            service.responses.put(response["id"], stored)

        await driver.answer(keep if turn.is_stored else None)


async def _recall(
    service: Service, context: RequestContext, request: ResponsesRequest
) -> ResponsesTurn:
    """Return the request with the conversation that it continues.  A durable request saves it, or restores it if resumed."""
    durable = context.durable
    if durable is None:
        return await recall(service, context, request)
    if durable.pieces:
        is_stored = service.responses.is_on and request.store is not False
        return kept_turn(request, durable.pieces, is_stored=is_stored)
    turn = await recall(service, context, request)
    pieces = turn.pieces or (encode(turn.history), encode(turn.items))
    durable.keep_conversation(msgspec.json.encode(turn.body), pieces)
    return turn


async def retrieve_response(service: Service, context: RequestContext, _: None) -> None:
    """Return a stored or running response, or its events if the query asks for them."""
    _check_found(service)
    start = _wanted_events(context.query())
    name = _name(context)
    journal = service.journal
    stream = None if journal is None else journal.streams.find(context.key_digest, name)
    if start is not None and stream is not None and stream.attach is None:
        # Events are numbered by their position.
        await follow_stream(service, context, stream, start)
        return
    stored = find(service, context, name)
    if start is None:
        await context.send_body(stored.body)
    else:
        await follow(service, context, name, start)


async def list_input_items(service: Service, context: RequestContext, _: None) -> None:
    """Return one page of a stored response's input items: the whole conversation before it."""
    _check_found(service)
    page = Page.of(context.query())
    name = _name(context).removesuffix("/input_items")
    items = await input_items(service, context, find(service, context, name))
    await context.send_json(listed(items, name.removeprefix("resp_"), page))


async def delete_response(service: Service, context: RequestContext, _: None) -> None:
    """Delete a response.  A running background response is cancelled.

    Responses that continue it keep their own copy of the conversation.
    """
    _check_found(service)
    name = _name(context)
    find(service, context, name)
    service.responses.remove(name)
    service.background.cancel(name)
    if service.journal is not None:
        service.journal.streams.remove(name)
        await service.journal.delete(name)
    await context.send_json({"id": name, "object": "response", "deleted": True})


async def cancel_response(service: Service, context: RequestContext, _: None) -> None:
    """Cancel a running background response, and return it.  A finished one is returned unchanged.

    A response without background cannot be cancelled; its client closes the connection instead.
    """
    _check_found(service)
    name = _name(context).removesuffix("/cancel")
    stored = find(service, context, name)
    response = msgspec.json.decode(stored.body)
    if not response["background"]:
        text = "Cannot cancel a synchronous response. Only responses created with background can be cancelled."
        raise HTTPError(400, "invalid_value", text, param="response_id")
    if stored.is_running:
        response["status"] = "cancelled"
        body = msgspec.json.encode(response)
        ended = msgspec.structs.replace(stored, status="cancelled", body=body)
        service.responses.put(name, ended)
        service.background.cancel(name)
        if service.journal is not None:
            service.journal.streams.note_end(name, time.time())
            await service.journal.note_end(name, body)
    await context.send_json(response)


def _wanted_events(query: Mapping[str, Sequence[str]]) -> int | None:
    """Return the number of the first requested event, or None if the query asks for the whole response.

    Raises:
        TrouperValidationError: a field of the query is invalid; the error names it.
    """
    stream = query.get("stream", ["false"])[-1]
    after = query.get("starting_after", [None])[-1]
    if stream.lower() not in ("true", "false"):
        raise invalid("stream", "must be true or false", stream[:64])
    if stream.lower() == "false":
        if after is not None:
            raise invalid("starting_after", "requires stream=true")
        return None
    if after is None:
        return 0
    if not (after.isascii() and after.isdigit() and len(after) <= MAX_DIGITS):
        raise invalid("starting_after", "must be the number of an event", after[:64])
    return int(after) + 1


async def _start(
    service: Service, context: RequestContext, turn: ResponsesTurn
) -> JSONObject | DurableStream:
    """Start a background task for the request, and return the queued response.

    Returns a stream instead if an earlier request had the same `Idempotency-Key`.

    Raises:
        HTTPError: the server has no room for the request.
        UnsupportedFeatureError: the application runs without lifespan events, so there is nothing to run the task.
    """
    if not service.background.is_on:
        raise unsupported("background", "this application runs no background work; use stream")
    with ExitStack() as resources:
        if context.ticket is not None:
            # The task gets a place of its own.
            context.ticket.leave()
        later = context.detached(resources.enter_context(service.enter(context)))
        residency = residency_of(service)
        if residency is not None:
            resources.enter_context(residency.opened(residency.table.of_service(service)))
        if service.journal is not None:
            turn.body = with_seed(turn.body)
        created = int(time.time())
        driver = prepare(service, later, turn, ResponsesAdapter, created)
        if service.journal is not None:
            earlier = await keep_request(service, later, turn, driver, created)
            if earlier is not None:
                return earlier
            context.own_headers += ((b"x-stream-id", driver.adapter.response["id"].encode()),)
        try:
            response = BackgroundResponse(service, later, turn, driver)
            queued = response.queue()
            service.background.start(response.name, partial(response.perform, resources.pop_all()))
            if service.journal is not None:
                service.journal.streams.note_begin(response.name)
        except BaseException as error:
            if service.journal is not None:
                name = driver.adapter.response["id"]
                await forget_request(service.journal, name, error)  # noqa: ASYNC102  # waits only after its record is handed in
            raise
        return queued


def _check_found(service: Service) -> None:
    """Check that lookups of stored responses can succeed.

    Raises:
        UnsupportedFeatureError: the server stores no responses.
        TrouperError: the responses of an earlier server are not restored yet, because the model is being loaded.
    """
    check_is_on(service.responses, None)
    if service.journal is not None:
        service.check_open()


def _name(context: RequestContext) -> str:
    return context.path.removeprefix(RESPONSES)


def _render_event(problem: ErrorBody, number: int) -> dict[str, Any]:
    """Return the typed event `error`, with the body that makes OpenAI's clients raise an exception."""
    return {
        "type": "error",
        "sequence_number": number,
        "code": problem.code,
        "message": clean(problem.message, MAX_MESSAGE),
        "param": None if problem.param is None else clean(problem.param, MAX_PARAM),
        **problem.body,
    }


RESPONSES_ERRORS = ErrorForm(
    OPENAI_ERRORS.render, event="error", stream_end=b"", render_event=_render_event
)
