"""Checkpoints to packed weights."""
