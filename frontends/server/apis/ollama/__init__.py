"""Ollama's API: its requests are translated to the chats, completions and embeddings that the other routes answer."""
