"""The OpenAI-compatible server: an ASGI application over `AsyncLLMEngine`, and what runs it."""
