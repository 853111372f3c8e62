"""Benchmarks: only the CLI imports them, inside its commands."""
