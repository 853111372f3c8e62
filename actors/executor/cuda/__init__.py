"""The device world of a GPU."""
