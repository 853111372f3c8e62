"""Measurements of the GPU path on an H200.  They need a checkout."""
