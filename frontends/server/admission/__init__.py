"""Decide which HTTP requests are admitted, in which order they start, and which are refused under load."""
