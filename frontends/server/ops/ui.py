"""Serve the page at `/ui/`, and the stream of states behind it.

The modules of the page are imported at its first request, so a server without viewers neither reads the files of the page nor
spends time on its state.
"""

import anyio

from trouper import __version__
from trouper.frontends.server.http.context import TEXT, RequestContext
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import Headers, HTTPError

FOLDER = "/ui/"
FILE = "/ui/{file}"
STATE = "/ui/state"
# The page loads its own files and asks its own server, and nothing else; no text can become markup or a script.
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
# With every answer below /ui, errors too.
SAFETY: Headers = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)


def is_below_ui(path: str) -> bool:
    """Return whether a path belongs to the page."""
    return path == FOLDER[:-1] or path.startswith(FOLDER)


async def welcome(service: Service, context: RequestContext, _: None) -> None:
    """Answer a program with one line, and send a browser to the page.

    The model is named only if no key is needed, because this route needs none.
    """
    headers: Headers = ((b"vary", b"accept"), (b"cache-control", b"no-store"))
    is_browser = b"text/html" in (context.header(b"accept") or b"")
    if is_browser and any(route.path == FOLDER for route in context.served):
        location = (b"location", f"{context.root_path}{FOLDER}".encode())
        await context.send_body(b"", TEXT, 307, (location, *headers))
        return
    hides_model = service.is_starting or bool(service.settings.api_keys)
    what = "" if hides_model else f" with the model {service.model_names[0]}"
    line = f"trouper {__version__} is running{what}; its OpenAI-compatible API is at /v1\n"
    await context.send_body(line.encode(), TEXT, headers=headers)


async def to_folder(service: Service, context: RequestContext, _: None) -> None:
    """Redirect to the page, whose links are relative to its folder."""
    location = (b"location", f"{context.root_path}{FOLDER}".encode())
    await context.send_body(b"", TEXT, 307, (location,))


async def send_file(service: Service, context: RequestContext, _: None) -> None:
    """Send a file of the page.  Names are looked up in a table, never in the file system."""
    from trouper.frontends.server.page.files import find

    name = context.path.removeprefix(FOLDER) or "index.html"
    file = await anyio.to_thread.run_sync(find, name, limiter=service.threads)
    if file is None:
        raise HTTPError(404, "not_found", "the page has no such file")
    headers: Headers = (
        (b"etag", file.etag),
        (b"cache-control", b"no-cache"),
        (b"vary", b"accept-encoding"),
    )
    if file.etag in (context.header(b"if-none-match") or b""):
        await context.send_body(b"", file.kind, 304, headers)
    elif b"gzip" in (context.header(b"accept-encoding") or b""):
        packed = (*headers, (b"content-encoding", b"gzip"))
        await context.send_body(file.packed, file.kind, headers=packed)
    else:
        await context.send_body(file.content, file.kind, headers=headers)


async def stream_state(service: Service, context: RequestContext, _: None) -> None:
    """Stream the state of the server, some times a second, as server-sent events.

    The frames are described on the page of documentation about this route.
    """
    from trouper.frontends.server.page.feed import watch

    await watch(service, context)
