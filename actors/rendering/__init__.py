"""Prompt rendering: plain synchronous work that the Renderer runs in threads."""
