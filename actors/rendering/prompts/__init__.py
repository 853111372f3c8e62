"""Prompts of every form, rendered to token ids or embeddings with complete parameters."""
