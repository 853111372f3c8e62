"""Turn logits into tokens, and draft tokens that one step verifies."""
