"""Kernels: one operation per file, each with its torch reference."""
