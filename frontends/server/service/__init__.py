"""The state that all handlers share, and what runs or is kept beyond one request."""
