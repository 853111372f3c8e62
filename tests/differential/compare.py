"""Comparison of two answers to one request.  Pure.

Texts and numbers of a model may differ from one implementation to the other; names, types and counts must not.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .http import Answer

# Leaves that a client relies on: their values are compared, not only their types.
EXACT = {
    "object", "type", "index", "finish_reason", "role", "prompt_tokens", "completion_tokens", "total_tokens",
    "prompt_token_ids", "text_offset", "token_strs", "count", "max_model_len", "num_classes", "input_tokens",
}  # fmt: skip
# Lists whose lengths are compared, and dictionaries whose keys are data.
COUNTED = {"choices", "data", "tokens", "token_logprobs", "top_logprobs", "content", "prompt_logprobs", "embedding", "results"}  # fmt: skip
DATA_KEYS = {"top_logprobs", "prompt_logprobs"}
TYPES = {
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """One thing in which the subject's answer differs from the reference's."""

    path: str
    reference: str
    subject: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reference} -> {self.subject}"


def differences(
    reference: Answer, subject: Answer, offenders: Sequence[str] = ()
) -> list[Difference]:
    """Compare two answers; `offenders` are words of the request that an error's message may name."""
    if reference.status != subject.status:
        return [Difference("status", _status(reference), _status(subject))]
    if (reference.events is None) != (subject.events is None):
        kinds = [
            "one body" if answer.events is None else "a stream" for answer in (reference, subject)
        ]
        return [Difference("content-type", *kinds)]
    if reference.status >= 400:
        return list(_errors(reference.body, subject.body, offenders))
    if reference.events is None:
        return list(_shapes([reference.body], [subject.body], "$"))
    return list(_streams(reference.events, subject.events or []))


def _status(answer: Answer) -> str:
    return f"{answer.status} {message_of(answer.body)[:160]}".strip()


def message_of(body: Any) -> str:
    """Return the message of an error in OpenAI's form; an empty text for another body."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else ""


def _errors(reference: Any, subject: Any, offenders: Sequence[str]) -> Iterator[Difference]:
    yield from _shapes([_without_texts(reference)], [_without_texts(subject)], "$")
    messages = [message_of(reference), message_of(subject)]
    for word in offenders:
        named = [bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)) for text in messages]
        if named[0] and not named[1]:
            yield Difference("names", word, messages[1][:160])
    kinds = [_error_type(body) for body in (reference, subject)]
    if kinds[0] != kinds[1]:
        yield Difference("$.error.type", *kinds)


def _error_type(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("type")) if isinstance(error, dict) else str(body)[:80]


def _without_texts(body: Any) -> Any:
    """Leave the names of an error's fields, whose values are compared otherwise."""
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        error = body["error"]
        return {**body, "error": {**dict.fromkeys(error, ""), "code": error.get("code")}}
    return body


def _shapes(references: Sequence[Any], subjects: Sequence[Any], name: str) -> Iterator[Difference]:
    """Compare the shapes that values of one place have together; what is below a difference is left out."""
    shapes = shape_of(references), shape_of(subjects)
    reported: list[str] = []
    for place in sorted({*shapes[0], *shapes[1]}):
        found = [" or ".join(sorted(shape.get(place, {ABSENT}))) for shape in shapes]
        is_below = any(place.startswith((f"{above}.", f"{above}[")) for above in reported)
        if found[0] != found[1] and not is_below:
            reported.append(place)
            yield Difference(name + place, *found)


def _streams(reference: Sequence[Any], subject: Sequence[Any]) -> Iterator[Difference]:
    """Compare the chunks of each kind: two servers may cut one text into different pieces."""
    kinds = _by_kind(reference), _by_kind(subject)
    for kind in sorted({*kinds[0], *kinds[1]}):
        if all(kind in each for each in kinds):
            yield from _shapes(kinds[0][kind], kinds[1][kind], f"{kind} chunk")
        else:
            found = ["there" if kind in each else "none" for each in kinds]
            yield Difference(f"{kind} chunk", *found)


def _by_kind(events: Sequence[Any]) -> dict[str, list[Any]]:
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for event in events:
        found[_kind(event)].append(event)
    return dict(found)


def _kind(event: Any) -> str:
    if not isinstance(event, dict):
        return str(event)
    if "choices" not in event:
        return str(event.get("type") or ("error" if "error" in event else "other"))
    if not event["choices"]:
        return "usage"
    choice = event["choices"][0]
    if choice.get("finish_reason") is not None:
        return "last"
    return "first" if (choice.get("delta") or {}).get("role") else "text"


def shape_of(values: Sequence[Any]) -> dict[str, set[str]]:
    """Return the types, by path, that several values of one place have together."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    _note(values, "", "", found)
    return dict(found)


def _note(values: Sequence[Any], path: str, name: str, found: defaultdict[str, set[str]]) -> None:
    for value in values:
        found[path].add(_name(value, name))
    entries = [entry for value in values if isinstance(value, list) for entry in value]
    if entries:
        _note(entries, f"{path}[]", name, found)
    objects = [value for value in values if isinstance(value, dict)]
    if name in DATA_KEYS:
        contents = [entry for each in objects for entry in each.values()]
        if contents and isinstance(contents[0], dict):
            _note(contents, f"{path}.*", "", found)
        return
    for key in dict.fromkeys(key for each in objects for key in each):
        held = [each[key] for each in objects if key in each]
        if len(held) < len(objects):
            found[f"{path}.{key}"].add(ABSENT)
        _note(held, f"{path}.{key}", key, found)


def _name(value: Any, name: str) -> str:
    if value is None:
        return "null"
    if name in COUNTED and isinstance(value, list):
        return f"array of {len(value)}"
    if name in DATA_KEYS and isinstance(value, dict):
        return f"object of {len(value)}"
    if name in EXACT and not isinstance(value, list | dict):
        return json_of(value)
    return TYPES[type(value)]


def json_of(value: Any) -> str:
    """Return a scalar as it would stand in JSON."""
    return f'"{value}"' if isinstance(value, str) else str(value)
