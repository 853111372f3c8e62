"""Requests over HTTP, and their answers in the form that is compared."""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 300  # the reference may compile something first


@dataclass
class Answer:
    """A status and a body: JSON, or the events of a stream, or the length of other bytes."""

    status: int
    body: Any = None
    events: list[Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)


class Peer:
    """One of the two servers; its model is the first that it lists."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        models = self.send("GET", "/v1/models", None).body
        self.model = models["data"][0]["id"]

    def send(
        self, method: str, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send one request on a connection of its own, so that no answer depends on another."""
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        given = dict(headers or {})
        if body is not None:
            given["content-type"] = "application/json"
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, given)
            response = connection.getresponse()
            kind = response.headers.get_content_type()
            answer = Answer(
                response.status, headers={k.lower(): v for k, v in response.headers.items()}
            )
            raw = response.read()
        finally:
            connection.close()
        if kind == "text/event-stream":
            answer.events = read_events(raw.decode())
        elif kind == "application/json" and raw:
            answer.body = json.loads(raw)
        else:
            answer.body = f"<{kind}>" if raw else None
        return answer


def read_events(text: str) -> list[Any]:
    """Return the data of the events of a stream; `[DONE]` is a text."""
    found: list[Any] = []
    for frame in text.split("\n\n"):
        lines = [line[5:].strip() for line in frame.splitlines() if line.startswith("data:")]
        found += [data if data == "[DONE]" else json.loads(data) for data in lines]
    return found
