"""Everything that computes: with kernels/, the only place that imports torch."""
