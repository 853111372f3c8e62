"""The device world: with kernels/, the only place that imports torch."""
