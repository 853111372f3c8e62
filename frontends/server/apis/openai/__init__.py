"""OpenAI's generation routes."""
