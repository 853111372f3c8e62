"""List the input items of a stored response in pages.  Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trouper.errors import invalid

JSONObject = dict[str, Any]
MAX_ITEMS = 100  # of a page
PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"
}  # fmt: skip


class Page(NamedTuple):
    """The requested part of a list.

    Attributes:
        limit: the maximum number of items.
        is_descending: whether the newest item comes first.
        after: the id of the item before the page.
    """

    limit: int = 20
    is_descending: bool = True
    after: str | None = None

    @classmethod
    def of(cls, query: Mapping[str, Sequence[str]]) -> "Page":
        """Read the fields of a query.  Other fields are ignored.

        Raises:
            TrouperValidationError: a field is invalid; the error names it.

        The default is 20 items, newest first, as in OpenAI's API.
        """
        given = {name: query[name][-1] for name in ("limit", "order", "after") if name in query}
        limit, order = given.get("limit", "20"), given.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_ITEMS):
            raise invalid("limit", f"must be an integer from 1 to {MAX_ITEMS}", limit[:64])
        if order not in ("asc", "desc"):
            raise invalid("order", "must be asc or desc", order[:64])
        return cls(int(limit), order == "desc", given.get("after"))


def listed(items: Sequence[JSONObject], response_id: str, page: Page) -> JSONObject:
    """Return one page of the items.  Every item gets an id, the same one in all pages.

    Raises:
        TrouperValidationError: `after` is not the id of an item.
    """
    places = range(len(items))[:: -1 if page.is_descending else 1]
    if page.after is not None:
        last = _place_of(page.after, items, response_id, places)
        if last is None:
            raise invalid("after", "must be the id of an item of this list", page.after[:64])
        places = places[places.index(last) + 1 :]
    data = [_named(items[i], _id(items[i], response_id, i)) for i in places[: page.limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": page.limit < len(places),
    }


def _place_of(
    name: str, items: Sequence[JSONObject], response_id: str, places: range
) -> int | None:
    """Find the index of an item by its id: a generated id contains the index, and of equal own ids the first in `places` counts."""
    _, mark, number = name.rpartition(f"_{response_id}_in")
    if mark and number.isascii() and number.isdigit():
        place = int(number[:9])
        if place < len(items) and _id(items[place], response_id, place) == name:
            return place
    return next((i for i in places if name and items[i].get("id") == name), None)


def _id(item: JSONObject, response_id: str, index: int) -> str:
    """Return the item's own id, or one generated from its index."""
    given = item.get("id")
    if isinstance(given, str) and given:
        return given
    return f"{PREFIXES.get(item.get('type', 'message'), 'it')}_{response_id}_in{index}"


def _named(item: JSONObject, name: str) -> JSONObject:
    """Complete an item with its type, its id and the fields that OpenAI's clients require."""
    kind = item.get("type", "message")
    content = item.get("content")
    whole = {"status": "completed", **item, "id": name, "type": kind}
    if kind == "reasoning":
        whole.setdefault("summary", [])
    if kind == "message" and isinstance(content, str):
        whole["content"] = [_text(content, item.get("role"))]
    return whole


def _text(text: str, role: object) -> JSONObject:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}
