"""Compiled kernels of recurrent mixers."""
