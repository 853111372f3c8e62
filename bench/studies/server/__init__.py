"""Studies of the HTTP server, its event loop and its clients."""
