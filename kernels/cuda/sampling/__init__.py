"""The Triton kernels that draw tokens and report their log probabilities."""
