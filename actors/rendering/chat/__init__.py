"""Conversations, rendered by the model's chat template in processes with a budget."""
