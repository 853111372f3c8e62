"""Turn tokens into text and pooled tensors into answers."""
