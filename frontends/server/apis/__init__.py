"""One folder for each API: its requests, its replies and its routes."""
