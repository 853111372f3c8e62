"""The Triton kernels that edit logits, draw tokens and report log probabilities."""
