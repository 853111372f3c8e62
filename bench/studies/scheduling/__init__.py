"""Studies of waiting: fairness between requests, structured outputs, and the event loop."""
