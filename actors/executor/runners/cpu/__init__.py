"""Model runners of the CPU."""
