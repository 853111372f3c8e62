"""The ASGI application: routes, keys, and the one place where an exception becomes a response."""
