"""Benchmarks: what `trouper bench` measures; only its commands import it, when they run."""
