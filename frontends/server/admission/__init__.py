"""Decide which HTTP requests start, in which order, and which ones the server refuses under load."""
