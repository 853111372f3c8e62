"""Answer `/`: one line for programs that check for a server, and a small page for browsers."""

import re
from base64 import b64encode
from hashlib import sha256
from html import escape

from trouper import __version__
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.service.service import Service

STYLE = "body{font:1rem/1.6 system-ui,sans-serif;max-width:46rem;margin:3rem auto;padding:0 1rem}pre{overflow:auto;padding:1rem;border:1px solid}"
# The page runs no script and loads nothing, and no other page may frame it.
POLICY = (
    f"default-src 'none'; style-src 'sha256-{b64encode(sha256(STYLE.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"vary", b"accept"),
)
# The page repeats the client's own Host header in a command; anything but a name or address is left out.
HOST = re.compile(r"[\w.-]{1,253}(:\d{1,5})?|\[[0-9a-fA-F:.]{2,45}\](:\d{1,5})?", re.ASCII)
CHAT = ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}')
EMBED = ("/v1/embeddings", '{"input": "Hello"}')
LINKS = ("/v1/models", "/openapi.json", "/health", "/metrics")


async def welcome(service: Service, context: RequestContext, _: None) -> None:
    """Describe the running server, and how to send requests to it."""
    is_wanted = b"text/html" in (context.header(b"accept") or b"")
    text, kind = (
        (_page(service, context), b"text/html") if is_wanted else (_line(service), b"text/plain")
    )
    await context.send_body(text.encode(), kind + b"; charset=utf-8", headers=HEADERS)


def _model(service: Service) -> str | None:
    """Return the model's name, or None while it is loading or if only clients with a key may know it."""
    if service.is_starting or service.settings.api_keys:
        return None
    return service.model_names[0]


def _line(service: Service) -> str:
    model = _model(service)
    what = "" if model is None else f" with the model {model}"
    return f"trouper {__version__} is running{what}; its OpenAI-compatible API is at /v1\n"


def _page(service: Service, context: RequestContext) -> str:
    model = _model(service)
    pools = not service.is_starting and service.config.pooler is not None
    path, body = EMBED if pools else CHAT
    key = " -H 'Authorization: Bearer YOUR-KEY'" if service.settings.api_keys else ""
    command = f"curl {_address(context)}{path}{key} -H 'Content-Type: application/json' -d '{body}'"
    state = "is loading its model" if service.is_starting else "is running"
    what = "" if model is None else f"<p>Model: <code>{escape(model)}</code></p>"
    prefix = escape(context.root_path)
    links = " · ".join(f'<a href="{prefix}{link}">{link}</a>' for link in LINKS)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>trouper</title><style>{STYLE}</style></head>'
        f"<body><h1>trouper {__version__}</h1><p>The server {state}.</p>{what}"
        f"<p>Ask it from a terminal:</p><pre>{escape(command)}</pre><p>{links}</p></body></html>\n"
    )


def _address(context: RequestContext) -> str:
    host = (context.header(b"host") or b"").decode("latin-1")
    host = host if HOST.fullmatch(host) else "127.0.0.1:8000"
    return f"{context.scheme}://{host}{context.root_path}"
