"""Open, run and stop the actors of one engine."""
