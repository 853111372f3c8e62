"""Small fused operations on the CPU."""
