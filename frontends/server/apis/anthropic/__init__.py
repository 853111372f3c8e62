"""Anthropic's Messages API: its requests, its replies and its errors."""
