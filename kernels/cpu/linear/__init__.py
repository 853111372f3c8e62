"""Products with weights on the CPU."""
