"""Kernels that fuse several small operations into one pass over memory."""
