"""Benchmarks: `trouper bench` measures engines, servers and kernels.  Only its commands import this package."""
