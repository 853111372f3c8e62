"""The Python interfaces: offline, step by step, async."""
