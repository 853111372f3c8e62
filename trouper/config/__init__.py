"""Options of an engine, and the plan that they resolve to."""
