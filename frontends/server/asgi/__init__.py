"""The ASGI application: routes, keys, and the conversion of exceptions to responses."""
