"""Torch implementations that define what the kernels compute."""
