"""Bridges between event loops, threads and tasks."""
