"""Decide which HTTP requests may enter, and when."""
