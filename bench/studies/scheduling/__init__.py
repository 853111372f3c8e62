"""Studies of waiting: structured outputs, and the event loop."""
