"""The access log: one line for each answer, without anything that a client could forge it with."""

import re

from trouper.frontends.server.http.context import RequestContext

MAX_PATH = 128  # characters of a path that is no route
UNSAFE_IN_PATH = re.compile(r"[^A-Za-z0-9._~:@!$&'()*+,;=/-]")


def access_line(context: RequestContext, route: str | None) -> str:
    """Return client, method, path, status, duration, tokens of prompt and answer, and the request's ids.

    The query is left out, for it may hold secrets; of a path that is no route, characters that could begin
    another line or move a terminal's cursor are replaced.
    """
    path = route or UNSAFE_IN_PATH.sub("_", context.path[:MAX_PATH])
    tokens = "-"
    if context.ticket is not None:
        num_prompt, num_output = context.ticket.cost
        tokens = f"{num_prompt}+{num_output} tokens"
    method = UNSAFE_IN_PATH.sub("_", context.method[:8])
    ids = context.id if context.client_id is None else f"{context.id} {context.client_id}"
    status = context.status or "left"
    return f"{context.client} {method} {path} {status} {context.age_s:.3f} s {tokens} {ids}"
