"""The Triton kernels.  Only code that runs on a GPU imports them."""
