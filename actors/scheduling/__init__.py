"""Decide what the device computes next."""
