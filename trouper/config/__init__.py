"""Arguments of an engine, and what they resolve to."""
