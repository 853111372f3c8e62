"""Logits to tokens, and their penalties."""
