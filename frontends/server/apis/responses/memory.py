"""Load the conversation that a request continues from the response store, and encode its own response for the store."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio.to_thread
import msgspec

from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid
from trouper.frontends.server.apis.responses.adapter import response_of
from trouper.frontends.server.apis.responses.conversation import ResponsesRequest, ResponsesTurn
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.http.decoding import THREAD_FROM
from trouper.frontends.server.service.response_store import ResponseStore, StoredResponse
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import NO_MEMORY, HTTPError, clean

MAX_ECHO = 100  # characters of an unknown id
A = TypeVar("A")
B = TypeVar("B")
JSONObject = dict[str, Any]
encode = msgspec.json.Encoder().encode
decode_items = msgspec.json.Decoder(list[JSONObject]).decode


async def recall(
    service: Service, context: RequestContext, request: ResponsesRequest
) -> ResponsesTurn:
    """Return the request together with the conversation that it continues.

    Raises:
        HTTPError: the previous response or a referenced item does not exist, or belongs to another key.
        TrouperValidationError, UnsupportedFeatureError: a field is invalid; the error names it.
    """
    store = service.responses
    _check(request, store)
    if store.is_on and isinstance(request.input, list):
        items = await _resolved(service, context, request.input)
        request = msgspec.structs.replace(request, input=items)
    previous: StoredResponse | None = None
    history: list[JSONObject] = []
    if request.previous_response_id is not None:
        previous = find(service, context, request.previous_response_id, "previous_response_id")
        if previous.status not in ("completed", "incomplete"):
            text = f"that response is {previous.status}; only a completed or incomplete one can be continued"
            raise invalid("previous_response_id", text)
        history = await _read(service, context, previous.pieces)
    is_stored = store.is_on and request.store is not False
    turn = ResponsesTurn(request, previous, history, is_stored=is_stored)
    if is_stored:
        piece = await _here_or_there(service, context.num_body_bytes, encode, turn.items)
        turn.pieces = (*(previous.pieces if previous else ()), piece)
    return turn


def find(
    service: Service, context: RequestContext, name: str, parameter: str | None = None
) -> StoredResponse:
    """Return a stored response.  Raises the same HTTPError (404) if it does not exist and if it belongs to another key."""
    found = service.responses.get(name, context.tenant)
    if found is None:
        text = f"Response with id '{clean(name, MAX_ECHO)}' not found. It was evicted, or it belongs to another key."
        raise HTTPError(404, "response_not_found", text, param=parameter or "response_id")
    return found


async def input_items(
    service: Service, context: RequestContext, stored: StoredResponse
) -> list[JSONObject]:
    """Return the items of the conversation before a response, oldest first.

    They may be stored in arrays that several responses of one conversation share.
    """
    return await _read(service, context, stored.pieces[: stored.num_input_pieces])


def check_is_on(store: ResponseStore, parameter: str | None) -> None:
    """Raise UnsupportedFeatureError, with the option to change, if the server stores no responses."""
    if not store.is_on:
        text = f"{parameter or 'this route'} is not supported: {NO_MEMORY}"
        raise UnsupportedFeatureError(text, parameter=parameter)


def stored_response(turn: ResponsesTurn, response: JSONObject, owner: str) -> StoredResponse:
    """Convert a response to its stored form.  The items before it are shared with the response that it continues."""
    output = response["output"]
    return StoredResponse(
        owner=owner,
        status=response["status"],
        body=encode(response),
        pieces=(*turn.pieces, encode(output)) if output else turn.pieces,
        num_input_pieces=len(turn.pieces),
        model=response["model"],
        cache_salt=turn.body.cache_salt,
        priority=turn.body.priority,
    )


def _check(request: ResponsesRequest, store: ResponseStore) -> None:
    for name in ("store", "background", "previous_response_id"):
        if getattr(request, name):
            check_is_on(store, name)
    if request.background and request.store is False:
        # vLLM's text.
        text = "background can only be used when `store` is true"
        raise TrouperValidationError(text, parameter="background")


async def _resolved(
    service: Service, context: RequestContext, items: list[JSONObject]
) -> list[JSONObject]:
    """Replace references to items of earlier responses by the items themselves.

    Each item may be referenced only once, so that a request never reads more than the store contains.

    Raises:
        HTTPError: a referenced item does not exist, or belongs to another key.
    """
    named: dict[str, str] = {}  # the client's place, by the item's id
    for i, item in enumerate(items):
        if item.get("type") == "item_reference":
            place, name = f"input[{i}].id", item.get("id")
            if not isinstance(name, str) or name in named:
                raise invalid(place, "must be an id, and each id may be referenced only once")
            named[name] = place
    owners: dict[str, str] = {}
    for name, place in named.items():
        owners.setdefault(response_of(name), place)
    kept = [find(service, context, name, place) for name, place in owners.items()]
    outputs = await _read(service, context, [each.pieces[-1] for each in kept if each.pieces])
    by_id = {name: item for item in outputs if isinstance(name := item.get("id"), str)}
    for name, place in named.items():
        if name not in by_id:
            raise HTTPError(404, "item_not_found", "no stored item has this id", param=place)
    return [by_id[item["id"]] if item.get("type") == "item_reference" else item for item in items]


async def _read(
    service: Service, context: RequestContext, pieces: Sequence[bytes]
) -> list[JSONObject]:
    """Decode stored items.  Their bytes count against the limits like bytes of the request's body."""
    num_bytes = sum(map(len, pieces))
    context.num_body_bytes += num_bytes
    return await _here_or_there(service, num_bytes, _items, pieces)


def _items(pieces: Sequence[bytes]) -> list[JSONObject]:
    return [item for piece in pieces for item in decode_items(piece)]


async def _here_or_there(service: Service, num_bytes: int, act: Callable[[A], B], given: A) -> B:
    """Call `act` on the event loop if the data is small, and otherwise in a thread."""
    if num_bytes < THREAD_FROM:
        return act(given)
    return await anyio.to_thread.run_sync(act, given, limiter=service.threads)
